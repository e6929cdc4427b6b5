"""How sure a simulated ratio is: the error that a finite number of draws leaves, and the draws that make it small.

Values only: who simulates is above this floor. Definitions: docs/reference/method.md.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import NamedTuple

from harness.analysis.stats import FloatArray

SHARE = 0.1
"""The error of a prediction is to be this share of the effect, or of the margin where that is larger."""
SAFETY = 1.2
"""More draws than the present spread asks for, since it is estimated itself."""
ERROR_LEVEL = 0.95
"""Share of predictions whose error is at most the one stated."""


class DrawnRatio(NamedTuple):
    """A ratio of means over draws. error: half width of its 95 % Monte Carlo interval; nan for a single draw."""

    ratio: float
    error: float
    num_draws: int

    def wanted_error(self, margin: float) -> float:
        """The error that is small enough: a tenth of the effect, or of the margin where that is larger."""
        return SHARE * max(abs(self.ratio - 1), margin)

    def is_sure(self, margin: float) -> bool:
        return self.error <= self.wanted_error(margin)

    @property
    def shows_effect(self) -> bool:
        """Whether the draws tell the ratio from 1."""
        return abs(self.ratio - 1) > self.error

    def draws_needed(self, margin: float) -> int:
        """Draws in all that would make the error small enough, by the present spread."""
        if self.is_sure(margin):
            return self.num_draws
        return math.ceil(SAFETY * self.num_draws * (self.error / self.wanted_error(margin)) ** 2)


def ratio_of_means(costs: FloatArray, baseline_costs: FloatArray) -> DrawnRatio:
    """The ratio of mean costs over paired draws, each of shape (draws,).

    The error is by the delta method, from the spread of the costs less the ratio times the baseline's: what both sides
    of a draw have in common cancels.
    """
    ratio = float(costs.mean() / baseline_costs.mean())
    left = (costs - ratio * baseline_costs) / baseline_costs.mean()
    if len(left) < 2:
        return DrawnRatio(ratio, math.nan, len(left))
    z = NormalDist().inv_cdf((1 + ERROR_LEVEL) / 2)
    return DrawnRatio(ratio, z * float(left.std(ddof=1)) / math.sqrt(len(left)), len(left))
