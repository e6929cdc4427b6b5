"""What a calibration leaves open, read from the cost file it wrote: relative deviations of buckets and of prefill.

Files without a calibration say nothing, and then the given deviations stay. Nothing is fitted here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any, cast

from pydantic import BaseModel, Field, TypeAdapter, ValidationError, model_validator

from harness.engine.cost import find_cost_file
from harness.errors import SpecError
from harness.sim.search.space import UncertaintySpec
from harness.spec import PredictionSpec, load_toml

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


FIELDS = {
    "start_ms": "start_jitter_ms",
    "lag_ms": "rearrival_lag_ms",
    "step_sd": "step_relative",
    "decode_sd": "decode_relative",
    "bucket_sd": "bucket_relative",
    "prefill_sd": "prefill_relative",
    "artifact_sd": "artifact_relative",
}
"""Keys of [prediction], and what a search space calls the same."""


@dataclass(frozen=True)
class Perturbation:
    """How far draws lie from the nominal simulation. assumed: keys that neither experiment nor calibration gave."""

    uncertainty: UncertaintySpec
    assumed: tuple[str, ...]

    @property
    def sizes(self) -> dict[str, float]:
        """By key of [prediction]."""
        return {key: getattr(self.uncertainty, name) for key, name in FIELDS.items()}

    def line(self) -> str:
        """What is drawn and how much of it is known, for people."""
        values = self.sizes
        known = [f"{key} {value:g}" for key, value in values.items() if key not in self.assumed]
        guessed = [f"{key} {value:g}" for key, value in values.items() if key in self.assumed]
        parts = [f"calibrated or given: {', '.join(known)}"] * bool(known)
        return "; ".join([*parts, *[f"assumed, not calibrated: {', '.join(guessed)}"] * bool(guessed)])


def perturbation_of(given: PredictionSpec, cost_file: Path) -> Perturbation:
    """What an experiment writes, then what the cost file's calibration says, then what any space assumes."""
    known = _calibrated(cost_file) | {
        name: value for key, name in FIELDS.items() if (value := getattr(given, key)) is not None
    }
    uncertainty = UncertaintySpec(draws="given", seed=given.seed, level=given.level).model_copy(update=known)
    return Perturbation(uncertainty, tuple(key for key, name in FIELDS.items() if name not in known))


def calibrated_uncertainty(given: UncertaintySpec, cost_model: str | Path) -> UncertaintySpec:
    """``given`` with the deviations of the cost model's own calibration, where its file has intervals.

    bucket_relative: root mean square over the f(b). prefill_relative: of the cost per device call. decode_relative
    stays: what all steps have in common is not in a calibration's intervals. Raises SpecError for an interval that
    cannot be read.
    """
    return given.model_copy(update=_calibrated(find_cost_file(cost_model)))


def _calibrated(path: Path) -> dict[str, float]:
    table = load_toml(path)
    decode, prefill = (_intervals(_table(_table(table, "calibration"), part), path) for part in ("decode", "prefill"))
    f_ms = {f"f({bucket})": float(value) for bucket, value in _table(_table(table, "decode"), "f_ms").items()}
    buckets = [decode[name].relative_deviation(value) for name, value in f_ms.items() if name in decode and value > 0]
    changes: dict[str, float] = {}
    if buckets:
        changes["bucket_relative"] = math.sqrt(sum(each * each for each in buckets) / len(buckets))
    per_call_ms = float(_table(table, "prefill").get("per_call_ms", 0.0))
    if "per_call_ms" in prefill and per_call_ms > 0:
        changes["prefill_relative"] = prefill["per_call_ms"].relative_deviation(per_call_ms)
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
