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
    weights = _Weights()
    for side in sides:
        weights.add(side)
    return weights.error(1.0)


def errors_of_means(blocks: Iterable[tuple[ChannelA, ChannelA]]) -> Iterator[CostError]:
    """What the costs leave unknown of the mean log ratio of the first block, the first two, and so on.

    blocks: the runs of a condition and of its baseline.
    """
    weights = _Weights()
    for num, (own, base) in enumerate(blocks, 1):
        weights.add(CostSide([own], 1.0))
        weights.add(CostSide([base], -1.0))
        yield weights.error(1 / num)


class _Weights:
    """The change of a sum of log times for a unit of each coefficient, by cost model."""

    def __init__(self) -> None:
        self.by_model: list[tuple[CostModel, defaultdict[str, float]]] = []
        self.is_known = True

    def add(self, side: CostSide) -> None:
        total_ms = sum(run.total_ns for run in side.runs) / NS_PER_MS
        for run in side.runs:
            model = run.cost_model
            if not isinstance(model, CostModel) or not total_ms:
                self.is_known = False
                return
            of_model = next((found for known, found in self.by_model if known is model or known == model), None)
            if of_model is None:
                self.by_model.append((model, of_model := defaultdict(float)))
            for name, amount in run.usage.items():
                of_model[name] += side.sign * amount / total_ms

    def error(self, share: float) -> CostError:
        """Of ``share`` of the sum."""
        if not self.is_known:
            return UNKNOWN
        errors = [
            model.error_of({name: share * weight for name, weight in of_model.items()})
            for model, of_model in self.by_model
        ]
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
