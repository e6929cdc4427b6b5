"""TraceLab's rounds: copies count once, placeholders are estimated from the characters that a release has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.clock import NS_PER_S
from harness.model.traces.links import BACKWARDS, FALLEN, MAY_ASK, NO_READING, UNEXPLAINED
from tests.support.sound_traces import SOUND
from tests.support.trace_rows import at, trace_of


def rounds() -> list[Any]:
    """Three rounds of one session."""
    return [json.loads(line) for line in SOUND["tracelab"]()[:3]]


def test_a_session_that_repeats_another_sessions_rounds_goes_on_from_it(tmp_path: Path) -> None:
    first = rounds()
    resumed = [row | {"session_id": "resumed"} for row in first]
    events = [{"event_type": "user_message", "timestamp": at(500)}, {"event_type": "text", "timestamp": at(503)}]
    resumed.append(resumed[-1] | {"round_index": 3, "timing_events": events, "input_tokens_total": 1600})
    trace = trace_of(tmp_path, [*resumed, *first])
    (recording,) = trace.recordings
    assert [one.prompt_tokens for one in recording.requests] == [1000, 1200, 1400, 1600]
    assert sum(trace.head.dropped.values()) == 3


def test_a_forks_burst_of_its_parents_rounds_is_dropped_with_the_parent_there_or_not(tmp_path: Path) -> None:
    first = [row | {"provider": "codex"} for row in rounds()]
    burst = [{"event_type": kind, "timestamp": at(400)} for kind in ("user_message", "text")]
    own = [{"event_type": "user_message", "timestamp": at(401)}, {"event_type": "text", "timestamp": at(405)}]
    fork = [row | {"session_id": "fork", "timing_events": burst} for row in first]
    fork.append(fork[-1] | {"round_index": 3, "timing_events": own, "input_tokens_total": 1600})
    assert trace_of(tmp_path, [*first, *fork]).num_requests == 4
    assert trace_of(tmp_path, fork).num_requests == 1
    assert sum(trace_of(tmp_path, fork).head.dropped.values()) == 3


@pytest.mark.parametrize("output", [0, 1, 2, 20])
def test_a_placeholder_beside_a_long_answer_is_estimated_and_labelled(tmp_path: Path, output: int) -> None:
    trace = trace_of(tmp_path, [row | {"output_tokens": output} for row in rounds()])
    assert [one.generate_tokens for one in trace.recordings[0].requests] == [100, 100, 100]
    assert trace.head.labels == (
        "3 x output tokens estimated from characters, 4 to a token: the recording has a placeholder",
    )


@pytest.mark.parametrize(
    ("asks", "ends_s", "kind"), [("f", 9, "tool"), ("AskUserQuestion", 9, "human"), ("get_approval", 9, "none")]
)
def test_the_answer_to_a_tool_that_asks_a_person_is_a_persons_and_of_two_the_slower_one(
    tmp_path: Path, asks: str, ends_s: int, kind: str
) -> None:
    first, second, third = rounds()
    first["tools"] = [{"tool_name": asks, "tool_call_id": "q"}, {"tool_name": "f", "tool_call_id": "f"}]
    results = [("tool_result", ends_s, "q"), ("tool_result", 4, "f"), ("text", 13, "")]
    second["timing_events"] = [
        {"event_type": kind, "timestamp": at(seconds), "tool_call_id": tool} for kind, seconds, tool in results
    ]
    third["timing_events"].append({"event_type": "user_message", "timestamp": at(20)})
    (recording,) = trace_of(tmp_path, [first, second, third]).recordings
    assert [(one.wait_kind, one.wait_ns) for one in recording.requests[1:]] == [
        (kind, 6 * NS_PER_S),
        ("human", 7 * NS_PER_S),
    ]


@pytest.mark.parametrize(("prompt", "is_said"), [(1300, False), (1199, True), (500, True)])
def test_a_shorter_prompt_that_keeps_less_than_half_of_the_one_before_is_labelled(
    tmp_path: Path, prompt: int, *, is_said: bool
) -> None:
    rows = rounds()
    rows[2] |= {"input_tokens_total": prompt, "prefix_tokens": 400, "newly_append_tokens": prompt - 400}
    assert (f"1 x {FALLEN}" in trace_of(tmp_path, rows).head.labels) == is_said


@pytest.mark.parametrize(("new", "is_labelled"), [(400, False), (500, True)])
def test_new_tokens_that_do_not_sum_to_the_input_are_labelled(tmp_path: Path, new: int, is_labelled: bool) -> None:
    rows = rounds()
    rows[2]["newly_append_tokens"] = new
    assert (f"1 x {NO_READING}" in trace_of(tmp_path, rows).head.labels) == is_labelled


def test_rounds_that_are_missing_at_the_start_and_times_that_contradict_each_other_are_labelled(tmp_path: Path) -> None:
    assert "1 x rounds that are missing by their number" in trace_of(tmp_path, rounds()[1:]).head.labels
    rows = rounds()
    rows[2]["timing_events"][0]["timestamp"] = at(40)  # its output is of 23 s
    assert f"1 x {BACKWARDS}" in trace_of(tmp_path, rows).head.labels


def test_waits_for_rounds_that_are_missing_by_their_number_are_unknown_and_labelled(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, rounds()[::2])
    assert "1 x rounds that are missing by their number" in trace.head.labels
    assert "1 x waits that are unknown: a round before theirs is missing" in trace.head.labels
    assert [request.is_drawn for request in trace.recordings[0].requests] == [False, True]


@pytest.mark.parametrize(("ran_ms", "kind"), [(3000, "none"), (62_000, "tool"), (None, "tool")])
def test_a_tool_that_ran_much_shorter_than_its_wait_may_have_waited_for_an_approval(
    tmp_path: Path, ran_ms: int | None, kind: str
) -> None:
    first, second, _ = rounds()
    first["tools"] = [{"tool_name": "exec_command", "tool_call_id": "c", "tool_internal_latency_ms": ran_ms}]
    second["timing_events"] = [
        {"event_type": "tool_result", "timestamp": at(66), "tool_call_id": "c"},
        {"event_type": "text", "timestamp": at(70), "content_chars": 400},
    ]
    trace = trace_of(tmp_path, [first, second])
    assert [(one.wait_kind, one.wait_ns // NS_PER_S) for one in trace.recordings[0].requests[1:]] == [(kind, 63)]
    assert (f"1 x {UNEXPLAINED}" in trace.head.labels) == (kind == "none")
    assert (f"1 x {MAY_ASK}" in trace.head.labels) == (ran_ms is None)
