"""What a calibration leaves open, read from the cost file it wrote: relative deviations of buckets and of prefill.

Files without a calibration say nothing, and then the given deviations stay. Nothing is fitted here.
Next: ``interval`` draws true costs with these deviations.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from statistics import NormalDist
from typing import Any, cast

from harness.engine.cost import find_cost_file
from harness.sim.search.space import UncertaintySpec
from harness.spec import load_toml

INTERVAL = re.compile(r"^\[(?P<low>[-+.\de]+), (?P<high>[-+.\de]+)\] (?P<level>[\d.]+)%")


def calibrated_uncertainty(given: UncertaintySpec, cost_model: str) -> UncertaintySpec:
    """``given`` with the deviations of the cost model's own calibration, where its file has intervals.

    bucket_relative: root mean square over the f(b). prefill_relative: of the cost per device call. decode_relative
    stays: what all steps have in common is not in a calibration's intervals.
    """
    table = load_toml(find_cost_file(cost_model))
    calibration = _table(table, "calibration")
    decode, prefill = (_table(_table(calibration, part), "intervals") for part in ("decode", "prefill"))
    f_ms = {f"f({bucket})": float(value) for bucket, value in _table(_table(table, "decode"), "f_ms").items()}
    buckets = [
        relative_deviation(str(decode[name]), value) for name, value in f_ms.items() if name in decode and value > 0
    ]
    changes: dict[str, float] = {}
    if buckets:
        changes["bucket_relative"] = math.sqrt(sum(each * each for each in buckets) / len(buckets))
    per_call_ms = float(_table(table, "prefill").get("per_call_ms", 0.0))
    if "per_call_ms" in prefill and per_call_ms > 0:
        changes["prefill_relative"] = relative_deviation(str(prefill["per_call_ms"]), per_call_ms)
    return given.model_copy(update={name: min(value, 0.49) for name, value in changes.items()})


def relative_deviation(interval: str, value: float) -> float:
    """One standard deviation, relative to ``value``, of an interval such as "[9.86, 9.88] 95% percentile bootstrap"."""
    found = INTERVAL.match(interval)
    if found is None:
        return 0.0
    half = (float(found["high"]) - float(found["low"])) / 2
    return half / NormalDist().inv_cdf((1 + float(found["level"]) / 100) / 2) / value


def _table(table: Mapping[str, Any], key: str) -> dict[str, Any]:
    inner = table.get(key, {})
    return cast("dict[str, Any]", inner) if isinstance(inner, dict) else {}
