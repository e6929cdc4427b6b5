"""Ablations change one rule and nothing else; what they must show is known for small cases."""

from __future__ import annotations

import numpy as np
import pytest

from harness.errors import SpecError
from harness.extras.search.intervals import ABLATIONS, ablation, with_arrivals_of
from harness.model.engine import EngineConfig, load_cost_model
from harness.model.experiment import build_plan
from harness.model.plan.model import Plan, RequestPlan, SessionPlan
from harness.model.sim import plan_arrays
from harness.model.sim.kernel import arrays as layout
from harness.model.sim.simulate import run_batch
from harness.model.spec import WorkloadSpec

COST = load_cost_model("paper")
EIGHT = EngineConfig(8, (1, 2, 4, 8), 8)
SIXTEEN = EngineConfig(16, (1, 2, 4, 8, 16), 16)


def paper_plans(users: int) -> layout.PlanArrays:
    return plan_arrays([build_plan(WorkloadSpec(source="paper", num_sessions=users), 20261000, b) for b in range(3)])


def plan_of(*sessions: SessionPlan) -> Plan:
    return Plan("drawn", 0, 0, "as-drawn", 0, (0, 1000), sessions)


def test_arrivals_fixed_at_the_baselines_own_change_nothing_of_the_baseline() -> None:
    plans = paper_plans(8)
    fixed = run_batch(with_arrivals_of(plans, EIGHT, COST), EIGHT, COST)
    assert fixed.totals.tolist() == run_batch(plans, EIGHT, COST).totals.tolist()


def test_fixed_arrivals_come_when_they_came_under_the_baseline_unless_the_session_is_later() -> None:
    plans = paper_plans(8)
    base = run_batch(plans, EIGHT, COST).requests
    fixed = run_batch(with_arrivals_of(plans, EIGHT, COST), SIXTEEN, COST).requests
    again = np.flatnonzero(plans.requests["keep"] > 0)
    completed_before = fixed["completed_ns"][again - 1]
    pinned = base["arrival_ns"][again]
    assert np.array_equal(fixed["arrival_ns"][again], np.maximum(pinned, completed_before))


def test_slots_by_last_use_keep_who_finished_last() -> None:
    # Session 0 fills its slot first and finishes last: by allocation its slot is the first to go, by use the last.
    lengths = (50, 2, 2)
    together = [SessionPlan(k, 0, None, None, (RequestPlan(0, 1000, lengths[k], 0),)) for k in range(3)]
    other = SessionPlan(3, 0, 0, None, (RequestPlan(0, 1000, 2, 0),))
    back = SessionPlan(4, 0, 3, 0, (RequestPlan(1000, 8, 2, 0),))
    plans = plan_arrays([plan_of(*together, other, back)])
    config = EngineConfig(3, (3,), 3, rules="paper")
    by_use = run_batch(plans, config, COST, evicts_by_last_use=True)
    by_allocation = run_batch(plans, config, COST)
    assert (by_allocation.requests["cached_tokens"][-1], by_use.requests["cached_tokens"][-1]) == (0, 896)


def test_all_ablations_run_on_every_set_of_rules() -> None:
    plans = paper_plans(6)
    for changed in ABLATIONS.values():
        for rules in ("vendor-0.11.1", "vendor-0.11.2", "paper", "paper+dummy"):
            config = EngineConfig(8, (1, 2, 4, 8), 8, rules=rules)
            pinned = with_arrivals_of(plans, config, COST) if changed.is_fixed_arrivals else plans
            totals = run_batch(pinned, config, COST, evicts_by_last_use=changed.is_lru_slots).totals
            assert (totals["stuck_session"] == -1).all()
            assert (totals["decode_ns"] > 0).all()


def test_an_unknown_ablation_is_refused_with_the_names() -> None:
    with pytest.raises(SpecError, match="lru-slots"):
        ablation("mru")
