"""Who arrives when, and what their prompts share: the arrivals' half of the compiled simulator.

A heap of next arrivals by (instant, session); block keys by who wrote a block first. No decision of the engine is taken
here. Next: ``events`` moves time from arrival to arrival.
"""

from __future__ import annotations

from harness.compiled import inner
from harness.engine.state import C_BLOCK_TOKENS, C_HAS_BLOCKS, Q_OUTPUT, Q_PROMPT, EngineState, IntArray, reset
from harness.engine.steps import submit
from harness.sim.kernel.arrays import (
    A_PREFILLS,
    A_STUCK_SESSION,
    NUM_A,
    O_ADMITTED,
    O_ARRIVAL,
    O_COMPLETED,
    O_FIRST_TOKEN,
    O_PREEMPTIONS,
    OWNER_STRIDE,
    Outcome,
    PlanArrays,
    Scratch,
)


@inner
def heap_push(heap: IntArray, size: int, arrival_ns: IntArray, session: int) -> None:
    """Add a session to the heap of next arrivals, ordered by (arrival, session)."""
    place = size
    at_ns = arrival_ns[session]
    while place > 0:
        parent = (place - 1) >> 1
        above = heap[parent]
        if arrival_ns[above] < at_ns or (arrival_ns[above] == at_ns and above < session):
            break
        heap[place] = above
        place = parent
    heap[place] = session


@inner
def heap_pop(heap: IntArray, size: int, arrival_ns: IntArray) -> int:
    """Remove and return the session that arrives first."""
    first = int(heap[0])
    last = heap[size - 1]
    size -= 1
    at_ns = arrival_ns[last]
    place = 0
    while True:
        child = 2 * place + 1
        if child >= size:
            break
        right = child + 1
        if right < size and (
            arrival_ns[heap[right]] < arrival_ns[heap[child]]
            or (arrival_ns[heap[right]] == arrival_ns[heap[child]] and heap[right] < heap[child])
        ):
            child = right
        below = heap[child]
        if at_ns < arrival_ns[below] or (at_ns == arrival_ns[below] and last < below):
            break
        heap[place] = below
        place = child
    heap[place] = last
    return first


@inner
def write_owners(
    plans: PlanArrays, plan: int, scratch: Scratch, state: EngineState, session: int, request: int
) -> None:
    """Say of each block of a request's stream which request of the plan wrote it first.

    Two requests share a block exactly when the same request wrote it: blocks wholly inside the kept tokens stay.
    ``request`` is its index in all plans.
    """
    block_tokens = state.cfg[C_BLOCK_TOKENS]
    first_session = plans.first_session[plan]
    keep = plans.keep[request]
    kept_blocks = keep // block_tokens
    owner = scratch.owner
    if request == plans.first_request[first_session + session]:
        parent = plans.continues[first_session + session]
        if parent >= 0:
            for i in range(kept_blocks):
                owner[session, i] = owner[parent, i]
    shared_blocks = 0
    if keep == 0:
        shared_blocks = min(plans.shared_prefix[plan], plans.new[request]) // block_tokens
        for i in range(shared_blocks):
            owner[session, i] = -1
        shared_blocks += write_named(plans, plan, owner, block_tokens, session, request, shared_blocks)
    row = request - plans.first_request[first_session]
    stream_blocks = (keep + plans.new[request] + plans.generate[request]) // block_tokens
    for i in range(max(kept_blocks, shared_blocks), min(stream_blocks, owner.shape[1])):
        owner[session, i] = row


@inner
def write_named(
    plans: PlanArrays, plan: int, owner: IntArray, block_tokens: int, session: int, request: int, begin: int
) -> int:
    """Owners of the blocks wholly inside the named blocks that a session's first prompt begins with; how many."""
    place = plans.first_session[plan] + session
    first_name = plans.first_name[place]
    num_names = plans.first_name[place + 1] - first_name
    if num_names == 0 or request != plans.first_request[place]:
        return 0
    named_tokens = plans.named_tokens[plan]
    num_requests = plans.first_request[plans.first_session[plan + 1]] - plans.first_request[plans.first_session[plan]]
    num_blocks = min(num_names * named_tokens // block_tokens, owner.shape[1])
    for i in range(begin, num_blocks):
        last_name = ((i + 1) * block_tokens - 1) // named_tokens
        owner[session, i] = num_requests + plans.name[first_name + last_name]
    return max(0, num_blocks - begin)


@inner
def load_keys(plans: PlanArrays, first_request: int, scratch: Scratch, state: EngineState, row: int) -> None:
    """Put the chain keys of the queue's head where the engine expects them."""
    session = plans.session[first_request + row]
    num_tokens = state.rows[row, Q_PROMPT] + state.rows[row, Q_OUTPUT]
    for i in range(num_tokens // state.cfg[C_BLOCK_TOKENS]):
        state.keys[i] = (scratch.owner[session, i] + 2) * OWNER_STRIDE + i


@inner
def arrive(plans: PlanArrays, plan: int, scratch: Scratch, state: EngineState, outcome: Outcome, session: int) -> None:
    """The next request of a session joins the queue."""
    place = int(plans.first_session[plan] + session)
    request = int(plans.first_request[place] + scratch.next_request[session])
    outcome.requests[request, O_ARRIVAL] = scratch.arrival_ns[session]
    outcome.requests[request, O_ADMITTED] = -1
    outcome.requests[request, O_FIRST_TOKEN] = -1
    outcome.requests[request, O_PREEMPTIONS] = 0
    row = int(request - plans.first_request[plans.first_session[plan]])
    if state.cfg[C_HAS_BLOCKS]:
        write_owners(plans, plan, scratch, state, session, request)
    generate = int(plans.generate[request])
    prompt = int(plans.keep[request] + plans.new[request])
    submit(state, row, prompt, generate, generate, int(plans.root[place]))


@inner
def complete(
    plans: PlanArrays, plan: int, scratch: Scratch, outcome: Outcome, waiting: int, row: int, now_ns: int
) -> int:
    """A request is done: note it, and schedule what follows it; returns the new number of expected arrivals."""
    first_session = plans.first_session[plan]
    request = plans.first_request[first_session] + row
    outcome.requests[request, O_COMPLETED] = now_ns
    session = int(plans.session[request])
    if request + 1 < plans.first_request[first_session + session + 1]:
        scratch.next_request[session] += 1
        pinned_ns = plans.pinned_ns[request + 1]
        scratch.arrival_ns[session] = now_ns + plans.wait_ns[request] if pinned_ns < 0 else max(now_ns, pinned_ns)
        heap_push(scratch.heap, waiting, scratch.arrival_ns, session)
        return waiting + 1
    place = first_session + session
    for edge in range(plans.first_follower[place], plans.first_follower[place + 1]):
        follower = int(plans.follower[edge])
        scratch.num_missing[follower] -= 1
        if scratch.num_missing[follower] == 0:
            scratch.arrival_ns[follower] = now_ns + plans.start_ns[first_session + follower]
            heap_push(scratch.heap, waiting, scratch.arrival_ns, follower)
            waiting += 1
    return waiting


@inner
def begin(plans: PlanArrays, plan: int, scratch: Scratch, state: EngineState, outcome: Outcome) -> int:
    """A fresh server and the first arrivals of a plan; returns how many arrivals are expected."""
    reset(state)
    for i in range(NUM_A):
        outcome.totals[plan, i] = 0
    for i in range(outcome.histogram.shape[1]):
        outcome.histogram[plan, i] = 0
    outcome.totals[plan, A_STUCK_SESSION] = -1
    first_session = plans.first_session[plan]
    waiting = int(outcome.totals[plan, A_PREFILLS])
    for session in range(plans.first_session[plan + 1] - first_session):
        scratch.next_request[session] = 0
        scratch.num_missing[session] = plans.num_before[first_session + session]
        if scratch.num_missing[session] == 0:
            scratch.arrival_ns[session] = plans.start_ns[first_session + session]
            heap_push(scratch.heap, waiting, scratch.arrival_ns, session)
            waiting += 1
    return waiting
