"""rbln-metrics-exporter as a second witness of the devices: its Prometheus text, read leniently, kept as it came.

Names are taken by their endings, because only the gauge family RBLN_DEVICE_STATUS and its members are public: what no
ending fits is kept and not interpreted. Units are the exporter's own. Next: ``watch`` asks it through a run.
Source: the vendor's public documentation; never run against an exporter of a device.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from harness.errors import ServerError
from harness.live.ask import HTTP_OK, ask

TIMEOUT_S = 4.0
Reading = dict[str, "float | int | None"]
_SAMPLE = re.compile(r"([A-Za-z_:][\w:.]*)\s*(?:\{(.*)\})?\s+([-+]?[\w.+-]+)(?:\s+-?\d+)?$")
_LABEL = re.compile(r'(\w+)\s*=\s*"((?:[^"\\]|\\.)*)"')
_ENDINGS = {
    "temperature": "temperature_c",
    "temp": "temperature_c",
    "power": "card_power_w",
    "utilization": "utilisation",
    "util": "utilisation",
    "dram_used": "dram_used",
    "memory_used": "dram_used",
    "dram_total": "dram_total",
    "memory_total": "dram_total",
    "health": "health",
}
"""Ending of a metric's name, lower case, to the key of a reading."""
_DEVICE_LABELS = ("deviceid", "device_id", "npu", "device", "name")
"""Labels that say which device, the surest first; compared in lower case. name is "rbln0", or a product's name."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One line of the exporter's answer that speaks of a device."""

    name: str
    labels: Mapping[str, str]
    value: float
    line: str


def read_exporter(url: str, timeout_s: float = TIMEOUT_S) -> str:
    """The exporter's answer as text; ServerError when there is none or it is no success."""
    parts = urlsplit(url)
    reply = ask(parts.hostname or "", parts.port or 80, parts.path or "/metrics", deadline_s=timeout_s)
    if reply.error:
        raise ServerError(f"gives no answer ({reply.error})", where=url, hint="Check server.device_metrics_url")
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
        if _device_of(labels) is not None:
            samples.append(Sample(match[1], labels, value, line.strip()))
    return samples


def exporter_readings(samples: list[Sample]) -> list[Reading]:
    """Temperature, power and the rest by device number, ascending; a value that is not there is absent."""
    found: dict[int, Reading] = {}
    for sample in samples:
        npu = _device_of(sample.labels)
        key = _key_of(sample.name)
        # NaN is how a gauge says that it has nothing to say.
        if npu is not None and key is not None and math.isfinite(sample.value):
            found.setdefault(npu, {"npu": npu})[key] = sample.value
    return [found[npu] for npu in sorted(found)]


def _key_of(name: str) -> str | None:
    words = re.sub(r"[^a-z0-9]+", "_", name.lower())
    return next((key for ending, key in _ENDINGS.items() if words.endswith(f"_{ending}") or words == ending), None)


def _device_of(labels: Mapping[str, str]) -> int | None:
    for name in _DEVICE_LABELS:
        if name in labels and (digits := re.fullmatch(r"(?:rbln|npu)?(\d+)", labels[name])):
            return int(digits[1])
    return None
