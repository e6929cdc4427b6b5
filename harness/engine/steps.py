"""One engine step after another: who is prefilled, who decodes, who is preempted, who is finished.

Exactly one prefill per step, never mixed with decode, and always before it. No clock: a step has no duration here.
Next: ``scheduler.Scheduler`` and ``harness.sim.kernel.events`` drive these functions, and give steps their times.
"""

from __future__ import annotations

from harness.compiled import compiled, inner
from harness.engine.events import log_free_request
from harness.engine.paper import paper_admit, paper_release
from harness.engine.pools import make_room
from harness.engine.state import (
    C_ACTIVE_LIMIT,
    C_BLOCK_TOKENS,
    C_CACHING,
    C_HAS_BLOCKS,
    C_IS_FULL,
    C_LIMIT,
    C_MAX_MODEL_LEN,
    C_NUM_SLOTS,
    CALLER_DUMMY,
    Q_COMPUTED,
    Q_MAX_TOKENS,
    Q_NEXT,
    Q_OUTPUT,
    Q_PREV,
    Q_PROMPT,
    Q_SEAT,
    Q_SESSION,
    Q_STATUS,
    Q_STOP_TOKENS,
    R_BATCH,
    R_CACHED,
    R_CALLER,
    R_COMPUTED,
    R_CONTEXT,
    R_DUMMY,
    R_EVENTS_LEN,
    R_FREE_SLOT_HEAD,
    R_HIT_TOKENS,
    R_KIND,
    R_NUM_CACHED_SLOTS,
    R_NUM_EVICTED,
    R_NUM_FINISHED,
    R_NUM_PREEMPTED,
    R_NUM_RUNNING,
    R_NUM_WAITING,
    R_WAIT_HEAD,
    R_WAIT_TAIL,
    ROW_GONE,
    ROW_RUNNING,
    ROW_WAITING,
    STEP_DECODE,
    STEP_IDLE,
    STEP_PREFILL,
    EngineState,
)
from harness.engine.vendor import vendor_admit, vendor_grow, vendor_release

FAR = 1 << 62

IDLE_STEP_NS = 1_000_000
"""The engine sleeps so long when nothing could be scheduled while work remains. Source: vLLM 0.22.0, engine core."""


@compiled
def submit(state: EngineState, row: int, prompt: int, max_tokens: int, stop_tokens: int, session: int) -> None:
    """Queue a request at the tail. ``stop_tokens`` is its true output length; admission never reads it."""
    reg, rows = state.reg, state.rows
    rows[row, Q_PROMPT] = prompt
    rows[row, Q_MAX_TOKENS] = max_tokens
    rows[row, Q_STOP_TOKENS] = stop_tokens
    rows[row, Q_OUTPUT] = 0
    rows[row, Q_COMPUTED] = 0
    rows[row, Q_STATUS] = ROW_WAITING
    rows[row, Q_SEAT] = -1
    rows[row, Q_SESSION] = session
    rows[row, Q_NEXT] = -1
    rows[row, Q_PREV] = reg[R_WAIT_TAIL]
    if reg[R_WAIT_TAIL] >= 0:
        rows[reg[R_WAIT_TAIL], Q_NEXT] = row
    else:
        reg[R_WAIT_HEAD] = row
    reg[R_WAIT_TAIL] = row
    reg[R_NUM_WAITING] += 1


@inner
def unqueue(state: EngineState, row: int) -> None:
    """Take a request out of the waiting queue, wherever it stands."""
    reg, rows = state.reg, state.rows
    before, after = rows[row, Q_PREV], rows[row, Q_NEXT]
    if before >= 0:
        rows[before, Q_NEXT] = after
    else:
        reg[R_WAIT_HEAD] = after
    if after >= 0:
        rows[after, Q_PREV] = before
    else:
        reg[R_WAIT_TAIL] = before
    reg[R_NUM_WAITING] -= 1


@inner
def requeue_first(state: EngineState, row: int) -> None:
    """Put a preempted request before everyone who waits; it keeps its generated tokens, not its KV."""
    reg, rows = state.reg, state.rows
    rows[row, Q_STATUS] = ROW_WAITING
    rows[row, Q_COMPUTED] = 0
    rows[row, Q_PREV] = -1
    rows[row, Q_NEXT] = reg[R_WAIT_HEAD]
    if reg[R_WAIT_HEAD] >= 0:
        rows[reg[R_WAIT_HEAD], Q_PREV] = row
    else:
        reg[R_WAIT_TAIL] = row
    reg[R_WAIT_HEAD] = row
    reg[R_NUM_WAITING] += 1


@inner
def admit(state: EngineState, row: int) -> bool:
    """Try to give the head of the queue its KV memory, by the configured rules."""
    if state.cfg[C_HAS_BLOCKS]:
        return vendor_admit(state, row)
    if paper_admit(state, row):
        return True
    # With nobody to decode, the releases that just took effect are tried at once.
    return state.reg[R_NUM_RUNNING] == 0 and paper_admit(state, row)


@inner
def forget_last_step(state: EngineState) -> None:
    """Nothing is scheduled yet."""
    reg = state.reg
    reg[R_EVENTS_LEN] = 0
    reg[R_NUM_EVICTED] = 0
    reg[R_NUM_PREEMPTED] = 0
    reg[R_NUM_FINISHED] = 0
    reg[R_CACHED] = 0
    reg[R_COMPUTED] = 0
    reg[R_HIT_TOKENS] = 0
    reg[R_NUM_CACHED_SLOTS] = 0
    reg[R_CONTEXT] = 0
    reg[R_DUMMY] = -1
    reg[R_BATCH] = 0
    reg[R_KIND] = STEP_IDLE


@compiled
def schedule_decode_only(state: EngineState) -> int:
    """A decode step of everyone who runs, with no admission before it: between the parts of a chunked prefill."""
    forget_last_step(state)
    return schedule_decode(state)


@compiled
def schedule(state: EngineState) -> int:
    """Decide the next step and return its kind; its particulars are in ``state.reg`` and ``state.batch``.

    Source: vllm-rbln 0.11.1, v1/core/optimum_scheduler.py, schedule(). ``state.keys`` must hold the chain keys of the
    request at the head of the queue when fewer run than the active limit.
    """
    cfg, reg, rows = state.cfg, state.reg, state.rows
    forget_last_step(state)
    row = reg[R_WAIT_HEAD]
    if row >= 0 and reg[R_NUM_RUNNING] < cfg[C_ACTIVE_LIMIT] and admit(state, row):
        unqueue(state, row)
        rows[row, Q_STATUS] = ROW_RUNNING
        state.running[reg[R_NUM_RUNNING]] = row
        reg[R_NUM_RUNNING] += 1
        num_tokens = rows[row, Q_PROMPT] + rows[row, Q_OUTPUT]
        rows[row, Q_COMPUTED] = num_tokens
        state.batch[0] = row
        reg[R_BATCH] = 1
        reg[R_COMPUTED] = num_tokens - reg[R_CACHED]
        reg[R_CONTEXT] = num_tokens
        reg[R_KIND] = STEP_PREFILL
        return STEP_PREFILL
    if reg[R_NUM_RUNNING] == 0:
        return STEP_IDLE
    return schedule_decode(state)


@inner
def schedule_decode(state: EngineState) -> int:
    """One token for every running request, in admission order; the last admitted give way when memory runs out."""
    cfg, reg, rows = state.cfg, state.reg, state.rows
    has_blocks = cfg[C_HAS_BLOCKS]
    count = 0
    context = 0
    while count < reg[R_NUM_RUNNING]:
        row = state.running[count]
        is_out = False
        while has_blocks and not is_out and not vendor_grow(state, row):
            reg[R_NUM_RUNNING] -= 1
            victim = int(state.running[reg[R_NUM_RUNNING]])
            vendor_release(state, victim, 1)
            requeue_first(state, victim)
            state.preempted[reg[R_NUM_PREEMPTED]] = victim
            reg[R_NUM_PREEMPTED] += 1
            is_out = victim == row
        if is_out:
            break
        state.batch[count] = row
        context += rows[row, Q_PROMPT] + rows[row, Q_OUTPUT]
        rows[row, Q_COMPUTED] += 1
        count += 1
    reg[R_BATCH] = count
    reg[R_CONTEXT] = context
    if count == 0:
        return STEP_IDLE
    if has_blocks and cfg[C_CACHING] and count < cfg[C_LIMIT]:
        if not cfg[C_IS_FULL]:
            reg[R_DUMMY] = cfg[C_NUM_SLOTS]
        else:
            reg[R_CALLER] = CALLER_DUMMY
            if make_room(state, 1):
                # Peeked, not taken: the very next admission receives this slot.
                reg[R_DUMMY] = state.free_slots[reg[R_FREE_SLOT_HEAD]]
    reg[R_KIND] = STEP_DECODE
    return STEP_DECODE


@compiled
def equal_steps(state: EngineState) -> int:
    """How many decode steps exactly like the one just scheduled can follow each other, this one included.

    Until the first finish, or until a request needs another inner block. What else could change the next decision
    (an arrival, a queue whose head may be admitted) is for the caller to judge.
    """
    cfg, reg, rows = state.cfg, state.reg, state.rows
    has_blocks = cfg[C_HAS_BLOCKS]
    most = FAR
    for i in range(reg[R_BATCH]):
        row = state.batch[i]
        output = rows[row, Q_OUTPUT]
        num_tokens = rows[row, Q_PROMPT] + output
        most = min(most, rows[row, Q_STOP_TOKENS] - output, rows[row, Q_MAX_TOKENS] - output)
        most = min(most, cfg[C_MAX_MODEL_LEN] - num_tokens)
        if has_blocks:
            most = min(most, state.seat_fill[rows[row, Q_SEAT], 0] * cfg[C_BLOCK_TOKENS] - num_tokens + 1)
    return max(most, 1)


@inner
def leave_running(state: EngineState, row: int) -> None:
    """Remove a request from the running list; the others keep their order."""
    reg = state.reg
    place = 0
    while state.running[place] != row:
        place += 1
    reg[R_NUM_RUNNING] -= 1
    for i in range(place, reg[R_NUM_RUNNING]):
        state.running[i] = state.running[i + 1]


@inner
def release(state: EngineState, row: int) -> None:
    """Free what a running request holds, by the configured rules."""
    if state.cfg[C_HAS_BLOCKS]:
        vendor_release(state, row, 0)
    else:
        paper_release(state, row)


@compiled
def finish_steps(state: EngineState, num_steps: int) -> int:
    """Append ``num_steps`` tokens to everyone in the batch, free the finished, return how many there are.

    num_steps > 1 repeats the decode step just scheduled: at most `equal_steps`. Requests aborted since schedule() are
    -1 in the batch and get nothing.
    """
    cfg, reg, rows = state.cfg, state.reg, state.rows
    reg[R_EVENTS_LEN] = 0
    finished = 0
    for i in range(reg[R_BATCH]):
        row = state.batch[i]
        if row < 0:
            continue
        rows[row, Q_OUTPUT] += num_steps
        rows[row, Q_COMPUTED] += num_steps - 1
        output = rows[row, Q_OUTPUT]
        if (
            output >= rows[row, Q_STOP_TOKENS]
            or output >= rows[row, Q_MAX_TOKENS]
            or rows[row, Q_PROMPT] + output >= cfg[C_MAX_MODEL_LEN]
        ):
            release(state, row)
            leave_running(state, row)
            rows[row, Q_STATUS] = ROW_GONE
            state.finished[finished] = row
            finished += 1
    reg[R_NUM_FINISHED] = finished
    reg[R_BATCH] = 0
    return finished


@compiled
def abort(state: EngineState, row: int) -> None:
    """Drop a request that waits or runs. What it prefilled stays reusable, as after a normal finish."""
    reg, rows = state.reg, state.rows
    reg[R_EVENTS_LEN] = 0
    if rows[row, Q_STATUS] == ROW_WAITING:
        unqueue(state, row)
        if state.cfg[C_CACHING]:
            log_free_request(state, row, 0, 0, 0)
    elif rows[row, Q_STATUS] == ROW_RUNNING:
        leave_running(state, row)
        release(state, row)
        for i in range(reg[R_BATCH]):
            if state.batch[i] == row:
                state.batch[i] = -1
    rows[row, Q_STATUS] = ROW_GONE
