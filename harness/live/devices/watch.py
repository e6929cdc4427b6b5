"""The devices' state through a run: before, at an interval, after; raw reports with instants, one JSON line each.

A report that fails is a line with its error, never an exception, and never holds the replay up. Next: provenance keeps
the first and the last; the files are for whoever doubts a step time.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from harness.clock import NS_PER_S, Clock
from harness.errors import ServerError
from harness.live.devices.exporter import device_samples, exporter_readings, read_exporter
from harness.live.devices.smi import read_devices, readings
from harness.records import Finding, layout

INTERVAL_S = 5.0
Reason = Literal["before", "interval", "after"]
Ask = Callable[[Reason], dict[str, Any]]
"""What one line says beside its instant and reason; ServerError when there is nothing to say."""


def from_driver(command: Sequence[str]) -> Ask | None:
    """The driver's own tool, rbln-smi; None without a command."""

    def ask(reason: Reason) -> dict[str, Any]:
        report = read_devices(command)
        if report is None:
            return {"readings": []}
        return {"readings": readings(report)} | ({} if reason == "interval" else {"raw": report.raw})

    return ask if command else None


def from_exporter(url: str) -> Ask | None:
    """rbln-metrics-exporter; None without an address. Its lines about devices are kept as they came, every time."""

    def ask(reason: Reason) -> dict[str, Any]:
        text = read_exporter(url)
        samples = device_samples(text)
        line: dict[str, Any] = {"readings": exporter_readings(samples), "samples": [one.line for one in samples]}
        return line | ({} if reason == "interval" else {"raw": text})

    return ask if url else None


class DeviceWatch:
    """Asks from a thread of its own while it is entered; with nothing to ask it does nothing."""

    def __init__(self, path: Path, ask: Ask | None, clock: Clock, interval_s: float = INTERVAL_S) -> None:
        self._path = path
        self._ask = ask
        self._clock = clock
        self._interval_ns = int(interval_s * NS_PER_S)
        self._stop_asked = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> DeviceWatch:
        if self._ask is not None:
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
        assert self._ask is not None
        line: dict[str, Any] = {"at_ns": self._clock.now_ns(), "reason": reason}
        try:
            line |= self._ask(reason)
        except ServerError as error:
            line["error"] = str(error)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def devices_seen(folder: Path) -> dict[str, dict[str, Any]]:
    """What each file of a run's folder says in short, by file: lines, errors, and least and most of every quantity."""
    found: dict[str, dict[str, Any]] = {}
    for name in (layout.DEVICES, layout.DEVICE_METRICS):
        path = folder / name
        if path.is_file():
            lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
            errors = [str(line["error"]) for line in lines if "error" in line]
            rows = [reading for line in lines for reading in line.get("readings", ())]
            seen = {key: _bounds(row.get(key) for row in rows) for key in ("temperature_c", "card_power_w")}
            found[name] = {
                "reports": len(lines),
                "errors": len(errors),
                "first_error": errors[0] if errors else "",
                "devices": len({row["npu"] for row in rows}),
                **{key: bounds for key, bounds in seen.items() if bounds is not None},
            }
    return found


def device_findings(seen: dict[str, dict[str, Any]]) -> list[Finding]:
    """A source that was asked for and never told anything of a device."""
    return [
        Finding(
            code="devices-silent",
            severity="warning",
            evidence=f"{name}: no report of a device in {facts['reports']}"
            + (f"; first error: {facts['first_error']}" if facts["first_error"] else ""),
            hint="Check server.device_metrics_url" if name == layout.DEVICE_METRICS else "Look at rbln-smi",
        )
        for name, facts in seen.items()
        if not facts["devices"]
    ]


def _bounds(values: Iterable[float | None]) -> list[float] | None:
    known = [value for value in values if value is not None]
    return [min(known), max(known)] if known else None
