"""What errors of the cost model add to an interval of modelled device time (A).

A is linear in the coefficients of its cost file, so the change of a log ratio for a unit of each is known, and what
both sides have in common cancels. The blocks of a comparison share their costs: the error comes in once.
Definitions: docs/method.md, "Errors of the costs".
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from harness.analysis.cost.reconstruct import ChannelA
from harness.analysis.stats import GIVEN_COSTS, Estimate
from harness.clock import NS_PER_MS
from harness.engine import CostModel
from harness.engine.cost import CostError

UNKNOWN = CostError((), ("every cost",))
# From so many degrees of freedom on a t distribution is a normal one.
MANY = 10**6


class Side(NamedTuple):
    """Runs of one side of a log ratio, and the sign that their time has in it."""

    runs: Sequence[ChannelA]
    sign: float


def cost_error(*sides: Side) -> CostError:
    """What the costs leave unknown of the sum of the sides' log times, each with its sign."""
    weights: list[tuple[CostModel, defaultdict[str, float]]] = []
    for runs, sign in sides:
        total_ms = sum(run.total_ns for run in runs) / NS_PER_MS
        for run in runs:
            model = run.cost_model
            if not isinstance(model, CostModel) or not total_ms:
                return UNKNOWN
            of_model = next((found for known, found in weights if known is model or known == model), None)
            if of_model is None:
                weights.append((model, of_model := defaultdict(float)))
            for name, amount in run.usage.items():
                of_model[name] += sign * amount / total_ms
    errors = [model.error_of(of_model) for model, of_model in weights]
    return CostError(
        tuple(part for error in errors for part in error.parts),
        tuple(dict.fromkeys(name for error in errors for name in error.given)),
    )


def with_cost_error(estimate: Estimate, error: CostError) -> Estimate:
    """The estimate of a log ratio with what its costs leave unknown.

    Degrees of freedom: the harmonic mean of those of the parts, weighted by variance. Satterthwaite's are too many
    beside a part that has two, as three blocks have: such 95 % intervals held the truth in .92 of the experiments.
    """
    method = estimate.method
    if error.parts:
        parts = [(estimate.error**2, float(estimate.degrees)), *error.parts]
        variance = sum(part for part, _ in parts)
        rarity = sum(part / degrees for part, degrees in parts) / variance
        estimate = estimate._replace(error=math.sqrt(variance), degrees=1 / max(rarity, 1 / MANY))
        method = f"{method} with the error of the costs"
    return estimate._replace(method=f"{method}{GIVEN_COSTS}" if error.given else method)
