"""How far draws lie from the nominal simulation: what is written, what a calibration found, what is assumed.

Nothing is drawn or fitted here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import NormalDist
from typing import Any, cast

from pydantic import BaseModel, Field, TypeAdapter, ValidationError, model_validator

from harness.engine.cost import find_cost_file
from harness.errors import SpecError
from harness.spec import PerturbationSpec, load_toml

# A file of format 1 holds an interval as a line: "[9.86, 9.88] 95% percentile bootstrap; 40 blocks, ...".
_FORMAT_1 = re.compile(r"\[(?P<low>[-+.\de]+), (?P<high>[-+.\de]+)\] (?P<percent>[\d.]+)%")


class StoredInterval(BaseModel):
    """What is needed of an interval in a cost file: its ends, in the coefficient's unit, and its level."""

    low: float
    high: float
    level: float = Field(gt=0, lt=1)

    @model_validator(mode="before")
    @classmethod
    def _from_format_1(cls, found: object) -> object:
        match = _FORMAT_1.match(found) if isinstance(found, str) else None
        return found if match is None else {**match.groupdict(), "level": float(match["percent"]) / 100}

    def relative_deviation(self, value: float) -> float:
        """One standard deviation, relative to ``value``, of an estimate that is spread normally."""
        return (self.high - self.low) / 2 / NormalDist().inv_cdf((1 + self.level) / 2) / value


@dataclass(frozen=True, slots=True)
class Perturbation:
    """How far draws lie from the nominal simulation, every size known; see PerturbationSpec for their meaning.

    assumed: sizes that neither the specification nor a calibration gave.
    """

    seed: int
    level: float = 0.9
    start_ms: float = 1.0
    lag_ms: float = 1.0
    step_sd: float = 0.002
    decode_sd: float = 0.02
    bucket_sd: float = 0.005
    prefill_sd: float = 0.02
    artifact_sd: float = 0.004
    assumed: tuple[str, ...] = ()

    @property
    def sizes(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in SIZES}

    def line(self) -> str:
        """What is drawn and how much of it is known, for people."""
        values = self.sizes
        known = [f"{key} {value:g}" for key, value in values.items() if key not in self.assumed]
        guessed = [f"{key} {value:g}" for key, value in values.items() if key in self.assumed]
        parts = [f"calibrated or given: {', '.join(known)}"] * bool(known)
        return "; ".join([*parts, *[f"assumed, not calibrated: {', '.join(guessed)}"] * bool(guessed)])


SIZES = tuple(field.name for field in fields(Perturbation) if field.name.endswith(("_ms", "_sd")))


def perturbation_of(given: PerturbationSpec, cost_model: str | Path) -> Perturbation:
    """What is written, then what the calibration in the cost file says, then what is assumed.

    bucket_sd: root mean square over the f(b). prefill_sd: of the cost per device call. decode_sd is not in a
    calibration's intervals: all steps have it in common. Raises SpecError for an interval that cannot be read.
    """
    written = {name: size for name in SIZES if (size := getattr(given, name)) is not None}
    known = _calibrated(find_cost_file(cost_model)) | written
    assumed = tuple(name for name in SIZES if name not in known)
    return Perturbation(given.seed, given.level, assumed=assumed, **known)


def _calibrated(path: Path) -> dict[str, float]:
    table = load_toml(path)
    decode, prefill = (_intervals(_table(_table(table, "calibration"), part), path) for part in ("decode", "prefill"))
    f_ms = {f"f({bucket})": float(value) for bucket, value in _table(_table(table, "decode"), "f_ms").items()}
    buckets = [decode[name].relative_deviation(value) for name, value in f_ms.items() if name in decode and value > 0]
    changes: dict[str, float] = {}
    if buckets:
        changes["bucket_sd"] = math.sqrt(sum(each * each for each in buckets) / len(buckets))
    per_call_ms = float(_table(table, "prefill").get("per_call_ms", 0.0))
    if "per_call_ms" in prefill and per_call_ms > 0:
        changes["prefill_sd"] = prefill["per_call_ms"].relative_deviation(per_call_ms)
    return {name: min(value, 0.49) for name, value in changes.items()}


def _intervals(part: Mapping[str, Any], path: Path) -> dict[str, StoredInterval]:
    try:
        return TypeAdapter(dict[str, StoredInterval]).validate_python(_table(part, "intervals"))
    except ValidationError as error:
        name = error.errors()[0]["loc"][0]
        raise SpecError(
            f"its interval of {name} cannot be read",
            where=str(path),
            hint="Write low, high and level as numbers, or leave [calibration] out",
        ) from error


def _table(table: Mapping[str, Any], key: str) -> dict[str, Any]:
    inner = table.get(key, {})
    return cast("dict[str, Any]", inner) if isinstance(inner, dict) else {}
