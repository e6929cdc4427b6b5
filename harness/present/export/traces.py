"""A sealed run as a trace that others replay: agentic Mooncake, OpenTelemetry GenAI spans, or TraceLab's columns.

The first and the last come from the run's plan and give it back when read again; the spans carry what was measured, and
every engine step as an event. Nothing of a prompt is in any of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timedelta, timezone
from typing import Any

from harness.clock import NS_PER_MS
from harness.errors import SpecError
from harness.measure.records.run import SealedRun
from harness.measure.records.schema import ABORTED
from harness.model.plan.blocks import BlockKeys
from harness.model.plan.model import Plan, RequestPlan
from harness.present.export.measured import MeasuredRun, measured
from harness.table import table_of, to_csv

MOONCAKE_BLOCK_TOKENS = 512
EPOCH = datetime(2000, 1, 1, tzinfo=timezone.utc)
"""Instants of a run have no date of their own: spans count from here."""


def export_trace(run: SealedRun, form: str) -> bytes:
    """The run in a format of EXPORTS; SpecError for another format, or where it cannot hold this run."""
    if form not in EXPORTS:
        raise SpecError(f"unknown format {form!r}", where="--format", hint=f"Use {', '.join(EXPORTS)}")
    return EXPORTS[form](run)


def _agentic(run: SealedRun) -> bytes:
    return b"".join(json.dumps(row, separators=(",", ":")).encode() + b"\n" for row in _calls(run.plan))


def _calls(plan: Plan) -> Iterator[dict[str, Any]]:
    """One row a request; block names by the plan's own keys, so that equal beginnings have equal names."""
    keys = BlockKeys(plan, MOONCAKE_BLOCK_TOKENS)
    names: dict[int, int] = {}
    for session in plan.sessions:
        agent = _agent(plan, session.index)
        for place, request in enumerate(session.requests):
            if place:
                before = [_name(session.index, place - 1)]
                wait_ns, kind = session.requests[place - 1].wait_after_ns, session.requests[place - 1].wait_kind
            else:
                before = [_name(other, len(plan.sessions[other].requests) - 1) for other in session.predecessors]
                wait_ns, kind = session.start_offset_ns, session.start_kind
            blocks = [names.setdefault(int(key), len(names)) for key in keys.prompt(session.index, place)]
            yield {
                "request_id": _name(session.index, place),
                "session_id": agent,
                "timestamp": 0 if before else wait_ns / NS_PER_MS,
                "wait_for": before,
                "delay": wait_ns / NS_PER_MS if before and kind == "none" else 0,
                "tool_wait_ms": wait_ns / NS_PER_MS if before and kind != "none" else 0,
                "wait_kind": kind,
                "prefix_reset": request.keep_tokens == 0,
                "keep_tokens": request.keep_tokens,
                "input_length": request.prompt_tokens,
                "output_length": request.generate_tokens,
                "hash_ids": blocks,
                **_left(request),
            }


def _left(request: RequestPlan) -> dict[str, float]:
    """When the client leaves an answer, for those that it does not stay for."""
    if request.abort_after_ns:
        return {"abort_after_ms": request.abort_after_ns / NS_PER_MS}
    return {"abort_after_tokens": request.abort_after_tokens} if request.abort_after_tokens else {}


def _name(session: int, request: int) -> str:
    return f"s{session}r{request}"


def _agent(plan: Plan, session: int) -> str:
    """The conversation that a session goes on with: named by its first session."""
    while (ancestor := plan.sessions[session].continues) is not None:
        session = ancestor
    return f"agent-{session}"


def _conversation(plan: Plan, session: int) -> int:
    """The session that a tree of agents began with; one that only takes over a free place begins its own."""
    while plan.sessions[session].is_start_waited:
        session = plan.sessions[session].predecessors[0]
    return session


def _table(run: SealedRun) -> bytes:
    plan = run.plan
    if any(session.predecessors for session in plan.sessions):
        raise SpecError("sessions wait for one another, which columns cannot say", hint="Use agentic-mooncake or otel")
    if plan.num_abortable:
        raise SpecError("a client leaves answers, which columns cannot say", hint="Use agentic-mooncake")
    rows = [
        {
            "session_id": session.index,
            "input_len": request.new_tokens,
            "output_len": request.generate_tokens,
            # Whole where it is, as TraceLab writes it.
            "arrival_time": start_ns / NS_PER_MS if start_ns % NS_PER_MS else start_ns // NS_PER_MS,
            "round_idx": place,
            "tool_wait_after_ms": request.wait_after_ns / NS_PER_MS,
            "prefix_len": request.keep_tokens,
        }
        for session, start_ns in ((session, session.start_offset_ns) for session in plan.sessions)
        for place, request in enumerate(session.requests)
    ]
    return to_csv(table_of("", "", rows)).encode()


def _spans(run: SealedRun) -> bytes:
    plan, sent = run.plan, measured(run)
    start_ns = min((request.sent_ns for request in sent.requests), default=0)
    spans = [_run_span(sent, start_ns)]
    for request in sent.requests:
        attributes = {
            "gen_ai.operation.name": "chat",
            "gen_ai.conversation.id": f"{run.label}/{_conversation(plan, request.session)}",
            "gen_ai.agent.name": _agent(plan, request.session),
            "gen_ai.usage.input_tokens": request.prompt_tokens,
            # Of an answer that the client left: those that it had.
            "gen_ai.usage.output_tokens": request.output_tokens
            or (0 if request.status == ABORTED else request.max_tokens),
        }
        if request.cached_tokens is not None:
            attributes["gen_ai.usage.cache_read.input_tokens"] = request.cached_tokens
        done_ns = request.done_ns - start_ns
        spans.append(_span(run, request.name, "chat", (request.sent_ns - start_ns, done_ns), attributes))
        if request.wait_ns and request.turn + 1 < len(plan.sessions[request.session].requests):
            tool = {"gen_ai.operation.name": "execute_tool"}
            span_ns = (done_ns, done_ns + request.wait_ns)
            spans.append(_span(run, f"{request.name}-tool", "execute_tool", span_ns, tool))
    return json.dumps({"spans": spans}, separators=(",", ":")).encode()


def _span(
    run: SealedRun, span_id: str, name: str, span_ns: tuple[int, int], attributes: Mapping[str, Any]
) -> dict[str, Any]:
    """span_ns: its start and end, from the first send of the run."""
    return {
        "trace_id": run.manifest.plan_hash[:32],
        "span_id": span_id,
        **({} if span_id == "run" else {"parent_span_id": "run"}),
        "name": name,
        "start_time": _instant(span_ns[0]),
        "end_time": _instant(span_ns[1]),
        "attributes": attributes,
    }


def _run_span(sent: MeasuredRun, start_ns: int) -> dict[str, Any]:
    """The whole run, with every decode step as an event. start_ns: the first send, since 1970."""
    run, events = sent.run, list[dict[str, Any]]()
    for row in run.table("steps").to_pylist():
        step = {"name": "step", "attributes": {"rbln.n": row["n"], "rbln.b": row["b"]}}
        # A log without stamps says what was in a step, not when it was.
        time = {} if row["log_ns"] is None else {"time": _instant(row["log_ns"] + sent.wall_ns - start_ns)}
        events.append(step | time)
    length_ns = max((request.done_ns - start_ns for request in sent.requests), default=0)
    name = f"{run.experiment}/{run.label} ({run.manifest.kind.name})"
    return {**_span(run, "run", name, (0, length_ns), {"gen_ai.operation.name": "invoke_agent"}), "events": events}


def _instant(since_start_ns: int) -> str:
    return (EPOCH + timedelta(microseconds=since_start_ns // 1000)).isoformat()


EXPORTS: dict[str, Callable[[SealedRun], bytes]] = {"agentic-mooncake": _agentic, "otel": _spans, "csv": _table}
