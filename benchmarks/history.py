"""How often a history shows a change where there is none, and where there is one. No runs are made."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np

from benchmarks.figure import Figure
from harness.analysis.stats import FloatArray
from harness.extras.history.points import change_points

SERIES, SEED, ALPHA = 1_000, 20261123, 0.05
LENGTHS = (6, 8, 12, 24, 48, 96)
SHIFTS = (2.0, 3.0, 5.0)
Noise = Callable[[np.random.Generator, tuple[int, int]], FloatArray]
CORRELATION = 0.4


def _correlated(rng: np.random.Generator, shape: tuple[int, int]) -> FloatArray:
    """Each point takes a part of the one before it, as where a host changes slowly."""
    series = rng.normal(size=shape)
    for place in range(1, shape[1]):
        series[:, place] = CORRELATION * series[:, place - 1] + math.sqrt(1 - CORRELATION**2) * series[:, place]
    return series


NOISES: dict[str, Noise] = {
    "normal": lambda rng, shape: rng.normal(size=shape),
    "long tails (t, 4 degrees)": lambda rng, shape: rng.standard_t(4, size=shape),
    f"neighbours correlated by {CORRELATION:g}": _correlated,
}


def share_with_changes(series: FloatArray) -> float:
    """Share of the rows in which a change is shown."""
    return sum(bool(change_points(row.tolist())) for row in series) / len(series)


def bench_history(num_series: int = SERIES) -> Iterator[Figure]:
    """False alarms by length and noise; changes found by their size, in the middle of the series."""
    error = math.sqrt(ALPHA * (1 - ALPHA) / num_series)
    for noise, drawn in NOISES.items():
        for length in LENGTHS:
            share = share_with_changes(drawn(np.random.default_rng(SEED), (num_series, length)))
            mark = f"<= {ALPHA}" if noise == "normal" else ""
            note = f"{length} points, {num_series:,} null series, Monte Carlo error {error:.3f}"
            yield Figure(f"false alarms, {noise}", f"{share:.3f}", mark, note)
    for length in (8, 12, 24):
        for shift in SHIFTS:
            series = NOISES["normal"](np.random.default_rng(SEED), (num_series, length))
            series[:, length // 2 :] += shift
            note = f"{length} points, {num_series:,} series"
            yield Figure(
                f"shown, a change of {shift:g} sd in the middle", f"{share_with_changes(series):.3f}", "", note
            )
