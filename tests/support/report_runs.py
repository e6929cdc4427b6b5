"""Sealed runs for report tests, written through the real RunWriter from a small made-up server.

The server here is no model of anything: FIFO prefill, then one decode step for all, enough for every table to be
filled consistently. Time is arithmetic; no clock is read.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from harness.measure.records.manifest import Finding
from harness.measure.records.run import SealedRun
from harness.measure.records.schema import CHUNKS, KV_EVENTS, REQUESTS, STEPS
from harness.measure.records.writer import RunWriter

MS = 1_000_000
START_NS = 5_000_000_000
# A little above the published step and prefill times, as a real run is.
DECODE_MS = {1: 10.5, 2: 11.1, 4: 11.5, 6: 12.6, 8: 13.7, 16: 18.2}


@dataclass
class Shape:
    """What a made-up run looks like."""

    experiment: str = "demo"
    title: str = "Bucket intervention at N=6: {1,2,4,8} against {1,2,4,6,8}"
    condition: str = "base-waits"
    replicate: int = 0
    baseline: str = "base-waits"
    num_sessions: int = 6
    num_requests: int = 2
    buckets: tuple[int, ...] = (1, 2, 4, 8)
    waits: bool = True
    reuse_share: float = 0.6
    time_scale: float = 4.0
    backend: str = "emulator"
    has_chunks: bool = True
    has_audit: bool = True
    has_step_times: bool = True
    has_steps: bool = True
    states_reuse: bool = True
    slow_start_ns: int = 0
    fails: bool = False
    invalid_reasons: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    manifest: dict[str, Any] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)


@dataclass
class _Request:
    session: int
    request: int
    prompt: int
    generate: int
    wait_ns: int
    previous_prompt: int
    cached: int = 0
    trigger_ns: int = 0
    due_ns: int = 0
    sent_ns: int = 0
    first_ns: int = 0
    done_ns: int = 0
    left: int = 0
    stamps: list[int] = field(default_factory=list)


def seal_run(root: Path, shape: Shape | None = None) -> SealedRun:
    """Write and seal one run of ``shape``."""
    shape = shape or Shape()
    requests, steps, events = _replay(shape)
    writer = RunWriter(root, shape.experiment, shape.condition, shape.replicate, len(requests))
    with writer:
        writer.write("requests", _request_table(requests, shape))
        if shape.has_chunks:
            writer.write("chunks", _chunk_table(requests))
        if shape.has_steps:
            writer.write("steps", pa.Table.from_pylist(steps, schema=STEPS))
            writer.write("kv_events", pa.Table.from_pylist(events, schema=KV_EVENTS))
        for name, text in shape.files.items():
            (writer.folder / name).write_text(text)
        return writer.seal(_manifest(shape, requests), shape.invalid_reasons)


def seal_demo(root: Path, *, num_replicates: int = 3, **changes: Any) -> list[SealedRun]:
    """Four conditions, as the demo has them: two grids, with tool waits and without."""
    runs: list[SealedRun] = []
    for replicate in range(num_replicates):
        for waits in (True, False):
            for grid, buckets in (("base", (1, 2, 4, 8)), ("bucket6", (1, 2, 4, 6, 8))):
                condition = f"{grid}-{'waits' if waits else 'nowaits'}"
                baseline = "base-nowaits" if condition == "bucket6-nowaits" else "base-waits"
                shape = Shape(
                    condition=condition, replicate=replicate, baseline=baseline, buckets=buckets, waits=waits, **changes
                )
                runs.append(seal_run(root, shape))
    return runs


def _plan(shape: Shape) -> list[list[_Request]]:
    rng = random.Random(1000 + shape.replicate)
    sessions: list[list[_Request]] = []
    for session in range(shape.num_sessions):
        prompt, previous, mine = rng.randint(800, 1600), 0, list[_Request]()
        for request in range(shape.num_requests):
            generate, wait_ns = rng.randint(32, 256), int(rng.lognormvariate(0.4, 1.0) * 1e9)
            cached = 128 * (min(previous, prompt - 1) // 128) if previous and rng.random() < shape.reuse_share else 0
            wait_ns = wait_ns if request and shape.waits else 0
            mine.append(_Request(session, request, prompt, generate, wait_ns, previous, cached))
            previous, prompt = prompt, prompt + generate + 8
        sessions.append(mine)
    return sessions


def _replay(shape: Shape) -> tuple[list[_Request], list[dict[str, Any]], list[dict[str, Any]]]:
    """Run the plan; returns its requests, rows of steps and rows of kv events."""
    sessions = _plan(shape)
    late = random.Random(hash_seed(shape))
    pending: list[_Request] = []
    for mine in sessions:
        _arrive(mine[0], START_NS, late, shape)
        pending.append(mine[0])
    running: list[_Request] = []
    steps: list[dict[str, Any]] = []
    events: list[dict[str, Any]] = []
    now_ns = START_NS
    while pending or running:
        ready = [request for request in pending if request.sent_ns <= now_ns]
        if not running and not ready:
            now_ns = min(request.sent_ns for request in pending)
            continue
        if ready and len(running) < shape.buckets[-1]:
            request = min(ready, key=lambda item: item.sent_ns)
            pending.remove(request)
            if request.request and not request.cached:
                caller = late.choice(["request", "request", "dummy"])
                events.append(_kv_event(len(events), len(steps), now_ns, "eviction", caller, 0))
            if request.cached:
                events.append(_kv_event(len(events), len(steps), now_ns, "cache_hit", "", request.cached))
            now_ns += _prefill_ns(request.prompt - request.cached)
            now_ns += shape.slow_start_ns
            request.first_ns, request.left = now_ns, request.generate - 1
            request.stamps.append(now_ns)
            running.append(request)
            continue
        n = len(running)
        b = min(bucket for bucket in shape.buckets if bucket >= n)
        log_ns = now_ns if shape.has_step_times else None
        steps.append({"step": len(steps), "log_ns": log_ns, "n": n, "b": b})
        now_ns += int((DECODE_MS[b] + 0.0413 * n) * MS)
        for request in running:
            request.stamps.append(now_ns)
            request.left -= 1
        for request in [request for request in running if request.left <= 0]:
            running.remove(request)
            request.done_ns = now_ns + int(0.2 * MS)
            mine = sessions[request.session]
            if request.request + 1 < len(mine):
                _arrive(mine[request.request + 1], request.done_ns, late, shape)
                pending.append(mine[request.request + 1])
    return [request for mine in sessions for request in mine], steps, events


def _prefill_ns(tokens: int) -> int:
    return int(-(-tokens // 128) * (21.4 + 6.5e-4 * tokens) * MS)


def hash_seed(shape: Shape) -> int:
    return int(hashlib.sha256(f"{shape.condition}/{shape.replicate}".encode()).hexdigest()[:8], 16)


def _arrive(request: _Request, trigger_ns: int, late: random.Random, shape: Shape) -> None:
    request.trigger_ns = trigger_ns
    request.due_ns = trigger_ns + request.wait_ns
    request.sent_ns = request.due_ns + int(late.lognormvariate(-2.6, 0.7) * MS * shape.time_scale)


def _kv_event(index: int, step: int, log_ns: int, kind: str, caller: str, reused: int) -> dict[str, Any]:
    return {
        "index": index,
        "step": step,
        "log_ns": log_ns,
        "kind": kind,
        "request_id": f"cmpl-{index}",
        "slots": [index % 8],
        "num_blocks": 1,
        "caller": caller,
        "reused_tokens": reused,
    }


def _request_table(requests: list[_Request], shape: Shape) -> pa.Table:
    rows = [_row(request) for request in requests]
    if not shape.states_reuse:
        rows = [{**row, "cached_tokens": None} for row in rows]
    if shape.fails:
        rows[-1].update(
            status="http_error", http_status=500, error="HTTP 500", completion_tokens=None, response_head_ns=None
        )
    return pa.Table.from_pylist(rows, schema=REQUESTS)


def _row(request: _Request) -> dict[str, Any]:
    return {
        "session": request.session,
        "request": request.request,
        "trigger_ns": request.trigger_ns,
        "due_ns": request.due_ns,
        "sent_ns": request.sent_ns,
        "response_head_ns": request.first_ns,
        "done_ns": request.done_ns,
        "status": "ok",
        "http_status": 200,
        "error": "",
        "planned_prompt_tokens": request.prompt,
        "planned_generate_tokens": request.generate,
        "planned_wait_ns": request.wait_ns,
        "prompt_tokens": request.prompt,
        "completion_tokens": request.generate,
        "cached_tokens": request.cached,
        "request_id": f"s{request.session}r{request.request}",
        "response_id": f"cmpl-{request.session}-{request.request}",
        "finish_reason": "length",
        "token_digest": "",
    }


def _chunk_table(requests: list[_Request]) -> pa.Table:
    rows = [
        {
            "session": request.session,
            "request": request.request,
            "chunk": index,
            "received_ns": stamp_ns,
            "kernel_ns": None,
            "num_tokens": 1,
            "is_coalesced": False,
        }
        for request in requests
        for index, stamp_ns in enumerate(request.stamps)
    ]
    return pa.Table.from_pylist(rows, schema=CHUNKS)


def _manifest(shape: Shape, requests: list[_Request]) -> dict[str, Any]:
    drawn = hashlib.sha256(f"drawn {shape.replicate}".encode()).hexdigest()
    treatment = "as-drawn" if shape.waits else "no-waits"
    server = {
        "max_num_seqs": shape.buckets[-1],
        "decode_buckets": list(shape.buckets),
        "kv_slots": None,
        "slot_tokens": 8192,
        "cost_model": "paper",
        "prefix_caching": True,
        "rules": "vendor-0.11.1",
    }
    audit: dict[str, Any] = {"client": "epoll", "stream": True, "num_early_sends": 0}
    if shape.has_audit:
        audit |= {
            "cpu_s": 0.41,
            "cpu_others_s": 1.25,
            "num_stalls": 1,
            "stall_max_ms": 2.3,
            "stall_intervals_ns": [[requests[0].sent_ns - MS, 2 * MS]],
            "self_audit": {"floor_rearrival_lag_ms": [0.02, 0.03, 0.03, 0.05, 0.09]},
        }
    facts: dict[str, Any] = {
        "baseline": shape.baseline,
        "backend": shape.backend,
        "plan_hash": hashlib.sha256(f"{drawn} {treatment}".encode()).hexdigest(),
        "drawn_hash": drawn,
        "treatment": treatment,
        "findings": shape.findings,
        "requested": {
            "experiment": {
                "name": shape.experiment,
                "title": shape.title,
                "question": "Does a fitting bucket pay?",
                "replicates": 3,
                "base_seed": 20260101,
                "server": {**server, "decode_buckets": [1, 2, 4, 8]},
                "workload": {"source": "drawn", "num_sessions": shape.num_sessions, "waits": "tracelab-v0.0.2"},
            },
            "server": server,
            "client": {"name": "epoll", "stream": True, "spin_us": 300},
            "limits": {"rearrival_lag_p99_ms": 10.0, "start_spread_ms": 20.0, "request_timeout_s": 600.0},
            "spec_source": "plans/experiments/demo.toml",
        },
        "clock": {"scale": shape.time_scale},
        "client_audit": audit,
        "provenance": {
            "argv": ["harness", "run", "plans/experiments/demo.toml"],
            "host": {"cpu_model": "x86", "cpu_count": 2},
            "packages": {"rbln-harness": "0.1.0"},
        },
        "timings": {"replay_start_ns": START_NS, "replay_end_ns": max(request.done_ns for request in requests)},
    }
    return facts | shape.manifest
