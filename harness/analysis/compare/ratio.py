"""The ratio of two conditions in one measure: its blocks, what its costs leave unknown, its interval and its verdict.

Every view and every rule takes it from here. A ratio is of sums, as the values of a measure are amounts of units.
Comparisons that are judged together share alpha in equal parts (Bonferroni): each interval has level 1 - alpha / size.
Where a stopping rule looked at the runs while they came in, intervals stay valid at every look.
Definitions: docs/reference/method-comparisons.md, "Intervals" and "Answers".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np

from harness.analysis.compare.boundaries import spending_boundaries, t_mixture_boundary
from harness.analysis.compare.measures import Value, log_values
from harness.analysis.compare.pairs import num_comparisons
from harness.analysis.cost.cost_errors import NO_ERROR, half_width, with_cost_error
from harness.analysis.cost.devices import Placed, ratio_estimate
from harness.analysis.stats import (
    DEFAULT_LEVEL,
    MIN_REPLICATES,
    Base,
    Estimate,
    FloatArray,
    Interval,
    contrast,
    log_mean_values,
    of_blocks,
    of_ratio,
)
from harness.errors import RecordsError
from harness.measure.records.run import SealedRun
from harness.model.engine.cost import CostError
from harness.model.spec import ExperimentSpec
from harness.model.spec.sections import StopSpec


class Verdict(str, Enum):
    """What an interval shows of a ratio. An interval inside a stopping rule's margin is equivalent, even without 1.

    WITHHELD: the channels contradict each other, or lie apart. ONE_PLAN, NOTHING_VARIED: there is nothing that an
    interval could be of.
    """

    LOWER = "lower"
    HIGHER = "higher"
    EQUIVALENT = "equivalent"
    NO_DIFFERENCE = "no difference shown"
    GO_ON = "go on"
    INCONCLUSIVE = "inconclusive"
    WITHHELD = "withheld"
    TOO_FEW = "too few runs for an interval"
    ONE_PLAN = "one plan, repeated"
    NOTHING_VARIED = "nothing varied"

    @property
    def is_final(self) -> bool:
        """Whether a stopping rule ends with it."""
        return self is not Verdict.GO_ON

    @property
    def is_answer(self) -> bool:
        """Whether a stopping rule that ended with it has an answer."""
        return self in (Verdict.LOWER, Verdict.HIGHER, Verdict.EQUIVALENT)

    def label(self, words: tuple[str, str] = ("cheaper", "more expensive")) -> str:
        """The word; words: what a shown ratio below and above 1 is called."""
        below, above = words
        return below if self is Verdict.LOWER else above if self is Verdict.HIGHER else self.value


class BlockCosts(NamedTuple):
    """What one block cost on both sides, and for how many units: tokens where the work differs, else 1."""

    own: float
    base: float
    own_units: float = 1
    base_units: float = 1

    @property
    def ratio(self) -> float | None:
        """Of this block alone; None where a side cost nothing."""
        base = self.base * self.own_units
        return self.own * self.base_units / base if base else None

    def over(self, other: BlockCosts) -> BlockCosts:
        """The same block with the condition of another comparison as its baseline."""
        return BlockCosts(self.own, other.own, self.own_units, other.own_units)


def logs_of_blocks(blocks: Sequence[BlockCosts]) -> tuple[FloatArray, FloatArray]:
    """Of both sides, values whose mean is the log of the cost a unit; every sum must be above 0."""
    own, base, own_units, base_units = zip(*blocks, strict=True)
    return log_mean_values(own, own_units), log_mean_values(base, base_units)


def values_of_blocks(blocks: Sequence[BlockCosts]) -> FloatArray:
    """Values, one a block, whose mean is the log of the ratio of sums; every sum must be above 0."""
    own, base = logs_of_blocks(blocks)
    return own - base


def have_ratio(blocks: Sequence[BlockCosts]) -> bool:
    """Whether both sides cost something."""
    return all(any(block[side] for block in blocks) for side in (0, 1))


def ratio_of_sums(blocks: Sequence[BlockCosts]) -> float:
    """Of the costs a unit; the baseline's must be above 0."""
    own, base, own_units, base_units = map(sum, zip(*blocks, strict=True))
    return own * base_units / (base * own_units)


def estimate_of_blocks(blocks: Sequence[BlockCosts]) -> Estimate:
    """The log of the ratio of sums of two blocks or more, on whichever device; every cost must be above 0."""
    logs = logs_of_blocks(blocks)
    found = of_ratio(*(of_blocks(values.tolist()) for values in (logs[0] - logs[1], *logs)))
    assert found is not None, "blocks have an estimate"
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """A condition over its baseline.

    values: one a block, whose mean is ln(ratio) and whose spread gives its error; of independent samples their scatter.
    blocks: the estimate by the blocks alone; None where so few have none. costs: what the costs leave unknown of it.
    of_blocks: what each block cost; empty of independent samples.
    """

    ratio: float
    values: tuple[float, ...]
    of_blocks: tuple[BlockCosts, ...] = ()
    blocks: Estimate | None = None
    costs: CostError = NO_ERROR

    @property
    def estimate(self) -> Estimate | None:
        """By the blocks and the errors of the costs."""
        return None if self.blocks is None else with_cost_error(self.blocks, self.costs)


def blocks_of(own: Sequence[Value], base: Sequence[Value]) -> tuple[BlockCosts, ...]:
    """Blocks of one measure; where both sides did the same work, of its amounts alone."""
    is_same_work = [value.units for value in own] == [value.units for value in base]
    return tuple(
        BlockCosts(one.amount, other.amount, *((1, 1) if is_same_work else (one.units, other.units)))
        for one, other in zip(own, base, strict=True)
    )


def paired_ratio(blocks: Sequence[BlockCosts], runs: Sequence[Placed], costs: CostError = NO_ERROR) -> Ratio:
    """Over blocks; over several devices the mean of their ratios. runs: where each block was made."""
    logs = logs_of_blocks(blocks)
    estimate, has_devices = ratio_estimate(*logs, runs), len({run.device for run in runs}) > 1
    ratio = math.exp(estimate.mean) if has_devices and estimate is not None else ratio_of_sums(blocks)
    values = tuple((logs[0] - logs[1]).tolist())
    return Ratio(ratio=ratio, values=values, of_blocks=tuple(blocks), blocks=estimate, costs=costs)


def unpaired_ratio(own: Sequence[Value], base: Sequence[Value], costs: CostError = NO_ERROR) -> Ratio:
    """Over runs of other inputs, which count as independent samples."""
    logs = (log_values(own), log_values(base))
    scatter: FloatArray = np.concatenate([one - one.mean() for one in logs])
    blocks = None if min(map(len, logs)) < MIN_REPLICATES else contrast([(1, logs[0]), (-1, logs[1])])
    blocks = blocks and blocks._replace(base=Base(float(np.var(logs[1], ddof=1)) / len(base)))
    mean = float(logs[0].mean() - logs[1].mean())
    return Ratio(ratio=math.exp(mean), values=tuple(scatter.tolist()), blocks=blocks, costs=costs)


ALPHA = 1 - DEFAULT_LEVEL


@dataclass(frozen=True, slots=True)
class Family:
    """Comparisons that are judged together.

    is_checked: a stopping rule looked at the runs while they came in. looks: the numbers of blocks at which it looked;
    empty: at every one.
    """

    size: int = 1
    is_checked: bool = False
    looks: tuple[int, ...] = ()

    @classmethod
    def of(cls, runs: Sequence[SealedRun]) -> Family:
        """The comparisons that the experiment of these runs declares; of records without it, those of the runs."""
        try:
            spec = runs[0].spec
        except RecordsError:
            size = len({run.condition for run in runs if run.manifest.baseline not in ("", run.condition)})
            return cls(max(1, size), is_checked=any(map(ran_until_decided, runs)))
        if spec.stop is not None and any(map(ran_until_decided, runs)):
            return cls.under(spec, spec.stop)
        return cls(num_comparisons(spec))

    @classmethod
    def under(cls, spec: ExperimentSpec, stop: StopSpec) -> Family:
        """The comparisons of an experiment whose runs are checked by a stopping rule."""
        return cls(num_comparisons(spec), is_checked=True, looks=stop.preset_looks)

    def interval(self, ratio: Ratio, of: Callable[[float], float] = math.exp) -> Interval | None:
        """Of a ratio; None where so few blocks have none. of: makes the figure of its log."""
        estimate, blocks = ratio.estimate, ratio.blocks
        if estimate is None or blocks is None:
            return None
        ends = None
        if self.is_checked:
            alpha = ALPHA / self.size
            num_blocks, for_blocks = int(blocks.degrees) + 1, alpha / 2 if ratio.costs.parts else alpha
            t = t_mixture_boundary(num_blocks, for_blocks)
            if num_blocks in self.looks:
                t = spending_boundaries(self.looks, self.looks[-1], for_blocks)[self.looks.index(num_blocks)]
            if math.isinf(t):
                return None
            (low, high), more = blocks.ends(t), half_width(ratio.costs, alpha / 2)
            ends = low - more, high + more
        found = estimate.interval(of, family=self.size, ends=ends)
        return found if math.isfinite(found.high) else None


ALONE = Family()


def ran_until_decided(run: SealedRun) -> bool:
    """Whether the stopping rule was to end the experiment: then it has as many replicates as the rule's budget."""
    experiment = run.manifest.requested_experiment
    rule = experiment.get("stop") or {}
    return bool(rule) and rule.get("budget") == experiment.get("replicates")
