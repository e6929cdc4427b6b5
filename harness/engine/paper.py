"""The paper's own rules of KV slots, so that its printed predictions can be reproduced. Not what the stack does.

One slot per admission, first-in first-out; a completed request's slot cannot be evicted before the next admission has
chosen its victim; no inner blocks, no dummy block. Next: ``steps`` calls these in place of ``vendor``.
"""

from __future__ import annotations

from harness.compiled import inner
from harness.engine.pools import evict_slot, note_use, oldest_inactive, take_slot
from harness.engine.state import (
    C_BLOCK_TOKENS,
    C_LIMIT,
    C_SETS_SLOT_ASIDE,
    CALLER_REQUEST,
    Q_COMPUTED,
    Q_PROMPT,
    Q_SEAT,
    Q_SESSION,
    R_CACHED,
    R_CALLER,
    R_FIFO_HEAD,
    R_FREE_SEATS,
    R_FREE_SLOTS,
    R_HIT_TOKENS,
    R_NUM_CACHED_SLOTS,
    R_NUM_RUNNING,
    R_PENDING_RELEASES,
    S_ACTIVE,
    S_NEXT,
    S_PROMPT,
    S_SESSION,
    SLOT_INACTIVE,
    SLOT_PENDING,
    EngineState,
)


@inner
def settle_releases(state: EngineState) -> None:
    """Completed requests' slots become evictable."""
    if state.reg[R_PENDING_RELEASES] == 0:
        return
    walk = state.reg[R_FIFO_HEAD]
    while walk >= 0:
        if state.slots[walk, S_ACTIVE] == SLOT_PENDING:
            state.slots[walk, S_ACTIVE] = SLOT_INACTIVE
        walk = state.slots[walk, S_NEXT]
    state.reg[R_PENDING_RELEASES] = 0


@inner
def paper_admit(state: EngineState, row: int) -> bool:
    """Choose a victim if no slot is free, settle releases, look the session up, take a slot; False: no slot to take."""
    cfg, reg, slots = state.cfg, state.reg, state.slots
    needed = 1
    if cfg[C_SETS_SLOT_ASIDE] and 0 < reg[R_NUM_RUNNING] < cfg[C_LIMIT]:
        needed = 2
    while reg[R_FREE_SLOTS] < needed:
        victim = oldest_inactive(state)
        if victim < 0:
            break
        reg[R_CALLER] = CALLER_REQUEST
        evict_slot(state, victim)
    has_room = reg[R_FREE_SLOTS] >= needed
    settle_releases(state)
    if not has_room:
        return False
    prompt = state.rows[row, Q_PROMPT]
    longest = 0
    source = -1
    walk = int(reg[R_FIFO_HEAD])
    while walk >= 0:
        if slots[walk, S_SESSION] == state.rows[row, Q_SESSION] and slots[walk, S_PROMPT] > longest:
            longest = slots[walk, S_PROMPT]
            source = walk
        walk = int(slots[walk, S_NEXT])
    if source >= 0:
        note_use(state, source)
    block_tokens = cfg[C_BLOCK_TOKENS]
    reg[R_CACHED] = min(longest, prompt - 1) // block_tokens * block_tokens
    reg[R_HIT_TOKENS] = reg[R_CACHED]
    reg[R_NUM_CACHED_SLOTS] = 0
    slot = take_slot(state, row)
    slots[slot, S_SESSION] = state.rows[row, Q_SESSION]
    slots[slot, S_PROMPT] = prompt
    reg[R_FREE_SEATS] -= 1
    seat = state.free_seats[reg[R_FREE_SEATS]]
    state.rows[row, Q_SEAT] = seat
    state.rows[row, Q_COMPUTED] = 0
    state.seat_fill[seat, 0] = 0
    state.seat_fill[seat, 1] = 1
    state.seat_slots[seat, 0] = slot
    return True


@inner
def paper_release(state: EngineState, row: int) -> None:
    """A request is over; its slot waits for the next admission before it can be evicted."""
    seat = state.rows[row, Q_SEAT]
    state.slots[state.seat_slots[seat, 0], S_ACTIVE] = SLOT_PENDING
    note_use(state, int(state.seat_slots[seat, 0]))
    state.reg[R_PENDING_RELEASES] += 1
    state.free_seats[state.reg[R_FREE_SEATS]] = seat
    state.reg[R_FREE_SEATS] += 1
    state.rows[row, Q_SEAT] = -1
