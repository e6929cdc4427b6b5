"""What errors of the cost model add to an interval of modelled device time (A).

A is linear in the coefficients of its cost file, so the change of a log ratio for a unit of each is known, and what
both sides have in common cancels. The blocks of a comparison share their costs: the error comes in once.
Definitions: docs/reference/method.md, "Errors of the costs".
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from harness.analysis.cost.reconstruct import ChannelA
from harness.analysis.stats import GIVEN_COSTS, Estimate, t_quantile
from harness.clock import NS_PER_MS
from harness.model.engine import CostModel
from harness.model.engine.cost import CostError

UNKNOWN = CostError((), ("every cost",))
NO_ERROR = CostError((), ())
# From so many degrees of freedom on a t distribution is a normal one.
MANY = 10**6


class CostSide(NamedTuple):
    """Runs of one side of a log ratio, and the sign that their time has in it."""

    runs: Sequence[ChannelA]
    sign: float


def cost_error(*sides: CostSide) -> CostError:
    """What the costs leave unknown of the sum of the sides' log times, each with its sign."""
    sums = [_Usage(side.sign) for side in sides]
    for one, side in zip(sums, sides, strict=True):
        for run in side.runs:
            one.add(run)
    return _error(sums)


def errors_of_first(blocks: Iterable[tuple[ChannelA, ChannelA]]) -> Iterator[CostError]:
    """What the costs leave unknown of the log of the ratio of sums of the first block, the first two, and so on.

    blocks: the runs of a condition and of its baseline.
    """
    sides = _Usage(1.0), _Usage(-1.0)
    for block in blocks:
        for side, run in zip(sides, block, strict=True):
            side.add(run)
        yield _error(sides)


class _Usage:
    """How often the runs of one side use each coefficient, by cost model, and their time."""

    def __init__(self, sign: float) -> None:
        self.by_model: list[tuple[CostModel, defaultdict[str, float]]] = []
        self.sign, self.total_ms, self.is_known = sign, 0.0, True

    def add(self, run: ChannelA) -> None:
        model = run.cost_model
        self.total_ms += run.total_ns / NS_PER_MS
        if not isinstance(model, CostModel):
            self.is_known = False
            return
        of_model = next((found for known, found in self.by_model if known is model or known == model), None)
        if of_model is None:
            self.by_model.append((model, of_model := defaultdict(float)))
        for name, amount in run.usage.items():
            of_model[name] += amount


def _error(sides: Sequence[_Usage]) -> CostError:
    weights: list[tuple[CostModel, defaultdict[str, float]]] = []
    for side in sides:
        if not side.is_known or (side.by_model and not side.total_ms):
            return UNKNOWN
        for model, usage in side.by_model:
            of_model = next((found for known, found in weights if known is model or known == model), None)
            if of_model is None:
                weights.append((model, of_model := defaultdict(float)))
            for name, amount in usage.items():
                of_model[name] += side.sign * amount / side.total_ms
    errors = [model.error_of(of_model) for model, of_model in weights]
    return CostError(
        tuple(part for error in errors for part in error.parts),
        tuple(dict.fromkeys(name for error in errors for name in error.given)),
    )


def states_errors(runs: Iterable[ChannelA]) -> bool:
    """Whether the cost file of any of these runs states errors."""
    return any(isinstance(run.cost_model, CostModel) and run.cost_model.errors for run in runs)


def with_cost_error(estimate: Estimate, error: CostError) -> Estimate:
    """The estimate of a log ratio with what its costs leave unknown.

    Degrees of freedom: the harmonic mean of those of the parts, weighted by variance. Satterthwaite's are too many
    beside a part that has two, as three blocks have: such 95 % intervals held the truth in .92 of the experiments.
    """
    method = estimate.method
    if error.parts:
        deviation, degrees = _joined([(estimate.error**2, float(estimate.degrees)), *error.parts])
        estimate = estimate._replace(error=deviation, degrees=degrees)
        method = f"{method}{WITH_ERRORS}"
    return estimate._replace(method=f"{method}{GIVEN_COSTS}" if error.given else method)


WITH_ERRORS = " with the error of the costs"


def half_width(error: CostError, alpha: float) -> float:
    """How far the costs may move the log ratio, but with probability ``alpha``: half of an interval of theirs alone."""
    if not error.parts:
        return 0.0
    deviation, degrees = _joined(error.parts)
    return t_quantile(1 - alpha, degrees) * deviation


def _joined(parts: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Standard deviation and degrees of freedom of a sum of independent parts, each a variance and its degrees."""
    variance = sum(part for part, _ in parts)
    rarity = sum(part / degrees for part, degrees in parts) / variance
    return math.sqrt(variance), 1 / max(rarity, 1 / MANY)
