"""What is written of each step: the step log of a vLLM server, and the emulator's own trace.

``harness.stacks.vllm.step_log`` reads the step log as that of a real server. The trace is one JSON line per step, in
model ns, to judge what was reconstructed from the log.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from harness.measure.emulator.logs import BackgroundWriter
from harness.model.engine import EngineConfig
from harness.model.engine.config import settings_of
from harness.model.engine.core import StepEnd
from harness.model.spec.server import SERVER_KEYS


def step_log_header(config: EngineConfig, started_ns: int) -> dict[str, Any]:
    """The header, with the settings in effect."""
    # Imported here: it loads pyarrow, and a server with slots writes no such log.
    from harness.stacks.vllm.step_log import COLUMNS, FORMAT

    settings = settings_of(config, "")
    return {
        "vllm_step_log": FORMAT,
        "columns": list(COLUMNS),
        # The newest release that decides by these rules.
        "vllm": config.rule_set.vllm[-1],
        "engine": 0,
        "started_ns": started_ns,
        "effective": {
            **{SERVER_KEYS[key].header: value for key, value in settings.items() if SERVER_KEYS[key].header},
            "enforce_eager": False,
            "enable_chunked_prefill": True,
            "cudagraph_mode": "FULL_AND_PIECEWISE",
            "cudagraph_metrics": True,
            "iteration_details": True,
        },
        "absent": [],
    }


def step_log_row(config: EngineConfig, end: StepEnd, at_ns: int, logger_ns: int = 0) -> list[Any]:
    """The values of ``COLUMNS`` of a step, after its tokens were drawn. at_ns: CLOCK_MONOTONIC."""
    from harness.stacks.vllm.step_log import COLUMNS

    step, paged = end.start.step, config.paged
    num_tokens = sum(step.tokens)
    num_decodes = num_tokens - step.computed_tokens
    mode, padded = paged.graph_of(step.tokens)
    lookups = end.start.lookups if paged.prefix_caching else ()
    first = [request for request in end.requests if request.num_generated == 1]
    values = {
        "at_ns": at_ns,
        "running": end.num_running,
        "waiting": end.num_waiting,
        "skipped_waiting": 0,
        "kv_usage": end.used_blocks / paged.num_usable_blocks,
        "prefix_queries": sum(lookup.cached_tokens + lookup.computed_tokens for lookup in lookups),
        "prefix_hits": sum(lookup.cached_tokens for lookup in lookups),
        "unpadded_tokens": num_tokens,
        "padded_tokens": padded,
        "runtime_mode": mode,
        "context_requests": step.num_seqs - num_decodes,
        "context_tokens": step.computed_tokens,
        "generation_requests": num_decodes,
        "generation_tokens": num_decodes,
        "is_dummy": False,
        "prompt_tokens": sum(len(request.prompt) for request in first),
        "generated_tokens": len(end.requests),
        "preempted": len(step.preempted),
        "logger_ns": logger_ns,
    }
    return [values[column] for column in COLUMNS]


def step_record(end: StepEnd, woken_ns: int, emitted_ns: int) -> dict[str, Any]:
    """The record of a step in the trace.

    arrivals: [response id, arrival instant] of the requests first seen by this step, in order. evictions: [slot,
    caller]. aborted_before: requests dropped since the step before; aborted: while it ran, before its tokens.
    woken_ns, emitted_ns: when the host noticed the end and when it had sent the tokens.
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
        "aborted_before": [request.external_id for request in start.aborted],
        "aborted": [request.external_id for request in end.aborted],
        "finished": [request.external_id for request in end.finished],
        "waiting": start.num_waiting,
        "woken_ns": woken_ns,
        "emitted_ns": emitted_ns,
    }


class StepTraceFile:
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

    trace: StepTraceFile | None
    step_log: StepTraceFile | None

    def close(self, timeout_s: float = 5.0) -> None:
        """Write everything out."""
        for file in self:
            if file is not None:
                file.close(timeout_s)
