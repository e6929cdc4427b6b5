"""Steps of vLLM on Gaudi: server_events_*.json, a trace whose events name a batch and the bucket it was padded to.

Read from documents only: no package of it was available. Its wall-clock times are not read, since no other record of a
run has that clock.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast

from harness.stack.step_file import StepFile, is_count, json_object, step_table

PACKAGE = "vllm-gaudi"
HOW = "VLLM_PROFILER_ENABLED=true writes server_events_*.json"
MARK = b'_bucket_batch_size"'
# The file is a JSON array that a running server leaves open, all events on one line.
_EVENT_START = re.compile(rb'(?=\{\s*"pid")')
_PROFILE_NOTES = (
    "times, graph modes, KV use and prefix hits are not read from this file",
    "whether warm-up steps are in the file is not known: start reading after the warm-up, or leave their sizes out",
    "query lengths and context blocks are padded to buckets too: this padding is not in b",
)


def read(content: bytes) -> StepFile:
    """Events of Gaudi; an event that is no JSON, or whose bucket is smaller than its batch, is damaged."""
    records: list[dict[str, Any]] = []
    damaged: list[bytes] = []
    for part in _EVENT_START.split(content):
        text = part.strip(b" \t\r\n,[]")
        if not text:
            continue
        event = json_object(text)
        steps = _steps_of_event(event) if event else None
        if steps is None:
            damaged.append(text)
        else:
            records += steps
    source = "vLLM on Gaudi (format from documents, no release read)"
    return StepFile(source, step_table(records), damaged, _PROFILE_NOTES)


def _steps_of_event(event: Mapping[str, Any]) -> list[dict[str, Any]] | None:
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
        if phase == "prompt":
            steps.append({"context_requests": n, "kind": "prefill"})
            continue
        tokens = {"unpadded_tokens": n, "padded_tokens": b, "generation_requests": n}
        steps.append(tokens | ({"kind": "decode", "n": n, "b": b} if n else {"kind": "idle"}))
    return steps
