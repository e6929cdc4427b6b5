"""Agent logs become rounds, and rounds become recordings: tokens and waits as the log has them, sub-agents joined."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.clock import NS_PER_MS, NS_PER_S
from harness.extras.formats.codex import CodexLog
from harness.extras.formats.tracelab import tracelab_logs
from harness.model.traces.account import ReadNotes
from harness.model.traces.calls import Call, logs_of
from harness.model.traces.claude import ClaudeLog
from harness.model.traces.links import AFTER_SUMMARY, recordings_of
from harness.model.traces.recording import Recording, check_recording
from tests.support.trace_rows import SECRET, assistant, at, result, text, tool, user, written

RECORDED = Path(__file__).parents[4] / "shared" / "traces" / "agent-logs"


def claude(folder: Path, *rows: dict[str, Any]) -> tuple[list[Recording], ReadNotes]:
    notes = ReadNotes()
    recordings = list(recordings_of(logs_of(ClaudeLog, [written(folder, list(rows))], notes), notes))
    for recording in recordings:
        check_recording(recording)
    return recordings, notes


def test_a_claude_log_becomes_requests_that_keep_what_was_cached_and_wait_as_the_tool_did(tmp_path: Path) -> None:
    (recording,), _ = claude(
        tmp_path,
        user(0.0),
        assistant("a", 2.0, (10, 1000, 0, 5), text()),
        assistant("a", 3.0, (10, 1000, 0, 40), tool("t1")),
        result("t1", 4.25),
        assistant("b", 6.0, (2, 100, 1010, 30), text()),
        user(36.0),
        assistant("c", 40.0, (3, 40, 1112, 20), text()),
    )
    first, second, third = recording.requests
    assert (first.prompt_tokens, first.generate_tokens, first.keep_tokens, first.wait_ns) == (1010, 40, 0, 0)
    assert (second.prompt_tokens, second.keep_tokens, second.wait_kind) == (1112, 1010, "tool")
    assert second.wait_ns == 1250 * NS_PER_MS
    assert (third.wait_kind, third.wait_ns, third.keep_tokens) == ("human", 30 * NS_PER_S, 1112)


def test_a_compaction_begins_a_stream_of_what_the_provider_had_cached(tmp_path: Path) -> None:
    boundary = {"type": "system", "subtype": "compact_boundary", "sessionId": SECRET, "timestamp": at(4)}
    (recording,), notes = claude(
        tmp_path,
        user(0.0),
        assistant("a", 1.0, (10, 1000, 0, 40), text()),
        boundary,
        user(5.0),
        assistant("b", 6.0, (10, 200, 300, 40), text()),
    )
    assert (recording.requests[1].base, recording.requests[1].keep_tokens) == (0, 300)
    assert notes.assumed[AFTER_SUMMARY] == 1


def test_what_a_hook_asks_for_was_waited_for_by_nobody(tmp_path: Path) -> None:
    rows = [user(0.0), assistant("a", 3.0, (10, 1000, 0, 40), text()), user(6.1, isMeta=True)]
    (recording,), _ = claude(tmp_path, *rows, assistant("b", 9.0, (2, 100, 1010, 30), text()))
    assert (recording.requests[1].wait_kind, recording.requests[1].wait_ns) == ("none", 3100 * NS_PER_MS)


def test_a_parent_waits_for_its_sub_agent_and_then_for_the_rest_of_the_tool(tmp_path: Path) -> None:
    side = {"isSidechain": True, "agentId": "kid"}
    (recording,), _ = claude(
        tmp_path,
        user(0.0),
        assistant("a", 1.0, (10, 1000, 0, 40), tool("t1")),
        user(1.5, **side),
        assistant("k", 4.0, (10, 300, 0, 50), text(), **side),
        result("t1", 4.75, agent="kid"),
        assistant("b", 7.0, (2, 100, 1010, 30), text()),
    )
    parent, child, joined = recording.requests
    assert (child.after, child.base, child.wait_ns) == ((0,), None, 500 * NS_PER_MS)
    assert joined.after == (0, 1)
    assert joined.base == 0
    assert joined.wait_ns == 750 * NS_PER_MS, "the residual after the child's end"
    assert parent.after == ()


def test_rows_of_an_agent_that_names_itself_in_a_circle_end(tmp_path: Path) -> None:
    side = {"isSidechain": True, "agentId": "kid"}
    recordings, notes = claude(
        tmp_path,
        user(0.0, **side),
        assistant("a", 1.0, (10, 10, 0, 4), tool("t"), **side),
        {**result("t", 2.0, agent="kid"), **side},
        assistant("b", 3.0, (10, 10, 0, 4), text(), **side),
    )
    assert recordings == []
    assert not notes.broken


def test_a_codex_log_closes_a_round_at_its_token_count_and_hides_reasoning_from_the_next_prompt(tmp_path: Path) -> None:
    def row(seconds: float, kind: str, payload: dict[str, Any]) -> dict[str, Any]:
        return {"timestamp": at(seconds), "type": kind, "payload": payload}

    def count(seconds: float, *numbers: int) -> dict[str, Any]:
        keys = ("input_tokens", "cached_input_tokens", "output_tokens", "reasoning_output_tokens")
        usage = dict(zip(keys, numbers, strict=True))
        return row(seconds, "event_msg", {"type": "token_count", "info": {"last_token_usage": usage}})

    rows = [
        row(0, "session_meta", {"id": "x", "cwd": SECRET}),
        row(1, "event_msg", {"type": "user_message", "message": SECRET}),
        row(2, "response_item", {"type": "reasoning", "encrypted_content": SECRET}),
        row(3, "response_item", {"type": "function_call", "name": "f", "arguments": SECRET, "call_id": "c"}),
        count(3.5, 500, 0, 60, 20),
        count(3.6, 500, 0, 60, 20),
        row(5, "response_item", {"type": "function_call_output", "call_id": "c", "output": SECRET}),
        row(6, "response_item", {"type": "message", "role": "assistant", "content": SECRET}),
        count(6.5, 700, 600, 30, 0),
    ]
    notes = ReadNotes()
    (recording,) = recordings_of(logs_of(CodexLog, [written(tmp_path, rows)], notes), notes)
    first, second = recording.requests
    assert (first.prompt_tokens, first.generate_tokens) == (500, 60)
    assert (second.keep_tokens, second.wait_ns, second.wait_kind) == (540, 2 * NS_PER_S, "tool")


@pytest.mark.skipif(not RECORDED.is_dir(), reason="the recorded agent logs are not here")
def test_recorded_logs_give_the_rounds_that_tracelab_made_of_them_to_the_millisecond() -> None:
    def numbers(one: Call) -> tuple[object, ...]:
        lengths = (
            one.input_tokens,
            one.prefix_tokens,
            one.output_tokens,
            max(one.output_tokens - one.reasoning_tokens, 0),
        )
        return (one.submitted_ns, one.end_ns, *lengths, one.kind == "human", tuple(sorted(one.tool_spans)))

    notes = ReadNotes()
    expected = [turn for log in tracelab_logs([RECORDED / "rounds.jsonl"], notes) for turn in log]
    logs = [
        *logs_of(ClaudeLog, [RECORDED / "claude-session.jsonl"], notes),
        *logs_of(CodexLog, [RECORDED / "codex-rollout.jsonl"], notes),
    ]
    ours = [turn for log in logs for turn in log]
    assert len(list(recordings_of(logs, notes))) == 2
    assert [len(expected), len(ours)] == [19, 19]
    assert [numbers(one) for one in ours] == [numbers(one) for one in expected]
    assert not notes.broken
