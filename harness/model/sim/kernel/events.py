"""Steps of a simulated server with slots: what each takes and what is recorded of it; compiled, integer nanoseconds.

Steps and evictions are recorded as far as the given tables have room.
"""

from __future__ import annotations

from harness.compiled import always_inline, jit
from harness.model.engine.state import FS_PER_NS, QUEUED, STEP_DECODE, STEP_IDLE, STEP_PREFILL, EngineState
from harness.model.engine.steps import finish_steps, schedule
from harness.model.sim.kernel.arrays import CostArrays, PagedCosts, SimOutcome, noise_place
from harness.model.sim.kernel.arrivals import SlotRun, load_head_keys

STEP_STUCK, STEP_NOTHING = -1, -2
"""No step begins: a request can never be admitted; or nothing is to be done now."""


@jit
def record_step(
    outcome: SimOutcome,
    plan: int,
    start_ns: int,
    kind: int,
    num_seqs: int,
    bucket: int,
    computed: int,
    session: int,
    request: int,
    duration_ns: int,
) -> None:
    """Record one step. computed: tokens of prompts. request: its number within the session of a prompt. -1: of none."""
    room, totals = len(outcome.steps), outcome.totals[plan]
    if room == 0:
        return
    used = totals.num_step_records
    totals.num_step_records = used + 1
    if used < room:
        step = outcome.steps[used]
        step.start_ns = start_ns
        step.kind = kind
        step.num_seqs = num_seqs
        step.bucket = bucket
        step.count = 1
        step.session = session
        step.request = request
        step.computed_tokens = computed
        step.duration_ns = duration_ns


@jit
def record_decode(outcome: SimOutcome, plan: int, start_ns: int, num_seqs: int, bucket: int, each_ns: int) -> None:
    """Record one decode step; a step that continues the last record unchanged is added to it."""
    used = outcome.totals[plan].num_step_records
    if 0 < used <= len(outcome.steps):
        last = outcome.steps[used - 1]
        if (
            last.kind == STEP_DECODE
            and last.num_seqs == num_seqs
            and last.bucket == bucket
            and last.duration_ns == each_ns
            and last.start_ns + last.count * each_ns == start_ns
        ):
            last.count += 1
            return
    record_step(outcome, plan, start_ns, STEP_DECODE, num_seqs, bucket, -1, -1, -1, each_ns)


@jit
def record_eviction(
    outcome: SimOutcome, plan: int, at_ns: int, slot: int, caller: int, session: int, request: int
) -> None:
    """Record memory that was taken for ``caller``. request: its number within the session; -1: of none."""
    used = outcome.totals[plan].num_eviction_records
    outcome.totals[plan].num_eviction_records = used + 1
    if used < len(outcome.evictions):
        record = outcome.evictions[used]
        record.at_ns = at_ns
        record.slot = slot
        record.caller = caller
        record.session = session
        record.request = request


place_of = jit(noise_place)


@jit
def noisy_ns(cost: CostArrays | PagedCosts, number: int, step_ns: int) -> int:
    """Duration of step ``number`` of a plan with noise."""
    if len(cost.noise) == 1:
        return step_ns
    place = place_of(cost.other[0].noise_seed + number, len(cost.noise))
    return int(step_ns + step_ns * cost.noise[place] // 1_000_000)


@jit
def steps_so_far(outcome: SimOutcome, plan: int) -> int:
    """How many steps of a plan have run, without idle steps."""
    return int(outcome.totals[plan].decode_steps + outcome.totals[plan].prefills)


@jit
def admit(run: SlotRun, plan: int, now_ns: int) -> tuple[int, int]:
    """Record the admission of the prefill just scheduled; returns (session, number of its request), within the plan."""
    server = run.state.server[0]
    request = int(run.plans.plans[plan].first_request + run.state.places[0].batch)
    result = run.outcome.requests[request]
    if result.admitted_ns < 0:
        result.admitted_ns = now_ns
        result.cached_tokens = server.cached_tokens
        result.hash_hit_tokens = server.hit_tokens
    totals = run.outcome.totals[plan]
    totals.prefills += 1
    totals.computed_tokens += server.computed_tokens
    totals.cached_tokens += server.cached_tokens
    session = int(run.plans.requests[request].session)
    return session, int(request - run.plans.sessions[run.plans.plans[plan].first_session + session].first_request)


@jit
def run_prefill(run: SlotRun, plan: int, now_ns: int) -> int:
    """Record the prefill just scheduled; returns its duration."""
    server = run.state.server[0]
    computed = int(server.computed_tokens)
    duration_ns = noisy_ns(
        run.cost, steps_so_far(run.outcome, plan), prefill_ns(run.cost, computed, int(server.cached_tokens))
    )
    session, number = admit(run, plan, now_ns)
    result = run.outcome.requests[run.plans.plans[plan].first_request + run.state.places[0].batch]
    if result.first_token_ns < 0:  # else the prefill follows a preemption
        result.first_token_ns = now_ns + duration_ns
    record_step(run.outcome, plan, now_ns, STEP_PREFILL, 1, 0, computed, session, number, duration_ns)
    run.outcome.totals[plan].prefill_ns += duration_ns
    # The other running requests, which are ready to decode, wait.
    run.outcome.totals[plan].wait_ns += (server.num_running - 1) * duration_ns
    return duration_ns


@jit
def prefill_ns(cost: CostArrays, computed: int, cached: int) -> int:
    """How long a prefill takes, as CostModel.prefill_ns has it."""
    other = cost.other[0]
    chunk = other.chunk_tokens
    calls = (computed + chunk - 1) // chunk
    positions = calls * cached + chunk * (calls * (calls - 1) // 2)
    total_fs = calls * (other.call_fs + other.token_fs * computed) + other.position_fs * positions
    return int((total_fs + FS_PER_NS // 2) // FS_PER_NS)


@jit
def slot_steps_ahead(state: EngineState, max_steps: int) -> int:
    """How many equal decode steps may be taken before any decision can change, arrivals apart."""
    server = state.server[0]
    if server.num_waiting > 0 and server.num_running < state.server[0].active_limit:
        # This schedule() refused the queue's head, and will again while memory does not change. But the paper's
        # rules settle releases on a refusal, and a preemption or an eviction has changed memory.
        is_settled = state.server[0].has_inner_blocks and server.num_preempted == 0 and server.num_evicted == 0
        if not is_settled:
            return 1
    return int(min(server.equal_steps, max_steps))


@always_inline
def slot_batch(run: SlotRun) -> tuple[int, int]:
    """Requests of the decode step just scheduled, and the size that it is run with."""
    count = int(run.state.server[0].num_batch)
    return count, int(run.cost.batch[count].bucket)


@always_inline
def slot_decode_ns(run: SlotRun, place: int) -> int:
    """How long the decode step just scheduled lasts, without noise; place: so many equal steps later."""
    server = run.state.server[0]
    context_fs = run.cost.other[0].context_fs * (server.context_tokens + place * server.num_batch)
    return int((run.cost.batch[server.num_batch].base_fs + context_fs + FS_PER_NS // 2) // FS_PER_NS)


@jit
def note_losses(run: SlotRun, plan: int, now_ns: int) -> None:
    """Record the evictions and preemptions of the step just scheduled."""
    own, server, totals = run.plans.plans[plan], run.state.server[0], run.outcome.totals[plan]
    totals.evictions += server.num_evicted
    for i in range(server.num_evicted):
        evicted, request = run.state.evicted[i], own.first_request + run.state.evicted[i].row
        session = run.plans.requests[request].session
        number = request - run.plans.sessions[own.first_session + session].first_request
        record_eviction(run.outcome, plan, now_ns, int(evicted.slot), int(evicted.caller), int(session), int(number))
    totals.preemptions += server.num_preempted
    for i in range(server.num_preempted):
        run.outcome.requests[own.first_request + run.state.places[i].preempted].preemptions += 1


@jit
def decide_in_slots(run: SlotRun, plan: int, loaded: int, now_ns: int) -> tuple[int, int]:
    """(row whose keys are loaded now, kind of the step that begins). loaded: the row whose keys were loaded before."""
    server = run.state.server[0]
    loaded = load_head_keys(run.plans, plan, run.state, loaded)
    kind = schedule(run.state)
    if server.num_evicted > 0 or server.num_preempted > 0:
        note_losses(run, plan, now_ns)
    if kind == STEP_PREFILL:
        loaded = -1  # after a preemption it may return with more blocks
    elif kind == STEP_IDLE and server.num_preempted == 0:
        kind = STEP_STUCK
    return loaded, kind


@jit
def finish_in_slots(run: SlotRun, _plan: int, taken: int, _now_ns: int) -> None:
    """So many steps are over: their requests that end are in ``state.places``."""
    finish_steps(run.state, taken)


@jit
def has_work_in_slots(state: EngineState) -> int:
    """How many requests run or wait."""
    return int(state.server[0].num_running + state.server[0].num_waiting)


@jit
def stuck_in_slots(state: EngineState) -> int:
    """The row of a request that can never be admitted."""
    return int(state.queues[QUEUED].head)


@jit
def take_costs(cost: CostArrays | PagedCosts, draw: int) -> None:
    """Copy the drawn costs of a plan, if any, to the costs that the kernel reads."""
    if len(cost.drawn_other) == 0:
        return
    size = len(cost.batch)
    # Both sides of an assignment are of one kind of costs.
    for i in range(size):
        cost.batch[i] = cost.drawn_batch[draw * size + i]  # pyright: ignore[reportArgumentType]
    cost.other[0] = cost.drawn_other[draw]  # pyright: ignore[reportArgumentType]
