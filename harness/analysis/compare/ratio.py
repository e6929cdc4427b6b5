"""The ratio of two conditions in one measure: its log block by block, its estimate, and what its costs leave unknown.

Every view and every rule takes it from here. A ratio is of sums, as the values of a measure are amounts of units.
Definitions: docs/reference/method.md, "Intervals".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from harness.analysis.compare.measures import Value, log_values
from harness.analysis.cost.cost_errors import NO_ERROR, with_cost_error
from harness.analysis.cost.devices import Placed, estimate_of
from harness.analysis.stats import MIN_REPLICATES, Estimate, FloatArray, contrast
from harness.model.engine.cost import CostError


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """A condition over its baseline.

    values: one a block, whose mean is ln(ratio) and whose spread gives its error; of independent samples their scatter.
    blocks: the estimate by the blocks alone; None where so few have none. costs: what the costs leave unknown of it.
    """

    ratio: float
    values: tuple[float, ...]
    blocks: Estimate | None = None
    costs: CostError = NO_ERROR

    @property
    def estimate(self) -> Estimate | None:
        """By the blocks and the errors of the costs."""
        return None if self.blocks is None else with_cost_error(self.blocks, self.costs)


def paired_ratio(
    own: Sequence[Value], base: Sequence[Value], runs: Sequence[Placed], costs: CostError = NO_ERROR
) -> Ratio:
    """Over blocks. own, base: of each block; runs: where each was made."""
    values: list[float] = (log_values(own) - log_values(base)).tolist()
    blocks = estimate_of(values, runs)
    mean = float(np.mean(values)) if blocks is None else blocks.mean
    return Ratio(ratio=math.exp(mean), values=tuple(values), blocks=blocks, costs=costs)


def unpaired_ratio(own: Sequence[Value], base: Sequence[Value], costs: CostError = NO_ERROR) -> Ratio:
    """Over runs of other inputs, which count as independent samples."""
    logs = (log_values(own), log_values(base))
    scatter: FloatArray = np.concatenate([one - one.mean() for one in logs])
    blocks = None if min(map(len, logs)) < MIN_REPLICATES else contrast([(1, logs[0]), (-1, logs[1])])
    mean = float(logs[0].mean() - logs[1].mean())
    return Ratio(ratio=math.exp(mean), values=tuple(scatter.tolist()), blocks=blocks, costs=costs)
