"""TraceLab's rounds, one a line (SyFI Lab, University of Washington, v0.0.2): model calls of Claude Code and Codex."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from harness.extras.formats.blocks import parsed_lines
from harness.model.traces.account import ReadNotes
from harness.model.traces.base import Progress, trace_format
from harness.model.traces.calls import Call, Log, mark_replay
from harness.model.traces.links import through_calls
from harness.model.traces.values import Record, instant_ns, records_of, text_of, tokens_of

INPUTS = ("user_message", "tool_result")
OUTPUTS = ("text", "reasoning", "tool_call")


def tracelab_logs(files: Iterable[Path], notes: ReadNotes, progress: Progress | None = None) -> Iterator[Log]:
    """The rounds of each session by their index."""
    logs: dict[str, Log] = {}
    for _, turn in parsed_lines(files, notes, progress, _round_of, "a round without its tokens or times"):
        logs.setdefault(turn.session, []).append(turn)
    for rounds in logs.values():
        log = notes.in_order(rounds, lambda turn: turn.index, "rounds out of order of their index")
        notes.check_numbers([turn.index for turn in log], "rounds")
        history, before = 0, log[0].index
        for turn in log:
            turn.unknown_wait = "a round before theirs is missing" if turn.index > before + 1 else ""
            before = turn.index
            counts = (turn.input_tokens, turn.prefix_tokens, turn.output_tokens, turn.reasoning_tokens)
            history = hash((history, *counts))
            turn.history = ("tracelab", history)
        mark_replay(log, [turn.end_ns for turn in log], log[0].submitted_ns, is_fork=False)
        yield log


def _round_of(record: Record, at: str) -> Call | None:
    events = records_of(record, "timing_events")
    stamped = [(text_of(event, "event_type"), instant_ns(event.get("timestamp"))) for event in events]
    inputs = [moment for kind, moment in stamped if kind in INPUTS and moment is not None]
    outputs = [moment for kind, moment in stamped if kind in OUTPUTS and moment is not None]
    total, prefix = tokens_of(record.get("input_tokens_total")), tokens_of(record.get("prefix_tokens"))
    output = tokens_of(record.get("output_tokens"))
    session = text_of(record, "session_id")
    if not inputs or not outputs or not total or output is None or not session:
        return None
    tools = records_of(record, "tools")
    spans = [(instant_ns(tool.get("emitted_at")), instant_ns(tool.get("result_at"))) for tool in tools]
    hidden = tokens_of(record.get("reasoning_output_tokens")) or 0
    is_codex = text_of(record, "provider") == "codex"
    index = tokens_of(record.get("round_index")) or 0
    said = (event.get("content_chars") for event in events if text_of(event, "event_type") in OUTPUTS)
    call = Call(session, max(inputs), max(outputs), total, prefix, output, at=at, index=index)
    call.reasoning_tokens = hidden if is_codex else 0
    call.kind = "human" if text_of(record, "first_input_event_type") == "user_message" else "tool"
    call.tool_spans = [(start, end) for start, end in spans if start is not None and end is not None and end >= start]
    call.answer_characters = 0 if is_codex else sum(tokens_of(characters) or 0 for characters in said)
    call.identity = ("tracelab", max(inputs), max(outputs), total, prefix, output)
    return call


FORMAT = trace_format(__file__, "tracelab", through_calls(tracelab_logs))
