"""Runs as one Chrome/Perfetto JSON trace: sessions and the server's steps as tracks, who was in each step, and stalls.

Instants are the run's clock (model time when scaled), microseconds since the first request was due. Nothing is
smoothed or left out; events are written one by one.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from harness.analysis.cost.reconstruct import decoding_spans
from harness.analysis.run_tables import join_request_id
from harness.errors import RecordsError
from harness.measure.records.run import SealedRun, origin_of
from harness.measure.records.schema import ABORTED
from harness.outputs import check_output
from harness.present.report.timeline import NO_STEPS, Bar, Steps, step_lengths_s, step_segments, timeline

US_PER_S = 1_000_000
# Tracks of a server; those of a client are its sessions, from 1 on, and its machine's stalls.
STEPS_TID, PREFILLS_TID = 1, 2
STALLS_TID = 0
EVENTS_PER_WRITE = 10_000

TraceEvent = dict[str, Any]
Request = tuple[int, int]


def write_perfetto(runs: Sequence[SealedRun], path: Path) -> Path:
    """Write the runs as JSON in the Chrome trace format, piece by piece: a million steps never stand in memory as text.

    With a name that ends in ".gz" it is compressed. It has no events when no request was ever due.
    """
    pieces = (piece.encode() for piece in _pieces(runs))
    check_output(path)
    with RecordsError.on_os_error("cannot be written", where=path, hint="Name a file in a folder that can be written"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with gzip.open(path, "wb") if path.suffix == ".gz" else path.open("wb") as file:
            file.writelines(pieces)
    return path


def _pieces(runs: Sequence[SealedRun]) -> Iterator[str]:
    facts = {
        f"{run.experiment}/{run.label}": {
            "backend": run.manifest.kind.name,
            "time_scale": run.manifest.clock.scale,
            "plan_hash": run.manifest.plan_hash,
        }
        for run in runs
    }
    yield f'{{"displayTimeUnit":"ms","otherData":{_json(facts)},"traceEvents":['
    pending: list[str] = []
    comma = ""
    for place, run in enumerate(runs):
        for event in _run_events(run, client=2 * place + 1, server=2 * place + 2):
            pending.append(_json(event))
            if len(pending) == EVENTS_PER_WRITE:
                yield comma + ",".join(pending)
                comma, pending = ",", []
    yield (comma if pending else "") + ",".join(pending) + "]}"


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def _run_events(run: SealedRun, *, client: int, server: int) -> Iterator[TraceEvent]:
    """client, server: the process ids that stand for the two sides of this run."""
    view = timeline(run, 0)
    if view is None:
        return
    yield from _names(run, view.num_sessions, client, server)
    # The steps of replicas lie beside one another, and a track shows one after another.
    steps = view.servers[0] if len(view.servers) == 1 else NO_STEPS
    lengths_s = step_lengths_s(steps)
    spans = decoding_spans(run.table("steps"), run.table("kv_events"), run.table("requests")) if lengths_s.size else []
    shares_s = _shares(spans, lengths_s, steps)
    previous: Bar | None = None
    for bar in view.bars:
        waited_from_s = previous.done_s if previous is not None and previous.session == bar.session else None
        # A viewer puts a slice of no length inside whatever begins with it: here, the next request.
        if waited_from_s is not None and bar.due_s > waited_from_s:
            yield _slice(client, bar.session + 1, "tool wait", (waited_from_s, bar.due_s), {})
        yield from _request_events(bar, client, shares_s.get((bar.session, bar.request)))
        previous = bar
    for start_s, duration_s in view.stalls_s:
        yield _slice(client, STALLS_TID, "the machine stood still", (start_s, start_s + duration_s), {})
    yield from _step_events(steps, lengths_s, spans, server)
    yield from _padding_events(steps, server)
    yield from _kv_lines(run, view.start_ns, steps, server)


def _names(run: SealedRun, num_sessions: int, client: int, server: int) -> Iterator[TraceEvent]:
    scale, origin = run.manifest.clock.scale, origin_of([run])
    note = f"{run.label}{'' if scale == 1 else f' (model time, x{scale:g})'}{f'. {origin}' if origin else ''}"
    tracks = {
        (client, None): f"client of {note}",
        (server, None): f"server of {note}",
        (client, STALLS_TID): "stalls of the client's machine",
        **{(client, session + 1): f"session {session}" for session in range(num_sessions)},
        (server, STEPS_TID): "decode steps",
        (server, PREFILLS_TID): "prefills, to the next line of the log",
    }
    for (pid, tid), name in tracks.items():
        kind = "process_name" if tid is None else "thread_name"
        yield {"ph": "M", "pid": pid, "tid": tid or 0, "name": kind, "args": {"name": name}}


def _request_events(bar: Bar, client: int, share_s: float | None) -> Iterator[TraceEvent]:
    """The request, and inside it the time until the first token and the decode."""
    if bar.sent_s is None:
        return
    end_s = bar.done_s if bar.done_s is not None else bar.sent_s
    facts: dict[str, Any] = {
        "status": bar.status,
        "prompt_tokens": bar.prompt_tokens,
        "cached_tokens": bar.cached_tokens,
        "completion_tokens": bar.completion_tokens,
        "reuse": bar.reuse,
        "lag_us": round((bar.sent_s - bar.due_s) * US_PER_S, 3),
    }
    if share_s is not None:
        facts["share_of_its_steps_ms"] = round(share_s * 1000, 3)
    name = f"request {bar.request}" + (", left by the client" if bar.status == ABORTED else "")
    tid = bar.session + 1
    yield _slice(client, tid, name, (bar.sent_s, end_s), facts)
    if bar.first_token_s is not None:
        yield _slice(client, tid, "queue and prefill", (bar.sent_s, bar.first_token_s), {})
        yield _slice(client, tid, "decode", (bar.first_token_s, end_s), {})


def _slice(pid: int, tid: int, name: str, span_s: tuple[float, float], facts: dict[str, Any]) -> TraceEvent:
    start_s, end_s = span_s
    start_us, length_us = round(start_s * US_PER_S, 3), round(max(0.0, end_s - start_s) * US_PER_S, 3)
    return {"ph": "X", "pid": pid, "tid": tid, "name": name, "ts": start_us, "dur": length_us, "args": facts}


def _shares(spans: Sequence[tuple[Request, range]], lengths_s: Any, of_server: Steps) -> dict[Request, float]:
    """Seconds of decode steps by request, each step divided by the requests in it: no step is charged twice."""
    if lengths_s.size == 0:
        return {}
    until_s = np.concatenate(([0.0], np.cumsum(lengths_s / np.maximum(of_server.step_n, 1))))
    shares_s: dict[Request, float] = {}
    for request, steps in spans:
        shares_s[request] = shares_s.get(request, 0.0) + float(until_s[steps.stop] - until_s[steps.start])
    return shares_s


def _step_events(
    steps: Steps, lengths_s: Any, spans: Sequence[tuple[Request, range]], server: int
) -> Iterator[TraceEvent]:
    """A slice per decode step: who was in it, where the log tells, and the share of it that each of them bears."""
    begins = sorted(spans, key=lambda span: span[1].start)
    running: dict[Request, int] = {}
    place = 0
    for step in range(len(lengths_s)):
        while place < len(begins) and begins[place][1].start <= step:
            running[begins[place][0]] = begins[place][1].stop
            place += 1
        running = {request: stop for request, stop in running.items() if stop > step}
        start_s, length_s = float(steps.step_s[step]), float(lengths_s[step])
        n, b = int(steps.step_n[step]), int(steps.step_b[step])
        facts: dict[str, Any] = {"n": n, "b": b, "padding": b - n, "share_of_each_ms": round(1000 * length_s / n, 6)}
        if spans:
            facts["requests"] = " ".join(f"s{session}r{request}" for session, request in running)
        yield _slice(server, STEPS_TID, f"{n} of {b}", (start_s, start_s + length_s), facts)


def _padding_events(steps: Steps, server: int) -> Iterator[TraceEvent]:
    """n and padding as a counter, 0 where no step runs."""
    previous_end_s: float | None = None
    for segment in step_segments(steps):
        if previous_end_s is not None and segment.start_s - previous_end_s > 1e-6:
            yield _counter(server, previous_end_s, 0, 0)
        yield _counter(server, segment.start_s, segment.n, segment.b)
        previous_end_s = segment.end_s
    if previous_end_s is not None:
        yield _counter(server, previous_end_s, 0, 0)


def _counter(server: int, at_s: float, n: int, b: int) -> TraceEvent:
    at_us = round(at_s * US_PER_S, 3)
    return {"ph": "C", "pid": server, "name": "bucket positions", "ts": at_us, "args": {"n": n, "padding": b - n}}


def _kv_lines(run: SealedRun, start_ns: int, steps: Steps, server: int) -> Iterator[TraceEvent]:
    """Evictions as marks; admissions as prefills that last until the log has its next line."""
    rows = [row for row in run.table("kv_events").to_pylist() if row["log_ns"] is not None]
    names = run.table("requests").select(["response_id", "session", "request"]).to_pylist()
    of_id = {row["response_id"]: f"s{row['session']}r{row['request']}" for row in names if row["response_id"]}
    admitted_s = [(row["log_ns"] - start_ns) / 1e9 for row in rows if row["kind"] == "alloc"]
    lines_s = np.sort(np.concatenate([steps.step_s, np.asarray(admitted_s, dtype=np.float64)]))
    for row in rows:
        at_s = (row["log_ns"] - start_ns) / 1e9
        if row["kind"] == "eviction":
            name = f"eviction by {row['caller'] or 'unknown'}"
            mark: TraceEvent = {"ph": "i", "s": "p", "pid": server, "tid": PREFILLS_TID, "name": name}
            yield {**mark, "ts": round(at_s * US_PER_S, 3), "args": {"slots": row["slots"]}}
        elif row["kind"] == "alloc":
            after = int(np.searchsorted(lines_s, at_s, side="right"))
            end_s = float(lines_s[after]) if after < lines_s.size else at_s
            request = of_id.get(join_request_id(row["request_id"], of_id) or "", row["request_id"])
            yield _slice(
                server, PREFILLS_TID, f"prefill of {request}", (at_s, end_s), {"reused_tokens": row["reused_tokens"]}
            )
