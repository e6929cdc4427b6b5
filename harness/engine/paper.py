"""The paper's own rules of KV slots, so that its printed predictions can be reproduced. Not what the stack does.

One slot per admission, first-in first-out; a completed request's slot cannot be evicted before the next admission has
chosen its victim; no inner blocks, no dummy block.
"""

from __future__ import annotations

from harness.compiled import jit
from harness.engine.pools import evict_slot, note_use, oldest_inactive, take_slot
from harness.engine.state import (
    CALLER_REQUEST,
    SLOT_INACTIVE,
    SLOT_PENDING,
    EngineState,
)


@jit
def settle_releases(state: EngineState) -> None:
    """Completed requests' slots become evictable."""
    for place in range(state.server[0].pending_releases):
        state.slots[state.slots[place].pending].status = SLOT_INACTIVE
    state.server[0].pending_releases = 0


@jit
def paper_admit(state: EngineState, row: int) -> bool:
    """Choose a victim if no slot is free, settle releases, look the session up, take a slot; False: no slot to take."""
    server, slots = state.server[0], state.slots
    needed = 1
    if server.sets_slot_aside and 0 < server.num_running < server.limit:
        needed = 2
    while server.free_slots < needed:
        victim = oldest_inactive(state)
        if victim < 0:
            break
        server.caller = CALLER_REQUEST
        evict_slot(state, victim)
    has_room = server.free_slots >= needed
    settle_releases(state)
    if not has_room:
        return False
    prompt = state.rows[row].prompt
    longest = 0
    source = -1
    walk = int(server.fifo_head)
    while walk >= 0:
        if slots[walk].session == state.rows[row].session and slots[walk].prompt > longest:
            longest = slots[walk].prompt
            source = walk
        walk = int(slots[walk].next)
    if source >= 0:
        note_use(state, source)
    block_tokens = server.block_tokens
    server.cached_tokens = min(longest, prompt - 1) // block_tokens * block_tokens
    server.hit_tokens = server.cached_tokens
    server.num_cached_slots = 0
    slot = take_slot(state, row)
    slots[slot].session = state.rows[row].session
    slots[slot].prompt = prompt
    server.free_seats -= 1
    seat = state.places[server.free_seats].free_seat
    state.rows[row].seat = seat
    state.places[seat].num_blocks = 0
    state.places[seat].num_slots = 1
    state.seat_slots[seat, 0] = slot
    return True


@jit
def paper_release(state: EngineState, row: int) -> None:
    """A request is over; its slot waits for the next admission before it can be evicted."""
    seat = state.rows[row].seat
    slot = int(state.seat_slots[seat, 0])
    state.slots[slot].status = SLOT_PENDING
    note_use(state, slot)
    state.slots[state.server[0].pending_releases].pending = slot
    state.server[0].pending_releases += 1
    state.places[state.server[0].free_seats].free_seat = seat
    state.server[0].free_seats += 1
    state.rows[row].seat = -1
