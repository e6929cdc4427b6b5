"""A calibration as a cost-model file: the coefficients, and everything they were made from, in one TOML file.

The schema is that of plans/costs; a file once written is never written over, so a name and its number mean one thing
for ever. Nothing is fitted here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w

from harness.analysis.method.stats import Interval
from harness.engine import load_cost_model
from harness.errors import RecordsError, SpecError

if TYPE_CHECKING:
    from harness.runner.calibrate import Calibration

# 2: intervals are tables of numbers; in format 1 each was a line of text.
FILE_FORMAT = 2
# A nanosecond of a step, and 1e-6 us (with 100,000 tokens of context: 0.1 us).
DECIMALS = 6


def write_cost_file(calibration: Calibration, folder: Path, name: str) -> Path:
    """Write ``<folder>/<name>-<k>.toml`` with the lowest number k that is free, and read it back.

    Raises SpecError when the fitted coefficients make no cost model, RecordsError when it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        path = folder / f"{name}-{number}.toml"
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(cost_file_text(calibration, path.stem))
            break
        except FileExistsError:
            number += 1
        except OSError as error:
            raise RecordsError(f"cannot be written ({error.strerror})", where=str(path)) from error
    try:
        load_cost_model(path)
    except SpecError as error:
        path.rename(path.with_suffix(".rejected"))
        raise SpecError(
            f"the fitted coefficients make no cost model: {error.what}",
            where=str(path.with_suffix(".rejected")),
            hint="Look at its residuals: some prefill or step was not what it was taken for",
        ) from error
    return path


def cost_file_text(calibration: Calibration, name: str) -> str:
    """The text of a cost-model file."""
    decode, prefill = calibration.decode, calibration.prefill
    table = {
        "name": name,
        "artifact": calibration.artifact,
        "source": calibration.source,
        "note": " ".join((*calibration.notes, *decode.notes)),
        "decode": {
            "alpha_ms": decode.alpha_ms,
            "beta_ms_per_request": decode.beta_ms_per_request,
            "context_us_per_token": decode.context_us_per_token,
            "fitted_context_tokens": decode.fitted_context_tokens,
            "f_ms": {str(bucket): f_ms for bucket, f_ms in decode.f_ms.items()},
        },
        "prefill": {
            "chunk_tokens": prefill.chunk_tokens,
            "per_call_ms": prefill.per_call_ms,
            "per_call_us_per_token": prefill.per_call_us_per_token,
            "fitted_tokens": prefill.fitted_tokens,
        },
        "calibration": {
            "format": FILE_FORMAT,
            **calibration.provenance,
            "packages": calibration.packages,
            "decode": {
                "method": decode.method,
                "points": decode.num_points,
                **asdict(decode.error),
                "intervals": _ends(decode.intervals),
            },
            "prefill": {
                "method": "least squares on the median time of each length",
                "points": prefill.num_points,
                **asdict(prefill.error),
                "intervals": _ends(prefill.intervals),
            },
            "runs": calibration.run_hashes,
        },
    }
    return tomli_w.dumps(_rounded(table))


def _rounded(value: Any) -> Any:
    """The same value with every float rounded to DECIMALS, and without what is absent."""
    if isinstance(value, float):
        return round(value, DECIMALS)
    if isinstance(value, Mapping):
        members: Mapping[Any, Any] = value  # pyright: ignore[reportUnknownVariableType]
        return {str(key): _rounded(member) for key, member in members.items() if member is not None and member != ""}
    if isinstance(value, list | tuple):
        return [_rounded(member) for member in value]  # pyright: ignore[reportUnknownVariableType]
    return value


def _ends(intervals: Mapping[str, Interval]) -> dict[str, dict[str, Any]]:
    """Intervals without their estimates, which are the coefficients themselves."""
    return {
        name: {key: value for key, value in asdict(interval).items() if key != "estimate"}
        for name, interval in intervals.items()
    }
