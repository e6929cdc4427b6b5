"""rbln-metrics-exporter as a second witness of the devices: its Prometheus text, read leniently, kept as it came.

Both public families, RBLN_DEVICE_STATUS:* and rbln_npu_*, are read by the endings of their names; what no ending fits
is kept and not interpreted. A device is its name ("rbln0") or its uuid: the label deviceID is the PCIe id, the same on
every die of every card.
Source: the vendor's public documentation; never run against an exporter of a device.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from harness.errors import ServerError
from harness.server.ask import HTTP_OK, ask
from harness.stack.rbln.devices.units import memory_bytes, power_w, temperature_c

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
