"""What a calibration leaves open, read from the cost file it wrote: relative deviations of buckets and of prefill.

Files without a calibration say nothing, and then the given deviations stay. Nothing is fitted here.
Next: ``interval`` draws true costs with these deviations.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from statistics import NormalDist
from typing import Any, cast

from pydantic import BaseModel, Field, TypeAdapter, ValidationError, model_validator

from harness.engine.cost import find_cost_file
from harness.errors import SpecError
from harness.sim.search.space import UncertaintySpec
from harness.spec import load_toml

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


def calibrated_uncertainty(given: UncertaintySpec, cost_model: str) -> UncertaintySpec:
    """``given`` with the deviations of the cost model's own calibration, where its file has intervals.

    bucket_relative: root mean square over the f(b). prefill_relative: of the cost per device call. decode_relative
    stays: what all steps have in common is not in a calibration's intervals. Raises SpecError for an interval that
    cannot be read.
    """
    path = find_cost_file(cost_model)
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
    return given.model_copy(update={name: min(value, 0.49) for name, value in changes.items()})


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
