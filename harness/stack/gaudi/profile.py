"""Reads the profiler file of vLLM on Gaudi: ``server_events_*.json``, written with VLLM_PROFILER_ENABLED=true.

Read from documents only, no package of it was available: a trace of events whose arguments name the batch and the
bucket that it was padded to. Its wall-clock times are not read: no other record of a run has that clock.
"""

from __future__ import annotations

import re
from typing import Any, cast

from harness.stack.vllm.step_file import StepFile, is_count, json_object, step_table

SOURCE = "vLLM on Gaudi (format from documents, no release read)"
MARK = b'_bucket_batch_size"'
# The file is a JSON array that a running server leaves open, all events on one line.
_EVENT_START = re.compile(rb'(?=\{\s*"pid")')
_NOTES = (
    "times, graph modes, KV use and prefix hits are not read from this file",
    "whether warm-up steps are in the file is not known: start reading after the warm-up, or leave their sizes out",
    "query lengths and context blocks are padded to buckets too: this padding is not in b",
)


def read_profile(content: bytes) -> StepFile:
    """The steps of a file; an event that is no JSON, or whose bucket is smaller than its batch, is damaged."""
    records: list[dict[str, Any]] = []
    damaged: list[bytes] = []
    for part in _EVENT_START.split(content):
        text = part.strip(b" \t\r\n,[]")
        if not text:
            continue
        event = json_object(text)
        steps = _steps(event) if event else None
        if steps is None:
            damaged.append(text)
        else:
            records += steps
    return StepFile(SOURCE, step_table(records), damaged, _NOTES)


def _steps(event: dict[str, Any]) -> list[dict[str, Any]] | None:
    """The steps that an event counts, mostly none; None where its counts cannot be right."""
    given = event.get("args")
    arguments = cast("dict[str, Any]", given) if isinstance(given, dict) else {}
    steps: list[dict[str, Any]] = []
    for phase in ("prompt", "decode"):
        names = (f"{phase}_batch_size", f"{phase}_bucket_batch_size")
        if not any(name in arguments for name in names):
            continue
        n, b = (arguments.get(name) for name in names)
        if not (is_count(n) and is_count(b)) or cast("int", n) > cast("int", b):
            return None
        steps.append(_decode(n, b) if phase == "decode" else {"context_requests": n, "kind": "prefill"})
    return steps


def _decode(n: Any, b: Any) -> dict[str, Any]:
    return {
        "unpadded_tokens": n,
        "padded_tokens": b,
        "generation_requests": n,
        "kind": "decode" if n else "idle",
        "n": n or None,
        "b": b if n else None,
    }
