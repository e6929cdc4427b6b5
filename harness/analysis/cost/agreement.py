"""Whether two channels of a comparison contradict each other, what they would have noticed, and the likely reason.

The channels see the same blocks, so the difference of their log ratios has an interval of its own. The tolerance of the
paper decides only below three blocks, where nothing has an interval.
Definitions: docs/reference/method-comparisons.md, "What agreement means".
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from harness.analysis.cost.reconstruct import DEFAULT_TAU, ROUNDING, ChannelA
from harness.analysis.stats import Estimate, Interval, t_quantile
from harness.model.engine import CostModel
from harness.model.engine.cost import fs_to_ns
from harness.model.spec.sections import Basis

# A's part of B may be smaller by no more than this: with more, ratios of A speak of something else than B's do.
MAX_TAU = 0.05
# Device time lies inside time in flight. A that exceeds B by less than this is below the smallest published effect.
MAX_EXCESS = 0.01
# Ratios of A and B need not be equal: B holds queueing and HTTP too. So much they may differ, and no more than half of
# the change that A shows, but where that is below the least.
LEAST_TOLERANCE = 0.005
# A contradiction is called noticeable where so many experiments would show it.
NOTICED_SHARE = 0.95
# Costs whose share of device time moved at least this part as much as the one that moved most.
NAMED_PART = 0.25


class Agreement(str, Enum):
    """Whether two channels say the same of a comparison.

    SILENT: the channel that is asked is too noisy to notice a contradiction as large as the effect. S_ALONE: time in
    flight holds the steps, so that it cannot confirm them, and no modelled device time explains them.
    """

    AGREE = "agree"
    NO_CONFLICT = "no conflict"
    SILENT = "silent"
    DIFFER = "differ"
    CANNOT_TELL = "cannot tell"
    PREDICTED = "predicted"
    B_ALONE = "B alone"
    S_ALONE = "S alone"

    @property
    def shown(self) -> str:
        """The word beside a ratio: where the channels differ, the answer is withheld."""
        return "withheld" if self is Agreement.DIFFER else self.value

    @property
    def is_missing(self) -> bool:
        """Whether both channels are there and nothing may be said: they contradict each other, or lie apart."""
        return self in (Agreement.DIFFER, Agreement.CANNOT_TELL)


class RatioWithInterval(NamedTuple):
    """The ratio of one channel and its interval; None below three blocks."""

    ratio: float
    interval: Interval | None


@dataclass(frozen=True, slots=True)
class Channels:
    """Two channels of one comparison. Intervals are None where so few blocks have none."""

    answers: RatioWithInterval
    """The channel that answers; below "A"."""
    asked: RatioWithInterval
    """The channel that is asked about it; below "B"."""
    gap: Interval | None
    """Of the ratio of ``answers`` over that of ``asked``; 1: they say the same."""
    noticed: float | None
    """The least contradiction, as a log ratio, that such blocks show with NOTICED_SHARE of certainty."""
    residuals: tuple[Interval, Interval] | None
    """Of ln(B / A) of the baseline, then of the condition."""
    residual_share: float
    """r / B of the baseline."""
    tau: float
    """The paper's tolerance."""
    bases: tuple[Basis, Basis] = ("a", "b")
    """Their letters."""
    is_few: bool = False
    """Whether there are fewer than three blocks."""

    @property
    def difference(self) -> float:
        return abs(self.answers.ratio - self.asked.ratio)

    @property
    def tolerance(self) -> float:
        """By how much the ratios may differ: half of the change on A, from LEAST_TOLERANCE to DEFAULT_TAU."""
        return min(DEFAULT_TAU, max(LEAST_TOLERANCE, abs(self.answers.ratio - 1) / 2))

    @property
    def are_opposed(self) -> bool:
        """Whether A shows one direction and B the other."""
        sides = [_side(seen.interval) for seen in (self.answers, self.asked)]
        return sides[0] * sides[1] < 0

    @property
    def differ(self) -> bool:
        """Whether B contradicts A's direction, or A's size by more than the tolerance."""
        if self.gap is None:
            return self.is_few and self.difference > self.tau + ROUNDING
        return self.are_opposed or (not self.gap.contains(1) and self.difference > self.tolerance + ROUNDING)

    @property
    def least_noticed(self) -> float | None:
        """The least contradiction that would have withheld the answer, as a share; None where none would surely."""
        return None if self.noticed is None else max(math.expm1(self.noticed), self.tolerance)

    @property
    def is_silent(self) -> bool:
        """Whether B would not have noticed a contradiction as large as A's effect."""
        return self.noticed is None or self.noticed > abs(math.log(self.answers.ratio))

    @property
    def is_unexplained(self) -> bool:
        """Whether the baseline's B is shown to hold more than MAX_TAU that A does not explain."""
        if self.residuals is None:
            return self.residual_share > MAX_TAU
        return self.residuals[0].low > -math.log1p(-MAX_TAU)

    @property
    def is_overpriced(self) -> bool:
        """Whether A exceeds B, on either side, by more than B's noise and more than MAX_EXCESS."""
        if self.residuals is None:
            return self.residual_share < -MAX_TAU
        return any(each.high < 0 and each.estimate < -math.log1p(MAX_EXCESS) for each in self.residuals)

    @property
    def agreement(self) -> Agreement:
        is_apart = not self.differ and (self.is_unexplained or self.is_overpriced)
        return Agreement.CANNOT_TELL if is_apart else self.ratio_agreement

    @property
    def ratio_agreement(self) -> Agreement:
        """What B says of A's ratio, however far apart the two lie."""
        if self.differ:
            return Agreement.DIFFER
        gap = self.gap
        if gap is not None and max(abs(gap.low - 1), abs(gap.high - 1)) * self.asked.ratio <= self.tolerance:
            return Agreement.AGREE
        return Agreement.SILENT if self.is_silent else Agreement.NO_CONFLICT


def least_noticed(gap: Interval, estimate: Estimate) -> float:
    """The least true gap, as a log ratio, whose interval leaves 0 out in NOTICED_SHARE of experiments with this spread.

    gap: the interval of exp(estimate).
    """
    half = math.log(gap.high / gap.estimate)
    return half + t_quantile(2 * NOTICED_SHARE - 1, estimate.degrees) * estimate.error


def _side(interval: Interval | None) -> int:
    """-1 where an interval lies below 1, 1 above; 0 where it holds 1, or is not there."""
    if interval is None or interval.contains(1):
        return 0
    return -1 if interval.high < 1 else 1


class Cause(NamedTuple):
    """The costs by which the sides of a comparison differ most.

    sizes: of decode steps. unmeasured: those of them whose f was filled in. models: (name, source) of each cost file.
    """

    sizes: tuple[int, ...]
    unmeasured: tuple[int, ...]
    has_prefill: bool
    models: tuple[tuple[str, str], ...]


PREFILL = "prefill"


def cause_of(own: Sequence[ChannelA], base: Sequence[ChannelA]) -> Cause | None:
    """What moved between the sides, by the share of device time; None where they were not priced by a cost file."""
    models = [run.cost_model for run in (*own, *base) if isinstance(run.cost_model, CostModel)]
    if len(models) < len(own) + len(base):
        return None
    after, before = map(_shares, (own, base))
    moved = {part: abs(after[part] - before[part]) for part in {**after, **before}}
    parts = [part for part, change in moved.items() if change and change >= NAMED_PART * max(moved.values())]
    sizes = sorted(part for part in parts if isinstance(part, int))
    return Cause(
        sizes=tuple(sizes),
        unmeasured=tuple(size for size in sizes if any(size not in model.f_fs for model in models)),
        has_prefill=PREFILL in parts,
        models=tuple(dict.fromkeys((model.name, model.source) for model in models)),
    )


def _shares(runs: Sequence[ChannelA]) -> Mapping[int | str, float]:
    """Shares of the device time of all runs: of f of each size, and of prefills."""
    total_ns = sum(run.total_ns for run in runs) or 1
    shares = defaultdict[int | str, float](float)
    for run in runs:
        assert isinstance(run.cost_model, CostModel), "checked by the caller"
        shares[PREFILL] += run.prefill_ns / total_ns
        for size, count in run.steps_by_size.items():
            shares[size] += count * fs_to_ns(run.cost_model.bucket_fs(size)) / total_ns
    return shares
