"""What a simulator promised for one run, as numbers that can be frozen in a file and compared later.

Values only: who simulates is above this floor. Times in model ns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pydantic import AliasChoices, Field

from harness.analysis.cost.padding import Padding
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
