"""What a step did: tokens to clients, then log lines, metrics and the emulator's own record of its steps.

It runs after the next step was armed, so none of it delays the engine. The record (``TraceFile``) is one JSON line per
step, in model ns, to judge what was reconstructed from the log.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from harness.clock import NS_PER_MS, ScaledClock
from harness.emulator import logs
from harness.emulator.config import EmulatorConfig
from harness.emulator.core import EngineRequest, StepEnd, StepStart
from harness.emulator.logs import BackgroundWriter, ServerLog, copy_lines, kv_event_line
from harness.emulator.metrics import ServerMetrics
from harness.emulator.responses import ClientStream
from harness.emulator.step_log import step_log_header, step_log_row
from harness.engine import DECODE, PREFILL, EngineConfig, KvEvent

CRASH_EXIT_CODE = 1


def step_record(end: StepEnd, woken_ns: int, emitted_ns: int) -> dict[str, Any]:
    """The record of a step in the trace.

    arrivals: [response id, arrival instant] of the requests first seen by this step, in order. evictions: [slot,
    caller]. woken_ns, emitted_ns: when the host noticed the end and when it had sent the tokens.
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

    def append(self, record: dict[str, Any] | list[Any]) -> None:
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


class StepFiles(NamedTuple):
    """Where steps are recorded. trace: the emulator's own record. step_log: of a server with paged KV memory."""

    trace: TraceFile | None
    step_log: TraceFile | None

    def close(self, timeout_s: float = 5.0) -> None:
        """Write everything out."""
        for file in self:
            if file is not None:
                file.close(timeout_s)


class StepReporter:
    """The driver's listener. ``streams``: the client waiting for each engine request, by handle."""

    def __init__(
        self,
        config: EmulatorConfig,
        clock: ScaledClock,
        log: ServerLog,
        metrics: ServerMetrics,
        files: StepFiles,
    ) -> None:
        self.streams: dict[int, ClientStream] = {}
        self._names: dict[int, str] = {}
        self._slots: dict[int, list[int]] = {}
        self._clock, self._log, self._metrics = clock, log, metrics
        self._trace, self._step_log = files
        self._engine = EngineConfig.from_server(config.server)
        self._is_paged = self._engine.rule_set.is_paged
        self._has_bucket_log = config.bucket_log and not self._is_paged
        if self._step_log is not None:
            self._step_log.append(step_log_header(self._engine, clock.to_monotonic_ns(clock.now_ns())))

    def register(self, request: EngineRequest, stream: ClientStream) -> None:
        """From now on the tokens of ``request`` go to ``stream``."""
        self.streams[request.handle] = stream
        self._names[request.handle] = request.engine_id

    def step_ended(self, end: StepEnd, woken_ns: int) -> None:
        """A step ended at ``end.start.end_ns``; the host noticed at ``woken_ns`` (model ns)."""
        for request in end.requests:
            token = request.draw_token()
            if (stream := self.streams.get(request.handle)) is not None:
                stream.push(request, token)
        for request in end.finished:
            self.streams.pop(request.handle, None)
        emitted_ns = self._clock.now_ns()
        self._log_kv(end.kv_events, end.start.end_ns)
        self._metrics.observe(end)
        if self._step_log is not None and end.start.step.tokens:
            at_ns = self._clock.to_monotonic_ns(end.start.end_ns)
            self._step_log.append(step_log_row(self._engine, end, at_ns))
        if self._trace is not None:
            self._trace.append(step_record(end, woken_ns, emitted_ns))

    def step_started(self, start: StepStart) -> None:
        self._log_kv(start.kv_events_before, start.start_ns)
        self._log_kv(start.step.kv_events, start.start_ns)
        for request in start.preempted:
            self._slots.pop(request.handle, None)
        self._log_flushed(start.flushed, start.start_ns)
        if start.step.kind == PREFILL and not self._is_paged:
            self._log_prefill(start)
        elif start.step.kind == DECODE and self._has_bucket_log:
            step = start.step
            self._log.line(
                logs.BUCKET, f"[BUCKET] request_nums={step.num_seqs} padded_batch_size={step.bucket}", start.start_ns
            )

    def schedule_moved(self, by_ns: int) -> None:
        """The host stalled; every later step starts ``by_ns`` later than the model alone would have it."""
        self._log.line(logs.STALL, f"[EMULATOR] host stalled: schedule moved by {by_ns / NS_PER_MS:.3f} ms")
        if self._trace is not None:
            now_ns = self._clock.now_ns()
            self._trace.append({"kind": "STALL", "start_ns": now_ns, "duration_ns": 0, "moved_ns": by_ns})

    def engine_crashed(self, traceback: str) -> None:
        """The engine cannot continue: the configured crash (no traceback), or a defect."""
        self._log.line(logs.FATAL, f"EngineCore encountered a fatal error.\n{traceback}".rstrip())
        self._log.close()
        StepFiles(self._trace, self._step_log).close()
        os._exit(CRASH_EXIT_CODE)

    def abort_all(self) -> list[int]:
        """End every open answer as aborted; returns the handles, for the core to drop."""
        handles = list(self.streams)
        for handle in handles:
            stream = self.streams.pop(handle)
            request = next(request for request in stream.answer.requests if request.handle == handle)
            request.finish_reason = "abort"
            stream.push(request, None)
        return handles

    def _log_prefill(self, start: StepStart) -> None:
        request, step = start.requests[0], start.step
        slots = self._slots.get(request.handle, [])
        scheduled = (
            f"Request {request.engine_id} is now scheduled. Prompt tokens: {len(request.prompt)}, "
            f"Already generated tokens: {request.num_generated}, Allocated block(s): {list(request.kv_blocks)}"
        )
        self._log.line(logs.SCHEDULED, scheduled, start.start_ns)
        for site, message in copy_lines(step, slots, request.engine_id):
            self._log.line(site, message, start.start_ns)
        if step.failed_copy >= 0:
            # The runner prepares the prefill again, without reuse.
            self._log.line(logs.SCHEDULED, scheduled, start.start_ns)

    def _log_flushed(self, flushed: Iterable[EngineRequest], at_ns: int) -> None:
        for request in flushed:
            self._slots.pop(request.handle, None)
            self._names.pop(request.handle, None)
            if request.scheduled_ns < 0 or self._is_paged:
                continue  # aborted before the worker received it
            self._log.line(
                logs.FINISHED,
                f"Request {request.engine_id} is finished. Prompt tokens: {len(request.prompt)}, "
                f"Generated tokens: {request.num_generated}, Freed block(s): {list(request.kv_blocks)}",
                at_ns,
            )

    def _log_kv(self, events: Iterable[KvEvent], at_ns: int) -> None:
        for event in events:
            if event.kind == "ALLOC":
                self._slots.setdefault(event.request, []).extend(event.slots)
            self._log.line(*kv_event_line(event, self._names.get(event.request, "")), at_ns)
