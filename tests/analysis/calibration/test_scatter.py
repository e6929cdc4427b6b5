"""How far runs scatter: deviations that were put in are found again, and what runs cannot tell is left out."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from harness.analysis.calibration.scatter import (
    Level,
    StepRatios,
    artifact_deviation,
    bucket_deviation,
    restart_deviation,
    scatter,
    step_deviation,
)
from harness.runner import run_experiment
from tests.support.command_line import harness
from tests.support.experiments import small_experiment


def steps(seed: int, sd: float, trend: float = 0.0, num: int = 4000) -> StepRatios:
    rng = np.random.default_rng(seed)
    return StepRatios(rng.normal(0, sd, num) + trend * np.arange(num) / num, np.repeat([4.0, 8.0], num // 2))


def test_the_noise_of_steps_is_found_beside_a_trend_and_stalls() -> None:
    found = steps(1, 0.004, trend=0.1)
    found.log_ratio[::100] += 3.0
    told = step_deviation([found, steps(2, 0.004)])
    assert told.value == pytest.approx(0.004, rel=0.06)
    assert told.num_units == 7996


def test_a_deviation_is_told_for_each_level_from_what_has_it() -> None:
    rng = np.random.default_rng(3)
    levels = [
        Level(f"{artifact}-{condition}", artifact, base + float(rng.normal(0, 0.002)))
        for artifact, base in enumerate(rng.normal(0, 0.01, 60))
        for condition in range(2)
        for _restart in range(5)
    ]
    restarts, artifacts = restart_deviation(levels), artifact_deviation(levels)
    assert restarts.value == pytest.approx(0.002, rel=0.1)
    assert artifacts.value == pytest.approx(0.01, rel=0.2)
    assert artifacts.num_units == 60


def test_what_the_cost_model_leaves_of_a_bucket_is_told_from_two_buckets_on() -> None:
    two = StepRatios(np.repeat([0.01, -0.01], 50), np.repeat([4.0, 8.0], 50))
    told = bucket_deviation([("one", two), ("one", two)])
    assert (told.value, told.unit) == (pytest.approx(0.02 / np.sqrt(2)), "buckets")
    assert bucket_deviation([("one", StepRatios(two.log_ratio[:50], two.bucket[:50]))]) is None


def test_one_run_of_each_condition_tells_no_scatter_between_restarts() -> None:
    levels = [Level("base", "a", 0.1), Level("more", "a", 0.2)]
    assert restart_deviation(levels) is None
    assert artifact_deviation(levels) is None


def test_simulated_steps_are_the_models_and_nothing_scatters(tmp_path: Path) -> None:
    runs = run_experiment(small_experiment(backend="sim", replicates=3), runs_root=tmp_path).runs
    found = scatter(runs)
    assert found["decode_sd"].value == pytest.approx(0, abs=1e-4)  # stamps are of whole microseconds
    assert found["step_sd"].value == pytest.approx(0, abs=1e-4)  # stamps are of whole microseconds
    assert found["decode_sd"].num_units == 6
    refused = harness("predict", "noise", "small", "--runs", str(tmp_path), cwd=tmp_path)
    assert refused.returncode == 2
    assert "its runs are simulated" in refused.stderr


def test_emulated_runs_tell_lines_to_paste_and_stand_beside_their_prediction(tmp_path: Path) -> None:
    run_experiment(small_experiment(prediction={"draws": 20}), runs_root=tmp_path)
    said = harness("predict", "noise", "small", "--runs", str(tmp_path), cwd=tmp_path)
    assert said.returncode == 0, said.stderr
    assert "No accelerator was measured" in said.stdout
    assert "lag_ms = " in said.stdout
    assert "# these runs cannot tell decode_sd" in said.stdout
    text = harness("table", "small", "--runs", str(tmp_path), "--predicted", cwd=tmp_path).stdout
    assert "no accelerator was measured" in text
    assert "observed   cost ratio" in text
    table = harness("table", "small", "--runs", str(tmp_path), "--predicted", "--format", "json", cwd=tmp_path).stdout
    (row,) = json.loads(table)
    assert row["predicted_low"] < row["predicted_ratio"] < row["predicted_high"]
    assert row["backend"] == "emulator"
