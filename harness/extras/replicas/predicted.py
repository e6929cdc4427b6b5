"""Predictions of several replicas behind a router: perturbed plans in virtual time, in the tables of one server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

import numpy as np

from harness.compiled.records import Several, record_fields
from harness.extras.replicas.kernel import run_routed
from harness.extras.replicas.routing import new_router
from harness.extras.replicas.simulated import check_simulated_router
from harness.model.engine import CostModel, EngineConfig
from harness.model.engine.config import new_state
from harness.model.engine.cost import load_cost_model
from harness.model.engine.paged_state import new_paged_state
from harness.model.plan.model import Plan, RequestPlan, SessionPlan
from harness.model.sim.draws import Draws, nominal
from harness.model.sim.kernel import arrays as layout
from harness.model.sim.kernel.arrivals import AnyRun, PagedRun, SlotRun
from harness.model.sim.plans import check_slots, check_times, plan_arrays
from harness.model.sim.simulate import check_admitted
from harness.model.spec import ServerSpec
from harness.stacks.rbln.rules.kv_rules import PAGED

NO_RECORDS = ("num_step_records", "num_eviction_records")
_Costs = TypeVar("_Costs", layout.CostArrays, layout.PagedCosts)


@dataclass(frozen=True, slots=True)
class DrawsOnReplicas:
    """Simulates draws on the replicas of a server, as ``run_draws`` does on one; SpecError for a router of its own."""

    server: ServerSpec

    def __post_init__(self) -> None:
        check_simulated_router(self.server)

    def __call__(self, draws: Draws, config: EngineConfig) -> layout.SimOutcome:
        """Sums over all replicas, and the requests of each plan, in the order of ``draws.arrays``."""
        check_slots(draws.arrays, config)
        check_times(draws.arrays, config, draws.models)
        arrays, replicas = draws.arrays, range(self.server.num_replicas)
        router, sent = new_router(self.server.routing.policy, len(replicas), arrays)
        scratch = layout.new_scratch(arrays, knows_returns=bool(config.keep_kv_ns))
        num_rows = int(arrays.plans["num_requests"].max())
        first = layout.new_outcome(arrays, config)
        # Requests are told apart by their place in the plan, so all replicas write into one table of them.
        outcomes = [
            first,
            *(layout.new_outcome(arrays, config)._replace(requests=first.requests) for _ in replicas[1:]),
        ]
        if config.rule_set.is_paged:
            most_decodes = min(config.max_num_seqs, int(arrays.plans["num_sessions"].max()))
            in_blocks = layout.paged_costs(config, draws.models, most_decodes, draws.noise_seeds, draws.noise)
            runs: list[AnyRun] = [
                PagedRun(arrays, new_paged_state(config, num_rows), scratch, outcome, _costs_of(in_blocks, place))
                for place, outcome in enumerate(outcomes)
            ]
        else:
            in_slots = layout.cost_arrays(config, draws.models, draws.noise_seeds, draws.noise)
            runs = [
                SlotRun(
                    arrays, new_state(config, num_rows, with_events=False), scratch, outcome, _costs_of(in_slots, place)
                )
                for place, outcome in enumerate(outcomes)
            ]
        run_routed(Several(runs), router, sent)
        check_admitted(first, hint="Give more KV memory or shorter prompts")
        return _summed(outcomes)


def _costs_of(costs: _Costs, place: int) -> _Costs:
    """The costs of the replica at this place: the same as of the others, with noise of its own."""
    other, drawn = costs.other.copy(), costs.drawn_other.copy()
    other["noise_seed"][:] += place
    drawn["noise_seed"][:] += place
    return cast("_Costs", costs._replace(batch=costs.batch.copy(), other=other, drawn_other=drawn))


def _summed(outcomes: Sequence[layout.SimOutcome]) -> layout.SimOutcome:
    """Sums of all replicas. The first has the end of each plan, and the requests of all."""
    first, totals = outcomes[0], outcomes[0].totals.copy()
    for name in set(record_fields(layout.PlanTotals)) - {"end_ns", "stuck_session"}:
        totals[name][:] = 0 if name in NO_RECORDS else sum(each.totals[name] for each in outcomes)
    return first._replace(totals=totals, histogram=np.sum([each.histogram for each in outcomes], axis=0))


def warm_up() -> None:
    """Compile the simulator of replicas, or load it."""
    session = SessionPlan(0, 0, None, None, (RequestPlan(0, 20, 4, 0),))
    arrays = plan_arrays([Plan("warm-up", 7, 0, "as-drawn", 0, (1000, 60_000), (session,))])
    for rules in ({}, {"rules": PAGED, "cost_model": "emulated-gpu"}):
        server = ServerSpec.model_validate({"replicas": 2, **rules})
        costs: CostModel = load_cost_model(server.cost_model)
        DrawsOnReplicas(server)(nominal(arrays, costs), EngineConfig.from_server(server.replica))
