"""What a simulator promised: one run's figures, as numbers that can be frozen in a file, and the ratios of drawn costs.

Ratios carry the error that finitely many draws leave, and the outcome's interval. Values only: who simulates is above
this floor. Times in model ns. Definitions: docs/reference/method-planning.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from pydantic import AliasChoices, Field

from harness.analysis.cost.padding import Padding
from harness.analysis.stats import FloatArray, Interval, prediction_interval
from harness.model.spec import Spec


class DrawnFigures(Spec):
    """Figures of each draw, draw after draw; draw k of every run of an experiment has the same true costs."""

    device_ns: tuple[int, ...]
    num_reused: tuple[int, ...]
    cached_tokens: tuple[int, ...]
    padded_slots: tuple[int, ...]
    bucket_slots: tuple[int, ...]


class Prediction(Spec):
    """One simulated run: means over its draws, rounded; of a single simulation where there are no draws.

    device_ns = decode_ns + prefill_ns; waiting_session_ns is W, never added to it. interpolated_buckets: buckets whose
    cost was interpolated or extrapolated. level: share of outcomes that an interval over the draws is to hold.
    """

    device_ns: int
    decode_ns: int
    prefill_ns: int
    waiting_session_ns: int
    end_ns: int
    num_decode_steps: int
    padded_slots: int
    bucket_slots: int
    num_rearrivals: int
    num_reused: int
    cached_tokens: int
    computed_tokens: int
    num_evictions: int
    # Files that were frozen before have the key filled_in_buckets.
    interpolated_buckets: tuple[int, ...] = Field(
        default=(), validation_alias=AliasChoices("interpolated_buckets", "filled_in_buckets")
    )
    draws: DrawnFigures | None = None
    level: float = 0.9

    @property
    def padding(self) -> Padding:
        return Padding(self.padded_slots, self.bucket_slots)


def predicted_ratio(own: Sequence[Prediction], base: Sequence[Prediction]) -> float:
    """Ratio of summed device times of runs beside their baselines."""
    return sum(one.device_ns for one in own) / sum(one.device_ns for one in base)


# condition -> replicate -> prediction
Predictions = Mapping[str, Mapping[int, Prediction]]


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


@dataclass(frozen=True, slots=True, eq=False)
class DrawnCosts:
    """Predicted costs, draw after draw, of what a comparison sums up.

    costs: shape (draws,), in any unit; empty where nothing was drawn. Draw k of both sides of a comparison has the same
    true costs of the device. level: share of outcomes that an interval is to hold.
    """

    costs: FloatArray
    level: float = 0.9

    @classmethod
    def of(cls, runs: Sequence[Prediction], figure: str = "device_ns") -> DrawnCosts:
        """A figure of ``DrawnFigures`` summed over runs; empty where some run has no draws, or fewer than another."""
        drawn = [getattr(run.draws, figure) for run in runs if run.draws is not None]
        if not drawn or len(drawn) != len(runs) or len({len(values) for values in drawn}) > 1:
            return cls(np.zeros(0))
        return cls(np.sum(np.array(drawn, dtype=np.float64), axis=0), runs[0].level)

    @property
    def interval(self) -> Interval | None:
        """Where one more outcome would lie; None where too little was drawn."""
        return prediction_interval(self.costs, self.level)

    def ratio_to(self, base: DrawnCosts) -> DrawnRatio | None:
        """The ratio of mean costs with its Monte Carlo error; None where nothing was drawn.

        The error is by the delta method, from the spread of the costs less the ratio times the baseline's: what both
        sides of a draw have in common cancels.
        """
        if not self._is_paired_with(base):
            return None
        ratio = float(self.costs.mean() / base.costs.mean())
        left = (self.costs - ratio * base.costs) / base.costs.mean()
        if len(left) < 2:
            return DrawnRatio(ratio, math.nan, len(left))
        z = NormalDist().inv_cdf((1 + ERROR_LEVEL) / 2)
        return DrawnRatio(ratio, z * float(left.std(ddof=1)) / math.sqrt(len(left)), len(left))

    def interval_to(self, base: DrawnCosts) -> Interval | None:
        """Where the ratio of one more outcome of each would lie; None where too little was drawn."""
        return prediction_interval(self.costs / base.costs, self.level) if self._is_paired_with(base) else None

    def _is_paired_with(self, base: DrawnCosts) -> bool:
        return len(self.costs) == len(base.costs) > 0
