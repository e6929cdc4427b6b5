"""Who arrives when, and what their prompts share: the arrivals' half of the compiled simulator.

A heap of next arrivals by (instant, session); block keys by who wrote a block first. No decision of the engine is taken
here. Next: ``events`` moves time from arrival to arrival.
"""

from __future__ import annotations

from harness.compiled import inner
from harness.compiled.records import IntArray, Records
from harness.engine.state import EngineState
from harness.engine.steps import reset, submit
from harness.sim.kernel.arrays import OWNER_STRIDE, Outcome, PlanArrays, PlanTotals, Scratch, SessionScratch
from harness.sim.kernel.watching import unwatch, watch


@inner
def heap_push(sessions: Records[SessionScratch], size: int, session: int) -> None:
    """Add a session to the heap of next arrivals, ordered by (arrival, session)."""
    place = size
    at_ns = sessions[session].arrival_ns
    while place > 0:
        parent = (place - 1) >> 1
        above = sessions[parent].heap
        above_ns = sessions[above].arrival_ns
        if above_ns < at_ns or (above_ns == at_ns and above < session):
            break
        sessions[place].heap = above
        place = parent
    sessions[place].heap = session


@inner
def heap_pop(sessions: Records[SessionScratch], size: int) -> int:
    """Remove and return the session that arrives first."""
    first = sessions[0].heap
    last = sessions[size - 1].heap
    size -= 1
    at_ns = sessions[last].arrival_ns
    place = 0
    while True:
        child = 2 * place + 1
        if child >= size:
            break
        below = sessions[child].heap
        below_ns = sessions[below].arrival_ns
        if child + 1 < size:
            other = sessions[child + 1].heap
            other_ns = sessions[other].arrival_ns
            if other_ns < below_ns or (other_ns == below_ns and other < below):
                child += 1
                below, below_ns = other, other_ns
        if at_ns < below_ns or (at_ns == below_ns and last < below):
            break
        sessions[place].heap = below
        place = child
    sessions[place].heap = last
    return first


@inner
def write_owners(
    plans: PlanArrays, plan: int, scratch: Scratch, state: EngineState, session: int, request: int
) -> None:
    """Say of each block of a request's stream which request of the plan wrote it first.

    Two requests share a block exactly when the same request wrote it: blocks wholly inside the kept tokens stay.
    ``request`` is its index in all plans.
    """
    block_tokens = state.server[0].block_tokens
    first_session = plans.plans[plan].first_session
    keep = plans.requests[request].keep
    kept_blocks = keep // block_tokens
    owner = scratch.owner
    if request == plans.sessions[first_session + session].first_request:
        parent = plans.sessions[first_session + session].continues
        if parent >= 0:
            for i in range(kept_blocks):
                owner[session, i] = owner[parent, i]
    shared_blocks = 0
    if keep == 0:
        shared_blocks = min(plans.plans[plan].shared_prefix, plans.requests[request].new) // block_tokens
        for i in range(shared_blocks):
            owner[session, i] = -1
        shared_blocks += write_named(plans, plan, owner, block_tokens, session, request, shared_blocks)
    row = request - plans.sessions[first_session].first_request
    stream_blocks = (keep + plans.requests[request].new + plans.requests[request].generate) // block_tokens
    for i in range(max(kept_blocks, shared_blocks), min(stream_blocks, owner.shape[1])):
        owner[session, i] = row


@inner
def write_named(
    plans: PlanArrays, plan: int, owner: IntArray, block_tokens: int, session: int, request: int, begin: int
) -> int:
    """Owners of the blocks wholly inside the named blocks that a session's first prompt begins with; how many."""
    own, its_plan = plans.sessions[plans.plans[plan].first_session + session], plans.plans[plan]
    if own.num_names == 0 or request != own.first_request:
        return 0
    num_blocks = min(own.num_names * its_plan.named_tokens // block_tokens, owner.shape[1])
    for i in range(begin, num_blocks):
        last_name = ((i + 1) * block_tokens - 1) // its_plan.named_tokens
        owner[session, i] = its_plan.num_requests + plans.names[own.first_name + last_name]
    return max(0, num_blocks - begin)


@inner
def load_keys(plans: PlanArrays, first_request: int, scratch: Scratch, state: EngineState, row: int) -> None:
    """Put the chain keys of the queue's head where the engine expects them."""
    session = plans.requests[first_request + row].session
    num_tokens = state.rows[row].prompt + state.rows[row].output
    for i in range(num_tokens // state.server[0].block_tokens):
        state.prefix[i].key = (scratch.owner[session, i] + 2) * OWNER_STRIDE + i


@inner
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
    if state.server[0].has_inner_blocks:
        write_owners(plans, plan, scratch, state, session, request)
    generate = int(plans.requests[request].generate)
    prompt = int(plans.requests[request].keep + plans.requests[request].new)
    submit(state, row, prompt, generate, generate, int(plans.sessions[place].root))


@inner
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
        heap_push(scratch.sessions, waiting, session)
        return waiting + 1
    for edge in range(own.first_follower, own.first_follower + own.num_followers):
        follower = plans.followers[edge]
        scratch.sessions[follower].num_missing -= 1
        if scratch.sessions[follower].num_missing == 0:
            scratch.sessions[follower].arrival_ns = now_ns + plans.sessions[first_session + follower].start_ns
            heap_push(scratch.sessions, waiting, follower)
            waiting += 1
    return waiting


@inner
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


@inner
def begin(plans: PlanArrays, plan: int, scratch: Scratch, state: EngineState, outcome: Outcome) -> int:
    """A fresh server and the first arrivals of a plan; returns how many arrivals are expected."""
    reset(state)
    clear(outcome.totals[plan])
    for i in range(outcome.histogram.shape[1]):
        outcome.histogram[plan, i] = 0
    scratch.num_watched[0] = 0
    first_session = plans.plans[plan].first_session
    waiting = 0
    for session in range(plans.plans[plan].num_sessions):
        scratch.sessions[session].next_request = 0
        scratch.sessions[session].num_missing = plans.sessions[first_session + session].num_before
        if scratch.sessions[session].num_missing == 0:
            scratch.sessions[session].arrival_ns = plans.sessions[first_session + session].start_ns
            heap_push(scratch.sessions, waiting, session)
            waiting += 1
    return waiting
