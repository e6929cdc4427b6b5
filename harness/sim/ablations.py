"""Ablations: a simulation with one rule of the stack changed and everything else kept.

Simulation only; no released server behaves this way, so no figure of an ablation is compared with a measurement.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from harness.engine.config import EngineConfig
from harness.engine.cost import CostModel
from harness.errors import SpecError
from harness.sim.kernel import arrays as layout
from harness.sim.simulate import run_with_costs
from harness.spec import Treatment

LABEL = "computed, not measured"


@dataclass(frozen=True)
class Ablation:
    """One changed rule.

    rules: other KV rules. treatment: other waits. is_fixed_arrivals: re-arrivals come when they came in the baseline
    configuration, but not before their session's completion (Table XI). chunked_prefill_calls: number of 128-token
    device calls of a prefill after which the other requests decode one step. is_lru_slots: KV slots are evicted by last
    use (filled, read by a look-up, or finished) instead of by allocation.
    """

    name: str
    meaning: str
    rules: str = ""
    treatment: Treatment = "as-drawn"
    is_fixed_arrivals: bool = False
    chunked_prefill_calls: int = 0
    is_lru_slots: bool = False


ABLATIONS = {
    ablation.name: ablation
    for ablation in (
        Ablation("fixed-arrivals", "re-arrivals come when they came under the baseline", is_fixed_arrivals=True),
        Ablation("paper+dummy", "the paper's rules with its dummy slot", rules="paper+dummy"),
        Ablation("equal-waits", "every wait is the mean of its plan", treatment="equal-waits"),
        Ablation("no-waits", "nobody waits for a tool", treatment="no-waits"),
        Ablation("chunked-prefill", "the others decode after each 128 tokens of a prefill", chunked_prefill_calls=1),
        Ablation("lru-slots", "KV slots are evicted by last use", is_lru_slots=True),
    )
}


def ablation(name: str) -> Ablation:
    """A shipped ablation; raises SpecError listing the names."""
    if name not in ABLATIONS:
        raise SpecError(f"no ablation {name!r}", where="--ablation", hint=f"Choose one of {', '.join(ABLATIONS)}")
    return ABLATIONS[name]


def run_ablated(
    plans: layout.PlanArrays, config: EngineConfig, costs: CostModel | layout.CostArrays, changed: Ablation
) -> layout.Outcome:
    """Every plan on a fresh server with one rule changed. The caller applies treatment, rules and arrivals.

    costs: a model, or arrays that already hold the chunked prefill calls. Raises PlanError as ``simulate`` does.
    """
    if isinstance(costs, CostModel):
        costs = layout.cost_arrays(config, costs, changed.chunked_prefill_calls)
    return run_with_costs(plans, config, costs, evicts_by_last_use=changed.is_lru_slots)


def with_arrivals_of(plans: layout.PlanArrays, baseline: EngineConfig, model: CostModel) -> layout.PlanArrays:
    """The plans with each request at the instant at which it arrives under the baseline without an ablation."""
    outcome = run_with_costs(plans, baseline, layout.cost_arrays(baseline, model))
    return layout.with_column(plans, "pinned_ns", np.ascontiguousarray(outcome.requests["arrival_ns"]))
