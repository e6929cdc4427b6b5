"""The devices' state through a run: before, at an interval, after; raw reports with instants, one JSON line each.

A report that fails is a line with its error, never an exception, and never holds the replay up.
"""

from __future__ import annotations

import json
import math
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal
from urllib.parse import urlsplit

from harness.clock import NS_PER_S, Clock
from harness.errors import ServerError
from harness.records import Finding, layout
from harness.server.ask import HTTP_OK, ask
from harness.stack.rbln.devices import ASSUMED, memory_bytes, power_w, read_devices, readings, temperature_c

TIMEOUT_S = 4.0
Reading = dict[str, Any]
_SAMPLE = re.compile(r"([A-Za-z_:][\w:.]*)\s*(?:\{(.*)\})?\s+([-+]?[\w.+-]+)(?:\s+-?\d+)?$")
_LABEL = re.compile(r'\b(\w+)\s*=\s*"((?:[^"\\]|\\.)*)"')
_ENDINGS = {
    "temperature": "temperature",
    "temp": "temperature",
    "power": "card_power",
    "utilization": "utilisation",
    "util": "utilisation",
    "dram_used": "memory_used",
    "memory_used": "memory_used",
    "dram_total": "memory_total",
    "memory_total": "memory_total",
    "health": "health",
}
"""Ending of a metric's name, lower case, to the key of a reading."""
_DEVICE_LABELS = ("name", "device", "npu")
"""Labels that may hold a device's own name or number; compared in lower case. name may be a product's instead."""
_CARD_LABELS = ("sid", "serial", "board")


@dataclass(frozen=True, slots=True)
class Sample:
    """One line of the exporter's answer that speaks of a device. device: its name or uuid; "" when neither is told."""

    device: str
    name: str
    labels: Mapping[str, str]
    value: float
    line: str


def read_exporter(url: str, timeout_s: float = TIMEOUT_S) -> str:
    """The exporter's answer as text; ServerError when there is none or it is no success."""
    parts = urlsplit(url)
    reply = ask(parts.hostname or "", parts.port or 80, parts.path or "/metrics", deadline_s=timeout_s)
    if reply.error:
        raise ServerError(
            f"gives no answer ({reply.error.split(':')[0]})", where=url, hint="Check server.device_metrics_url"
        )
    if reply.status != HTTP_OK:
        raise ServerError(f"answers with status {reply.status}", where=url, hint="Check server.device_metrics_url")
    return reply.body.decode("utf-8", "replace")


def device_samples(text: str) -> list[Sample]:
    """The lines that speak of a device: those with a label that says which. What is no sample is passed over."""
    samples: list[Sample] = []
    for line in text.splitlines():
        match = None if line.startswith("#") else _SAMPLE.match(line.strip())
        if match is None:
            continue
        labels = {name.lower(): value for name, value in _LABEL.findall(match[2] or "")}
        try:
            value = float(match[3])
        except ValueError:
            continue
        device = _device_of(labels)
        if device or "deviceid" in labels:
            samples.append(Sample(device, match[1], labels, value, line.strip()))
    return samples


def exporter_readings(samples: list[Sample]) -> list[Reading]:
    """Temperature, power and the rest by device; a value that is not there is absent.

    A sample that tells no device counts for none: ``unnamed_samples`` says how many there were.
    """
    found: dict[str, dict[str, float]] = {}
    cards: dict[str, str] = {}
    for sample in samples:
        key = _key_of(sample.name)
        # NaN is how a gauge says that it has nothing to say.
        if sample.device and key is not None and math.isfinite(sample.value):
            found.setdefault(sample.device, {})[key] = sample.value
            card = next((sample.labels[label] for label in _CARD_LABELS if sample.labels.get(label)), "")
            cards[sample.device] = card or cards.get(sample.device, "")
    return [_reading(device, cards[device], found[device]) for device in sorted(found, key=_order)]


def unnamed_samples(samples: list[Sample]) -> int:
    """Samples of the known names that do not say which device they are about."""
    return sum(not sample.device and _key_of(sample.name) is not None for sample in samples)


def _reading(device: str, card: str, values: Mapping[str, float]) -> Reading:
    warmth, power = temperature_c(values.get("temperature")), power_w(values.get("card_power"))
    used, total = memory_bytes(values.get("memory_used"), values.get("memory_total"))
    quantities = {
        "temperature_c": warmth.value,
        "card_power_w": power.value,
        "memory_used_bytes": used.value,
        "memory_total_bytes": total.value,
        "utilisation": values.get("utilisation"),
        "health": values.get("health"),
    }
    units = {"temperature": warmth.unit, "card_power": power.unit, "memory": total.unit or used.unit}
    return {
        "device": device,
        "card": card,
        **{name: value for name, value in quantities.items() if value is not None},
        "units": {name: unit for name, unit in units.items() if unit},
    }


def _key_of(name: str) -> str | None:
    words = re.sub(r"[^a-z0-9]+", "_", name.lower())
    return next((key for ending, key in _ENDINGS.items() if words.endswith(f"_{ending}") or words == ending), None)


def _device_of(labels: Mapping[str, str]) -> str:
    for name in _DEVICE_LABELS:
        if name in labels and (digits := re.fullmatch(r"(?:rbln|npu)?(\d{1,6})", labels[name])):
            return f"rbln{int(digits[1])}"
    return labels.get("uuid", "")


def _order(device: str) -> tuple[int, str]:
    digits = re.fullmatch(r"rbln(\d+)", device)
    return (int(digits[1]), "") if digits else (1 << 30, device)


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
