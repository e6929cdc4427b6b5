"""The engine's log of what happened to KV memory, as variable-length records in one int64 array.

Record: kind, row, caller, number of slots, number of block ids, x, y, then the slots, then the block ids. Nothing is
written unless the state was made with events. Next: ``scheduler`` turns records into KvEvent values.
"""

from __future__ import annotations

from harness.compiled import inner
from harness.engine.state import (
    C_EVENT_LEVEL,
    CALLER_NONE,
    CALLER_PREEMPT,
    CALLER_REQUEST,
    E_CALLER,
    E_NUM_BLOCKS,
    E_NUM_SLOTS,
    E_ROW,
    E_X,
    E_Y,
    EV_ALLOC,
    EV_CACHE_HIT,
    EV_CACHE_PARTIAL,
    EV_EVICTION,
    EV_FREE_REQUEST,
    EV_MAPPING_REMOVE,
    EV_MAPPING_SEARCH,
    EV_PREEMPT,
    EVENT_HEADER,
    EVENTS_OFF,
    R_CALLER,
    R_EVENTS_LEN,
    R_FIFO_HEAD,
    R_FREE_SLOTS,
    R_HIT_TOKENS,
    R_NUM_CACHED_SLOTS,
    S_ACTIVE,
    S_LEN,
    S_NEXT,
    SLOT_ACTIVE,
    EngineState,
)


@inner
def _begin(state: EngineState, row: int, slots: int, blocks: int) -> int:
    """Begin a record whose kind, caller, x and y are still 0; return its place."""
    at = int(state.reg[R_EVENTS_LEN])
    for i in range(EVENT_HEADER):
        state.events[at + i] = 0
    state.events[at + E_ROW] = row
    state.events[at + E_NUM_SLOTS] = slots
    state.events[at + E_NUM_BLOCKS] = blocks
    state.reg[R_EVENTS_LEN] = at + EVENT_HEADER + slots + blocks
    return at


@inner
def log_alloc(state: EngineState, row: int, seat: int, first_slot: int, slots: int, first_block: int, n: int) -> None:
    """``slots`` slots and ``n`` inner blocks were given, from these places of the seat on."""
    if state.cfg[C_EVENT_LEVEL] == EVENTS_OFF:
        return
    at = _begin(state, row, slots, n)
    state.events[at] = EV_ALLOC
    state.events[at + E_CALLER] = CALLER_REQUEST
    at += EVENT_HEADER
    for i in range(slots):
        state.events[at + i] = state.seat_slots[seat, first_slot + i]
    for i in range(n):
        state.events[at + slots + i] = state.seat_blocks[seat, first_block + i]


@inner
def log_mapping_remove(state: EngineState, slot: int) -> None:
    """The slot's list of inner blocks is about to be dropped."""
    if state.cfg[C_EVENT_LEVEL] == EVENTS_OFF:
        return
    length = state.slots[slot, S_LEN]
    at = _begin(state, -1, 1, length)
    state.events[at] = EV_MAPPING_REMOVE
    state.events[at + E_CALLER] = state.reg[R_CALLER]
    at += EVENT_HEADER
    state.events[at] = slot
    for i in range(length):
        state.events[at + 1 + i] = state.slot_blocks[slot, i]


@inner
def log_eviction(state: EngineState, slot: int, num_blocks: int) -> None:
    """The slot is free; after it come the inactive slots that remain, oldest allocation first. x: free slots."""
    if state.cfg[C_EVENT_LEVEL] == EVENTS_OFF:
        return
    inactive = 0
    walk = state.reg[R_FIFO_HEAD]
    while walk >= 0:
        if state.slots[walk, S_ACTIVE] != SLOT_ACTIVE:
            inactive += 1
        walk = state.slots[walk, S_NEXT]
    at = _begin(state, -1, 1 + inactive, 0)
    state.events[at] = EV_EVICTION
    state.events[at + E_CALLER] = state.reg[R_CALLER]
    state.events[at + E_X] = state.reg[R_FREE_SLOTS]
    state.events[at + E_Y] = num_blocks
    at += EVENT_HEADER
    state.events[at] = slot
    walk = state.reg[R_FIFO_HEAD]
    while walk >= 0:
        if state.slots[walk, S_ACTIVE] != SLOT_ACTIVE:
            at += 1
            state.events[at] = walk
        walk = state.slots[walk, S_NEXT]


@inner
def log_mapping_search(state: EngineState, row: int, first_hit: int, length: int, slot: int) -> None:
    """A group of hit blocks was looked up in the inner-to-outer index; ``slot`` is -1 when it had no entry."""
    if state.cfg[C_EVENT_LEVEL] == EVENTS_OFF:
        return
    at = _begin(state, row, 1, length)
    state.events[at] = EV_MAPPING_SEARCH
    at += EVENT_HEADER
    state.events[at] = slot
    for i in range(length):
        state.events[at + 1 + i] = state.hits[first_hit + i]


@inner
def log_lookup(state: EngineState, row: int, cached_tokens: int, block_tokens: int) -> None:
    """What the look-up gave: CACHE_PARTIAL when it fell short of the hash hits, CACHE_HIT when it gave anything.

    A CACHE_HIT carries, per slot, how many leading hit blocks its length stands for, then the hit blocks.
    """
    if state.cfg[C_EVENT_LEVEL] == EVENTS_OFF:
        return
    hit_tokens = state.reg[R_HIT_TOKENS]
    if cached_tokens < hit_tokens:
        at = _begin(state, row, 0, 0)
        state.events[at] = EV_CACHE_PARTIAL
        state.events[at + E_X] = cached_tokens
        state.events[at + E_Y] = hit_tokens
        at += EVENT_HEADER
    matched = state.reg[R_NUM_CACHED_SLOTS]
    if matched == 0:
        return
    longest = 0
    for i in range(matched):
        longest = max(longest, state.cached_slots[i, 1] // block_tokens)
    at = _begin(state, row, matched, matched + longest)
    state.events[at] = EV_CACHE_HIT
    state.events[at + E_X] = cached_tokens
    state.events[at + E_Y] = hit_tokens
    at += EVENT_HEADER
    for i in range(matched):
        state.events[at + i] = state.cached_slots[i, 0]
        state.events[at + matched + i] = state.cached_slots[i, 1] // block_tokens
    for i in range(longest):
        state.events[at + 2 * matched + i] = state.hits[i]


@inner
def log_free_request(state: EngineState, row: int, seat: int, num_slots: int, is_preemption: int) -> None:
    """A request leaves its slots. x: 1 for a preemption."""
    if state.cfg[C_EVENT_LEVEL] == EVENTS_OFF:
        return
    at = _begin(state, row, num_slots, 0)
    state.events[at] = EV_FREE_REQUEST
    state.events[at + E_CALLER] = CALLER_PREEMPT if is_preemption else CALLER_NONE
    state.events[at + E_X] = is_preemption
    at += EVENT_HEADER
    for i in range(num_slots):
        state.events[at + i] = state.seat_slots[seat, i]


@inner
def log_preempt(state: EngineState, row: int, seat: int, num_blocks: int, output: int) -> None:
    """A running request went back to the head of the queue; its inner blocks. x: tokens generated so far."""
    if state.cfg[C_EVENT_LEVEL] == EVENTS_OFF:
        return
    at = _begin(state, row, 0, num_blocks)
    state.events[at] = EV_PREEMPT
    state.events[at + E_CALLER] = CALLER_PREEMPT
    state.events[at + E_X] = output
    at += EVENT_HEADER
    for i in range(num_blocks):
        state.events[at + i] = state.seat_blocks[seat, i]
