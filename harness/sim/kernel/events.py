"""The simulator's inner loop: plans as arrays in, times and counts as arrays out; compiled, integer nanoseconds.

It moves virtual time from decision to decision and takes equal decode steps at once; every decision is the engine's.
It allocates nothing, so one call can run many plans. Next: ``harness.sim.simulate`` wraps it for one Plan.
"""

from __future__ import annotations

from harness.compiled import compiled, inner
from harness.engine.cost import FS_PER_NS, P_CALL_FS, P_CHUNK_TOKENS, P_CONTEXT_FS, P_POSITION_FS, P_TOKEN_FS
from harness.engine.state import (
    C_ACTIVE_LIMIT,
    C_HAS_BLOCKS,
    R_BATCH,
    R_CACHED,
    R_COMPUTED,
    R_CONTEXT,
    R_HIT_TOKENS,
    R_NUM_EVICTED,
    R_NUM_PREEMPTED,
    R_NUM_RUNNING,
    R_NUM_WAITING,
    R_WAIT_HEAD,
    STEP_DECODE,
    STEP_IDLE,
    STEP_PREFILL,
    EngineState,
)
from harness.engine.steps import FAR, IDLE_STEP_NS, equal_steps, finish_steps, schedule, schedule_decode_only
from harness.sim.kernel.arrays import (
    A_CACHED,
    A_COMPUTED,
    A_DECODE_NS,
    A_DECODE_STEPS,
    A_END_NS,
    A_EVICTIONS,
    A_PREEMPTIONS,
    A_PREFILL_NS,
    A_PREFILLS,
    A_STUCK_SESSION,
    A_WAIT_NS,
    O_ADMITTED,
    O_CACHED,
    O_FIRST_TOKEN,
    O_HIT_TOKENS,
    O_PREEMPTIONS,
    CostArrays,
    Outcome,
    PlanArrays,
    Scratch,
)
from harness.sim.kernel.arrivals import arrive, begin, complete, heap_pop, load_keys
from harness.sim.kernel.records import record_decode, record_evictions, record_prefill


@inner
def prefill_duration_ns(cost: CostArrays, computed: int, cached: int) -> int:
    """CostModel.prefill_ns."""
    other = cost.other
    chunk = other[P_CHUNK_TOKENS]
    calls = (computed + chunk - 1) // chunk
    positions = calls * cached + chunk * (calls * (calls - 1) // 2)
    total_fs = calls * (other[P_CALL_FS] + other[P_TOKEN_FS] * computed) + other[P_POSITION_FS] * positions
    return int((total_fs + FS_PER_NS // 2) // FS_PER_NS)


@inner
def run_prefill(
    plans: PlanArrays, plan: int, state: EngineState, cost: CostArrays, outcome: Outcome, now_ns: int
) -> int:
    """The duration of the prefill just scheduled, after noting who was admitted and who had to wait for it."""
    reg, totals = state.reg, outcome.totals
    first_request = plans.first_request[plans.first_session[plan]]
    request = first_request + state.batch[0]
    computed, cached = int(reg[R_COMPUTED]), int(reg[R_CACHED])
    duration_ns = prefill_duration_ns(cost, computed, cached)
    result = outcome.requests[request]
    if result[O_ADMITTED] < 0:
        result[O_ADMITTED] = now_ns
        result[O_CACHED] = cached
        result[O_HIT_TOKENS] = reg[R_HIT_TOKENS]
        result[O_FIRST_TOKEN] = now_ns + duration_ns
    session = int(plans.session[request])
    number = int(request - plans.first_request[plans.first_session[plan] + session])
    record_prefill(outcome, plan, now_ns, session, number, computed, duration_ns)
    totals[plan, A_PREFILLS] += 1
    totals[plan, A_PREFILL_NS] += duration_ns
    totals[plan, A_COMPUTED] += computed
    totals[plan, A_CACHED] += cached
    # Everyone else who runs is ready to decode and waits for this prefill.
    totals[plan, A_WAIT_NS] += (reg[R_NUM_RUNNING] - 1) * duration_ns
    return duration_ns


@inner
def run_chunked_prefill(
    plans: PlanArrays,
    plan: int,
    state: EngineState,
    cost: CostArrays,
    scratch: Scratch,
    outcome: Outcome,
    expected: int,
    now_ns: int,
) -> tuple[int, int]:
    """The prefill just scheduled, in parts of ``cost.chunked`` device calls, with a decode step after each but the
    last.

    An ablation: the served stack never does so. The prefilled request is set aside from the running ones until its
    last part; nobody is admitted meanwhile. Returns the instant of its end and the number of expected arrivals.
    """
    reg, totals, other = state.reg, outcome.totals, cost.other
    first_request = plans.first_request[plans.first_session[plan]]
    row = int(state.batch[0])
    request = int(first_request + row)
    computed, cached = int(reg[R_COMPUTED]), int(reg[R_CACHED])
    result = outcome.requests[request]
    if result[O_ADMITTED] < 0:
        result[O_ADMITTED] = now_ns
        result[O_CACHED] = cached
        result[O_HIT_TOKENS] = reg[R_HIT_TOKENS]
    session = int(plans.session[request])
    number = int(request - plans.first_request[plans.first_session[plan] + session])
    totals[plan, A_PREFILLS] += 1
    totals[plan, A_COMPUTED] += computed
    totals[plan, A_CACHED] += cached
    chunk = int(other[P_CHUNK_TOKENS])
    calls = (computed + chunk - 1) // chunk
    call_fs = int(other[P_CALL_FS] + other[P_TOKEN_FS] * computed)
    reg[R_NUM_RUNNING] -= 1
    done, spent_ns = 0, 0
    while True:
        part_end = min(done + cost.chunked[0], calls)
        positions = part_end * cached + chunk * (part_end * (part_end - 1) // 2)
        until_ns = int((part_end * call_fs + other[P_POSITION_FS] * positions + FS_PER_NS // 2) // FS_PER_NS)
        part_ns = until_ns - spent_ns
        tokens = min(part_end * chunk, computed) - done * chunk
        record_prefill(outcome, plan, now_ns, session, number, int(tokens), part_ns)
        totals[plan, A_PREFILL_NS] += part_ns
        totals[plan, A_WAIT_NS] += reg[R_NUM_RUNNING] * part_ns
        now_ns += part_ns
        done, spent_ns = int(part_end), until_ns
        if done >= calls:
            break
        if reg[R_NUM_RUNNING] > 0 and schedule_decode_only(state) == STEP_DECODE:
            totals[plan, A_EVICTIONS] += reg[R_NUM_EVICTED]
            record_evictions(outcome, plans, plan, state, now_ns)
            taken, decode_ns = run_decode(plan, state, cost, outcome, now_ns, now_ns + 1, done)
            now_ns += decode_ns
            for i in range(finish_steps(state, taken)):
                expected = complete(plans, plan, scratch, outcome, expected, int(state.finished[i]), now_ns)
    if result[O_FIRST_TOKEN] < 0:
        result[O_FIRST_TOKEN] = now_ns
    state.running[reg[R_NUM_RUNNING]] = row
    reg[R_NUM_RUNNING] += 1
    state.batch[0] = row
    reg[R_BATCH] = 1
    return now_ns, expected


@inner
def steps_ahead(state: EngineState, max_steps: int) -> int:
    """How many equal decode steps may be taken before any decision can change, arrivals apart."""
    reg = state.reg
    if reg[R_NUM_WAITING] > 0 and reg[R_NUM_RUNNING] < state.cfg[C_ACTIVE_LIMIT]:
        # The head was refused in this very schedule(). It will be again while memory does not change, but the paper's
        # rules settle releases on a refusal, and a preemption or an eviction did change memory.
        is_settled = state.cfg[C_HAS_BLOCKS] and reg[R_NUM_PREEMPTED] == 0 and reg[R_NUM_EVICTED] == 0
        if not is_settled:
            return 1
    return min(equal_steps(state), max_steps)


@inner
def run_decode(
    plan: int, state: EngineState, cost: CostArrays, outcome: Outcome, now_ns: int, until_ns: int, max_steps: int
) -> tuple[int, int]:
    """Take the decode step just scheduled and its equal followers that start before ``until_ns``.

    Returns how many steps were taken and how long they took.
    """
    reg = state.reg
    count = int(reg[R_BATCH])
    bucket = int(cost.bucket[count])
    most = steps_ahead(state, max_steps)
    context_fs = cost.other[P_CONTEXT_FS]
    step_fs = cost.base_fs[count] + context_fs * reg[R_CONTEXT] + FS_PER_NS // 2
    taken, spent_ns = 0, 0
    if context_fs == 0:
        each_ns = int(step_fs // FS_PER_NS)
        taken = most
        if until_ns < FAR:
            taken = min(taken, (until_ns - now_ns - 1) // each_ns + 1)
        spent_ns = taken * each_ns
        record_decode(outcome, plan, now_ns, count, bucket, taken, each_ns)
    else:
        while taken < most and (taken == 0 or now_ns + spent_ns < until_ns):
            each_ns = int(step_fs // FS_PER_NS)
            record_decode(outcome, plan, now_ns + spent_ns, count, bucket, 1, each_ns)
            spent_ns += each_ns
            taken += 1
            step_fs += context_fs * count
    outcome.totals[plan, A_DECODE_STEPS] += taken
    outcome.totals[plan, A_DECODE_NS] += spent_ns
    outcome.histogram[plan, count] += taken
    return taken, spent_ns


@compiled
def run_plan(
    plans: PlanArrays,
    plan: int,
    state: EngineState,
    cost: CostArrays,
    scratch: Scratch,
    outcome: Outcome,
    max_steps: int,
) -> None:
    """Simulate one plan from a fresh server to its last completion.

    totals[A_STUCK_SESSION] is the session whose request can never be admitted, or -1.
    """
    reg, totals = state.reg, outcome.totals
    first_request = int(plans.first_request[plans.first_session[plan]])
    expected = begin(plans, plan, scratch, state, outcome)
    is_vendor = state.cfg[C_HAS_BLOCKS]
    # Read, not written as 0: numba would compile everything it is passed to a second time for the constant.
    now_ns = int(totals[plan, A_END_NS])
    while True:
        while expected > 0 and scratch.arrival_ns[scratch.heap[0]] <= now_ns:
            session = heap_pop(scratch.heap, expected, scratch.arrival_ns)
            expected -= 1
            arrive(plans, plan, scratch, state, outcome, session)
        if reg[R_NUM_RUNNING] + reg[R_NUM_WAITING] == 0:
            if expected == 0:
                break
            now_ns = int(scratch.arrival_ns[scratch.heap[0]])
            continue
        if is_vendor and reg[R_NUM_WAITING] > 0 and reg[R_NUM_RUNNING] < state.cfg[C_ACTIVE_LIMIT]:
            load_keys(plans, first_request, scratch, state, int(reg[R_WAIT_HEAD]))
        kind = schedule(state)
        if reg[R_NUM_EVICTED] > 0:
            totals[plan, A_EVICTIONS] += reg[R_NUM_EVICTED]
            record_evictions(outcome, plans, plan, state, now_ns)
        for i in range(reg[R_NUM_PREEMPTED]):
            totals[plan, A_PREEMPTIONS] += 1
            outcome.requests[first_request + state.preempted[i], O_PREEMPTIONS] += 1
        taken = 1
        if kind == STEP_PREFILL and cost.chunked[0] > 0 and reg[R_COMPUTED] > 0:
            now_ns, expected = run_chunked_prefill(plans, plan, state, cost, scratch, outcome, expected, now_ns)
        elif kind == STEP_PREFILL:
            now_ns += run_prefill(plans, plan, state, cost, outcome, now_ns)
        elif kind == STEP_DECODE:
            until_ns = FAR
            if reg[R_NUM_WAITING] == 0 and reg[R_NUM_RUNNING] < state.cfg[C_ACTIVE_LIMIT] and expected > 0:
                until_ns = int(scratch.arrival_ns[scratch.heap[0]])
            taken, spent_ns = run_decode(plan, state, cost, outcome, now_ns, until_ns, max_steps)
            now_ns += spent_ns
        else:
            if kind == STEP_IDLE and reg[R_NUM_PREEMPTED] == 0:
                totals[plan, A_STUCK_SESSION] = plans.session[first_request + reg[R_WAIT_HEAD]]
                break
            now_ns += IDLE_STEP_NS
        for i in range(finish_steps(state, taken)):
            expected = complete(plans, plan, scratch, outcome, expected, int(state.finished[i]), now_ns)
    totals[plan, A_END_NS] = now_ns


@compiled
def run_range(
    plans: PlanArrays,
    first_plan: int,
    last_plan: int,
    state: EngineState,
    cost: CostArrays,
    scratch: Scratch,
    outcome: Outcome,
    max_steps: int,
) -> None:
    """Simulate plans [first_plan, last_plan), each on a fresh server."""
    for plan in range(first_plan, last_plan):
        run_plan(plans, plan, state, cost, scratch, outcome, max_steps)


@compiled
def run_plans(
    plans: PlanArrays, state: EngineState, cost: CostArrays, scratch: Scratch, outcome: Outcome, max_steps: int
) -> None:
    """Simulate every plan, each on a fresh server."""
    run_range(plans, 0, len(plans.first_session) - 1, state, cost, scratch, outcome, max_steps)
