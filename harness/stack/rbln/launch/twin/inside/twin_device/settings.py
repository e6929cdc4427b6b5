"""Settings of the device: a JSON file, named by an environment variable, written by the harness at launch.

Without the file the device takes no time, has no faults and writes no trace.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .pacing import StepCosts, TimingMode, costs_from

SETTINGS_VARIABLE = "RBLN_TWIN_SETTINGS"


@dataclass(frozen=True)
class Fault:
    """A fault that occurs once: ``do`` is hang, crash, error or slow; ``at`` counts calls of ``call``.

    call: "decode", "prefill" (chunks), "copy" or "start". seconds: extra time of "slow".
    """

    do: str
    call: str
    at: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Settings:
    """npu_name, num_npus: the devices that the machine claims to have. trace_path: JSON lines, appended."""

    npu_name: str = "RBLN-CA25"
    num_npus: int = 16
    timing: TimingMode = "none"
    costs: StepCosts | None = None
    trace_path: str = ""
    faults: tuple[Fault, ...] = ()


def settings_from(table: Mapping[str, Any]) -> Settings:
    """Settings from the file's table; an unknown key is a TypeError."""
    values = dict(table)
    if values.get("costs") is not None:
        values["costs"] = costs_from(values["costs"])
    values["faults"] = tuple(Fault(**fault) for fault in values.get("faults", ()))
    settings = Settings(**values)
    if settings.timing != "none" and settings.costs is None:
        raise ValueError("timing needs costs")
    return settings


def read_settings() -> Settings:
    """The settings of this process."""
    path = os.environ.get(SETTINGS_VARIABLE, "")
    return settings_from(json.loads(Path(path).read_text(encoding="utf-8"))) if path else Settings()
