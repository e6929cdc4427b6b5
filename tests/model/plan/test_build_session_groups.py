"""Groups of sessions: own distributions, own starts, numbered one after another."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from harness.clock import NS_PER_S
from harness.model.experiment import build_plan
from harness.model.spec import ExperimentSpec, WorkloadSpec

BACKGROUND: dict[str, Any] = {"name": "background", "num_sessions": 4}
INJECTED: dict[str, Any] = {
    "name": "injected",
    "num_sessions": 1,
    "start_s": 3.0,
    "prompt_tokens": {"distribution": "fixed", "value": 500},
    "generate_tokens": {"distribution": "fixed", "value": 1},
}


def workload(*groups: dict[str, Any], **changes: Any) -> WorkloadSpec:
    table = {
        "waits": "none",
        "requests_per_session": 1,
        "prompt_tokens": {"distribution": "fixed", "value": 300},
        "generate_tokens": {"distribution": "fixed", "value": 800},
        "group": list(groups),
    }
    return WorkloadSpec.model_validate({**table, **changes})


def test_four_streams_and_one_injection_three_seconds_later() -> None:
    plan = build_plan(workload(BACKGROUND, INJECTED), 1, 0)
    assert [session.requests[0].prompt_tokens for session in plan.sessions] == [300] * 4 + [500]
    assert [session.requests[0].generate_tokens for session in plan.sessions] == [800] * 4 + [1]
    assert [session.start_offset_ns for session in plan.sessions] == [0] * 4 + [3 * NS_PER_S]


def test_sessions_of_a_group_may_be_staggered() -> None:
    group = {**INJECTED, "num_sessions": 3, "start_offset_s": 0.5}
    starts = [session.start_offset_ns for session in build_plan(workload(group), 1, 0).sessions]
    assert starts == [3 * NS_PER_S, 3 * NS_PER_S + NS_PER_S // 2, 4 * NS_PER_S]


def test_groups_say_how_many_sessions_there_are() -> None:
    assert workload(BACKGROUND, INJECTED).num_sessions == 5
    with pytest.raises(ValidationError, match="num_sessions is 7, the groups have 5"):
        workload(BACKGROUND, INJECTED, num_sessions=7)


def test_a_group_may_take_more_turns_than_another() -> None:
    plan = build_plan(workload(BACKGROUND, {**INJECTED, "requests_per_session": 3}), 1, 0)
    assert [len(session.requests) for session in plan.sessions] == [1, 1, 1, 1, 3]


def test_a_condition_replaces_the_groups_of_the_experiment() -> None:
    table = {
        "name": "e",
        "base_seed": 1,
        "workload": {"waits": "none", "requests_per_session": 1, "group": [BACKGROUND]},
        "condition": [{"name": "control"}, {"name": "inject", "workload": {"group": [BACKGROUND, INJECTED]}}],
    }
    spec = ExperimentSpec.model_validate(table)
    assert [spec.workload_of(condition).num_sessions for condition in spec.condition] == [4, 5]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"source": "paper"}, "groups belong to source 'drawn'"),
        ({"concurrency": 2}, "without concurrency"),
        ({"start_offset_s": 1.0}, "own start_offset_s"),
    ],
)
def test_groups_refuse_what_would_contradict_them(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        workload(BACKGROUND, **changes)


def test_group_names_are_unique() -> None:
    with pytest.raises(ValidationError, match="group names repeat"):
        workload(BACKGROUND, BACKGROUND)


def test_a_workload_without_groups_keeps_its_plan() -> None:
    # Golden: drawn before groups existed. What was frozen must stay what it is.
    assert build_plan(WorkloadSpec(num_sessions=6), 5, 0).hash.startswith("4b22e00eaeda")
