"""What if the stack did otherwise: one rule changed, everything else kept. Computed, never measured.

No server behaves like an ablated run, so nothing here is ever compared with a measurement as if one did.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from harness.compiled.records import IntArray
from harness.engine.config import EngineConfig
from harness.engine.cost import CostModel
from harness.engine.memory import new_state
from harness.engine.steps import FAR
from harness.errors import PlanError, SpecError
from harness.sim import memory
from harness.sim.kernel import arrays as layout
from harness.sim.kernel import events as kernel
from harness.sim.simulate import check_slots
from harness.spec import Treatment

LABEL = "computed, not measured"


@dataclass(frozen=True)
class Ablation:
    """One changed rule.

    rules: other KV rules. treatment: other waits. is_fixed_arrivals: re-arrivals come when they came in the baseline
    configuration, but not before their session's completion (Table XI). chunked_prefill_calls: after so many 128-token
    device calls of a prefill the others decode one step. is_lru_slots: KV slots are evicted by last use (filled, read
    by a look-up, or finished) instead of by allocation.
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


def ablated_totals(
    plans: layout.PlanArrays,
    config: EngineConfig,
    model: CostModel,
    changed: Ablation,
    baseline: EngineConfig | None = None,
) -> layout.Outcome:
    """Every plan on a fresh server with one rule changed; treatments and rules are for the caller to apply.

    baseline: the configuration whose arrivals are kept, for fixed arrivals. Raises PlanError as ``simulate`` does.
    """
    if changed.is_fixed_arrivals and baseline is not None:
        plans = layout.with_column(plans, "pinned_ns", _arrivals(plans, baseline, model))
    return _run(plans, config, model, changed)


def _arrivals(plans: layout.PlanArrays, baseline: EngineConfig, model: CostModel) -> IntArray:
    """When each request arrives under the baseline, unablated."""
    outcome = _run(plans, baseline, model, Ablation("", ""))
    return np.ascontiguousarray(outcome.requests["arrival_ns"])


def _run(plans: layout.PlanArrays, config: EngineConfig, model: CostModel, changed: Ablation) -> layout.Outcome:
    check_slots(plans, config)
    most_requests = int(plans.plans["num_requests"].max())
    state = new_state(config, most_requests, evicts_by_last_use=changed.is_lru_slots)
    cost = memory.cost_arrays(config, model, changed.chunked_prefill_calls)
    outcome = memory.new_outcome(plans, config)
    kernel.run_plans(plans, 0, len(plans.plans), state, cost, memory.new_scratch(plans), outcome, FAR)
    stuck = outcome.totals["stuck_session"]
    if np.any(stuck >= 0):
        plan = int(np.argmax(stuck >= 0))
        raise PlanError("its request can never be admitted", where=f"plan {plan}, session {int(stuck[plan])}")
    return outcome
