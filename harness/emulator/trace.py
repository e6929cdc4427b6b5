"""The emulator's own record: one JSON line per engine step, to judge what was reconstructed from its log.

Times are model ns; ``duration_ns`` is what the cost model said, never what the host did. Nothing is rounded or sampled.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from harness.emulator.core import StepEnd
from harness.emulator.output import BackgroundWriter


def step_record(end: StepEnd, woken_ns: int, emitted_ns: int) -> dict[str, Any]:
    """What the trace says of one step.

    arrivals: [response id, arrival instant] of the requests first seen by this step, in order. evictions: [slot, who
    asked]. woken_ns, emitted_ns: when the host saw the end and when it had sent the tokens.
    """
    start, step = end.start, end.start.step
    events = (*start.kv_events_before, *step.kv_events)
    return {
        "index": start.number,
        "start_ns": start.start_ns,
        "duration_ns": step.duration_ns,
        "kind": step.kind,
        "n": step.num_seqs,
        "b": step.bucket,
        "requests": [request.external_id for request in start.requests],
        "arrivals": [[request.external_id, request.arrival_ns] for request in start.arrivals],
        "cached_tokens": step.cached_tokens,
        "computed_tokens": step.computed_tokens,
        "hash_hit_tokens": step.hash_hit_tokens,
        "context_tokens": step.context_tokens,
        "evictions": [[event.slots[0], event.caller] for event in events if event.kind == "EVICTION"],
        "dummy_slot": step.dummy_slot,
        "preempted": [request.external_id for request in start.preempted],
        "finished": [request.external_id for request in end.finished],
        "waiting": start.num_waiting,
        "woken_ns": woken_ns,
        "emitted_ns": emitted_ns,
    }


class TraceFile:
    """Appends records to a file from another thread."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        self._writer = BackgroundWriter(self._fd, name="trace-writer")

    def append(self, record: dict[str, Any]) -> None:
        """Queue one record."""
        self._writer.write(json.dumps(record, separators=(",", ":")).encode() + b"\n")

    def close(self, timeout_s: float = 5.0) -> None:
        """Write everything out."""
        self._writer.close(timeout_s)
        os.close(self._fd)


def read_trace(path: Path) -> list[dict[str, Any]]:
    """All whole records of a trace file; a last line cut off by a kill is left out."""
    lines = path.read_bytes().split(b"\n")
    return [json.loads(line) for line in lines[:-1] if line]
