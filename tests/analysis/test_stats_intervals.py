"""Intervals hold together: the figure lies in its interval, the interval in the range of the quantity."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest

from harness.analysis import stats
from harness.analysis.cost.devices import positive_mean_interval, quantile_interval
from harness.analysis.stats import FloatArray, Interval

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
        samples = drawn_runs(rng, int(rng.integers(3, 7)), int(rng.integers(1, 60)))
        samples = [sample.round(int(rng.integers(0, 4))) for sample in samples]
        runs = [Run(f"dev{rng.integers(0, 4)}" if rng.random() < 0.5 else "", k) for k in range(len(samples))]
        values = np.concatenate(samples)
        for q in (0.5, 0.9, 0.99):
            found = quantile_interval(samples, runs, q)
            wrong += found is not None and not is_whole(found, stats.quantile(values, q), values.min(), values.max())
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
    found = [stats.quantile_interval(drawn_runs(rng, num_runs, num_requests), q) for _ in range(num_experiments)]
    return float(np.mean([one is not None and one.contains(truth) for one in found]))


def test_no_figure_lies_outside_its_interval_and_no_interval_outside_its_range() -> None:
    assert points_outside(1000, seed=29) == 0


@pytest.mark.parametrize(("q", "num_runs", "num_requests"), [(0.5, 3, 24), (0.5, 8, 60), (0.9, 4, 60), (0.9, 8, 60)])
def test_intervals_of_percentiles_hold_the_truth_as_often_as_they_say(
    q: float, num_runs: int, num_requests: int
) -> None:
    assert 0.93 <= held(q, num_runs, num_requests, 1000) <= 0.97


def test_percentiles_of_few_requests_or_runs_have_no_interval() -> None:
    rng = np.random.default_rng(3)
    assert stats.quantile_interval(drawn_runs(rng, 2, 500), 0.5) is None
    assert stats.quantile_interval(drawn_runs(rng, 3, 33), 0.9) is None
    assert stats.quantile_interval(drawn_runs(rng, 4, 25), 0.9) is not None


def test_equal_runs_have_an_interval_of_no_width() -> None:
    found = stats.quantile_interval([np.full(30, 5.0)] * 3, 0.5)
    assert found is not None
    assert (found.low, found.estimate, found.high) == (5.0, 5.0, 5.0)
