"""One engine step after another: who is prefilled, who decodes, who is preempted, who is finished.

Exactly one prefill per step, never mixed with decode, and always before it. No clock: a step has no duration here.
"""

from __future__ import annotations

from harness.compiled import always_inline, jit
from harness.model.engine.events import log_free_request
from harness.model.engine.paged_state import PagedState
from harness.model.engine.pools import make_room
from harness.model.engine.rules import paper_admit, paper_release, vendor_admit, vendor_grow, vendor_release
from harness.model.engine.state import (
    CALLER_DUMMY,
    QUEUED,
    ROW_GONE,
    ROW_RUNNING,
    ROW_WAITING,
    SLOT_INACTIVE,
    STEP_DECODE,
    STEP_IDLE,
    STEP_PREFILL,
    EngineState,
)

FAR = 1 << 62

IDLE_STEP_NS = 1_000_000
"""The engine sleeps so long when nothing could be scheduled while work remains. Source: vLLM 0.22.0, engine core."""


@jit
def reset(state: EngineState) -> None:
    """Make ``state`` a freshly started server. Rows are left alone: `submit` writes them whole."""
    state.server[0] = state.server[1]
    empty_queues(state)
    server = state.server[0]
    for slot in range(server.num_slots):
        state.slots[slot].free = slot
        state.slots[slot].length = 0
        state.slots[slot].status = SLOT_INACTIVE
    for seat in range(server.limit):
        state.places[seat].free_seat = server.limit - 1 - seat
    for bucket in range(len(state.buckets)):
        state.buckets[bucket] = 0


@jit
def submit(state: EngineState, row: int, prompt: int, max_tokens: int, stop_tokens: int, session: int) -> None:
    """Queue a request at the tail. ``stop_tokens`` is its true output length; admission never reads it."""
    server, rows = state.server[0], state.rows
    rows[row].prompt = prompt
    rows[row].output = 0
    rows[row].end_output = min(stop_tokens, max_tokens, server.max_model_len - prompt)
    rows[row].room_output = FAR
    rows[row].status = ROW_WAITING
    rows[row].seat = -1
    rows[row].session = session
    queue_last(state, row, QUEUED)


@jit
def queue_last(state: EngineState | PagedState, row: int, queue: int) -> None:
    """Put a request behind everyone in a queue."""
    rows, ends = state.rows, state.queues[queue]
    rows[row].next = -1
    rows[row].prev = ends.tail
    if ends.tail >= 0:
        rows[ends.tail].next = row
    else:
        ends.head = row
    ends.tail = row
    state.server[0].num_waiting += 1


@jit
def queue_first(state: EngineState | PagedState, row: int, queue: int) -> None:
    """Put a request before everyone in a queue. One that was preempted keeps its generated tokens, not its KV."""
    rows, ends = state.rows, state.queues[queue]
    rows[row].prev = -1
    rows[row].next = ends.head
    if ends.head >= 0:
        rows[ends.head].prev = row
    else:
        ends.tail = row
    ends.head = row
    state.server[0].num_waiting += 1


@jit
def unqueue(state: EngineState | PagedState, row: int, queue: int) -> None:
    """Take a request out of its queue, wherever it stands."""
    rows, ends = state.rows, state.queues[queue]
    before, after = rows[row].prev, rows[row].next
    if before >= 0:
        rows[before].next = after
    else:
        ends.head = after
    if after >= 0:
        rows[after].prev = before
    else:
        ends.tail = before
    state.server[0].num_waiting -= 1


@jit
def empty_queues(state: EngineState | PagedState) -> None:
    """Nobody waits."""
    for queue in range(len(state.queues)):
        state.queues[queue].head = -1
        state.queues[queue].tail = -1


@jit
def admit(state: EngineState, row: int) -> bool:
    """Try to give the head of the queue its KV memory, by the configured rules."""
    if state.server[0].has_inner_blocks:
        return vendor_admit(state, row)
    if paper_admit(state, row):
        return True
    # With nobody to decode, the releases that just took effect are tried at once.
    return state.server[0].num_running == 0 and paper_admit(state, row)


@jit
def forget_last_step(state: EngineState) -> None:
    """Nothing is scheduled yet."""
    server = state.server[0]
    server.events_len = 0
    server.num_evicted = 0
    server.num_preempted = 0
    server.num_finished = 0
    server.cached_tokens = 0
    server.computed_tokens = 0
    server.hit_tokens = 0
    server.num_cached_slots = 0
    server.context_tokens = 0
    server.dummy_slot = -1
    server.num_batch = 0
    server.kind = STEP_IDLE


@jit
def schedule(state: EngineState) -> int:
    """Decide the next step and return its kind; its particulars are in ``state.server`` and the batch.

    Source: vllm-rbln 0.11.1, v1/core/optimum_scheduler.py, schedule(). ``state.prefix`` must hold the chain keys of the
    request at the head of the queue when fewer run than the active limit.
    """
    server, rows = state.server[0], state.rows
    forget_last_step(state)
    row = int(state.queues[QUEUED].head)
    if row >= 0 and server.num_running < server.active_limit and admit(state, row):
        unqueue(state, row, QUEUED)
        rows[row].status = ROW_RUNNING
        state.places[server.num_running].running = row
        server.num_running += 1
        num_tokens = rows[row].prompt + rows[row].output
        state.places[0].batch = row
        server.num_batch = 1
        server.computed_tokens = num_tokens - server.cached_tokens
        server.context_tokens = num_tokens
        server.kind = STEP_PREFILL
        return STEP_PREFILL
    if server.num_running == 0:
        return STEP_IDLE
    return schedule_decode(state)


@always_inline
def schedule_decode(state: EngineState) -> int:
    """One token for every running request, in admission order; the last admitted give way when memory runs out."""
    server, rows = state.server[0], state.rows
    has_blocks = server.has_inner_blocks
    count, context, equal_steps = 0, 0, FAR
    while count < server.num_running:
        row = state.places[count].running
        is_out = False
        while rows[row].output > rows[row].room_output and not is_out and not vendor_grow(state, row):
            server.num_running -= 1
            victim = int(state.places[server.num_running].running)
            vendor_release(state, victim, 1)
            rows[victim].status = ROW_WAITING
            queue_first(state, victim, QUEUED)
            state.places[server.num_preempted].preempted = victim
            server.num_preempted += 1
            is_out = victim == row
        if is_out:
            break
        state.places[count].batch = row
        output = rows[row].output
        context += rows[row].prompt + output
        equal_steps = min(equal_steps, rows[row].end_output - output, rows[row].room_output - output + 1)
        count += 1
    server.num_batch = count
    server.equal_steps = equal_steps
    server.context_tokens = context
    if count == 0:
        return STEP_IDLE
    if has_blocks and server.is_caching and count < server.limit:
        if not server.is_full:
            server.dummy_slot = server.num_slots
        else:
            server.caller = CALLER_DUMMY
            if make_room(state, 1):
                # Peeked, not taken: the very next admission receives this slot.
                server.dummy_slot = state.slots[server.free_slot_head].free
    server.kind = STEP_DECODE
    return STEP_DECODE


@jit
def leave_running(state: EngineState | PagedState, row: int) -> None:
    """Remove a request from the running list; the others keep their order."""
    server = state.server[0]
    place = 0
    while state.places[place].running != row:
        place += 1
    server.num_running -= 1
    for i in range(place, server.num_running):
        state.places[i].running = state.places[i + 1].running


@jit
def release(state: EngineState, row: int) -> None:
    """Free what a running request holds, by the configured rules."""
    if state.server[0].has_inner_blocks:
        vendor_release(state, row, 0)
    else:
        paper_release(state, row)


@always_inline
def finish_steps(state: EngineState, num_steps: int) -> int:
    """Append ``num_steps`` tokens to everyone in the batch, free the finished, return how many there are.

    num_steps > 1 repeats the decode step just scheduled: at most `equal_steps`. Requests aborted since schedule() are
    -1 in the batch and get nothing.
    """
    server, rows = state.server[0], state.rows
    server.events_len = 0
    finished = 0
    for i in range(server.num_batch):
        row = state.places[i].batch
        if row < 0:
            continue
        rows[row].output += num_steps
        if rows[row].output >= rows[row].end_output:
            release(state, row)
            leave_running(state, row)
            rows[row].status = ROW_GONE
            state.places[finished].finished = row
            finished += 1
    server.num_finished = finished
    server.num_batch = 0
    return finished


@jit
def abort(state: EngineState, row: int) -> None:
    """Drop a request that waits or runs. What it prefilled stays reusable, as after a normal finish."""
    server, rows = state.server[0], state.rows
    server.events_len = 0
    if rows[row].status == ROW_WAITING:
        unqueue(state, row, QUEUED)
        if state.server[0].is_caching:
            log_free_request(state, row, 0, 0, 0)
    elif rows[row].status == ROW_RUNNING:
        leave_running(state, row)
        release(state, row)
        for i in range(server.num_batch):
            if state.places[i].batch == row:
                state.places[i].batch = -1
    rows[row].status = ROW_GONE
