"""One run as a Chrome/Perfetto JSON trace: sessions as tracks, n and bucket as counters, evictions as marks.

Instants are the run's clock (model time when scaled), microseconds since the first request was due. Nothing is
smoothed or left out. Next: a person opens the file in a trace viewer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from harness.records import SealedRun
from harness.records.schema import ABORTED
from harness.report.tables import timeline
from harness.report.timeline import step_segments
from harness.report.view import Bar

CLIENT_PID = 1
SERVER_PID = 2
US_PER_S = 1_000_000

TraceEvent = dict[str, Any]


def perfetto_trace(run: SealedRun) -> bytes:
    """The run as UTF-8 JSON in the Chrome trace format; empty of events when no request was ever due."""
    view = timeline(run, 0)
    events: list[TraceEvent] = []
    if view is not None:
        events += _names(run, view.num_sessions)
        for bar in view.bars:
            events += _request_events(bar)
        previous_end_s: float | None = None
        for segment in step_segments(view):
            if previous_end_s is not None and segment.start_s - previous_end_s > 1e-6:
                events.append(_counter(previous_end_s, 0, 0))
            events.append(_counter(segment.start_s, segment.n, segment.b))
            previous_end_s = segment.end_s
        if previous_end_s is not None:
            events.append(_counter(previous_end_s, 0, 0))
        events += _eviction_events(run, view.start_ns)
    manifest = run.manifest
    trace = {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "run": f"{manifest.experiment}/{manifest.condition}/{manifest.replicate}",
            "backend": manifest.backend,
            "time_scale": manifest.clock.scale,
            "plan_hash": manifest.plan_hash,
        },
    }
    return json.dumps(trace, separators=(",", ":")).encode()


def _names(run: SealedRun, num_sessions: int) -> Iterator[TraceEvent]:
    scale = run.manifest.clock.scale
    note = "" if scale == 1 else f" (model time, x{scale:g})"
    for pid, name in ((CLIENT_PID, f"client: sessions{note}"), (SERVER_PID, f"server: decode steps{note}")):
        yield {"ph": "M", "pid": pid, "tid": 0, "name": "process_name", "args": {"name": name}}
    for session in range(num_sessions):
        yield {
            "ph": "M",
            "pid": CLIENT_PID,
            "tid": session + 1,
            "name": "thread_name",
            "args": {"name": f"session {session}"},
        }


def _request_events(bar: Bar) -> Iterator[TraceEvent]:
    """The request, and inside it the time until the first token and the decode."""
    if bar.sent_s is None:
        return
    end_s = bar.done_s if bar.done_s is not None else bar.sent_s
    facts = {
        "status": bar.status,
        "prompt_tokens": bar.prompt_tokens,
        "cached_tokens": bar.cached_tokens,
        "completion_tokens": bar.completion_tokens,
        "reuse": bar.reuse,
        "lag_us": round((bar.sent_s - bar.due_s) * US_PER_S, 3),
    }
    name = f"request {bar.request}" + (", left by the client" if bar.status == ABORTED else "")
    yield _slice(bar, name, bar.sent_s, end_s, facts)
    if bar.first_token_s is not None:
        yield _slice(bar, "queue and prefill", bar.sent_s, bar.first_token_s, {})
        yield _slice(bar, "decode", bar.first_token_s, end_s, {})


def _slice(bar: Bar, name: str, start_s: float, end_s: float, facts: dict[str, Any]) -> TraceEvent:
    return {
        "ph": "X",
        "pid": CLIENT_PID,
        "tid": bar.session + 1,
        "name": name,
        "ts": round(start_s * US_PER_S, 3),
        "dur": round(max(0.0, end_s - start_s) * US_PER_S, 3),
        "args": facts,
    }


def _counter(at_s: float, n: int, b: int) -> TraceEvent:
    at_us = round(at_s * US_PER_S, 3)
    return {"ph": "C", "pid": SERVER_PID, "name": "bucket positions", "ts": at_us, "args": {"n": n, "padding": b - n}}


def _eviction_events(run: SealedRun, start_ns: int) -> Iterator[TraceEvent]:
    for row in run.table("kv_events").to_pylist():
        if row["kind"] == "eviction" and row["log_ns"] is not None:
            yield {
                "ph": "i",
                "s": "p",
                "pid": SERVER_PID,
                "tid": 0,
                "name": f"eviction by {row['caller'] or 'unknown'}",
                "ts": (row["log_ns"] - start_ns) / 1000,
                "args": {"slots": row["slots"]},
            }
