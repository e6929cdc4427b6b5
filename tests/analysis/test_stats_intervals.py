"""Intervals hold together: the figure lies in its interval, the interval in the range of the quantity."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest

from harness.analysis import stats
from harness.analysis.cost.devices import independent_samples, positive_mean_interval
from harness.analysis.stats import FloatArray, Interval, NoInterval, quantile_intervals

NORMAL_QUANTILE = {0.5: 0.0, 0.9: 1.2815515655}
SPREAD, BETWEEN_RUNS = 0.5, 0.05


@dataclass(frozen=True)
class Run:
    """Where a sample was made."""

    device: str
    unit: int


def drawn_runs(rng: np.random.Generator, num_runs: int, num_requests: int) -> list[FloatArray]:
    """Latencies of runs that differ a little from each other."""
    levels = rng.normal(0, BETWEEN_RUNS, size=(num_runs, 1))
    return list(np.exp(levels + rng.normal(0, SPREAD, size=(num_runs, num_requests))))


def points_outside(num_samples: int, seed: int) -> int:
    """How many intervals of drawn samples of any size leave their figure or the range of the data."""
    rng, wrong = np.random.default_rng(seed), 0
    for _ in range(num_samples):
        samples = drawn_runs(rng, int(rng.integers(3, 12)), int(rng.integers(1, 60)))
        samples = [sample.round(int(rng.integers(0, 4))) for sample in samples]
        runs = [Run(f"dev{rng.integers(0, 4)}" if rng.random() < 0.5 else "", k) for k in range(len(samples))]
        values = np.concatenate(samples)
        at = (0.5, 0.9, 0.99)
        for q, found in zip(at, quantile_intervals(independent_samples(samples, runs)[0], at), strict=True):
            if isinstance(found, Interval):
                wrong += not is_whole(found, stats.quantile(values, q), values.min(), values.max())
                wrong += found.width <= 0
        rates = [float(sample.mean()) for sample in samples]
        found = positive_mean_interval(rates, runs, unit="runs")
        wrong += found is not None and not is_whole(found, found.estimate, 0.0, math.inf)
    return wrong


def is_whole(interval: Interval, point: float, lowest: float, highest: float) -> bool:
    return lowest <= interval.low <= point <= interval.high <= highest


def held(q: float, num_runs: int, num_requests: int, num_experiments: int) -> float:
    """Share of drawn experiments whose 95 % interval of a percentile holds the true one."""
    rng = np.random.default_rng(20261123)
    truth = math.exp(NORMAL_QUANTILE[q] * math.hypot(SPREAD, BETWEEN_RUNS))
    found = [quantile_intervals(drawn_runs(rng, num_runs, num_requests), [q])[0] for _ in range(num_experiments)]
    return float(np.mean([isinstance(one, Interval) and one.contains(truth) for one in found]))


def test_no_figure_lies_outside_its_interval_and_no_interval_outside_its_range() -> None:
    assert points_outside(300, seed=29) == 0


@pytest.mark.parametrize(("q", "num_runs", "num_requests"), [(0.5, 6, 24), (0.5, 12, 60), (0.9, 6, 60), (0.9, 12, 60)])
def test_intervals_of_percentiles_hold_the_truth_as_often_as_they_say(
    q: float, num_runs: int, num_requests: int
) -> None:
    assert 0.93 <= held(q, num_runs, num_requests, 400) <= 0.97


def test_percentiles_of_few_requests_or_runs_have_no_interval() -> None:
    rng = np.random.default_rng(3)
    assert quantile_intervals(drawn_runs(rng, 5, 500), [0.5]) == [NoInterval.RUNS]
    assert quantile_intervals(drawn_runs(rng, 6, 16), [0.9]) == [NoInterval.VALUES]
    assert isinstance(quantile_intervals(drawn_runs(rng, 6, 17), [0.9])[0], Interval)


def test_runs_that_all_have_half_below_the_median_have_an_interval_with_a_width() -> None:
    samples = [np.array([40.0 + k, 41.0 + k, 240.0 + k, 241.0 + k] * 2) for k in range(6)]
    (found,) = quantile_intervals(samples, [0.5])
    assert found.low < 46
    assert found.high > 240


def test_equal_values_have_no_interval() -> None:
    assert quantile_intervals([np.full(30, 5.0)] * 6, [0.5]) == [NoInterval.SPREAD]


def test_an_interval_of_many_values_is_that_of_trying_each_of_them() -> None:
    samples = drawn_runs(np.random.default_rng(11), 7, 1000)
    few, many = stats.MOST_PLACES, 10**9
    try:
        stats.MOST_PLACES = many
        each = quantile_intervals(samples, [0.5, 0.9, 0.99])
    finally:
        stats.MOST_PLACES = few
    assert quantile_intervals(samples, [0.5, 0.9, 0.99]) == each


@pytest.mark.parametrize(("num_runs", "rank"), [(7, 7), (10, 10), (11, 10), (12, 11), (20, 16)])
def test_a_typical_run_is_bounded_by_the_rank_that_the_binomial_distribution_gives(num_runs: int, rank: int) -> None:
    values = [float(value) for value in range(1, num_runs + 1)]
    assert stats.median_bound(values, 0.99) == rank
    assert stats.median_bound(values[:6], 0.99) is None
