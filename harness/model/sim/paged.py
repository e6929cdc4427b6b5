"""Simulates plans on a server with paged KV memory: the compiled loop, its tables and its costs.

Exact integers, no randomness, no I/O. Raises PlanError when a request does not fit the server.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from harness.compiled.records import IntArray, new_records, record_as_dict
from harness.errors import PlanError
from harness.model.engine import CostModel, EngineConfig
from harness.model.engine.paged_state import new_paged_state
from harness.model.engine.steps import FAR
from harness.model.sim.kernel import arrays as layout
from harness.model.sim.kernel.paged_costs import paged_costs
from harness.model.sim.kernel.paged_events import SessionReturn, run_paged_plans


def run_paged(  # noqa: PLR0913  # what a call of the kernel depends on
    arrays: layout.PlanArrays,
    config: EngineConfig,
    cost_models: Sequence[CostModel],
    noise_seeds: Sequence[int] = (),
    noise: IntArray = layout.NO_NOISE,
    *,
    with_records: bool = False,
    max_steps: int = FAR,
) -> layout.Outcome:
    """Each plan on a fresh server, at its own costs: the tables that the compiled simulator gives of other rules.

    cost_models: one for each plan, or one for all. noise_seeds: one for each plan, see ``CostArrays``; default: no
    noise. with_records: steps and evictions of the last plan. max_steps: see ``simulate``.
    Raises PlanError when a request can never be admitted.
    """
    most_decodes = min(config.max_num_seqs, int(arrays.plans["num_sessions"].max()))
    cost = paged_costs(config.paged, cost_models, most_decodes, noise_seeds, noise)
    state = new_paged_state(config.paged, int(arrays.plans["num_requests"].max()))
    scratch = layout.new_scratch(arrays)
    returns = new_records(SessionReturn, len(scratch.sessions) if config.keep_kv_ns else 0)
    room = (len(arrays.requests) * 16 + 64, 0) if with_records else (0, 0)
    while True:
        outcome = layout.new_outcome(arrays, config, *room)
        run_paged_plans(arrays, state, scratch, returns, outcome, cost, 0, len(arrays.plans), max_steps)
        check_admitted(outcome, hint="Give more num_gpu_blocks or shorter prompts")
        if not with_records:
            return outcome
        used = record_as_dict(outcome.totals, len(arrays.plans) - 1)
        needed = used["num_step_records"], used["num_eviction_records"]
        if needed[0] <= room[0] and needed[1] <= room[1]:
            return outcome._replace(steps=outcome.steps[: needed[0]], evictions=outcome.evictions[: needed[1]])
        room = needed


def check_admitted(outcome: layout.Outcome, hint: str) -> None:
    """Raise PlanError naming the session whose request can never be admitted, if there is one."""
    stuck = outcome.totals["stuck_session"]
    if not np.any(stuck >= 0):
        return
    plan = int(np.argmax(stuck >= 0))
    raise PlanError(
        "its request can never be admitted: the KV memory is too small for it",
        where=f"plan {plan}, session {stuck[plan]}" if len(stuck) > 1 else f"session {stuck[plan]}",
        hint=hint,
    )
