"""The devices' state through a run: before, at an interval, after; raw reports with instants, one JSON line each.

A report that fails is a line with its error, never an exception, and never holds the replay up.
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
from harness.records import Finding, layout
from harness.stack.rbln.devices.exporter import device_samples, exporter_readings, read_exporter, unnamed_samples
from harness.stack.rbln.devices.smi import read_devices, readings
from harness.stack.rbln.devices.units import ASSUMED

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
        if unnamed := unnamed_samples(samples):
            line["unnamed_samples"] = unnamed
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
    """What each file of a run's folder says in short, by file: lines, errors, and least and most of every quantity.

    power_w: of all cards together, each counted once, since every die of a card reports the whole card's power.
    units: what each quantity was read as, by name.
    """
    found: dict[str, dict[str, Any]] = {}
    for name in (layout.DEVICES, layout.DEVICE_METRICS):
        path = folder / name
        if path.is_file():
            lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
            errors = [str(line["error"]) for line in lines if "error" in line]
            reports = [line.get("readings", []) for line in lines]
            rows = [reading for report in reports for reading in report]
            seen = {key: _bounds(row.get(key) for row in rows) for key in ("temperature_c", "card_power_w")}
            seen["power_w"] = _bounds(total_power_w(report) for report in reports)
            units = sorted({pair for row in rows for pair in row["units"].items()})
            found[name] = {
                "reports": len(lines),
                "errors": len(errors),
                "first_error": errors[0] if errors else "",
                "devices": len({row["device"] for row in rows}),
                "unnamed_samples": max((line.get("unnamed_samples", 0) for line in lines), default=0),
                "units": {quantity: [unit for own, unit in units if own == quantity] for quantity in dict(units)},
                **{key: bounds for key, bounds in seen.items() if bounds is not None},
            }
    return found


def total_power_w(readings: Sequence[dict[str, Any]]) -> float | None:
    """Watts of all cards in one report; None where a device with a power does not say on which card it is."""
    powers = [(row.get("card", ""), row["card_power_w"]) for row in readings if row.get("card_power_w") is not None]
    if not powers or not all(card for card, _ in powers):
        return None
    # The dies of a card are asked one after the other: the highest is as good as any.
    return sum(max(power for own, power in powers if own == card) for card in {card for card, _ in powers})


def device_findings(seen: dict[str, dict[str, Any]]) -> list[Finding]:
    """A source that was asked for and never told of a device, told of none by name, or counts in an unusual unit."""
    findings: list[Finding] = []
    for name, facts in seen.items():
        hint = "Check server.device_metrics_url" if name == layout.DEVICE_METRICS else "Look at rbln-smi"
        if not facts["devices"]:
            error = f"; first error: {facts['first_error']}" if facts["first_error"] else ""
            evidence = f"{name}: no report of a device in {facts['reports']}{error}"
            findings.append(Finding(code="devices-silent", severity="warning", evidence=evidence, hint=hint))
        if facts["unnamed_samples"]:
            evidence = f"{name}: {facts['unnamed_samples']} samples say neither name nor uuid of their device: not read"
            findings.append(Finding(code="devices-unnamed", severity="warning", evidence=evidence, hint=hint))
        odd = [
            f"{quantity} was read as {', '.join(units)}"
            for quantity, units in facts["units"].items()
            if len(units) > 1 or any(unit.endswith(ASSUMED) for unit in units)
        ]
        if odd:
            evidence = f"{name}: {'; '.join(odd)}"
            findings.append(
                Finding(code="devices-unit", severity="warning", evidence=evidence, hint="Compare with rbln-smi")
            )
    return findings


def _bounds(values: Iterable[float | None]) -> list[float] | None:
    known = [value for value in values if value is not None]
    return [min(known), max(known)] if known else None
