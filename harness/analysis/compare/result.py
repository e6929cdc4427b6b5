"""What runs show of one ratio: interval, p and verdict, all of the same level, so that they cannot contradict.

A difference is shown where the interval of its family leaves 1 out.
Definitions: docs/reference/method.md, "Answers".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from harness.analysis.compare.family import Family
from harness.analysis.compare.ratio import Ratio
from harness.analysis.compare.stopping import ComparisonLooks
from harness.analysis.compare.verdict import Verdict
from harness.analysis.stats import NO_SCATTER, Interval


@dataclass(frozen=True, slots=True)
class Result:
    """One ratio. interval: of all comparisons of the family together. p: of this one alone; p_adjusted: min(1, size p).

    note: what a reader must know of the interval, or why there is none; empty for replicates of different plans.
    """

    ratio: float
    interval: Interval | None
    p: float | None
    p_adjusted: float | None
    verdict: Verdict
    family: int
    note: str = ""


def result_of(of: Ratio, num_plans: int, family: Family, looks: ComparisonLooks | None = None) -> Result:
    """What one ratio shows. num_plans: different inputs among the blocks. looks: of the stopping rule that decides."""
    if looks is not None and num_plans != 1:
        return _of_looks(of.ratio, looks)
    ratio, values, estimate = of.ratio, of.values, of.estimate
    is_varied = bool(len(values)) and float(np.ptp(values)) >= NO_SCATTER
    if num_plans == 1 and len(values) > 1:
        note = one_plan(len(values))
        interval = None if estimate is None or not is_varied else estimate.interval(family=family.size)
        what = "nothing varied between the runs" if interval is None else "the interval is over the machine's noise"
        what = "" if len(values) < 3 else f"; {what}"
        return Result(ratio, interval, None, None, Verdict.ONE_PLAN, family.size, note + what)
    if estimate is None:
        return Result(ratio, None, None, None, Verdict.TOO_FEW, family.size)
    if not is_varied:
        return Result(ratio, None, None, None, Verdict.NOTHING_VARIED, family.size, unvaried(len(values)))
    interval = family.interval(of)
    if interval is None:
        return Result(ratio, None, None, None, Verdict.TOO_FEW, family.size)
    p = None if family.is_checked else estimate.p
    return Result(ratio, interval, p, p and min(1.0, family.size * p), shown(interval), family.size)


def _of_looks(ratio: float, looks: ComparisonLooks) -> Result:
    """What a stopping rule shows: estimate and interval of its last look, as ``harness decide`` has them.

    ratio: where no look has an interval.
    """
    interval = looks.interval
    if interval is None:
        return Result(ratio, None, None, None, looks.verdict, looks.family, looks.why_no_interval)
    return Result(interval.estimate, interval, None, None, looks.verdict, looks.family)


def shown(interval: Interval) -> Verdict:
    """What an interval of a ratio shows."""
    if interval.contains(1):
        return Verdict.NO_DIFFERENCE
    return Verdict.LOWER if interval.high < 1 else Verdict.HIGHER


def why_no_interval(values: Sequence[float], num_plans: int) -> str:
    """Why blocks with these log ratios say nothing of other blocks; empty where they do."""
    if num_plans == 1 and len(values) > 1:
        return one_plan(len(values))
    return unvaried(len(values)) if len(values) > 1 and float(np.ptp(values)) < NO_SCATTER else ""


def one_plan(num_runs: int) -> str:
    """What must stand beside figures of one plan."""
    return f"one plan, repeated {num_runs} times: says nothing of other plans"


def unvaried(num_blocks: int) -> str:
    """Why there is no interval although there are blocks."""
    return f"the same ratio in each of {num_blocks} replicates: nothing varied, so there is no interval"
