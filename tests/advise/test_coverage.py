"""Intervals hold emulated ratios about as often as they say; the emulator takes jitter as the interval imagines it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from harness.advise.coverage import check_coverage, device_ns, emulated_ratio, expected_range, jittered_plan
from harness.engine import load_cost_model
from harness.errors import SpecError
from harness.plan import build_plan
from harness.sim import simulate
from harness.sim.search.space import SpaceSpec, candidate_of, parse_space


def space(**changes: Any) -> SpaceSpec:
    table = {
        "name": "cover",
        "limits": [4],
        "baseline": {"max_num_seqs": 4, "decode_buckets": [1, 2, 4]},
        "named": {"slots": {"max_num_seqs": 4, "decode_buckets": [1, 2, 4], "kv_slots": 8}},
        "inputs": {
            "users": [4],
            "search_seeds": [1],
            "workload": {"wait_cap_s": 5.0, "generate_tokens": {"law": "uniform", "low": 4, "high": 12}},
        },
        "uncertainty": {"samples": 120, "replicates": 2, "start_jitter_ms": 5, "rearrival_lag_ms": 5},
        **changes,
    }
    return parse_space(table, where="test")


def test_intervals_hold_about_as_many_emulated_ratios_as_they_say() -> None:
    found = check_coverage(space(), 25)
    fewest, _most = expected_range(25, 0.9)
    assert found.new >= fewest - 2
    assert found.given >= fewest - 2
    assert "of 25" in "\n".join(found.lines())


def test_a_jittered_run_of_the_emulator_is_the_simulation_of_the_jittered_plan() -> None:
    spec = space()
    plan = jittered_plan(build_plan(spec.inputs.workload_of(4), 9, 0), spec.uncertainty, np.random.default_rng(1))
    candidate, costs = candidate_of(spec.baseline), load_cost_model("paper")
    assert device_ns(plan, candidate, spec, costs) == simulate(plan, candidate.config(spec.rules), costs).device_ns


def test_emulated_experiments_are_repeatable_and_differ_by_seed() -> None:
    candidate = candidate_of(space().named["slots"])
    ratios = [emulated_ratio(space(), candidate, 4, seed) for seed in (5, 5, 6)]
    assert ratios[0] == ratios[1] != ratios[2]


def test_coverage_needs_something_to_emulate() -> None:
    with pytest.raises(SpecError, match="names no configuration"):
        check_coverage(space(named={}), 3)
    with pytest.raises(SpecError, match="rules"):
        check_coverage(space(rules="paper"), 3)


def test_of_a_hundred_checks_of_ninety_percent_between_84_and_95_hold() -> None:
    assert expected_range(100, 0.9) == (84, 95)
