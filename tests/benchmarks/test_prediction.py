"""Intervals hold emulated ratios about as often as they say; the emulator takes jitter as the interval imagines it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks.prediction import check_coverage, emulated, expected_range, figures, jittered_plan
from harness.errors import SpecError
from harness.extras.search.space import SpaceSpec, parse_space
from harness.extras.search.windows import window_figures
from harness.model.engine import EngineConfig, load_cost_model
from harness.model.experiment import build_plan
from harness.model.sim import plan_arrays, simulate
from harness.model.sim.draws import nominal, perturbation_of


def space(**changes: Any) -> SpaceSpec:
    table = {
        "name": "cover",
        "max_num_seqs": [4],
        "baseline": {"max_num_seqs": 4, "decode_buckets": [1, 2, 4]},
        "named": {"slots": {"max_num_seqs": 4, "decode_buckets": [1, 2, 4], "kv_slots": 8}},
        "inputs": {
            "users": [4],
            "search_seeds": [1],
            "workload": {"wait_cap_s": 5.0, "generate_tokens": {"distribution": "uniform", "low": 4, "high": 12}},
        },
        "prediction": {"draws": 120, "replicates": 2, "start_ms": 5, "lag_ms": 5},
        **changes,
    }
    return parse_space(table, where="test")


def test_intervals_hold_about_as_many_emulated_ratios_as_they_say() -> None:
    found = check_coverage(space(), 25)
    fewest, _most = expected_range(25, 0.9)
    assert found.new is not None
    assert min(found.new, found.given) >= fewest - 2
    assert "of 25" in "\n".join(found.lines())


def test_closed_populations_are_judged_in_their_window() -> None:
    prediction = {"draws": 40, "replicates": 1, "start_ms": 5, "lag_ms": 5}
    workload = {
        "wait_cap_s": 2.0,
        "requests_per_session": 3,
        "generate_tokens": {"distribution": "uniform", "low": 4, "high": 9},
    }
    inputs = {"users": [4], "search_seeds": [1], "sessions_per_user": 8, "workload": workload}
    windowed = space(prediction=prediction, inputs=inputs, window={"after_requests": 3, "measure_s": 2})
    found = check_coverage(windowed, 8)
    assert found.new is None
    assert found.given >= 5
    assert len(set(found.ratios)) == 8


def test_emulated_runs_are_counted_in_the_window_as_simulated_ones_are() -> None:
    workload = {"wait_cap_s": 2.0, "requests_per_session": 3}
    inputs = {"users": [4], "search_seeds": [1], "sessions_per_user": 3, "workload": workload}
    spec = space(inputs=inputs, window={"after_requests": 2, "measure_s": 9})
    assert spec.window is not None
    candidate, costs, plan = (
        spec.baseline.shape,
        load_cost_model("paper"),
        build_plan(spec.inputs.workload_of(4), 1, 0),
    )
    alone = window_figures(
        nominal(plan_arrays([plan]), costs), EngineConfig.of_shape(candidate, spec.rules), spec.window
    )
    assert figures(plan, candidate, spec, costs) == (alone.device_ns, alone.completed)


def test_a_jittered_run_of_the_emulator_is_the_simulation_of_the_jittered_plan() -> None:
    spec = space()
    perturbation = perturbation_of(spec.prediction, spec.cost_model)
    plan = jittered_plan(build_plan(spec.inputs.workload_of(4), 9, 0), perturbation, np.random.default_rng(1))
    candidate, costs = spec.baseline.shape, load_cost_model("paper")
    simulated = simulate(plan, EngineConfig.of_shape(candidate, spec.rules), costs)
    assert figures(plan, candidate, spec, costs)[0] == simulated.device_ns


def test_emulated_experiments_are_repeatable_and_differ_by_seed() -> None:
    candidate = space().named["slots"].shape
    ratios = [emulated(space(), candidate, 4, seed) for seed in (5, 5, 6)]
    assert ratios[0] == ratios[1]
    assert ratios[0] != ratios[2]


def test_coverage_needs_something_to_emulate() -> None:
    with pytest.raises(SpecError, match="names no configuration"):
        check_coverage(space(named={}), 3)
    with pytest.raises(SpecError, match="rules"):
        check_coverage(space(rules="paper"), 3)


def test_of_a_hundred_checks_of_ninety_percent_between_84_and_95_hold() -> None:
    assert expected_range(100, 0.9) == (84, 95)
