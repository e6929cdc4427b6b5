"""What a simulator promised for one run, as numbers that can be frozen in a file and compared later.

Values only: who simulates is above this floor. Times in model ns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from harness.analysis.compare.monte_carlo import DrawnRatio, ratio_of_means
from harness.analysis.cost.padding import Padding
from harness.analysis.stats import Interval, prediction_interval
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

    device_ns = decode_ns + prefill_ns; waiting_session_ns is W, never added to it. filled_in_buckets: buckets whose
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
    filled_in_buckets: tuple[int, ...] = ()
    draws: DrawnFigures | None = None
    level: float = 0.9

    @property
    def padding(self) -> Padding:
        return Padding(self.padded_slots, self.bucket_slots)


def predicted_ratio(own: Sequence[Prediction], base: Sequence[Prediction]) -> float:
    """Ratio of summed device times of runs beside their baselines."""
    return sum(one.device_ns for one in own) / sum(one.device_ns for one in base)


def drawn_ratio(own: Sequence[Prediction], base: Sequence[Prediction]) -> Interval | None:
    """Interval of the ratio of summed device times of runs beside their baselines; None where nothing was drawn."""
    costs = [_drawn_sums(runs, "device_ns") for runs in (own, base)]
    if costs[0] is None or costs[1] is None or len(costs[0]) != len(costs[1]):
        return None
    return prediction_interval(costs[0] / costs[1], own[0].level)


def mean_ratio(own: Sequence[Prediction], base: Sequence[Prediction]) -> DrawnRatio | None:
    """The ratio with its Monte Carlo error; None where nothing was drawn. Both sides of a draw share true costs."""
    costs, base_costs = (_drawn_sums(runs, "device_ns") for runs in (own, base))
    if costs is None or base_costs is None or len(costs) != len(base_costs):
        return None
    return ratio_of_means(costs, base_costs)


def drawn_interval(runs: Sequence[Prediction], figure: str) -> Interval | None:
    """Interval of a figure of DrawnFigures summed over runs; None where nothing was drawn."""
    sums = _drawn_sums(runs, figure)
    return None if sums is None else prediction_interval(sums, runs[0].level)


def _drawn_sums(runs: Sequence[Prediction], figure: str) -> NDArray[np.float64] | None:
    """A figure summed over runs, per draw; None where some run has no draws, or another number of them."""
    drawn = [getattr(run.draws, figure) for run in runs if run.draws is not None]
    if not drawn or len(drawn) != len(runs) or len({len(values) for values in drawn}) > 1:
        return None
    return np.sum(np.array(drawn, dtype=np.float64), axis=0)


# condition -> replicate -> prediction
Predictions = Mapping[str, Mapping[int, Prediction]]
