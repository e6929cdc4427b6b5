"""What clients do in the compiled simulator: they send, receive, and leave before their answer is complete.

Next arrivals are a heap by (instant, session). Block keys name the request that wrote a block first. A request that its
client leaves is dropped at the end of the running step, before the tokens of that step, as vLLM does
(``EngineCore.step``: pending aborts first, then ``update_from_output``). Every decision about memory is the engine's.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from harness.compiled import always_inline, by_kind, jit
from harness.compiled.records import Records
from harness.model.engine.blocks import PIN_FACTOR
from harness.model.engine.paged_state import PagedState
from harness.model.engine.paged_steps import abort_paged, keep_paged, submit_paged
from harness.model.engine.state import QUEUED, ROW_RUNNING, EngineState
from harness.model.engine.steps import FAR, abort, submit
from harness.model.sim.kernel.arrays import (
    OWNER_STRIDE,
    Arrival,
    CostArrays,
    PagedCosts,
    PlanArrays,
    Scratch,
    SimOutcome,
)

AnyState: TypeAlias = EngineState | PagedState
"""Both have ``server``, ``rows`` and ``prefix`` with the fields that are read here."""


class SlotRun(NamedTuple):
    """Every table of plans that run on a server with slots, one plan after another."""

    plans: PlanArrays
    state: EngineState
    scratch: Scratch
    outcome: SimOutcome
    cost: CostArrays


class PagedRun(NamedTuple):
    """As ``SlotRun``, on a server with paged KV memory."""

    plans: PlanArrays
    state: PagedState
    scratch: Scratch
    outcome: SimOutcome
    cost: PagedCosts


AnyRun: TypeAlias = SlotRun | PagedRun


@jit
def watch(run: AnyRun, session: int, request: int) -> None:
    """Remember a request that has arrived if its client may leave it. ``request`` is its index in all plans."""
    planned = run.plans.requests[request]
    if planned.abort_ns == 0 and planned.abort_tokens == 0:
        return
    place = run.scratch.num_watched[0]
    run.scratch.num_watched[0] = place + 1
    run.scratch.sessions[place].watched = session
    run.scratch.sessions[session].abort_at_ns = FAR
    if planned.abort_ns > 0:
        run.scratch.sessions[session].abort_at_ns = run.scratch.sessions[session].arrival_ns + planned.abort_ns


@jit
def unwatch(run: AnyRun, session: int, request: int) -> None:
    """Forget a request that has ended."""
    planned = run.plans.requests[request]
    if planned.abort_ns == 0 and planned.abort_tokens == 0:
        return
    place = 0
    while run.scratch.sessions[place].watched != session:
        place += 1
    last = run.scratch.num_watched[0] - 1
    run.scratch.num_watched[0] = last
    run.scratch.sessions[place].watched = run.scratch.sessions[last].watched


@jit
def next_to_leave(scratch: Scratch) -> int:
    """The session whose client leaves first, by (instant, session); -1 when no client leaves at a planned instant."""
    earliest = -1
    for place in range(scratch.num_watched[0]):
        session = int(scratch.sessions[place].watched)
        at_ns = scratch.sessions[session].abort_at_ns
        if at_ns == FAR:
            continue
        first_ns = FAR if earliest < 0 else scratch.sessions[earliest].abort_at_ns
        if at_ns < first_ns or (at_ns == first_ns and session < earliest):
            earliest = session
    return earliest


@jit
def row_of(run: AnyRun, plan: int, session: int) -> int:
    """The engine's row of a session's current request."""
    planned = run.plans.sessions[run.plans.plans[plan].first_session + session]
    return int(planned.first_request - run.plans.plans[plan].first_request + run.scratch.sessions[session].next_request)


@jit
def has_enough(run: AnyRun, plan: int, replica: int) -> int:
    """The first session of a server whose client has received the tokens after which it leaves; -1: none."""
    first = -1
    for place in range(run.scratch.num_watched[0]):
        session = int(run.scratch.sessions[place].watched)
        if run.scratch.sessions[session].replica != replica or 0 <= first < session:
            continue
        row = row_of(run, plan, session)
        if 0 < run.plans.requests[run.plans.plans[plan].first_request + row].abort_tokens <= run.state.rows[row].output:
            first = session
    return first


@jit
def next_leaves(run: AnyRun, plan: int, replica: int) -> tuple[int, int]:
    """When the first client leaves a request of a server, and how many decode steps until one has enough tokens."""
    abort_ns, most = FAR, FAR
    for place in range(run.scratch.num_watched[0]):
        session = int(run.scratch.sessions[place].watched)
        if run.scratch.sessions[session].replica != replica:
            continue
        abort_ns = min(abort_ns, int(run.scratch.sessions[session].abort_at_ns))
        row = row_of(run, plan, session)
        tokens = run.plans.requests[run.plans.plans[plan].first_request + row].abort_tokens
        if tokens > 0 and run.state.rows[row].status == ROW_RUNNING:
            most = min(most, max(1, int(tokens - run.state.rows[row].output)))
    return abort_ns, most


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
def load_keys(plans: PlanArrays, plan: int, state: AnyState, row: int, num_tokens: int, ahead: int) -> None:
    """Put the chain keys of a request's first tokens where the engine expects those of the queue's head.

    ahead: so many tokens after its block does a key name too.
    A key names the request that wrote the block first. Two requests share a block exactly when the same request wrote
    it, and the blocks wholly inside the kept tokens stay. So each stretch of blocks gets its name by going back over
    the requests whose text was kept.
    """
    own_plan, block_tokens = plans.plans[plan], state.server[0].block_tokens
    request = int(own_plan.first_request + row)
    end = (num_tokens - ahead) // block_tokens
    while True:
        writer, session = (
            request - own_plan.first_request,
            plans.sessions[own_plan.first_session + plans.requests[request].session],
        )
        keep = plans.requests[request].keep
        begin = (
            (keep - ahead) // block_tokens
            if keep > 0
            else load_shared_keys(plans, plan, state, request, int(end), ahead)
        )
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
def load_head_keys(plans: PlanArrays, plan: int, state: EngineState, row_with_keys: int) -> int:
    """Load the keys of the queue's head if it may be admitted; returns the row whose keys are loaded."""
    server = state.server[0]
    row = int(state.queues[QUEUED].head)
    if row < 0 or row == row_with_keys or server.num_running >= server.active_limit or not server.has_inner_blocks:
        return row_with_keys
    load_keys(plans, plan, state, row, int(state.rows[row].prompt + state.rows[row].output), 0)
    return row


@jit
def load_shared_keys(plans: PlanArrays, plan: int, state: AnyState, request: int, end: int, ahead: int) -> int:
    """Keys of the blocks that a fresh stream shares (the common prefix, then named blocks); returns how many."""
    own_plan, block_tokens = plans.plans[plan], state.server[0].block_tokens
    num_shared = max(min(own_plan.shared_prefix, plans.requests[request].new) - ahead, 0) // block_tokens
    for i in range(min(num_shared, end)):
        state.prefix[i].key = OWNER_STRIDE + i
    own = plans.sessions[own_plan.first_session + plans.requests[request].session]
    if own.num_names == 0 or request != own.first_request:
        return int(num_shared)
    num_named = (own.num_names * own_plan.named_tokens - ahead) // block_tokens
    for i in range(num_shared, min(num_named, end)):
        last_name = ((i + 1) * block_tokens + ahead - 1) // own_plan.named_tokens
        chain = plans.names[own.first_name + last_name]
        state.prefix[i].key = (own_plan.num_requests + chain + 2) * OWNER_STRIDE + i
    return int(max(num_shared, num_named))


@always_inline
def note_arrival(run: AnyRun, plan: int, session: int) -> int:
    """The next request of a session arrives: nothing is known of its end. Returns its row."""
    place = int(run.plans.plans[plan].first_session + session)
    request = int(run.plans.sessions[place].first_request + run.scratch.sessions[session].next_request)
    run.outcome.requests[request] = run.scratch.no_result[0]
    run.outcome.requests[request].arrival_ns = run.scratch.sessions[session].arrival_ns
    watch(run, session, request)
    return int(request - run.plans.plans[plan].first_request)


@always_inline
def submit_slots(run: SlotRun, plan: int, session: int, row: int) -> None:
    """The request of this row joins the queue of a server with slots."""
    planned = run.plans.requests[run.plans.plans[plan].first_request + row]
    generate, prompt = int(planned.generate), int(planned.keep + planned.new)
    root = int(run.plans.sessions[run.plans.plans[plan].first_session + session].root)
    submit(run.state, row, prompt, generate, generate, root)


@always_inline
def submit_blocks(run: PagedRun, plan: int, session: int, row: int) -> None:
    """The request of this row joins the queue of a server with paged KV memory."""
    planned = run.plans.requests[run.plans.plans[plan].first_request + row]
    submit_paged(run.state, row, int(planned.keep + planned.new), int(planned.generate), int(planned.generate))
    if len(run.scratch.returns) > 0:
        wait_ns, own = int(planned.wait_ns), run.plans.sessions[run.plans.plans[plan].first_session + session]
        if run.scratch.sessions[session].next_request + 1 == own.num_requests:
            return_ns = int(run.scratch.returns[session].return_ns)
            wait_ns = return_ns if return_ns < FAR else 0
        keep_paged(run.state, row, PIN_FACTOR * wait_ns)


submit_row = by_kind({SlotRun: submit_slots, PagedRun: submit_blocks})
abort_row = by_kind({EngineState: abort, PagedState: abort_paged})


@always_inline
def arrive(run: AnyRun, plan: int, session: int) -> None:
    """The next request of a session joins the queue."""
    row = note_arrival(run, plan, session)
    submit_row(run, plan, session, row)


@always_inline
def complete(run: AnyRun, plan: int, waiting: int, row: int, now_ns: int) -> int:
    """Record that a request ended, and schedule what follows it; returns the new number of expected arrivals."""
    first_session = run.plans.plans[plan].first_session
    request = run.plans.sessions[first_session].first_request + row
    run.outcome.requests[request].completed_ns = now_ns
    session = int(run.plans.requests[request].session)
    unwatch(run, session, request)
    own = run.plans.sessions[first_session + session]
    if request + 1 < own.first_request + own.num_requests:
        run.scratch.sessions[session].next_request += 1
        pinned_ns = run.plans.requests[request + 1].pinned_ns
        run.scratch.sessions[session].arrival_ns = (
            now_ns + run.plans.requests[request].wait_ns if pinned_ns < 0 else max(now_ns, pinned_ns)
        )
        heap_push(run.scratch, waiting, session)
        return waiting + 1
    for edge in range(own.first_follower, own.first_follower + own.num_followers):
        follower = run.plans.followers[edge]
        run.scratch.sessions[follower].num_missing -= 1
        if run.scratch.sessions[follower].num_missing == 0:
            run.scratch.sessions[follower].arrival_ns = now_ns + run.plans.sessions[first_session + follower].start_ns
            heap_push(run.scratch, waiting, follower)
            waiting += 1
    return waiting


@jit
def begin(run: AnyRun, plan: int, limit: int) -> int:
    """The first arrivals of a plan, and nothing counted; returns how many arrivals are expected."""
    run.outcome.totals[plan] = run.scratch.no_totals[0]
    for i in range(limit + 1):
        run.outcome.histogram[plan, i] = 0
    run.scratch.num_watched[0] = 0
    first_session = run.plans.plans[plan].first_session
    waiting = 0
    for session in range(run.plans.plans[plan].num_sessions):
        run.scratch.sessions[session].next_request = 0
        run.scratch.sessions[session].replica = 0
        run.scratch.sessions[session].num_missing = run.plans.sessions[first_session + session].num_before
        if run.scratch.sessions[session].num_missing == 0:
            run.scratch.sessions[session].arrival_ns = run.plans.sessions[first_session + session].start_ns
            heap_push(run.scratch, waiting, session)
            waiting += 1
    return waiting


@jit
def next_abort_ns(scratch: Scratch) -> int:
    """The first planned instant at which a client leaves; FAR when there is none."""
    session = next_to_leave(scratch)
    return FAR if session < 0 else int(scratch.sessions[session].abort_at_ns)


@jit
def leave(run: AnyRun, plan: int, expected: int, session: int, at_ns: int) -> int:
    """The client leaves the current request of a session; returns the new number of expected arrivals."""
    row = row_of(run, plan, session)
    result = run.outcome.requests[run.plans.plans[plan].first_request + row]
    if result.first_token_ns >= at_ns and run.plans.requests[run.plans.plans[plan].first_request + row].abort_ns > 0:
        result.first_token_ns = -1  # its prefill ends without a token for it; slots note the end of a prefill before
    result.aborted_tokens = run.state.rows[row].output
    abort_row(run.state, row)
    return complete(run, plan, expected, row, at_ns)


@jit
def leaves_first(scratch: Scratch, expected: int, end_ns: int) -> int:
    """What clients do next while a step runs that ends at ``end_ns``: the session whose client leaves, -1: the first
    of the heap arrives, -2: neither.

    At the same instant clients leave before others arrive.
    """
    arrival_ns = FAR
    if expected > 0:
        arrival_ns = int(scratch.heap[0].at_ns)
    session = next_to_leave(scratch)
    abort_ns = FAR if session < 0 else int(scratch.sessions[session].abort_at_ns)
    if abort_ns <= min(arrival_ns, end_ns):
        return session
    return -1 if arrival_ns < end_ns else -2


@jit
def leave_by(run: AnyRun, plan: int, expected: int, end_ns: int) -> int:
    """Process the running step, which ends at ``end_ns``: arrivals before its end and clients that leave by then."""
    while True:
        session = leaves_first(run.scratch, expected, end_ns)
        if session >= 0:
            at_ns = int(run.scratch.sessions[session].abort_at_ns)
            expected = leave(run, plan, expected, session, at_ns)
        elif session == -1:
            session = heap_pop(run.scratch.heap, expected)
            expected -= 1
            arrive(run, plan, session)
        else:
            return expected


@jit
def leave_with_enough(run: AnyRun, plan: int, expected: int, now_ns: int) -> int:
    """Clients leave that have received the tokens after which they leave, in the order of their sessions."""
    while True:
        session = has_enough(run, plan, 0)
        if session < 0:
            return expected
        expected = leave(run, plan, expected, session, now_ns)
