"""Drift: does a run cost more merely because it came later in its block?

Conditions and plan draws are taken out by least squares; what is left is set against the place in the order. Nothing is
corrected by it.
Definitions: docs/planning-method.md, "Orders and drift".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from harness.analysis.figures import run_figures
from harness.analysis.stats import DEFAULT_LEVEL, Estimate, FloatArray
from harness.records import SealedRun


@dataclass(frozen=True, slots=True)
class Drift:
    """Change of log cost (channel B) per place in the order of a block; left: see ``drift``."""

    per_run: Estimate
    left: float
    order: str

    @property
    def is_found(self) -> bool:
        return self.per_run.p < 1 - DEFAULT_LEVEL

    def __str__(self) -> str:
        words, found = "drift" if self.is_found else "no drift shown", self.per_run
        change, low, high = (f"{100 * math.expm1(value):+.2f}" for value in (found.mean, found.low, found.high))
        return (
            f"{words}: cost (B) changes by {change} % [{low}, {high}] per place in the order ({self.order}), "
            f"p = {found.p:.2g}, {found.num_units} runs; the order leaves at most "
            f"{100 * math.expm1(abs(self.left)):.2f} % in a comparison"
        )


def drift(runs: Sequence[SealedRun]) -> Drift | None:
    """Least squares of ln B on condition, replicate and place in the order; None where these cannot be separated.

    left: the largest part of the slope that any two conditions keep, by their mean places: 0 over whole squares.
    """
    valid = [run for run in runs if run.is_valid and run_figures(run).b_ns > 0]
    if not valid:
        return None
    names, condition = np.unique([run.condition for run in valid], return_inverse=True)
    place = np.array([run.manifest.order_index for run in valid], dtype=np.float64)
    log_cost = np.log([run_figures(run).b_ns for run in valid])
    slope = slope_of(log_cost, condition, np.array([run.replicate for run in valid]), place)
    if slope is None:
        return None
    means = [float(place[condition == one].mean()) for one in range(len(names))]
    order = str(valid[0].manifest.requested_experiment.get("order", "rotation"))
    return Drift(slope, slope.mean * (max(means) - min(means)), order)


def slope_of(
    log_cost: FloatArray, condition: NDArray[np.int64], block: NDArray[np.int64], place: FloatArray
) -> Estimate | None:
    """The slope on ``place`` beside a level for each condition and each block; None where it cannot be separated.

    All of shape (runs,). Source: Frisch and Waugh (1933), Lovell (1963): the slope is that of the two residuals.
    """
    design = np.column_stack(
        [condition[:, None] == np.unique(condition), (block[:, None] == np.unique(block))[:, 1:]]
    ).astype(np.float64)
    fitted = design @ np.linalg.lstsq(design, np.column_stack([place, log_cost]), rcond=None)[0]
    place_left, cost_left = place - fitted[:, 0], log_cost - fitted[:, 1]
    degrees = len(place) - int(np.linalg.matrix_rank(design)) - 1
    moved = float(place_left @ place_left)
    if degrees < 1 or moved < 1e-9:
        return None
    slope = float(place_left @ cost_left) / moved
    rest = cost_left - slope * place_left
    error = math.sqrt(float(rest @ rest) / degrees / moved)
    return Estimate(slope, error, degrees, "t interval of a slope", "runs", len(place))
