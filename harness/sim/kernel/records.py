"""Notes of steps and evictions, as many as there is room for: the memory half of the compiled simulator.

Equal decode steps that follow each other become one record. Nothing is decided here. Next: ``events`` calls these after
each step; ``simulate`` turns the records into tables.
"""

from __future__ import annotations

from harness.compiled import inner
from harness.engine.state import R_NUM_EVICTED, STEP_DECODE, STEP_PREFILL, EngineState
from harness.sim.kernel.arrays import (
    A_NUM_EVICTION_RECORDS,
    A_NUM_STEP_RECORDS,
    T_BUCKET,
    T_COMPUTED,
    T_COUNT,
    T_DURATION,
    T_KIND,
    T_NUM_SEQS,
    T_REQUEST,
    T_SESSION,
    T_START,
    V_AT,
    V_CALLER,
    V_REQUEST,
    V_SESSION,
    V_SLOT,
    Outcome,
    PlanArrays,
)


@inner
def record_decode(
    outcome: Outcome, plan: int, start_ns: int, num_seqs: int, bucket: int, count: int, each_ns: int
) -> None:
    """Note ``count`` equal decode steps, joined to the last record when they go on from it unchanged."""
    room = outcome.steps.shape[0]
    if room == 0:
        return
    used = outcome.totals[plan, A_NUM_STEP_RECORDS]
    if 0 < used <= room:
        last = outcome.steps[used - 1]
        if (
            last[T_KIND] == STEP_DECODE
            and last[T_NUM_SEQS] == num_seqs
            and last[T_DURATION] == each_ns
            and last[T_START] + last[T_COUNT] * each_ns == start_ns
        ):
            last[T_COUNT] += count
            return
    outcome.totals[plan, A_NUM_STEP_RECORDS] = used + 1
    if used < room:
        step = outcome.steps[used]
        step[T_START] = start_ns
        step[T_KIND] = STEP_DECODE
        step[T_NUM_SEQS] = num_seqs
        step[T_BUCKET] = bucket
        step[T_COUNT] = count
        step[T_SESSION] = -1
        step[T_REQUEST] = -1
        step[T_COMPUTED] = -1
        step[T_DURATION] = each_ns


@inner
def record_prefill(
    outcome: Outcome, plan: int, start_ns: int, session: int, request: int, computed: int, each_ns: int
) -> None:
    """Note one prefill step; ``request`` is its number within the session."""
    room = outcome.steps.shape[0]
    if room == 0:
        return
    used = outcome.totals[plan, A_NUM_STEP_RECORDS]
    outcome.totals[plan, A_NUM_STEP_RECORDS] = used + 1
    if used < room:
        step = outcome.steps[used]
        step[T_START] = start_ns
        step[T_KIND] = STEP_PREFILL
        step[T_NUM_SEQS] = 1
        step[T_BUCKET] = 0
        step[T_COUNT] = 1
        step[T_SESSION] = session
        step[T_REQUEST] = request
        step[T_COMPUTED] = computed
        step[T_DURATION] = each_ns


@inner
def record_evictions(outcome: Outcome, plans: PlanArrays, plan: int, state: EngineState, at_ns: int) -> None:
    """Note the slots that the last schedule() evicted."""
    room = outcome.evictions.shape[0]
    first_request = plans.first_request[plans.first_session[plan]]
    for i in range(state.reg[R_NUM_EVICTED]):
        used = outcome.totals[plan, A_NUM_EVICTION_RECORDS]
        outcome.totals[plan, A_NUM_EVICTION_RECORDS] = used + 1
        if used >= room:
            continue
        request = first_request + state.evicted[i, 2]
        session = plans.session[request]
        record = outcome.evictions[used]
        record[V_AT] = at_ns
        record[V_SLOT] = state.evicted[i, 0]
        record[V_CALLER] = state.evicted[i, 1]
        record[V_SESSION] = session
        record[V_REQUEST] = request - plans.first_request[plans.first_session[plan] + session]
