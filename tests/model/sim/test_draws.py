"""Draws are simulations like any other: each is what its perturbed plan and costs give alone."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.extras.cases.cases import outcome_of_plan
from harness.model.engine import CostModel, EngineConfig, load_cost_model
from harness.model.experiment import build_plan
from harness.model.plan.model import Plan
from harness.model.sim import plan_arrays
from harness.model.sim.draws import Draws, Perturbation, draw, run_draws
from harness.model.spec import WorkloadSpec
from tests.support.naive import naive_run

WIDE = Perturbation(20260801, start_ms=20.0, lag_ms=8.0, step_sd=0.03)


@dataclass
class NoisyCosts:
    """The costs of one draw, its steps counted and moved as the definition says, in plain integers."""

    model: CostModel
    seed: int
    noise: list[int]
    number: int = 0

    def decode_step_ns(self, bucket: int, num_seqs: int, context_tokens: int) -> int:
        return self._moved(self.model.decode_step_ns(bucket, num_seqs, context_tokens))

    def prefill_ns(self, computed_tokens: int, cached_tokens: int) -> int:
        return self._moved(self.model.prefill_ns(computed_tokens, cached_tokens))

    def _moved(self, step_ns: int) -> int:
        mixed = (self.seed + self.number) % 2**32
        for _ in range(2):
            mixed = (mixed ^ (mixed >> 16)) * 0x45D9F3B % 2**32
        self.number += 1
        return step_ns + step_ns * self.noise[(mixed ^ (mixed >> 16)) % len(self.noise)] // 10**6


def played(plan: Plan, draws: Draws, number: int) -> Plan:
    """The plan as draw ``number`` plays it."""
    first = int(draws.arrays.plans["first_request"][number])
    waits = iter(draws.arrays.requests["wait_ns"][first:].tolist())
    starts = iter(draws.arrays.sessions["start_ns"][int(draws.arrays.plans["first_session"][number]) :].tolist())
    sessions = tuple(
        replace(
            session,
            start_offset_ns=next(starts),
            requests=tuple(replace(request, wait_after_ns=next(waits)) for request in session.requests),
        )
        for session in plan.sessions
    )
    return replace(plan, sessions=sessions)


@settings(max_examples=6)
@given(
    seed=st.integers(0, 2**40),
    num_sessions=st.integers(1, 9),
    rules=st.sampled_from(["vendor-0.11.1", "vendor-0.12.0"]),
    cost_name=st.sampled_from(["paper", "context-1-2-4-8"]),
)
def test_every_draw_walks_as_the_naive_simulator_on_its_plan_at_its_costs(
    seed: int, num_sessions: int, rules: str, cost_name: str
) -> None:
    workload = WorkloadSpec(num_sessions=num_sessions, requests_per_session=3, wait_cap_s=2.0)
    plan = build_plan(workload, 5, 0)
    config = EngineConfig(4, (1, 2, 4), 5, rules=rules)
    perturbation = replace(WIDE, seed=seed)
    draws = draw(plan_arrays([plan]), config, load_cost_model(cost_name), perturbation, range(2))
    outcome = run_draws(draws, config)
    for number in range(2):
        costs = NoisyCosts(draws.models[number], draws.noise_seeds[number], draws.noise.tolist())
        alone = naive_run(played(plan, draws, number), config, costs)
        own = outcome_of_plan(draws.arrays, outcome, number)
        assert own.totals[["decode_ns", "prefill_ns", "wait_ns"]].tolist() == [
            (alone.decode_ns, alone.prefill_ns, alone.wait_session_ns)
        ]
        names = ["cached_tokens", "arrival_ns", "admitted_ns", "first_token_ns", "completed_ns"]
        requests = [alone.requests[place] for place in sorted(alone.requests)]
        assert [list(row) for row in own.requests[names].tolist()] == requests


def test_the_first_draws_do_not_depend_on_how_many_follow() -> None:
    arrays = plan_arrays([build_plan(WorkloadSpec(num_sessions=6), 1, block) for block in range(2)])
    config, model = EngineConfig(8, (1, 2, 4, 8), 8), load_cost_model("paper")
    few, many = (run_draws(draw(arrays, config, model, WIDE, range(count)), config) for count in (3, 7))
    assert np.array_equal(few.totals, many.totals[:6])
    assert len({int(value) for value in many.totals["decode_ns"][::2]}) == 7


def test_roles_share_true_costs_and_have_jitter_of_their_own() -> None:
    arrays, model = plan_arrays([build_plan(WorkloadSpec(num_sessions=6), 1, 0)]), load_cost_model("paper")
    config = EngineConfig(8, (1, 2, 4, 8), 8)
    one, other = (draw(arrays, config, model, replace(WIDE, role=role), range(3)) for role in ("a", "b"))
    assert [truth.bucket_fs(8) for truth in one.models] == [truth.bucket_fs(8) for truth in other.models]
    assert not np.array_equal(one.arrays.sessions["start_ns"], other.arrays.sessions["start_ns"])
