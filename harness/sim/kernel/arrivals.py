"""Who arrives when, and what their prompts share: the arrivals' half of the compiled simulator.

A heap of next arrivals by (instant, session); block keys by who wrote a block first. No decision of the engine is taken
here.
"""

from __future__ import annotations

from harness.compiled import always_inline, jit
from harness.compiled.records import Records
from harness.engine.state import EngineState
from harness.engine.steps import reset, submit
from harness.sim.kernel.arrays import OWNER_STRIDE, Arrival, Outcome, PlanArrays, PlanTotals, Scratch
from harness.sim.kernel.watching import unwatch, watch


@jit
def heap_push(scratch: Scratch, size: int, session: int) -> None:
    """Add a session to the heap of next arrivals, ordered by (arrival, session)."""
    heap, place = scratch.heap, size
    at_ns = scratch.sessions[session].arrival_ns
    while place > 0:
        parent = (place - 1) >> 1
        above_ns = heap[parent].at_ns
        if above_ns < at_ns or (above_ns == at_ns and heap[parent].session < session):
            break
        heap[place].at_ns = above_ns
        heap[place].session = heap[parent].session
        place = parent
    heap[place].at_ns = at_ns
    heap[place].session = session


@jit
def heap_pop(heap: Records[Arrival], size: int) -> int:
    """Remove and return the session that arrives first."""
    first = int(heap[0].session)
    size -= 1
    at_ns, last = heap[size].at_ns, heap[size].session
    place = 0
    while True:
        child = 2 * place + 1
        if child >= size:
            break
        below_ns = heap[child].at_ns
        if child + 1 < size:
            other_ns = heap[child + 1].at_ns
            if other_ns < below_ns or (other_ns == below_ns and heap[child + 1].session < heap[child].session):
                child += 1
                below_ns = other_ns
        if at_ns < below_ns or (at_ns == below_ns and last < heap[child].session):
            break
        heap[place].at_ns = below_ns
        heap[place].session = heap[child].session
        place = child
    heap[place].at_ns = at_ns
    heap[place].session = last
    return first


@jit
def load_keys(plans: PlanArrays, plan: int, state: EngineState, row: int) -> None:
    """Put the chain keys of the queue's head where the engine expects them: who of the plan wrote each block first.

    Two requests share a block exactly when the same request wrote it: blocks wholly inside the kept tokens stay. So
    each stretch of blocks is named by going back over the requests whose text was kept.
    """
    own_plan, block_tokens = plans.plans[plan], state.server[0].block_tokens
    request = int(own_plan.first_request + row)
    end = (state.rows[row].prompt + state.rows[row].output) // block_tokens
    while True:
        writer, session = (
            request - own_plan.first_request,
            plans.sessions[own_plan.first_session + plans.requests[request].session],
        )
        keep = plans.requests[request].keep
        begin = keep // block_tokens if keep > 0 else load_shared_keys(plans, plan, state, request, int(end))
        for i in range(begin, end):
            state.prefix[i].key = (writer + 2) * OWNER_STRIDE + i
        end = min(begin, end)
        if keep == 0 or end == 0:
            return
        before = request - 1
        if request == session.first_request:
            parent = plans.sessions[own_plan.first_session + session.continues]
            before = parent.first_request + parent.num_requests - 1
        request = int(before)


@jit
def see_to_keys(plans: PlanArrays, plan: int, state: EngineState, row_with_keys: int) -> int:
    """Load the keys of the queue's head if it may be admitted and they are not there; the row whose keys are there."""
    server = state.server[0]
    row = int(server.wait_head)
    if row < 0 or row == row_with_keys or server.num_running >= server.active_limit or not server.has_inner_blocks:
        return row_with_keys
    load_keys(plans, plan, state, row)
    return row


@jit
def load_shared_keys(plans: PlanArrays, plan: int, state: EngineState, request: int, end: int) -> int:
    """Keys of the blocks wholly inside what a fresh stream shares: the common prefix, then named blocks; how many."""
    own_plan, block_tokens = plans.plans[plan], state.server[0].block_tokens
    num_shared = min(own_plan.shared_prefix, plans.requests[request].new) // block_tokens
    for i in range(min(num_shared, end)):
        state.prefix[i].key = OWNER_STRIDE + i
    own = plans.sessions[own_plan.first_session + plans.requests[request].session]
    if own.num_names == 0 or request != own.first_request:
        return int(num_shared)
    num_named = own.num_names * own_plan.named_tokens // block_tokens
    for i in range(num_shared, min(num_named, end)):
        last_name = ((i + 1) * block_tokens - 1) // own_plan.named_tokens
        chain = plans.names[own.first_name + last_name]
        state.prefix[i].key = (own_plan.num_requests + chain + 2) * OWNER_STRIDE + i
    return int(max(num_shared, num_named))


@always_inline
def arrive(plans: PlanArrays, plan: int, scratch: Scratch, state: EngineState, outcome: Outcome, session: int) -> None:
    """The next request of a session joins the queue."""
    place = int(plans.plans[plan].first_session + session)
    request = int(plans.sessions[place].first_request + scratch.sessions[session].next_request)
    outcome.requests[request].arrival_ns = scratch.sessions[session].arrival_ns
    outcome.requests[request].admitted_ns = -1
    outcome.requests[request].first_token_ns = -1
    outcome.requests[request].preemptions = 0
    outcome.requests[request].cached_tokens = 0
    outcome.requests[request].hash_hit_tokens = 0
    outcome.requests[request].aborted_tokens = -1
    watch(plans, scratch, session, request)
    row = int(request - plans.plans[plan].first_request)
    generate = int(plans.requests[request].generate)
    prompt = int(plans.requests[request].keep + plans.requests[request].new)
    submit(state, row, prompt, generate, generate, int(plans.sessions[place].root))


@always_inline
def complete(
    plans: PlanArrays, plan: int, scratch: Scratch, outcome: Outcome, waiting: int, row: int, now_ns: int
) -> int:
    """A request is over: note it, and schedule what follows it; returns the new number of expected arrivals."""
    first_session = plans.plans[plan].first_session
    request = plans.sessions[first_session].first_request + row
    outcome.requests[request].completed_ns = now_ns
    session = int(plans.requests[request].session)
    unwatch(plans, scratch, session, request)
    own = plans.sessions[first_session + session]
    if request + 1 < own.first_request + own.num_requests:
        scratch.sessions[session].next_request += 1
        pinned_ns = plans.requests[request + 1].pinned_ns
        scratch.sessions[session].arrival_ns = (
            now_ns + plans.requests[request].wait_ns if pinned_ns < 0 else max(now_ns, pinned_ns)
        )
        heap_push(scratch, waiting, session)
        return waiting + 1
    for edge in range(own.first_follower, own.first_follower + own.num_followers):
        follower = plans.followers[edge]
        scratch.sessions[follower].num_missing -= 1
        if scratch.sessions[follower].num_missing == 0:
            scratch.sessions[follower].arrival_ns = now_ns + plans.sessions[first_session + follower].start_ns
            heap_push(scratch, waiting, follower)
            waiting += 1
    return waiting


@jit
def clear(totals: PlanTotals) -> None:
    """Nothing has happened yet."""
    totals.decode_ns = 0
    totals.prefill_ns = 0
    totals.wait_ns = 0
    totals.end_ns = 0
    totals.decode_steps = 0
    totals.prefills = 0
    totals.evictions = 0
    totals.computed_tokens = 0
    totals.cached_tokens = 0
    totals.preemptions = 0
    totals.num_step_records = 0
    totals.num_eviction_records = 0
    totals.stuck_session = -1


@jit
def begin(plans: PlanArrays, plan: int, scratch: Scratch, state: EngineState, outcome: Outcome) -> int:
    """A fresh server and the first arrivals of a plan; returns how many arrivals are expected."""
    reset(state)
    clear(outcome.totals[plan])
    for i in range(state.server[0].limit + 1):
        outcome.histogram[plan, i] = 0
    scratch.num_watched[0] = 0
    first_session = plans.plans[plan].first_session
    waiting = 0
    for session in range(plans.plans[plan].num_sessions):
        scratch.sessions[session].next_request = 0
        scratch.sessions[session].num_missing = plans.sessions[first_session + session].num_before
        if scratch.sessions[session].num_missing == 0:
            scratch.sessions[session].arrival_ns = plans.sessions[first_session + session].start_ns
            heap_push(scratch, waiting, session)
            waiting += 1
    return waiting
