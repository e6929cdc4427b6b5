"""Tables of many plans, drawn at once, are those of the Plans that the same seeds give one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from harness.model.experiment import build_plan
from harness.model.sim.plans import Input, input_arrays, plan_arrays
from harness.model.spec import Treatment, WorkloadSpec

GROUPS = [
    {"name": "many", "num_sessions": 2, "requests_per_session": 1, "start_offset_s": 0.5},
    {
        "name": "one",
        "num_sessions": 1,
        "requests_per_session": 4,
        "prompt_tokens": {"distribution": "fixed", "value": 900},
    },
]
WORKLOADS: dict[str, dict[str, Any]] = {
    "defaults": {"num_sessions": 5},
    "closed population": {"num_sessions": 9, "concurrency": 3, "requests_per_session": 3, "wait_cap_s": 2.0},
    "groups": {"group": GROUPS},
    "lognormal": {
        "num_sessions": 4,
        "new_tokens": {"distribution": "lognormal", "median": 200, "sigma": 1.0, "high": 900},
        "waits": "none",
    },
    "no wait is waited": {"num_sessions": 3, "requests_per_session": 1},
    "paper": {"source": "paper", "num_sessions": 4},
    "sequential": {"source": "sequential", "num_background": 2},
}


@pytest.mark.parametrize("treatment", ["as-drawn", "no-waits", "equal-waits"])
@pytest.mark.parametrize("keys", WORKLOADS.values(), ids=WORKLOADS.keys())
def test_the_tables_hold_the_numbers_of_the_plans(keys: dict[str, Any], treatment: Treatment) -> None:
    workload, other = WorkloadSpec.model_validate(keys), WorkloadSpec(num_sessions=2)
    inputs = [Input(workload, 7, 3), Input(other, 7, 0), Input(workload, 8, 0), Input(workload, 7, 1)]
    drawn = [build_plan(*each).with_treatment(treatment) for each in inputs]
    for found, expected in zip(input_arrays(inputs, treatment), plan_arrays(drawn), strict=True):
        np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))


def test_ten_plans_of_many_sessions_are_drawn_as_one_is() -> None:
    workload = WorkloadSpec(num_sessions=300)
    together = input_arrays([Input(workload, 1, replicate) for replicate in range(10)])
    alone = plan_arrays([build_plan(workload, 1, 9)])
    np.testing.assert_array_equal(together.requests["wait_ns"][-600:], alone.requests["wait_ns"])
    np.testing.assert_array_equal(together.requests["generate"][-600:], alone.requests["generate"])
