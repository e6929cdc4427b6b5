"""SWE-agent's trajectories: lengths that sum to what the run counted, tool times as waits; mini-swe-agent's usage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.clock import NS_PER_MS, NS_PER_S
from harness.errors import SpecError
from harness.extras.formats.trajectories import STOPPED, UNDATED, UNSTATED
from harness.model.traces.calls import AT_ONCE
from harness.model.traces.links import ALLOWED, UNANSWERED, UNKNOWN
from tests.support.sound_traces import mini_swe_agent
from tests.support.trace_rows import trace_of


def trajectory(**stats: int) -> Any:
    query: list[Any] = []
    steps: list[Any] = []
    for turn in range(3):
        query = [*query, {"role": "user", "content": "x" * 400}]
        steps.append({"query": query, "response": "y" * 100, "action": "ls", "execution_time": 0.25 * (turn + 1)})
        query = [*query, {"role": "assistant", "content": "y" * 100}]
    return {"environment": "e", "trajectory": steps, "info": {"model_stats": stats}, "history": []}


def test_lengths_sum_to_the_tokens_that_the_run_counted_and_waits_are_the_tools_times(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, [trajectory(tokens_sent=2700, tokens_received=60, api_calls=3)])
    (recording,) = trace.recordings
    assert trace.head.source_format == "swe-agent"
    assert sum(one.prompt_tokens for one in recording.requests) == 2700
    assert [one.generate_tokens for one in recording.requests] == [20, 20, 20]
    assert [one.wait_ns // NS_PER_MS for one in recording.requests] == [0, 250, 500]
    how = "by characters, so that they sum to the tokens that the run, or each attempt, counted"
    assert f"3 x lengths {how}" in trace.head.labels


def test_lengths_that_round_up_sum_to_what_was_counted_too(tmp_path: Path) -> None:
    document = trajectory(tokens_sent=1801, tokens_received=91, api_calls=3)
    for step, length in zip(document["trajectory"], (80, 121, 61), strict=True):
        step["response"] = "y" * length
    requests = trace_of(tmp_path, [document]).recordings[0].requests
    assert sum(one.prompt_tokens for one in requests) == 1801
    assert sum(one.generate_tokens for one in requests) == 91


def test_without_counted_tokens_four_characters_are_a_token_and_without_times_waits_are_drawn(tmp_path: Path) -> None:
    document = trajectory(tokens_sent=2700, tokens_received=60, api_calls=7)
    for step in document["trajectory"]:
        del step["execution_time"]
    trace = trace_of(tmp_path, [document])
    assert [one.prompt_tokens for one in trace.recordings[0].requests] == [100, 225, 350]
    assert "3 x lengths estimated from characters, 4 to a token" in trace.head.labels
    sums = ("7 stated, 3 counted", "2700 stated, 675 counted", "60 stated, 75 counted")
    assert sum(label.endswith(sums) for label in trace.head.labels) == 3
    assert any("waits drawn from" in label for label in trace.head.labels)


def test_a_demonstration_without_messages_that_were_sent_is_refused(tmp_path: Path) -> None:
    document = trajectory()
    for step in document["trajectory"]:
        del step["query"]
    with pytest.raises(SpecError, match="1 x no trajectory with the messages or the usage of its calls"):
        trace_of(tmp_path, [document])


def test_an_answer_of_mini_swe_agent_has_its_own_usage_and_time(tmp_path: Path) -> None:
    document = mini_swe_agent("s", 4)
    del document["messages"][4]["extra"]["response"]
    trace = trace_of(tmp_path, [document])
    (recording,) = trace.recordings
    assert [one.prompt_tokens for one in recording.requests] == [1000, 1600, 1900]
    assert [one.is_drawn for one in recording.requests] == [False, True, False]
    assert [one.wait_ns // NS_PER_S for one in recording.requests][::2] == [0, 5]
    assert trace.head.dropped == {"answers without token counts": 1}


def test_an_answer_that_the_program_could_not_read_is_a_call(tmp_path: Path) -> None:
    def answer(role: str, seconds: int, prompt: int) -> Any:
        usage = {"prompt_tokens": prompt, "completion_tokens": 20}
        stamp = {"timestamp": seconds} if role == "assistant" else {}
        return {"role": role, "content": "x", "extra": {"response": {"usage": usage}} | stamp}

    messages = [
        {"role": "system", "content": "x"},
        {"role": "user", "content": "x"},
        answer("assistant", 10, 100),
        {"role": "tool", "content": "x", "extra": {"timestamp": 12}},
        answer("user", 20, 200),
        answer("assistant", 30, 300),
    ]
    trace = trace_of(tmp_path, [{"messages": messages, "trajectory_format": "mini-swe-agent-1.1"}])
    assert [request.prompt_tokens for request in trace.recordings[0].requests] == [100, 200, 300]
    assert [request.is_drawn for request in trace.recordings[0].requests] == [False, False, True]
    assert trace.recordings[0].requests[1].wait_ns == 2 * NS_PER_S


def test_a_command_that_a_person_types_is_waited_for_as_a_persons(tmp_path: Path) -> None:
    document = mini_swe_agent("s", 3)
    document["messages"][3]["extra"]["timestamp"] -= 3
    document["messages"][4:4] = [{"role": "user", "content": "x", "extra": more} for more in ({"actions": []}, {})]
    document["messages"][5]["extra"]["timestamp"] = document["messages"][3]["extra"]["timestamp"] + 6
    requests = trace_of(tmp_path, [document]).recordings[0].requests
    assert [(one.wait_kind, one.wait_ns // NS_PER_S) for one in requests] == [("none", 0), ("human", 8), ("tool", 5)]


@pytest.mark.parametrize(("mode", "kind"), [("confirm", "none"), ("yolo", "tool")])
def test_commands_that_a_person_confirms_leave_their_waits_without_a_kind(tmp_path: Path, mode: str, kind: str) -> None:
    document = mini_swe_agent("s", 3)
    document["info"]["config"] = {"agent": {"mode": mode}}
    trace = trace_of(tmp_path, [document])
    assert [one.wait_kind for one in trace.recordings[0].requests] == ["none", kind, kind]
    assert (f"2 x {ALLOWED}" in trace.head.labels) == (kind == "none")


@pytest.mark.parametrize(
    ("why", "is_told"), [("UserRejection", True), ("UserNewTask", True), ("UserInterruption", False)]
)
def test_what_a_person_says_without_a_time_is_in_the_wait_before_but_behind_an_interruption(
    tmp_path: Path, why: str, *, is_told: bool
) -> None:
    document = mini_swe_agent("s", 3)
    document["messages"].insert(4, {"role": "user", "content": "x", "extra": {"interrupt_type": why}})
    trace = trace_of(tmp_path, [document])
    request = trace.recordings[0].requests[1]
    assert (request.wait_kind, request.is_drawn, request.wait_ns == 5 * NS_PER_S) == ("human", not is_told, is_told)
    assert f"1 x {UNDATED}" in trace.head.labels
    assert any(label.endswith(STOPPED) for label in trace.head.labels) != is_told
    assert not any(label.endswith(AT_ONCE) for label in trace.head.labels)


def test_an_image_in_a_message_is_no_text(tmp_path: Path) -> None:
    document = trajectory()
    url = "data:image/png;base64," + "iVBORw0KGgo" * 1000
    for step in document["trajectory"]:
        step["query"][0] = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}
    (recording,) = trace_of(tmp_path, [document]).recordings
    assert recording.requests[0].prompt_tokens < 50


def test_what_the_program_submits_at_a_limit_is_no_call_and_each_attempt_of_a_run_is_a_session(tmp_path: Path) -> None:
    document, more = trajectory(), {"query": [{}], "response": "", "execution_time": 45.0}
    num_calls = len(document["trajectory"])
    document["trajectory"].append(more)
    (recording,) = (trace := trace_of(tmp_path, [document])).recordings
    assert len(recording.requests) == num_calls
    assert trace.head.rows["passed over"] == 1
    trace = trace_of(tmp_path, [document | {"attempts": [document, document]}])
    assert [len(one.requests) for one in trace.recordings] == [num_calls, num_calls]
    # What a reviewer of the attempts used is in the run's sum alone.
    attempt, stats = trajectory(tokens_sent=2700, tokens_received=60, api_calls=3), {"tokens_sent": 9000}
    trace = trace_of(tmp_path, [document | {"info": {"model_stats": stats}, "attempts": [attempt]}])
    assert f"1 x prompt tokens {UNSTATED}: 9000 stated, 2700 counted" in trace.head.labels


@pytest.mark.parametrize(("of_run", "stated"), [({"api_calls": 8}, 8), ({}, 7)])
def test_what_a_run_states_is_held_to_the_calls_of_all_its_attempts_once(
    tmp_path: Path, of_run: dict[str, int], stated: int
) -> None:
    attempts = [trajectory(tokens_sent=2700, tokens_received=60, api_calls=num) for num in (4, 3)]
    trace = trace_of(tmp_path, [trajectory() | {"info": {"model_stats": of_run}, "attempts": attempts}])
    assert f"1 x calls {UNSTATED}: {stated} stated, 6 counted" in trace.head.labels


def test_an_answer_without_a_text_has_the_length_of_what_it_called(tmp_path: Path) -> None:
    document = trajectory(tokens_sent=2700, tokens_received=60, api_calls=3)
    for step, action in zip(document["trajectory"], ("a" * 10, "a" * 20, "a" * 30), strict=True):
        step |= {"response": "", "action": action}
    trace = trace_of(tmp_path, [document])
    assert [one.generate_tokens for one in trace.recordings[0].requests] == [10, 20, 30]


def test_a_short_length_that_was_estimated_is_no_placeholder(tmp_path: Path) -> None:
    document = trajectory()
    for step in document["trajectory"]:
        step |= {"response": "", "action": "ls"}
    labels = trace_of(tmp_path, [document]).head.labels
    assert "3 x lengths estimated from characters, 4 to a token" in labels
    assert not any("placeholder" in label for label in labels)


def test_an_answer_in_a_wrong_form_is_waited_for_by_nobody_and_an_end_asks_for_nothing(
    tmp_path: Path,
) -> None:
    document = mini_swe_agent("s", 3)
    document["messages"][3] = {"role": "user", "content": "x", "extra": {"interrupt_type": "FormatError"}} | {
        "timestamp": document["messages"][3]["extra"]["timestamp"]
    }
    document["messages"].append({"role": "exit", "content": "", "extra": {"exit_status": "Submitted"}})
    trace = trace_of(tmp_path, [document])
    assert [one.wait_kind for one in trace.recordings[0].requests] == ["none", "none", "tool"]
    assert f"1 x {UNKNOWN}" in trace.head.labels
    assert f"1 x {UNANSWERED}" not in trace.head.labels
