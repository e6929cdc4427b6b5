"""What is written of each step: the step log of a vLLM server, and the emulator's own trace.

``harness.stacks.vllm.step_log`` reads the step log as that of a real server. The trace is one JSON line per step, in
model ns, to judge what was reconstructed from the log.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from harness.measure.emulator.logs import BackgroundWriter
from harness.model.engine import EngineConfig
from harness.model.engine.config import drafts_shown, settings_of
from harness.model.engine.core import StepEnd
from harness.model.spec.server import SERVER_KEYS


def in_place(at_ns: int) -> int:
    """Model time that is written as it is."""
    return at_ns


def step_log_header(config: EngineConfig, started_ns: int) -> dict[str, Any]:
    """The header, with the settings in effect; of a server with drafts as its engine core writes it."""
    # Imported here: they load pyarrow, and a server with slots writes no such log.
    from harness.stacks.vllm.core_steps import COLUMNS_WITH_DRAFTS
    from harness.stacks.vllm.step_log import COLUMNS, EMULATED, FORMAT

    settings = settings_of(config, "")
    of_core = {"vllm_core_steps": FORMAT, "columns": list(COLUMNS_WITH_DRAFTS), "scheduler": EMULATED}
    drafts = drafts_shown(config.drafts)
    if drafts:
        drafts |= {"rejection_sample_method": "synthetic", "num_lookahead_tokens": config.drafts.lookahead_tokens}
    return {
        **(of_core if drafts else {"vllm_step_log": FORMAT, "columns": list(COLUMNS)}),
        # The newest release that decides by these rules.
        "vllm": config.drafts.release or config.rule_set.vllm[-1],
        "engine": 0,
        "started_ns": started_ns,
        "effective": {
            **{SERVER_KEYS[key].header: value for key, value in settings.items() if SERVER_KEYS[key].header},
            "enforce_eager": False,
            "enable_chunked_prefill": True,
            "cudagraph_mode": "FULL_AND_PIECEWISE",
            "cudagraph_metrics": True,
            "iteration_details": True,
            **drafts,
        },
        "absent": [],
    }


def step_log_row(
    config: EngineConfig, end: StepEnd, monotonic_ns: Callable[[int], int] = in_place, logger_ns: int = 0
) -> list[Any]:
    """The values of a step by the columns of the header, after its tokens were drawn; [] where nothing is written.

    monotonic_ns: an instant of the model as one of CLOCK_MONOTONIC.
    """
    from harness.stacks.vllm.step_log import COLUMNS

    step = end.start.step
    if config.drafts.num_drafts:
        return _core_row(config, end, monotonic_ns)
    if not step.tokens:
        return []
    num_tokens = sum(step.tokens)
    num_decodes = num_tokens - step.computed_tokens
    mode, padded = config.graph_of(step.tokens)
    lookups = end.start.lookups if config.prefix_caching else ()
    first = [request for request in end.requests if request.num_generated == 1]
    values = {
        "at_ns": monotonic_ns(end.start.end_ns),
        "running": end.num_running,
        "waiting": end.num_waiting,
        "skipped_waiting": 0,
        "kv_usage": end.used_blocks / (config.num_blocks - 1),
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


def _core_row(config: EngineConfig, end: StepEnd, monotonic_ns: Callable[[int], int]) -> list[Any]:
    """A step as the observer in the engine core of a server with drafts writes it. Empty steps are among them."""
    from harness.stacks.vllm.core_steps import COLUMNS_WITH_DRAFTS

    start, step = end.start, end.start.step
    tokens = [part.tokens for part in end.parts]
    mode, padded = config.graph_of(tokens)
    receives = {request.handle for request in end.requests}
    began_ns, ended_ns = monotonic_ns(start.start_ns), monotonic_ns(start.end_ns)
    admitted = {each.request: each for each in step.admissions}
    values = {
        "step": start.number,
        **dict.fromkeys(("schedule_ns", "scheduled_ns"), began_ns),
        **dict.fromkeys(("update_ns", "end_ns"), ended_ns),
        "requests": [part.handle for part in end.parts],
        "tokens": tokens,
        "admitted": [
            [
                request.handle,
                request.engine_id,
                monotonic_ns(request.queued_ns),
                each.cached_tokens + each.computed_tokens,
                each.cached_tokens,
                len(request.prompt),
            ]
            for request in start.requests
            if (each := admitted.get(request.handle)) is not None
        ],
        "preempted": list(step.preempted),
        "finished": [request.handle for request in start.flushed],
        "running": start.when_decided[0],
        "waiting": start.num_waiting,
        "skipped_waiting": 0,
        "free_blocks": start.when_decided[1],
        "generated_tokens": sum(end.num_tokens),
        "unpadded_tokens": sum(tokens),
        "padded_tokens": padded,
        "runtime_mode": mode,
        "drafts": [part.drafts for part in end.parts],
        "accepted": [part.accepted if part.handle in receives or not part.drafts else None for part in end.parts],
        "observer_ns": 0,
    }
    return [values[column] for column in COLUMNS_WITH_DRAFTS]


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
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o644)
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
