"""How many plans a comparison needs so that none too rare to be among them decides, by simulated pairs of its workload.

Nothing is run, and nothing is read but cost models. Definitions: docs/reference/method-comparisons.md, "Rare plans".
"""

from __future__ import annotations

import math

import numpy as np

from harness.analysis.compare.rare import unseen_in_words
from harness.analysis.stats import DEFAULT_LEVEL, MIN_REPLICATES, FloatArray, t_quantile
from harness.errors import HarnessError
from harness.model.engine.config import EngineConfig
from harness.model.engine.cost import load_cost_model
from harness.model.plan.build import derive_seed
from harness.model.sim.draws import nominal, simulator_of
from harness.model.sim.kernel.arrays import PlanArrays
from harness.model.sim.plans import Input, input_arrays
from harness.model.spec import ConditionSpec, ExperimentSpec, Treatment, WorkloadSpec

PAIRS = 1_000
# Of large plans fewer are simulated, and none where these are too few.
MOST_REQUESTS, LEAST_PAIRS = 60_000, 200
SEED, SEED_RANGE = 20261129, 2**31
# Experiments drawn from the pairs; the share of them that may show a false difference to one side, below .05 by what so
# many pairs may hold too few of; the growth of the numbers of plans that are tried; and how many of them must hold.
EXPERIMENTS, MOST_FALSE, GROWTH, IN_A_ROW, MOST_PLANS = 2_000, 0.04, 1.25, 3, 1_000
_Drawn = dict[tuple[WorkloadSpec, Treatment], PlanArrays]


def plans_asked(spec: ExperimentSpec, only: str = "") -> dict[str, int]:
    """Plans that each comparison needs, by condition; those without drawn plans or known costs are left out.

    only: of this condition alone.
    """
    named = {condition.name: condition for condition in spec.condition}
    pairs = {each.name: spec.baseline_of(each) for each in spec.condition if only in ("", each.name)}
    pairs = {name: base for name, base in pairs.items() if base in named and base != name and not spec.same_input}
    # Most sides replay the same plans, which take longer to draw than to simulate.
    drawn: _Drawn = {}
    costs = {name: _costs_ns(spec, named[name], drawn) for name in {*pairs, *pairs.values()}}
    sides = {name: (costs[name], costs[base]) for name, base in pairs.items()}
    return {
        name: fewest_plans(own, base)
        for name, (own, base) in sides.items()
        if own is not None and base is not None and len(own) == len(base)
    }


def left_open_in_words(spec: ExperimentSpec, condition: str, num_plans: int) -> str:
    """What stands beside a verdict on so few plans: how rare one may be that was not seen, and if rare ones decide."""
    asked = plans_asked(spec, condition).get(condition, 0)
    return "; ".join(filter(None, (unseen_in_words(num_plans), few_plans_in_words(asked, num_plans))))


def few_plans_in_words(asked: int, num_plans: int) -> str:
    """That so few plans are not enough; empty where they are."""
    if asked <= num_plans:
        return ""
    return f"rare plans carry the mean: {asked:,} plans are needed, by simulated ones; fewer show false differences"


def fewest_plans(own: FloatArray, base: FloatArray) -> int:
    """Fewest plans whose t test shows a difference to one side, where there is none, in MOST_FALSE of experiments.

    own, base: costs of many plans. Samples that hold none of the rare plans that carry the mean scatter little about
    another one; so do samples of so few plans that t is wide, and the next numbers must hold too. MOST_PLANS where more
    would be needed.
    """
    left = own - own.sum() / base.sum() * base
    if not left.any():
        return MIN_REPLICATES
    rng, number, held = np.random.default_rng(SEED), MIN_REPLICATES, list[int]()
    while number < MOST_PLANS and len(held) < IN_A_ROW:
        held = [*held, number] if _most_false(left, number, rng) <= MOST_FALSE else []
        number = math.ceil(GROWTH * number)
    return held[0] if len(held) == IN_A_ROW else MOST_PLANS


def _most_false(left: FloatArray, number: int, rng: np.random.Generator) -> float:
    drawn = left[rng.integers(0, len(left), (EXPERIMENTS, number))]
    t, limit = drawn.mean(axis=1) * math.sqrt(number), t_quantile(DEFAULT_LEVEL, number - 1) * drawn.std(axis=1, ddof=1)
    return max(float(np.mean(side * t > limit)) for side in (1, -1))


def _costs_ns(spec: ExperimentSpec, condition: ConditionSpec, drawn: _Drawn) -> FloatArray | None:
    """Device time of each plan; None where plans are not drawn, are too large, or do not fit the server."""
    workload, server = spec.workload_of(condition), spec.server_of(condition)
    count = min(PAIRS, MOST_REQUESTS // max(1, workload.num_sessions * workload.requests_per_session))
    if workload.source != "drawn" or count < LEAST_PAIRS:
        return None
    seed = derive_seed(spec.base_seed, "rare plans") % SEED_RANGE
    try:
        if (key := (workload, condition.treatment)) not in drawn:
            drawn[key] = input_arrays([Input(workload, seed, place) for place in range(count)], condition.treatment)
        draws = nominal(drawn[key], load_cost_model(server.cost_model))
        outcome = simulator_of(server)(draws, EngineConfig.from_server(server.replica))
    except HarnessError:
        return None
    return outcome.device_ns.astype(np.float64)
