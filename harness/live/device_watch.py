"""The devices' state through a run: before, at an interval, after; raw reports with instants, one JSON line each.

A report that fails is a line with its error, never an exception, and never holds the replay up. Next: provenance keeps
the first and the last; the file is for whoever doubts a step time.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from harness.clock import NS_PER_S, Clock
from harness.errors import ServerError
from harness.live.devices import read_devices, readings

DEVICES_FILE = "devices.jsonl"
INTERVAL_S = 5.0
Reason = Literal["before", "interval", "after"]


class DeviceWatch:
    """Asks ``command`` from a thread of its own while it is entered; without a command it does nothing."""

    def __init__(self, path: Path, command: Sequence[str], clock: Clock, interval_s: float = INTERVAL_S) -> None:
        self._path = path
        self._command = tuple(command)
        self._clock = clock
        self._interval_ns = int(interval_s * NS_PER_S)
        self._stop_asked = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> DeviceWatch:
        if self._command:
            self._record("before")
            self._thread = threading.Thread(target=self._watch, name="device-watch", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del kind, error, trace
        if self._thread is not None:
            self._stop_asked.set()
            self._thread.join()
            self._record("after")

    def _watch(self) -> None:
        due_ns = self._clock.now_ns() + self._interval_ns
        while not self._stop_asked.wait(max(0, due_ns - self._clock.now_ns()) / self._clock.scale / NS_PER_S):
            self._record("interval")
            # A report that took longer than the interval is not made up for.
            due_ns = max(due_ns + self._interval_ns, self._clock.now_ns())

    def _record(self, reason: Reason) -> None:
        line: dict[str, Any] = {"at_ns": self._clock.now_ns(), "reason": reason}
        try:
            report = read_devices(self._command)
            line |= {"readings": [] if report is None else readings(report)}
            if reason != "interval" and report is not None:
                line["raw"] = report.raw
        except ServerError as error:
            line["error"] = str(error)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
