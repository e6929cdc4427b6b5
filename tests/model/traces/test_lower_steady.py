"""A steady start: every recording begins at an instant of its own time, after one warm-up."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.clock import NS_PER_S
from harness.errors import SpecError
from harness.model.experiment import build_plan
from harness.model.plan.model import WaitKind
from harness.model.spec import WorkloadSpec
from harness.model.traces.lower import Lowering, begun_at_a_drawn_instant, sessions_of
from harness.model.traces.recording import RecordedRequest, Recording, check_recording

KINDS: tuple[WaitKind, ...] = ("tool", "human")


def chain(*waits_s: int) -> Recording:
    requests = [RecordedRequest(None, (), 0, "none", 100, 0, 10)]
    for wait_s in waits_s:
        before = requests[-1]
        keep = before.prompt_tokens + before.generate_tokens
        after = (len(requests) - 1,)
        requests.append(RecordedRequest(after[0], after, wait_s * NS_PER_S, "tool", keep + 8, keep, 10))
    return Recording("chain", 0, tuple(requests))


@st.composite
def trees(draw: st.DrawFn) -> Recording:
    requests: list[RecordedRequest] = []
    for place in range(draw(st.integers(1, 12))):
        after = tuple(sorted(draw(st.sets(st.integers(0, place - 1), max_size=3)))) if place else ()
        base = draw(st.sampled_from(after)) if after and draw(st.booleans()) else None
        keep = 0 if base is None else min(requests[base].prompt_tokens, 60)
        wait_ns = draw(st.integers(0, 50))
        requests.append(RecordedRequest(base, after, wait_ns, draw(st.sampled_from(KINDS)), 100 + place, keep, 5))
    return Recording("tree", 0, tuple(requests))


@given(trees(), st.integers(0, 1 << 30))
def test_what_begins_in_the_middle_is_a_whole_recording_and_a_plan(recording: Recording, seed: int) -> None:
    begun, num_warm_ups = begun_at_a_drawn_instant(recording, random.Random(seed))
    check_recording(begun)
    assert 0 < len(begun.requests) <= len(recording.requests)
    assert num_warm_ups == sum(one.wait_kind == "none" for one in begun.requests)
    how = Lowering(is_steady=True, concurrency=1)
    sessions, _, left = sessions_of([recording, recording], 0, how, random.Random(seed))
    sent = sum(len(session.requests) for session in sessions)
    assert sent + left.counts["requests before a drawn start"] == 2 * len(recording.requests)


def test_a_wait_that_had_begun_keeps_what_was_left_of_it_after_one_warm_up() -> None:
    recording = chain(1, 1000, 1)
    begun, num_warm_ups = begun_at_a_drawn_instant(recording, random.Random(3))
    warm_up, following = begun.requests[:2]
    assert num_warm_ups == 1
    assert (warm_up.prompt_tokens, warm_up.keep_tokens, warm_up.after) == (recording.requests[1].prompt_tokens, 0, ())
    assert 0 < following.wait_ns < recording.requests[2].wait_ns
    assert following.keep_tokens == recording.requests[2].keep_tokens


def test_long_waits_are_found_as_often_as_they_last() -> None:
    recording, rng = chain(1, 9), random.Random(11)
    in_the_long_one = sum(len(begun_at_a_drawn_instant(recording, rng)[0].requests) == 2 for _ in range(2000))
    assert 0.87 < in_the_long_one / 2000 < 0.93


def test_a_workload_starts_steady_says_its_warm_ups_and_refuses_recorded_arrivals() -> None:
    workload = WorkloadSpec.model_validate({"source": "trace", "trace": "coding-agent", "start": "steady"})
    plan = build_plan(workload, base_seed=5, replicate=0)
    whole = build_plan(workload.model_copy(update={"start": "beginning"}), base_seed=5, replicate=0)
    assert 0 < plan.num_requests < whole.num_requests
    assert plan.provenance["warm_up_requests"] == sum(session.after is None for session in plan.sessions)
    assert "requests before a drawn start" in str(plan.provenance["left_out"])
    assert "warm_up_requests" not in whole.provenance
    with pytest.raises((SpecError, ValueError), match="recorded"):
        WorkloadSpec.model_validate(workload.model_dump() | {"arrivals": "recorded"})
