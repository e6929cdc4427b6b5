"""Tables of many plans, drawn at once, are those of the Plans that the same seeds give one by one."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from harness.errors import PlanError
from harness.model.experiment import build_plan
from harness.model.plan.model import Plan, RequestPlan, SessionPlan
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


REQUEST = {"new_tokens": 9, "generate_tokens": 9, "wait_after_ns": 9, "keep_tokens": 9}
REQUEST |= {"abort_after_ns": 9, "abort_after_tokens": 2}
SESSION: dict[str, object] = {"start_offset_ns": 9, "after": 1, "continues": None, "also_after": (1,), "blocks": (1,)}
SESSION |= {"start_kind": "tool", "requests": (RequestPlan(0, 64, 4),)}
# What no server sees, or what only words and prompts are made of.
UNSEEN = {"index", "wait_kind", "source", "seed", "replicate", "treatment", "token_id_range", "provenance"}
UNSEEN |= {"prompt_form", "drawn_parent", "_hash"}


def test_every_field_of_a_plan_is_in_the_tables_of_the_simulator_or_is_refused() -> None:
    turns = (RequestPlan(0, 64, 4, 5), RequestPlan(68, 8, 4))
    first, other = (SessionPlan(index, 0, None, None, turns[:1]) for index in range(2))
    plan = Plan("drawn", 1, 0, "as-drawn", 0, (0, 2), (first, other), block_tokens=16)
    plan = replace(plan, sessions=(*plan.sessions, SessionPlan(2, 0, 0, 0, turns)))
    plan = replace(plan, sessions=(*plan.sessions, SessionPlan(3, 0, 0, None, turns, blocks=(1, 2))))

    def tables(changed: Plan) -> list[Any]:
        return [np.asarray(table).tolist() for table in plan_arrays([changed])]

    def with_session(place: int, **changes: Any) -> Plan:
        sessions = list(plan.sessions)
        sessions[place] = replace(sessions[place], **changes)
        return replace(plan, sessions=tuple(sessions))

    changed = {name: with_session(2 if name == "continues" else 3, **{name: value}) for name, value in SESSION.items()}
    for name, value in REQUEST.items():
        requests = (turns[0], replace(turns[1], **{name: value}))
        if name == "wait_after_ns":
            requests = (replace(turns[0], wait_after_ns=value), turns[1])
        changed[name] = with_session(3, requests=requests)
    changed |= {"sessions": replace(plan, sessions=plan.sessions[:2]), "block_tokens": replace(plan, block_tokens=8)}
    unchanged = with_session(3, blocks=())
    changed["shared_prefix_tokens"] = replace(unchanged, block_tokens=0, shared_prefix_tokens=16)
    assert {each.name for kind in (Plan, SessionPlan, RequestPlan) for each in fields(kind)} == UNSEEN | changed.keys()
    for name, each in changed.items():
        assert tables(each) != tables(unchanged if name == "shared_prefix_tokens" else plan), name
    with pytest.raises(PlanError, match="a shared prefix of 16 tokens and named blocks"):
        replace(plan, shared_prefix_tokens=16)
