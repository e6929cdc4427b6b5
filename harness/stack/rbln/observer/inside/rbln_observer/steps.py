"""The record of the step in progress, and the file it goes to: a header line, then one JSON array per engine step.

All instants are CLOCK_MONOTONIC ns, the clock of vLLM's own events. Values are copied when seen; nothing of the server
is kept.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from typing import Any

now_ns = time.monotonic_ns  # noqa: TID251 - runs inside the server, where the harness's clock is not

FORMAT = 1
COLUMNS = (
    "step",
    "schedule_ns",  # schedule() is called
    "scheduled_ns",  # schedule() has returned
    "device_start_ns",  # first device call; 0 when there was none
    "device_end_ns",  # last device call has returned
    "device_ns",  # inside device calls: a prefill is one call per chunk
    "device_calls",
    "copy_ns",  # copying KV of a reused prefix
    "executed_ns",  # execute_model() has returned
    "end_ns",  # update_from_output() has returned
    "kind",  # "prefill", "decode", "idle"
    "n",
    "b",
    "requests",  # in batch order
    "prompt_tokens",  # of a prefill: tokens of the request, generated ones of a resumed request included
    "cached_tokens",
    "computed_tokens",
    "dummy_slot",  # -1: none was asked for
    "evictions",  # [slot, caller]; caller is "request", "dummy" or "preempt"
    "preempted",
    "slots_held",  # mapped to running or finished requests, after schedule(); -1 without prefix caching
    "slots_free",
    "running",
    "waiting",
    "observer_ns",  # what the observer itself took, in the step before
)


class StepFile:
    """Append-only; every record is written when its step ends, since the server may be killed at any time."""

    def __init__(self, path: str, header: Mapping[str, Any]) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._encode = json.JSONEncoder(separators=(",", ":")).encode
        self._write({"observer_format": FORMAT, "columns": COLUMNS, **header})

    def append(self, row: tuple[Any, ...]) -> None:
        self._write(row)

    def _write(self, value: Any) -> None:
        line = (self._encode(value) + "\n").encode()
        if os.write(self._descriptor, line) != len(line):
            raise OSError("the record was written in part")


class Step:
    """What is known of the step in progress."""

    __slots__ = (
        "bucket",
        "caller",
        "copy_ns",
        "device_calls",
        "device_end_ns",
        "device_ns",
        "device_start_ns",
        "evictions",
        "executed_ns",
        "index",
        "last_observer_ns",
        "observer_ns",
        "scheduled",
    )

    def __init__(self) -> None:
        self.index = 0
        self.last_observer_ns = 0
        self.caller = "request"
        self.restart()

    def restart(self) -> None:
        """Forget the step; the next one begins."""
        self.bucket = 0
        self.copy_ns = self.device_ns = self.device_calls = 0
        self.device_start_ns = self.device_end_ns = self.executed_ns = 0
        self.evictions: list[tuple[int, str]] = []
        self.scheduled: tuple[Any, ...] | None = None
        self.observer_ns = 0
