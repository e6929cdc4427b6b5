"""Intervals and exact enumerations: sizes, symmetry, coverage of known cases, and that a seed decides everything."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from harness.analysis import stats
from harness.errors import SpecError


def test_an_interval_names_method_unit_and_seed() -> None:
    interval = stats.bootstrap_interval([1.0, 2.0, 3.0], stats.Bootstrap(5, 200), unit="replicates")
    text = str(interval)
    for word in ("bootstrap", "median", "3 replicates", "200 resamples", "seed 5", "95 %"):
        assert word in text


def test_the_seed_decides_the_interval() -> None:
    values = list(np.random.default_rng(0).normal(size=12))
    first, again, other = (
        stats.bootstrap_interval(values, stats.Bootstrap(seed), unit="runs", statistic="mean") for seed in (1, 1, 2)
    )
    assert first == again
    assert (first.low, first.high) != (other.low, other.high)
    assert first.estimate == other.estimate


def test_stratified_resampling_keeps_every_stratum() -> None:
    # Two strata without spread: their mean never moves, although pooled resampling would.
    strata = {"n6": [1.0, 1.0, 1.0], "n8": [3.0, 3.0, 3.0]}
    stratified = stats.bootstrap_interval(strata, stats.Bootstrap(1), unit="comparisons", statistic="mean")
    pooled = stats.bootstrap_interval([1.0] * 3 + [3.0] * 3, stats.Bootstrap(1), unit="comparisons", statistic="mean")
    assert (stratified.low, stratified.high) == (2.0, 2.0)
    assert pooled.width > 0.5


# Student's t, two-sided, as every textbook prints it.
@pytest.mark.parametrize(
    ("level", "degrees", "printed"),
    [(0.95, 1, 12.706), (0.95, 2, 4.303), (0.95, 3, 3.182), (0.95, 9, 2.262), (0.95, 30, 2.042), (0.99, 5, 4.032)],
)
def test_t_quantiles_are_the_printed_ones(level: float, degrees: int, printed: float) -> None:
    assert stats.t_quantile(level, degrees) == pytest.approx(printed, abs=5e-4)


# The 95th and 99th percentiles of Fisher's F, as every textbook prints them.
@pytest.mark.parametrize(
    ("f", "between", "inside", "level"),
    [(4.965, 1, 10, 0.95), (4.256, 2, 9, 0.95), (3.708, 3, 10, 0.95), (3.687, 5, 8, 0.95), (4.431, 4, 20, 0.99)],
)
def test_probabilities_of_f_are_the_printed_ones(f: float, between: int, inside: int, level: float) -> None:
    assert 1 - stats.f_tail(f, between, inside) == pytest.approx(level, abs=5e-5)


def test_a_constant_ratio_has_an_interval_of_no_width() -> None:
    baseline = [1.0, 5.0, 9.0]
    values = stats.log_mean_values([0.9 * cost for cost in baseline]) - stats.log_mean_values(baseline)
    interval = stats.of_blocks(values.tolist()).interval()
    assert (interval.low, interval.estimate, interval.high) == pytest.approx((0.9, 0.9, 0.9))
    assert str(interval) == "0.9000 [0.9000, 0.9000] (95 % t interval of the mean over 3 blocks)"
    given = replace(interval, method=f"{interval.method}{stats.GIVEN_COSTS}")
    assert str(given) == (
        "0.9000 [0.9000, 0.9000] (95 % t interval of the mean over 3 blocks, cost model assumed exact)"
    )


def test_the_interval_of_a_ratio_of_sums_by_hand() -> None:
    # Sums 3 and 4; deviations from the means -0.2 and 0, 0 and 0, 0.2 and 0: standard deviation 0.2.
    values = stats.log_mean_values([0.8, 1.0, 1.2]) - stats.log_mean_values([4.0, 4.0, 4.0], [3.0, 3.0, 3.0])
    interval = stats.of_blocks(values.tolist()).interval()
    half = 4.302653 * 0.2 / np.sqrt(3)
    assert interval.estimate == pytest.approx(0.75)
    assert (interval.low, interval.high) == pytest.approx((0.75 * np.exp(-half), 0.75 * np.exp(half)), rel=1e-5)


def test_values_of_costs_by_unit_hold_the_truth_as_often_as_they_say() -> None:
    rng = np.random.default_rng(29)
    held = []
    for _ in range(2000):
        base = rng.lognormal(0, 0.2, size=5)
        own = 0.96 * base * rng.lognormal(-(0.02**2) / 2, 0.02, size=5)
        logs = [stats.log_mean_values(side.tolist()) for side in (own, base)]
        interval = stats.of_blocks((logs[0] - logs[1]).tolist()).interval()
        held.append(interval.contains(0.96) and interval.contains(own.sum() / base.sum()))
    assert np.mean(held) == pytest.approx(0.95, abs=0.015)


def test_t_intervals_hold_the_truth_as_often_as_they_say() -> None:
    rng = np.random.default_rng(11)
    found = [stats.mean_interval(rng.normal(3.0, 1.0, size=4).tolist(), unit="runs") for _ in range(2000)]
    assert np.mean([one is not None and one.contains(3.0) for one in found]) == pytest.approx(0.95, abs=0.015)


def test_bootstrap_covers_the_median_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(7)
    hits = sum(
        stats.bootstrap_interval(rng.normal(size=25).tolist(), stats.Bootstrap(k, 500), unit="draws").contains(0.0)
        for k in range(200)
    )
    assert 0.88 <= hits / 200 <= 1.0


def test_no_values_make_no_interval() -> None:
    with pytest.raises(SpecError, match="no values"):
        stats.bootstrap_interval([], stats.Bootstrap(1), unit="runs")
