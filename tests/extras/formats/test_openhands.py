"""OpenHands: exported events, histories of pairs, and a conversation's folder with its usage beside the events."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.clock import NS_PER_S
from harness.errors import SpecError
from harness.extras.formats.openhands import LABELS as OF_OPENHANDS
from harness.extras.formats.trajectories import STOPPED, UNSTATED
from harness.model.traces.calls import BACK, LATE, SHIFTED
from harness.model.traces.links import ALLOWED, GAPS, MAY_ASK, MISSING, OVER, UNANSWERED
from harness.model.traces.recording import TraceFile
from harness.model.traces.values import text_of
from tests.support.sound_traces import chat_usage, openhands_events
from tests.support.trace_rows import at, imported


def check(trace: TraceFile) -> None:
    (recording,) = trace.recordings
    assert trace.head.source_format == "openhands"
    assert [one.prompt_tokens for one in recording.requests] == [1000, 1300, 1600]
    assert [one.keep_tokens for one in recording.requests] == [0, 1000, 1000]
    assert [one.wait_ns // NS_PER_S for one in recording.requests] == [0, 5, 5]


def test_a_list_of_events_and_a_history_of_pairs_are_the_same_calls(tmp_path: Path) -> None:
    events = list(openhands_events("s"))
    whole, pairs = tmp_path / "trajectory.json", tmp_path / "output.jsonl"
    whole.write_text(json.dumps(events))
    pairs.write_text(json.dumps({"instance_id": "i", "history": [events[:1], events[1:3], events[3:5], events[5:]]}))
    check(imported(whole))
    check(imported(pairs))
    assert imported(whole, pairs).num_requests == 3, "both hold the same answers"


def test_several_actions_of_one_answer_are_one_call_and_an_answer_without_usage_is_counted(tmp_path: Path) -> None:
    events: list[Any] = list(openhands_events("s"))
    events.insert(2, events[1] | {"id": 90, "timestamp": at(3.1)})
    events.append({"id": 99, "timestamp": at(40), "source": "agent", "action": "message"})
    (tmp_path / "in.json").write_text(json.dumps(events))
    trace = imported(tmp_path / "in.json")
    check(trace)
    assert trace.head.dropped == {"answers without token counts": 1}


def conversation_of_the_sdk(folder: Path, *, is_interrupted: bool = False, policy: str = "NeverConfirm") -> Path:
    """Three calls with their usage beside the events. is_interrupted: a person ended one before the second."""
    (folder / "events").mkdir(parents=True)
    usages = [
        {"response_id": f"r{turn}", **chat_usage(turn), "cache_read_tokens": 1000 * bool(turn)} for turn in range(3)
    ]
    state: dict[str, Any] = {"id": "c", "agent": {}, "confirmation_policy": {"kind": policy}}
    state["stats"] = {"usage_to_metrics": {"agent": {"token_usages": usages}}}
    (folder / "base_state.json").write_text(json.dumps(state))
    events = [{"kind": "MessageEvent", "source": "user", "timestamp": at(0)}]
    for turn in range(3):
        action = {"kind": "ActionEvent", "source": "agent", "llm_response_id": f"r{turn}"}
        events.append(action | {"timestamp": at(10 * turn + 3)})
        events.append({"kind": "ConversationStateUpdateEvent", "source": "environment", "timestamp": at(10 * turn + 4)})
        events.append({"kind": "ObservationEvent", "source": "environment", "timestamp": at(10 * turn + 8)})
    if is_interrupted:
        events.insert(4, {"kind": "InterruptEvent", "source": "user", "timestamp": at(9)})
    for place, event in enumerate(events):
        (folder / "events" / f"event-{place:05d}.json").write_text(json.dumps(event | {"id": str(place)}))
    return folder


def test_a_person_who_interrupts_a_call_leaves_one_that_no_event_holds(tmp_path: Path) -> None:
    trace = imported(conversation_of_the_sdk(tmp_path / "conversation", is_interrupted=True))
    assert trace.head.dropped == {"calls that were cancelled or failed: the log does not hold them": 1}
    assert "1 x waits that are unknown: a call before theirs was cancelled or failed" in trace.head.labels


def test_a_conversation_of_the_sdk_has_its_usage_beside_its_events(tmp_path: Path) -> None:
    folder = conversation_of_the_sdk(tmp_path / "conversation")
    check(imported(folder))
    (folder / "base_state.json").unlink()
    with pytest.raises(SpecError, match="3 x answers without token counts"):
        imported(folder)


@pytest.mark.parametrize(
    ("policy", "kind", "label"),
    [("", "tool", MAY_ASK), ("AlwaysConfirm", "none", ALLOWED), ("NeverConfirm", "tool", "")],
)
def test_a_tool_that_a_person_may_have_confirmed_is_labelled(
    tmp_path: Path, policy: str, kind: str, label: str
) -> None:
    trace = imported(conversation_of_the_sdk(tmp_path / "conversation", policy=policy))
    assert [one.wait_kind for one in trace.recordings[0].requests] == ["none", kind, kind]
    assert [each for each in trace.head.labels if UNANSWERED not in each] == ([f"2 x {label}"] if label else [])


def test_the_messages_of_an_evaluations_user_are_a_programs_and_missing_delegates_are_counted(tmp_path: Path) -> None:
    events: list[Any] = list(openhands_events("s"))
    said = {"id": events[2]["id"], "source": "user", "action": "message", "timestamp": at(8)}
    whole, line = tmp_path / "trajectory.json", tmp_path / "output.jsonl"
    events[1] |= {"action": {"kind": "DelegateAction", "tasks": {"a": "x", "b": "x"}}}
    rows = [*events[:2], said, *events[3:]]
    whole.write_text(json.dumps(rows))
    line.write_text(json.dumps({"instance_id": "i", "history": rows}))
    for path, kind in ((whole, "human"), (line, "none")):
        assert imported(path).recordings[0].requests[1].wait_kind == kind
    assert imported(line).head.dropped[MISSING] == 2


def test_a_conversation_that_its_agent_finished_has_no_last_input(tmp_path: Path) -> None:
    folder = conversation_of_the_sdk(tmp_path / "conversation")
    assert imported(folder).head.labels == (f"1 x {UNANSWERED}",)
    last = max((folder / "events").iterdir())
    last.write_text(json.dumps(json.loads(last.read_text()) | {"tool_name": "finish"}))
    trace = imported(folder)
    check(trace)
    assert not trace.head.labels


def with_metrics(events: list[Any]) -> list[Any]:
    """The events of 0.x with a model that calls no tools by name: only running sums tell of the answers."""
    sums = {"prompt_tokens": 0, "completion_tokens": 0, "cache_read_tokens": 0, "cache_write_tokens": 0}
    rows: list[Any] = []
    for event in events:
        usage = event.get("tool_call_metadata", {}).get("model_response", {}).get("usage")
        row = {key: value for key, value in event.items() if key != "tool_call_metadata"}
        if usage and "action" in event:
            sums = sums | {name: sums[name] + usage[name] for name in ("prompt_tokens", "completion_tokens")}
            sums["cache_read_tokens"] += usage["prompt_tokens_details"]["cached_tokens"]
            row["llm_metrics"] = {"accumulated_cost": 0.1, "accumulated_token_usage": sums, "token_usages": []}
        rows.append(row)
    return rows


def test_running_sums_of_metrics_are_steps_and_an_answer_that_is_missing_is_named(tmp_path: Path) -> None:
    whole = tmp_path / "trajectory.json"
    rows = with_metrics(list(openhands_events("s")))
    whole.write_text(json.dumps(rows))
    trace = imported(whole)
    check(trace)
    assert trace.head.labels[1:] == ("3 x calls whose usage is the step of the running totals",)
    events = list(openhands_events("s"))
    last = {"llm_metrics": {"accumulated_token_usage": {"prompt_tokens": 4900, "completion_tokens": 400}}}
    events[-2] = events[-2] | last
    whole.write_text(json.dumps(events))
    assert any(": 4900 stated, 3900 counted" in label for label in imported(whole).head.labels)


def without_metrics_but_the_last(rows: list[Any]) -> list[Any]:
    last = max(place for place, row in enumerate(rows) if "llm_metrics" in row)
    return [
        row if place == last else {key: value for key, value in row.items() if key != "llm_metrics"}
        for place, row in enumerate(rows)
    ]


def test_running_sums_on_the_last_event_alone_are_no_call_unless_all_others_have_counts(tmp_path: Path) -> None:
    whole, events = tmp_path / "trajectory.json", list(openhands_events("s"))
    bare = without_metrics_but_the_last(with_metrics(events))
    whole.write_text(json.dumps(bare))
    with pytest.raises(SpecError, match="answers without token counts"):
        imported(whole)  # one call of 3900 tokens was never made
    whole.write_text(json.dumps([*bare, *with_metrics(list(openhands_events("s", 4)))[-2:]]))
    trace = imported(whole)
    assert [one.prompt_tokens for one in trace.recordings[0].requests] == [1900], "the step behind it is of one call"
    assert f"1 x {OF_OPENHANDS['of_several']}" in trace.head.labels
    whole.write_text(json.dumps([*events[:5], *bare[5:]]))
    check(imported(whole))


def test_events_come_by_their_number_and_a_clock_that_was_set_back_is_said(tmp_path: Path) -> None:
    folder = tmp_path / "conversation"
    (folder / "events").mkdir(parents=True)
    usages = [{"response_id": f"r{turn}", **chat_usage(turn)} for turn in range(4)]
    state = {"id": "c", "agent": {}, "stats": {"usage_to_metrics": {"agent": {"token_usages": usages}}}}
    (folder / "base_state.json").write_text(json.dumps(state))
    events = [{"kind": "MessageEvent", "source": "user", "timestamp": at(0)}]
    for turn in range(4):
        back_s = 600 - 3600 * (turn > 1) / 10  # from the third turn on the clock is 6 minutes behind
        action = {"kind": "ActionEvent", "source": "agent", "llm_response_id": f"r{turn}"}
        events.append(action | {"timestamp": at(back_s + 10 * turn + 3)})
        events.append({"kind": "ObservationEvent", "source": "environment", "timestamp": at(back_s + 10 * turn + 8)})
    for place, event in enumerate(events, 99_997):  # beyond the digits that the names are filled up to
        (folder / "events" / f"event-{place:05d}-x.json").write_text(json.dumps(event | {"id": f"x{place}"}))
    trace = imported(folder)
    (recording,) = trace.recordings
    assert [one.prompt_tokens for one in recording.requests] == [1000, 1300, 1600, 1900]
    assert [one.is_drawn for one in recording.requests] == [False, False, True, False]
    assert [one.wait_ns / NS_PER_S for one in recording.requests if not one.is_drawn] == [0, 5, 5]
    assert f"1 x {SHIFTED}" in trace.head.labels
    assert f"1 x waits that are unknown: {BACK}" in trace.head.labels


@pytest.mark.parametrize("cached", [None, 600])
def test_a_branch_goes_on_from_the_call_that_its_parent_event_stands_behind(tmp_path: Path, cached: int | None) -> None:
    folder = tmp_path / "conversation"
    (folder / "events").mkdir(parents=True)
    prompts = [("a", 1000), ("b", 1500), ("c", 1300), ("d", 1600)]
    usages = [{"response_id": name, "prompt_tokens": size, "completion_tokens": 100} for name, size in prompts]
    usages[2] |= {} if cached is None else {"cache_read_tokens": cached}
    state = {"id": "c", "agent": {}, "stats": {"usage_to_metrics": {"agent": {"token_usages": usages}}}}
    (folder / "base_state.json").write_text(json.dumps(state))
    for place, (name, _) in enumerate(prompts):
        asked: dict[str, Any] = {
            "kind": "MessageEvent",
            "source": "user",
            "id": f"u{name}",
            "timestamp": at(20 * place),
        }
        action = {"kind": "ActionEvent", "source": "agent", "id": name, "timestamp": at(20 * place + 3)}
        action |= {"llm_response_id": name, "parent_id": f"u{name}"}
        asked["parent_id"] = (None, "a", "a", "b")[place]  # c goes on from a, and d from b
        for more, event in enumerate((asked, action)):
            (folder / "events" / f"event-{2 * place + more:05d}-x.json").write_text(json.dumps(event))
    (recording,) = imported(folder).recordings
    assert [one.base for one in recording.requests] == [None, 0, 0, 1]
    assert [one.keep_tokens for one in recording.requests] == [0, 1100, cached or 1100, 1600]
    assert [one.after for one in recording.requests] == [(), (0,), (1,), (2,)]


@pytest.mark.parametrize(("history", "is_broken"), [("x", True), ({}, True), (None, False), ([], False)])
def test_a_line_without_events_is_an_instance_whose_calls_are_lost_and_one_whose_history_is_no_list_is_broken(
    tmp_path: Path, history: object, *, is_broken: bool
) -> None:
    lines = [{"instance_id": "a", "history": [*openhands_events("a")]}, {"instance_id": "b", "history": history}]
    source = tmp_path / "output.jsonl"
    source.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    head = imported(source).head
    assert head.broken == ({"no event": 1} if is_broken else {})
    assert head.dropped == ({} if is_broken else {OF_OPENHANDS["no_events"]: 1})
    assert head.rows["passed over"] == (not is_broken)


def test_a_hook_that_blocks_an_action_is_no_person(tmp_path: Path) -> None:
    folder = conversation_of_the_sdk(tmp_path / "conversation")
    event = folder / "events" / "event-00003.json"
    refused = json.loads(event.read_text()) | {"kind": "UserRejectObservation"}
    for source, kind in (("user", "human"), ("hook", "tool")):
        event.write_text(json.dumps(refused | {"rejection_source": source}))
        (recording,) = imported(folder).recordings
        assert [one.wait_kind for one in recording.requests] == ["none", kind, "tool"]


@pytest.mark.parametrize(("took_s", "wait_s"), [(None, 5), (4.0, 1), (9.0, 5), ("x", 5)])
def test_a_rejection_is_a_persons_and_a_condensers_answer_is_nobodys_history(
    tmp_path: Path, took_s: object, wait_s: int
) -> None:
    folder = tmp_path / "conversation"
    (folder / "events").mkdir(parents=True)
    usages = [
        {"response_id": "a", "prompt_tokens": 1000, "completion_tokens": 100, "cache_read_tokens": 0},
        {"response_id": "b", "prompt_tokens": 1300, "completion_tokens": 100, "cache_read_tokens": 1000},
        {"response_id": "c", "prompt_tokens": 1250, "completion_tokens": 80, "cache_read_tokens": 0},
        {"response_id": "d", "prompt_tokens": 500, "completion_tokens": 50, "cache_read_tokens": 100},
    ]
    metrics = {"token_usages": usages, "response_latencies": [{"response_id": "d", "latency": took_s}]}
    state = {"id": "c", "agent": {}, "stats": {"usage_to_metrics": {"agent": metrics}}}
    (folder / "base_state.json").write_text(json.dumps(state))
    events = [
        {"kind": "MessageEvent", "source": "user", "timestamp": at(0)},
        {"kind": "ActionEvent", "source": "agent", "llm_response_id": "a", "timestamp": at(3)},
        {"kind": "UserRejectObservation", "source": "environment", "timestamp": at(103)},
        {"kind": "ActionEvent", "source": "agent", "llm_response_id": "b", "timestamp": at(106)},
        {"kind": "ObservationEvent", "source": "environment", "timestamp": at(107)},
        {"kind": "Condensation", "source": "environment", "llm_response_id": "c", "timestamp": at(110)},
        {"kind": "ActionEvent", "source": "agent", "llm_response_id": "d", "timestamp": at(115)},
    ]
    for place, event in enumerate(events):
        (folder / "events" / f"event-{place:05d}-x.json").write_text(json.dumps(event | {"id": f"x{place}"}))
    trace = imported(folder)
    (recording,) = trace.recordings
    assert [one.base for one in recording.requests] == [None, 0, None, 1]
    assert [one.keep_tokens for one in recording.requests] == [0, 1000, 0, 100]
    assert [one.wait_kind for one in recording.requests] == ["none", "human", "tool", "none"]
    # Nothing came before the last call: how long it took says when it began, where the call above it had ended then.
    assert recording.requests[-1].wait_ns / NS_PER_S == wait_s
    assert (f"1 x {GAPS}" in trace.head.labels) == (wait_s == 5)


@pytest.mark.parametrize("kind", ["PauseEvent", "InterruptEvent"])
@pytest.mark.parametrize(("took_s", "said_s", "wait_s"), [(None, 0, None), (10.0, 0, 87), (None, 80, 77)])
def test_a_pause_of_a_person_is_their_wait_where_the_next_call_or_a_message_tells_its_end(
    tmp_path: Path, kind: str, took_s: float | None, said_s: int, wait_s: int | None
) -> None:
    folder = tmp_path / "conversation"
    (folder / "events").mkdir(parents=True)
    usages = [{"response_id": f"r{turn}", **chat_usage(turn)} for turn in range(2)]
    metrics = {"token_usages": usages, "response_latencies": [{"response_id": "r1", "latency": took_s}]}
    state = {"id": "c", "agent": {}, "stats": {"usage_to_metrics": {"agent": metrics}}}
    (folder / "base_state.json").write_text(json.dumps(state))
    stop = {"kind": kind, "source": "user", "timestamp": at(4 if kind == "InterruptEvent" else 6)}
    events = [
        {"kind": "MessageEvent", "source": "user", "timestamp": at(0)},
        {"kind": "ActionEvent", "source": "agent", "llm_response_id": "r0", "timestamp": at(3)},
        {"kind": "ObservationEvent", "source": "environment", "timestamp": at(5)},
        *([{"kind": "MessageEvent", "source": "user", "timestamp": at(said_s)}] * (said_s > 0)),
        {"kind": "ActionEvent", "source": "agent", "llm_response_id": "r1", "timestamp": at(100)},
    ]
    events.insert(2 if kind == "InterruptEvent" else 3, stop)  # that of a tool, or behind its result
    for place, event in enumerate(events):
        (folder / "events" / f"event-{place:05d}-x.json").write_text(json.dumps(event | {"id": f"x{place}"}))
    trace = imported(folder)
    request = trace.recordings[0].requests[1]
    assert request.is_drawn == (wait_s is None)
    assert (f"1 x waits that are unknown: {STOPPED}" in trace.head.labels) == (wait_s is None)
    if wait_s is not None:
        assert (request.wait_kind, request.wait_ns / NS_PER_S) == ("human", wait_s)


def test_notices_of_0_x_are_no_results_and_a_person_who_lets_it_go_on_ends_their_pause(tmp_path: Path) -> None:
    events: list[Any] = list(openhands_events("s"))
    trace = imported(written(tmp_path, events))
    tools = [(one.wait_kind, one.wait_ns) for one in trace.recordings[0].requests]
    assert tools[1:] == [("tool", 5 * NS_PER_S)] * 2
    person = {"id": 50, "source": "user", "timestamp": at(100), "action": "message"}
    running = {"observation": "agent_state_changed", "source": "environment", "extras": {"agent_state": "running"}}
    recall = {"id": 52, "observation": "recall", "source": "environment", "timestamp": at(100.3)}
    more = list(openhands_events("s", 5))[-4:]  # two answers and what came of their actions
    more[0], more[2] = more[0] | {"timestamp": at(103)}, more[2] | {"timestamp": at(180)}
    more[1] = more[1] | {"timestamp": at(105)}
    states = [
        {"id": 60 + place, "source": "user", "timestamp": at(seconds), "action": "change_agent_state", "args": state}
        for place, (seconds, state) in enumerate([(106, {"agent_state": "paused"}), (176, {"agent_state": "running"})])
    ]
    notice = running | {"id": 62, "timestamp": at(176.1)}
    rows = [*events, person, running | {"id": 51, "timestamp": at(100.1)}, recall, *more[:2], *states, notice, more[2]]
    rows = [row | {"id": place} for place, row in enumerate(rows)]
    requests = imported(written(tmp_path, rows)).recordings[0].requests
    assert [one.wait_kind for one in requests[3:]] == ["human", "human"]
    assert requests[4].wait_ns == 73 * NS_PER_S
    rows.remove(next(row for row in rows if row.get("args") == {"agent_state": "running"}))
    assert imported(written(tmp_path, rows)).recordings[0].requests[4].is_drawn


NOT_KNOWN = "rows with a value that is not known here: args.agent_state of_tomorrow"


@pytest.mark.parametrize(
    ("state", "label"),
    [
        ("awaiting_user_confirmation", ALLOWED),
        ("user_confirmed", ALLOWED),
        ("rate_limited", OVER),
        ("of_tomorrow", NOT_KNOWN),
    ],
)
def test_a_state_that_may_be_a_persons_leaves_the_wait_over_it_without_a_kind(
    tmp_path: Path, state: str, label: str
) -> None:
    events: list[Any] = list(openhands_events("s"))
    change = {"source": "user", "timestamp": at(4.5), "action": "change_agent_state", "args": {"agent_state": state}}
    rows = [row | {"id": place} for place, row in enumerate([*events[:2], change, *events[2:]])]
    trace = imported(written(tmp_path, rows))
    assert [one.wait_kind for one in trace.recordings[0].requests] == ["none", "none", "tool"]
    assert f"1 x {label}" in trace.head.labels
    assert any("not known here" in each for each in trace.head.labels) == (label == NOT_KNOWN)


def test_a_person_who_does_not_confirm_an_action_is_who_was_waited_for(tmp_path: Path) -> None:
    events: list[Any] = list(openhands_events("s"))
    events[1] |= {"args": {"confirmation_state": "awaiting_confirmation"}}
    states = ({"extras": {"agent_state": state}} for state in ("awaiting_user_confirmation", "user_rejected"))
    asked, refused = (
        {"source": "environment", "timestamp": at(4), "observation": "agent_state_changed"} | state for state in states
    )
    events[2] |= {"observation": "user_rejected", "source": "user"}
    rows = [row | {"id": place} for place, row in enumerate([*events[:2], asked, refused, *events[2:]])]
    trace = imported(written(tmp_path, rows))
    assert [one.wait_kind for one in trace.recordings[0].requests] == ["none", "human", "tool"]
    assert not any("not known" in label for label in trace.head.labels)


@pytest.mark.parametrize("reason", ["STATUS$ERROR_LLM_SERVICE_UNAVAILABLE", "RuntimeError: Agent reached maximum"])
def test_a_state_of_error_tells_of_a_call_that_failed_where_a_model_is_its_reason(tmp_path: Path, reason: str) -> None:
    events: list[Any] = list(openhands_events("s"))
    error = {"source": "environment", "timestamp": at(40), "observation": "agent_state_changed"}
    error |= {"extras": {"agent_state": "error", "reason": reason}}
    person = {"source": "user", "timestamp": at(60), "action": "message"}
    more = list(openhands_events("s", 4))[-2:]
    more[0] |= {"timestamp": at(70)}
    rows = [row | {"id": place} for place, row in enumerate([*events, error, person, more[0]])]
    trace = imported(written(tmp_path, rows))
    has_failed = "LLM" in reason
    last = trace.recordings[0].requests[-1]
    assert (last.is_drawn, last.wait_kind) == (has_failed, "human")
    assert sum(trace.head.dropped.values()) == has_failed


def evaluation(folder: Path, usages: list[Any], events: list[Any], **metrics: Any) -> TraceFile:
    """A line of an evaluation, whose usage has these answers."""
    path = folder / "output.jsonl"
    path.write_text(json.dumps({"instance_id": "i", "history": events, "metrics": {"token_usages": usages} | metrics}))
    return imported(path)


def test_an_answer_that_the_program_could_not_use_is_a_call_and_the_wait_after_it_unknown(tmp_path: Path) -> None:
    events: list[Any] = list(openhands_events("s"))
    names = [text_of(event, "tool_call_metadata", "model_response", "id") for event in events if "action" in event]
    usages = [chat_usage(turn) | {"response_id": name} for turn, name in enumerate(filter(None, names))]
    unusable = {"source": "agent", "timestamp": at(9), "observation": "error", "content": "x"}
    rows = [row | {"id": place} for place, row in enumerate([*events[:3], unusable, *events[3:]])]
    trace = evaluation(tmp_path, [*usages, chat_usage(1) | {"response_id": "x"}], rows)
    assert trace.head.dropped == {"answers without token counts": 1}
    assert [one.is_drawn for one in trace.recordings[0].requests] == [False, True, False]
    assert f"1 x prompt tokens {UNSTATED}: 5200 stated, 3900 counted" in trace.head.labels
    assert f"1 x output tokens {UNSTATED}: 400 stated, 300 counted" in trace.head.labels
    # An error of a tool names the answer that called it, or its action.
    for more in ({"cause": 1}, {"tool_call_metadata": events[1]["tool_call_metadata"]}):
        rows[3] = rows[3] | more
        assert not evaluation(tmp_path, usages, rows).head.dropped
        rows[3] = {key: value for key, value in rows[3].items() if key not in more}


def test_running_totals_over_an_answer_that_could_not_be_used_are_no_calls(tmp_path: Path) -> None:
    rows = with_metrics(list(openhands_events("s")))
    unusable = {"source": "agent", "timestamp": at(9), "observation": "error", "content": "x"}
    whole = tmp_path / "trajectory.json"
    whole.write_text(json.dumps([row | {"id": place} for place, row in enumerate([*rows[:3], unusable, *rows[3:]])]))
    trace = imported(whole)
    assert [one.prompt_tokens for one in trace.recordings[0].requests] == [1000, 1600]
    assert f"1 x {OF_OPENHANDS['of_several']}" in trace.head.labels


def test_answers_that_the_usage_counts_and_no_event_names_are_counted(tmp_path: Path) -> None:
    events: list[Any] = list(openhands_events("s"))
    names = [text_of(event, "tool_call_metadata", "model_response", "id") for event in events if "action" in event]
    usages = [chat_usage(turn) | {"response_id": name} for turn, name in enumerate(filter(None, names))]
    trace = evaluation(tmp_path, [*usages, chat_usage(5) | {"response_id": "condenser"}], events)
    assert trace.head.dropped == {OF_OPENHANDS["in_no_event"]: 1}
    assert f"1 x prompt tokens {UNSTATED}: 6400 stated, 3900 counted" in trace.head.labels
    assert not evaluation(tmp_path, usages, events).head.dropped


def test_a_hook_after_a_result_ends_the_wait_which_has_no_kind(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    (folder / "events").mkdir(parents=True)
    usages = [chat_usage(turn) | {"response_id": f"r{turn}"} for turn in range(2)]
    state = {"id": "c", "agent": {}, "stats": {"usage_to_metrics": {"agent": {"token_usages": usages}}}}
    (folder / "base_state.json").write_text(json.dumps(state))
    events: list[Any] = [
        {"kind": "MessageEvent", "source": "user", "timestamp": at(0)},
        {"kind": "ActionEvent", "source": "agent", "llm_response_id": "r0", "timestamp": at(3)},
        {"kind": "ObservationEvent", "source": "environment", "timestamp": at(5)},
        {"kind": "HookExecutionEvent", "source": "hook", "timestamp": at(35)},
        {"kind": "ActionEvent", "source": "agent", "llm_response_id": "r1", "timestamp": at(40)},
    ]
    for place, event in enumerate(events):
        (folder / "events" / f"event-{place:05d}-x.json").write_text(json.dumps(event | {"id": f"x{place}"}))
    trace = imported(folder)
    assert f"1 x {LATE}" in trace.head.labels
    last = trace.recordings[0].requests[1]
    assert (last.wait_kind, last.wait_ns) == ("none", 32 * NS_PER_S)


def written(folder: Path, events: list[Any]) -> Path:
    """A trajectory of these events."""
    path = folder / "trajectory.json"
    path.write_text(json.dumps(events))
    return path
