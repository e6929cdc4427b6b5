"""Answers that the client leaves as planned: the same to the nanosecond in every simulator, and old plans unchanged."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from harness.errors import PlanError
from harness.model.plan.files import read_plan, save_plan
from harness.model.plan.model import Plan, RequestPlan, SessionPlan, canonical_lines
from tests.support.paged_in_steps import drawn_plan


def test_the_next_prompt_keeps_of_a_left_answer_what_was_surely_received() -> None:
    counted = RequestPlan(0, 100, 50, abort_after_tokens=3)
    timed = RequestPlan(0, 100, 50, abort_after_ns=1)
    for left, keep in ((counted, 103), (timed, 100)):
        assert left.stream_tokens == keep
        follower = RequestPlan(keep + 1, 8, 5)
        with pytest.raises(PlanError, match=f"a stream that has {keep}"):
            Plan("drawn", 1, 0, "as-drawn", 0, (1000, 9000), (SessionPlan(0, 0, None, None, (left, follower)),))


@pytest.mark.parametrize(
    "aborts", [{"abort_after_ns": -1}, {"abort_after_tokens": 50}, {"abort_after_ns": 1, "abort_after_tokens": 1}]
)
def test_an_abort_that_cannot_happen_is_refused(aborts: dict[str, int]) -> None:
    session = SessionPlan(0, 0, None, None, (RequestPlan(0, 9, 50, **aborts),))
    with pytest.raises(PlanError, match="aborted after"):
        Plan("drawn", 1, 0, "as-drawn", 0, (1000, 9000), (session,))


def test_a_plan_with_aborts_reads_back_and_one_without_has_the_bytes_it_always_had(tmp_path: Path) -> None:
    for plan in (drawn_plan(random.Random(seed)) for seed in range(10)):
        assert read_plan(save_plan(plan, tmp_path)) == plan
    never = Plan("drawn", 1, 0, "as-drawn", 0, (1000, 9000), (SessionPlan(0, 0, None, None, (RequestPlan(0, 9, 5),)),))
    assert b"abort" not in b"".join(canonical_lines(never))
