"""Notes of steps and evictions, as many as there is room for: the memory half of the compiled simulator.

Equal decode steps that follow each other become one record. Nothing is decided here.
"""

from __future__ import annotations

from harness.compiled import jit
from harness.engine.state import STEP_DECODE, STEP_PREFILL, EngineState
from harness.sim.kernel.arrays import (
    Outcome,
    PlanArrays,
)


@jit
def record_decode(
    outcome: Outcome, plan: int, start_ns: int, num_seqs: int, bucket: int, count: int, each_ns: int
) -> None:
    """Note ``count`` equal decode steps, joined to the last record when they go on from it unchanged."""
    room = len(outcome.steps)
    if room == 0:
        return
    used = outcome.totals[plan].num_step_records
    if 0 < used <= room:
        last = outcome.steps[used - 1]
        if (
            last.kind == STEP_DECODE
            and last.num_seqs == num_seqs
            and last.duration_ns == each_ns
            and last.start_ns + last.count * each_ns == start_ns
        ):
            last.count += count
            return
    outcome.totals[plan].num_step_records = used + 1
    if used < room:
        step = outcome.steps[used]
        step.start_ns = start_ns
        step.kind = STEP_DECODE
        step.num_seqs = num_seqs
        step.bucket = bucket
        step.count = count
        step.session = -1
        step.request = -1
        step.computed_tokens = -1
        step.duration_ns = each_ns


@jit
def record_prefill(
    outcome: Outcome, plan: int, start_ns: int, session: int, request: int, computed: int, each_ns: int
) -> None:
    """Note one prefill step; ``request`` is its number within the session."""
    room = len(outcome.steps)
    if room == 0:
        return
    used = outcome.totals[plan].num_step_records
    outcome.totals[plan].num_step_records = used + 1
    if used < room:
        step = outcome.steps[used]
        step.start_ns = start_ns
        step.kind = STEP_PREFILL
        step.num_seqs = 1
        step.bucket = 0
        step.count = 1
        step.session = session
        step.request = request
        step.computed_tokens = computed
        step.duration_ns = each_ns


@jit
def record_evictions(outcome: Outcome, plans: PlanArrays, plan: int, state: EngineState, at_ns: int) -> None:
    """Note the slots that the last schedule() evicted."""
    room = len(outcome.evictions)
    first_request = plans.plans[plan].first_request
    for i in range(state.server[0].num_evicted):
        used = outcome.totals[plan].num_eviction_records
        outcome.totals[plan].num_eviction_records = used + 1
        if used >= room:
            continue
        request = first_request + state.evicted[i].row
        session = plans.requests[request].session
        record = outcome.evictions[used]
        record.at_ns = at_ns
        record.slot = state.evicted[i].slot
        record.caller = state.evicted[i].caller
        record.session = session
        record.request = request - plans.sessions[plans.plans[plan].first_session + session].first_request
