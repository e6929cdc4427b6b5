"""Simulations with one rule of the stack changed and everything else kept.

No released server behaves so, and no figure of an ablation is compared with a measurement.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from harness.errors import SpecError
from harness.model.engine.config import EngineConfig
from harness.model.engine.cost import CostModel
from harness.model.sim.kernel import arrays as layout
from harness.model.sim.simulate import run_batch
from harness.model.spec import Treatment

LABEL = "computed, not measured"


@dataclass(frozen=True)
class Ablation:
    """One changed rule.

    rules: other KV rules. treatment: other waits. is_fixed_arrivals: re-arrivals come when they came in the baseline
    configuration, but not before their session's completion (Table XI). is_lru_slots: KV slots are evicted by last
    use (filled, read by a look-up, or finished) instead of by allocation.
    """

    name: str
    meaning: str
    rules: str = ""
    treatment: Treatment = "as-drawn"
    is_fixed_arrivals: bool = False
    is_lru_slots: bool = False


UNCHANGED = Ablation("", "")


ABLATIONS = {
    ablation.name: ablation
    for ablation in (
        Ablation("fixed-arrivals", "re-arrivals come when they came under the baseline", is_fixed_arrivals=True),
        Ablation("paper+dummy", "the paper's rules with its dummy slot", rules="paper+dummy"),
        Ablation("equal-waits", "every wait is the mean of its plan", treatment="equal-waits"),
        Ablation("no-waits", "nobody waits for a tool", treatment="no-waits"),
        Ablation("lru-slots", "KV slots are evicted by last use", is_lru_slots=True),
    )
}


def ablation(name: str) -> Ablation:
    """A shipped ablation; raises SpecError listing the names."""
    if name not in ABLATIONS:
        raise SpecError(f"no ablation {name!r}", where="--ablation", hint=f"Choose one of {', '.join(ABLATIONS)}")
    return ABLATIONS[name]


def with_arrivals_of(plans: layout.PlanArrays, baseline: EngineConfig, model: CostModel) -> layout.PlanArrays:
    """The plans with each request at the instant at which it arrives under the baseline without an ablation."""
    outcome = run_batch(plans, baseline, model)
    return layout.with_column(plans, "pinned_ns", np.ascontiguousarray(outcome.requests["arrival_ns"]))
