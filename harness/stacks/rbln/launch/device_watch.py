"""The devices' state before, during and after a run: a JSON line per report of rbln-smi or rbln-metrics-exporter.

A report that fails is a line with its error, never an exception, and never delays the replay. Of the exporter both
public families, RBLN_DEVICE_STATUS:* and rbln_npu_*, are read by the endings of their names; other samples are kept and
not interpreted. A device is its name ("rbln0") or its uuid: the label deviceID is the PCIe id, the same on every die.
Source of the exporter's format: the vendor's public documentation; never run against an exporter of a device.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from harness.clock import Clock
from harness.errors import ServerError
from harness.measure.records import layout
from harness.measure.records.findings import finding
from harness.measure.records.manifest import Finding
from harness.measure.server.ask import HTTP_OK, METRICS, Get, Poller, Reason
from harness.stacks.rbln.launch.devices import ASSUMED, quantities, read_devices, readings

TIMEOUT_S = 4.0
Reading = dict[str, Any]
_NUMBER = r"NaN|[-+]?(?:Inf|(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)"
_SAMPLE = re.compile(rf"([A-Za-z_:][\w:.]*)\s*(?:\{{(.*)\}})?\s+({_NUMBER})(?:\s+-?\d+)?$")
_LABEL = re.compile(r'\b(\w+)\s*=\s*"((?:[^"\\]|\\.)*)"')
_ENDINGS = {
    "temperature": "temperature",
    "temp": "temperature",
    "power": "card_power",
    # Exporters over NVML (DCGM's, and nvidia_gpu_exporter), in W.
    "power_usage": "card_power",
    "power_draw_watts": "card_power",
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
"""Labels that may hold a device's name or number, in lower case. ``name`` may be a product name instead."""
_CARD_LABELS = ("sid", "serial", "board")


def exporter_address(url: str) -> str:
    """Where an exporter's metrics are: at /metrics of an address without a path."""
    return url if urlsplit(url).path else f"{url}{METRICS}"


def read_exporter(url: str, get: Get) -> str:
    """The exporter's answer as text; ServerError, which names ``url``, without an answer of status 200."""
    reply = get(TIMEOUT_S)
    if reply.error:
        raise ServerError(
            f"gives no answer ({reply.error.split(':')[0]})", where=url, hint="Check server.device_metrics_url"
        )
    if reply.status != HTTP_OK:
        raise ServerError(f"answers with status {reply.status}", where=url, hint="Check server.device_metrics_url")
    return reply.body.decode("utf-8", "replace")


def exporter_report(text: str) -> dict[str, Any]:
    """Readings by device from an exporter's answer; missing values are absent.

    samples: the lines about devices, as they came. unnamed_samples: how many of known names name no device, and are not
    read; absent for none.
    """
    samples: list[str] = []
    devices: dict[str, dict[str, Any]] = {}
    num_unnamed = 0
    for line in map(str.strip, text.splitlines()):
        match = _SAMPLE.match(line)
        labels = {name.lower(): value for name, value in _LABEL.findall(match[2] or "")} if match else {}
        device = _device_of(labels)
        if match is None or not (device or "deviceid" in labels):
            continue
        samples.append(line)
        key, value = _key_of(match[1]), float(match[3])
        if key is not None and not device:
            num_unnamed += 1
        # A gauge without a value is NaN.
        elif key is not None and math.isfinite(value):
            seen = devices.setdefault(device, {"card": ""})
            seen[key] = value
            # A GPU is a card of its own.
            own = labels.get("uuid", "") if not device.startswith("rbln") else ""
            seen["card"] = next((labels[label] for label in _CARD_LABELS if labels.get(label)), seen["card"] or own)
    rows = [_reading(name, devices[name]) for name in sorted(devices, key=lambda name: (len(name), name))]
    return {"readings": rows, "samples": samples} | ({"unnamed_samples": num_unnamed} if num_unnamed else {})


def _reading(device: str, seen: Mapping[str, Any]) -> Reading:
    figures, units = quantities(*map(seen.get, ("temperature", "card_power", "memory_used", "memory_total")))
    figures |= {"utilisation": seen.get("utilisation"), "health": seen.get("health")}
    known = {name: value for name, value in figures.items() if value is not None}
    return {"device": device, "card": seen["card"], **known, "units": units}


def _key_of(name: str) -> str | None:
    words = re.sub(r"[^a-z0-9]+", "_", name.lower())
    return next((key for ending, key in _ENDINGS.items() if words.endswith(f"_{ending}") or words == ending), None)


def _device_of(labels: Mapping[str, str]) -> str:
    for name in _DEVICE_LABELS:
        if name in labels and (digits := re.fullmatch(r"(?:rbln|npu)?(\d{1,6})", labels[name])):
            return f"rbln{int(digits[1])}"
    return labels.get("uuid", "")


INTERVAL_S = 5.0
EXPORTER_INTERVAL_S = 0.5
"""An exporter is asked often enough for energy, which wants a sample a second; the driver's tool takes too long."""
Report = Callable[[Reason], dict[str, Any]]
"""Fields of a line beside instant and reason; ServerError without a report."""


def from_driver(command: Sequence[str]) -> Report | None:
    """Reports of the driver's tool, rbln-smi; None without a command."""

    def report(reason: Reason) -> dict[str, Any]:
        devices = read_devices(command)
        if devices is None:
            return {"readings": []}
        return {"readings": readings(devices)} | ({} if reason == "interval" else {"raw": devices.raw})

    return report if command else None


def from_exporter(url: str, get: Get | None) -> Report | None:
    """Reports of rbln-metrics-exporter, with its lines about devices verbatim; None without one. get: its address."""

    def report(reason: Reason) -> dict[str, Any]:
        assert get is not None
        text = read_exporter(url, get)
        return exporter_report(text) | ({} if reason == "interval" else {"raw": text})

    return report if get is not None else None


class DeviceWatch(Poller):
    """Records reports from a thread while entered; without a source it does nothing."""

    def __init__(self, path: Path, source: Report | None, clock: Clock, interval_s: float = INTERVAL_S) -> None:
        super().__init__(self._record, clock, interval_s, has_random_gaps=True)
        self._path = path
        self._source = source

    def start(self) -> None:
        if self._source is not None:
            super().start()

    def _record(self, reason: Reason) -> None:
        assert self._source is not None
        line: dict[str, Any] = {"at_ns": self._clock.now_ns(), "reason": reason}
        try:
            line |= self._source(reason)
        except ServerError as error:
            line["error"] = str(error)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def devices_seen(folder: Path) -> dict[str, dict[str, Any]]:
    """Summary of each file of a run's folder: lines, errors, least and most of every quantity.

    power_w: of all cards together; every die of a card reports the card's power, so each card counts once. units: the
    units in which each quantity was read.
    """
    summaries: dict[str, dict[str, Any]] = {}
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
            summaries[name] = {
                "reports": len(lines),
                "errors": len(errors),
                "first_error": errors[0] if errors else "",
                "devices": len({row["device"] for row in rows}),
                "unnamed_samples": max((line.get("unnamed_samples", 0) for line in lines), default=0),
                "units": {quantity: [unit for key, unit in units if key == quantity] for quantity in dict(units)},
                **{key: bounds for key, bounds in seen.items() if bounds is not None},
            }
    return summaries


def total_power_w(readings: Sequence[dict[str, Any]]) -> float | None:
    """Watts of all cards in a report; None when a device with a power names no card."""
    powers = [(row.get("card", ""), row["card_power_w"]) for row in readings if row.get("card_power_w") is not None]
    if not powers or not all(card for card, _ in powers):
        return None
    # The dies of a card are read at slightly different times; the highest value stands for the card.
    return sum(max(power for of_card, power in powers if of_card == card) for card in {card for card, _ in powers})


def device_findings(seen: dict[str, dict[str, Any]]) -> list[Finding]:
    """Warnings for a source without devices, with unnamed devices, or with an unusual unit."""
    findings: list[Finding] = []
    for name, facts in seen.items():
        hint = "Check server.device_metrics_url" if name == layout.DEVICE_METRICS else "Look at rbln-smi"
        if not facts["devices"]:
            error = f"; first error: {facts['first_error']}" if facts["first_error"] else ""
            evidence = f"{name}: no report of a device in {facts['reports']}{error}"
            findings.append(finding("devices-silent", evidence, do=hint))
        if facts["unnamed_samples"]:
            evidence = f"{name}: {facts['unnamed_samples']} samples name no device: not read"
            findings.append(finding("devices-unnamed", evidence, do=hint))
        odd = [
            f"{quantity} was read as {', '.join(units)}"
            for quantity, units in facts["units"].items()
            if len(units) > 1 or any(unit.endswith(ASSUMED) for unit in units)
        ]
        if odd:
            evidence = f"{name}: {'; '.join(odd)}"
            findings.append(finding("devices-unit", evidence))
    return findings


def _bounds(values: Iterable[float | None]) -> list[float] | None:
    known = [value for value in values if value is not None]
    return [min(known), max(known)] if known else None
