"""Two files of figures held to each other: what got slower or faster by more than its samples scatter.

Only the ratios to a reference of the same benchmark run are compared, so that another or a busier machine says nothing.
Noise is what repeated samples show within each benchmark run.
"""

from __future__ import annotations

import json
import math
import platform
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import TypeAdapter, ValidationError

from benchmarks.figure import Figure, Measured
from harness.analysis.stats import MIN_REPLICATES, t_quantile
from harness.errors import SpecError
from harness.outputs import write_text

LEVEL = 0.99
# Two benchmark runs of the same code differ by so much where samples scatter less: caches and addresses lie otherwise.
SAME_WITHIN = 0.05
Verdict = Literal[
    "slower", "faster", "no change shown", "too few samples", "not in the old file", "another reference then"
]
COMPARED = (
    f"Against the old file, by reference: slower or faster is what lies beyond {SAME_WITHIN:.0%} with the whole "
    f"{LEVEL:.0%} interval; noise is that of repeated samples within each benchmark run."
)
_FILE: TypeAdapter[dict[str, dict[str, Figure]]] = TypeAdapter(dict[str, dict[str, Figure]])


class Change(NamedTuple):
    """times: how many times as good as then, by the reference, with its interval; None where there are no samples."""

    name: str
    verdict: Verdict
    times: tuple[float, float, float] | None = None

    def __str__(self) -> str:
        if self.times is None:
            return f"{self.name:<46} {self.verdict}"
        ratio, low, high = self.times
        return f"{self.name:<46} {self.verdict}: {ratio:.2f} times as good as then [{low:.2f} .. {high:.2f}]"


def write_figures(path: Path, figures: Sequence[Figure]) -> None:
    """Every figure with its samples, as JSON, under the Python and machine that it was measured with."""
    where = f"Python {platform.python_version()}, {platform.machine()}"
    named = {
        figure.name: figure._asdict() | {"measured": figure.measured and figure.measured._asdict()}
        for figure in figures
    }
    write_text(path, json.dumps({where: named}, indent=1) + "\n")


def read_figures(path: Path) -> dict[str, Figure]:
    """Figures by name of a file that ``write_figures`` wrote; SpecError for anything else."""
    try:
        (figures,) = _FILE.validate_json(path.read_bytes()).values()
    except (OSError, ValueError, ValidationError) as error:
        hint = "Write one with: python -m benchmarks -o FILE"
        raise SpecError("is no file of measured figures", where=str(path), hint=hint) from error
    return figures


def changes(then: Mapping[str, Figure], now: Sequence[Figure]) -> list[Change]:
    """One for each figure of now that has samples beside a reference."""
    return [_change(figure.name, then.get(figure.name), figure.measured) for figure in now if figure.measured]


def _change(name: str, then: Figure | None, now: Measured) -> Change:
    """Welch's t interval of the difference of mean log ratios, its degrees those of the shorter series."""
    if then is None or then.measured is None:
        return Change(name, "not in the old file")
    if then.measured.beside != now.beside:
        return Change(name, "another reference then")
    old, new = ([math.log(ratio) for ratio in measured.times_as_good] for measured in (then.measured, now))
    if min(len(old), len(new)) < MIN_REPLICATES:
        return Change(name, "too few samples")
    difference = statistics.mean(new) - statistics.mean(old)
    error = math.sqrt(statistics.variance(new) / len(new) + statistics.variance(old) / len(old))
    half = t_quantile(LEVEL, min(len(old), len(new)) - 1) * error
    verdict: Verdict = "no change shown"
    if abs(difference) - half > math.log1p(SAME_WITHIN):
        verdict = "slower" if difference < 0 else "faster"
    return Change(name, verdict, (math.exp(difference), math.exp(difference - half), math.exp(difference + half)))
