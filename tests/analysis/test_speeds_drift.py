"""Drift: a slope that was put in is found again, none is found where none is, and too few runs tell nothing."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from harness.analysis.speeds import drift, slope_of
from harness.runner import run_experiment
from tests.support.experiments import small_experiment

CONDITIONS, BLOCKS = 3, 12


def fitted(per_run: float, seed: int = 4):
    """ln cost of 12 rotated blocks of 3 conditions, each with levels of their own, noise .002 and a slope."""
    rng = np.random.default_rng(seed)
    condition = np.array([(place + block) % CONDITIONS for block in range(BLOCKS) for place in range(CONDITIONS)])
    block = np.repeat(np.arange(BLOCKS), CONDITIONS)
    place = np.tile(np.arange(CONDITIONS), BLOCKS).astype(float)
    log_cost = np.array([0.0, -0.1, 0.2])[condition] + rng.normal(0, 0.3, BLOCKS)[block] + per_run * place
    return slope_of(log_cost + rng.normal(0, 0.002, len(place)), condition, block, place)


def test_a_slope_among_conditions_and_plan_draws_is_found_with_its_interval() -> None:
    found = fitted(0.004)
    assert found.low < 0.004 < found.high
    assert found.p < 0.001
    assert found.high - found.low < 0.004
    assert found.degrees == 36 - 3 - 11 - 1


def test_without_a_slope_one_in_twenty_is_found() -> None:
    share = np.mean([found.p < 0.05 for seed in range(400) if (found := fitted(0.0, seed)) is not None])
    assert 0.02 < share < 0.09


def test_sealed_runs_say_whether_they_drifted_and_one_block_says_nothing(tmp_path: Path) -> None:
    runs = run_experiment(small_experiment(backend="sim", replicates=3, order="abba"), runs_root=tmp_path).runs
    found = drift(runs)
    assert found.order == "abba"
    assert "per place in the order (abba)" in str(found)
    assert math.isfinite(found.per_run.mean)
    assert drift([run for run in runs if run.replicate == 0]) is None
