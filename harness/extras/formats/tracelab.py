"""TraceLab's rounds, one a line (SyFI Lab, University of Washington, v0.0.2): model calls of Claude Code and Codex."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from harness.clock import NS_PER_MS
from harness.extras.formats.blocks import parsed_lines
from harness.model.traces.account import ReadNotes
from harness.model.traces.base import read_tables, trace_format
from harness.model.traces.calls import ASK_A_PERSON, LIKE_ASKING, Call, Log, mark_replay, whose
from harness.model.traces.links import through_calls
from harness.model.traces.values import Record, instant_ns, records_of, seconds_ns, text_of, tokens_of

INPUTS, COUNTS, OUTPUTS, BROKEN = read_tables(Path(__file__).with_name("labels.toml"))["tracelab"].values()
Inputs = list[tuple[int, str]]  # instants of what a round was asked for, each with its tool; "" for a person's message


def tracelab_logs(files: Iterable[Path], notes: ReadNotes) -> Iterator[Log]:
    """The rounds of each session by their index."""
    sessions: dict[str, list[tuple[Call, Inputs]]] = {}
    asking = set[str]()  # tools that asked a person
    for _, (turn, inputs, asks) in parsed_lines(files, notes, _round_of, BROKEN):
        sessions.setdefault(turn.session, []).append((turn, inputs))
        asking |= asks
    for rounds in sessions.values():
        in_order = notes.in_order(rounds, lambda each: each[0].index, "rounds out of order of their index")
        log = [turn for turn, _ in in_order]
        notes.check_numbers([-1, *(turn.index for turn in log)], "rounds")  # from 0 on
        history, before, ended_ns = 0, log[0].index, log[0].submitted_ns
        told = [((), False, False), *((turn.ran_ns, turn.is_allowed, None in turn.ran_ns) for turn in log)]  # of tools
        for (turn, inputs), (turn.ran_ns, turn.is_allowed, turn.is_unstated) in zip(in_order, told, strict=False):
            turn.unknown_wait = "a round before theirs is missing" if turn.index > before + 1 else ""
            last_ns = {not tool or tool in asking: moment for moment, tool in sorted(inputs)}
            tools_ns, persons_ns = last_ns.get(False), last_ns.get(True)
            turn.inputs_ns, turn.kind = (tools_ns, persons_ns), whose(ended_ns, tools_ns, persons_ns)
            before, ended_ns = turn.index, turn.end_ns
            history = hash((history, turn.input_tokens, turn.prefix_tokens, turn.output_tokens, turn.reasoning_tokens))
            turn.history = ("tracelab", history)
        log[-1].is_unanswered = bool(log[-1].tool_spans)
        mark_replay(log, [turn.end_ns for turn in log], log[0].submitted_ns, is_fork=False)
        yield log


def _round_of(record: Record, at: str) -> tuple[Call, Inputs, set[str]] | None:
    """A round with what its own tools say, what it was asked for, and which of the tools asked a person."""
    events = records_of(record, "timing_events")
    stamped = [(text_of(event, "event_type"), instant_ns(event.get("timestamp")), event) for event in events]
    inputs = [
        (moment, "" if kind == "user_message" else text_of(event, "tool_call_id") or kind)
        for kind, moment, event in stamped
        if kind in INPUTS and moment is not None
    ]
    outputs = [moment for kind, moment, _ in stamped if kind in OUTPUTS and moment is not None]
    total, prefix, output, new = (tokens_of(record.get(name)) for name in COUNTS)
    session, index = text_of(record, "session_id"), tokens_of(record.get("round_index")) or 0
    if not inputs or not outputs or not total or output is None or not session:
        return None
    tools = records_of(record, "tools")
    spans = [(instant_ns(tool.get("emitted_at")), instant_ns(tool.get("result_at"))) for tool in tools]
    is_codex = text_of(record, "provider") == "codex"
    said = (event.get("content_chars") for kind, _, event in stamped if kind in OUTPUTS)
    submitted_ns, ended_ns = max(moment for moment, _ in inputs), max(outputs)
    call = Call(session, submitted_ns, ended_ns, total, prefix, output, at=at, index=index)
    call.reasoning_tokens = (tokens_of(record.get("reasoning_output_tokens")) or 0) * is_codex
    call.tool_spans = [(start, end) for start, end in spans if start is not None and end is not None and end >= start]
    call.answer_characters = 0 if is_codex else sum(tokens_of(characters) or 0 for characters in said)
    call.identity = ("tracelab", submitted_ns, ended_ns, total, prefix, output)
    call.total_tokens = None if new is None else (prefix or 0) + new + output
    asks = {text_of(tool, "tool_call_id") for tool in tools if text_of(tool, "tool_name") in ASK_A_PERSON}
    call.ran_ns = [seconds_ns(tool.get("tool_internal_latency_ms"), NS_PER_MS) for tool in tools]
    call.is_allowed = any(LIKE_ASKING.search(text_of(tool, "tool_name")) for tool in tools)
    return call, inputs, asks


FORMAT = trace_format(__file__, "tracelab", through_calls(tracelab_logs))
