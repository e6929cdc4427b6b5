"""The requests before the measured part: as long as those of the plan, and none where prompts begin alike."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from harness.clock import ScaledClock
from harness.measure.client.target import Endpoint, Target
from harness.measure.server.warm_up import MAX_SESSIONS, warm_up, warm_up_plan
from harness.model.plan.model import Plan, RequestPlan, SessionPlan
from harness.model.spec import ServerSpec
from harness.model.spec.sections import ClientSpec


def plan_of(num_sessions: int) -> Plan:
    requests = (RequestPlan(0, 900, 30), RequestPlan(930, 8, 30))
    sessions = tuple(SessionPlan(index, 0, None, None, requests) for index in range(num_sessions))
    return Plan("synthetic", 7, 0, "as-drawn", 0, (300, 2000), sessions)


@pytest.mark.parametrize(
    ("num_sessions", "max_num_seqs", "slot_tokens", "expected"),
    [(6, 4, 4096, (4, 900)), (2, 4, 4096, (2, 900)), (40, 64, 4096, (MAX_SESSIONS, 900)), (6, 4, 512, (4, 464))],
)
def test_it_is_as_long_and_as_wide_as_the_plan(
    num_sessions: int, max_num_seqs: int, slot_tokens: int, expected: tuple[int, int]
) -> None:
    server = ServerSpec(max_num_seqs=max_num_seqs, slot_tokens=slot_tokens, decode_buckets=(1, max_num_seqs))
    warm = warm_up_plan(plan_of(num_sessions), server)
    first, again = warm.sessions[0].requests
    assert (warm.num_sessions, first.prompt_tokens) == expected
    # The return computes its new tokens after the cached ones, and fits the server.
    assert again.keep_tokens == first.stream_tokens
    assert again.stream_tokens <= slot_tokens


def test_prompts_that_begin_alike_are_not_sent_before_the_measured_part() -> None:
    plan = replace(plan_of(2), prompt_form="chat")
    nowhere = Target(Endpoint("127.0.0.1", 1), "m", ClientSpec(), ScaledClock(1.0), 1)
    assert warm_up(plan, ServerSpec(), nowhere, threading.Event()) == {}
