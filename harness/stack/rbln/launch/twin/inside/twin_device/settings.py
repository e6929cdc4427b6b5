"""Settings of the device, step costs among them: a JSON file that the harness writes at launch.

An environment variable names it. Without it the device takes no time, has no faults and writes no trace.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

SETTINGS_VARIABLE = "RBLN_TWIN_SETTINGS"
FS_PER_NS = 1_000_000
TimingMode = Literal["period", "device", "none"]
"""period: a step starts at the end of the previous step, which hides the host's work. device: it starts when called."""


@dataclass(frozen=True)
class StepCosts:
    """A cost model's coefficients in whole femtoseconds, computed by the harness for this artifact's buckets.

    Decode: bucket_fs[b] + alpha + beta n + context * (sum of lengths). Prefill of q tokens after C cached ones: over
    its ceil(q / chunk) calls j, call + token q + position (C + chunk j).
    """

    bucket_fs: Mapping[int, int]
    alpha_fs: int = 0
    beta_fs: int = 0
    context_fs: int = 0
    chunk_tokens: int = 128
    call_fs: int = 0
    token_fs: int = 0
    position_fs: int = 0

    def decode_ns(self, bucket: int, num_seqs: int, context_tokens: int) -> int:
        """Duration of one decode step."""
        total = self.bucket_fs[bucket] + self.alpha_fs + self.beta_fs * num_seqs + self.context_fs * context_tokens
        return (total + FS_PER_NS // 2) // FS_PER_NS

    def prefill_ns(self, computed_tokens: int, cached_tokens: int) -> int:
        """Duration of a prefill up to and including ``computed_tokens``."""
        calls = -(-computed_tokens // self.chunk_tokens)
        positions = calls * cached_tokens + self.chunk_tokens * (calls * (calls - 1) // 2)
        total = calls * (self.call_fs + self.token_fs * computed_tokens) + self.position_fs * positions
        return (total + FS_PER_NS // 2) // FS_PER_NS


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


def costs_from(table: Mapping[str, object]) -> StepCosts:
    """StepCosts from the settings file; bucket keys arrive as text."""
    buckets = table["bucket_fs"]
    assert isinstance(buckets, Mapping)
    numbers = {key: int(str(value)) for key, value in table.items() if key != "bucket_fs"}
    return StepCosts(bucket_fs={int(str(key)): int(str(value)) for key, value in buckets.items()}, **numbers)


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
