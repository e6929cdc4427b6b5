"""The engine's log of what happened to KV memory, as variable-length records in one int64 array.

Record: kind, row, caller, number of slots, number of block ids, x, y, then the slots, then the block ids. Nothing is
written unless the state was made with events.
"""

from __future__ import annotations

from harness.compiled import jit
from harness.model.engine.state import (
    CALLER_NONE,
    CALLER_PREEMPT,
    CALLER_REQUEST,
    EV_ALLOC,
    EV_CACHE_HIT,
    EV_CACHE_PARTIAL,
    EV_EVICTION,
    EV_FREE_REQUEST,
    EV_MAPPING_REMOVE,
    EV_MAPPING_SEARCH,
    EV_PREEMPT,
    EVENT_HEADER,
    SLOT_ACTIVE,
    EngineState,
)


@jit
def begin_event(state: EngineState, kind: int, caller: int, row: int, slots: int, blocks: int, x: int, y: int) -> int:
    """Write a record's header and make room for its slots and blocks; return the place of the first."""
    server, events = state.server[0], state.events
    at = server.events_len
    events[at] = kind
    events[at + 1] = row
    events[at + 2] = caller
    events[at + 3] = slots
    events[at + 4] = blocks
    events[at + 5] = x
    events[at + 6] = y
    server.events_len = at + EVENT_HEADER + slots + blocks
    return at + EVENT_HEADER


@jit
def log_alloc(state: EngineState, row: int, seat: int, first_slot: int, slots: int, first_block: int, n: int) -> None:
    """``slots`` slots and ``n`` inner blocks were given, from these places of the seat on."""
    if state.server[0].has_events == 0:
        return
    at = begin_event(state, EV_ALLOC, CALLER_REQUEST, row, slots, n, 0, 0)
    for i in range(slots):
        state.events[at + i] = state.seat_slots[seat, first_slot + i]
    for i in range(n):
        state.events[at + slots + i] = state.seat_blocks[seat, first_block + i]


@jit
def log_mapping_remove(state: EngineState, slot: int) -> None:
    """The slot's list of inner blocks is about to be dropped."""
    if state.server[0].has_events == 0:
        return
    length = state.slots[slot].length
    at = begin_event(state, EV_MAPPING_REMOVE, state.server[0].caller, -1, 1, length, 0, 0)
    state.events[at] = slot
    for i in range(length):
        state.events[at + 1 + i] = state.slot_blocks[slot, i]


@jit
def log_eviction(state: EngineState, slot: int, num_blocks: int) -> None:
    """The slot is free; after it come the inactive slots that remain, oldest allocation first. x: free slots."""
    if state.server[0].has_events == 0:
        return
    inactive = 0
    walk = state.server[0].fifo_head
    while walk >= 0:
        if state.slots[walk].status != SLOT_ACTIVE:
            inactive += 1
        walk = state.slots[walk].next
    server = state.server[0]
    at = begin_event(state, EV_EVICTION, server.caller, -1, 1 + inactive, 0, server.free_slots, num_blocks)
    state.events[at] = slot
    walk = state.server[0].fifo_head
    while walk >= 0:
        if state.slots[walk].status != SLOT_ACTIVE:
            at += 1
            state.events[at] = walk
        walk = state.slots[walk].next


@jit
def log_mapping_search(state: EngineState, row: int, first_hit: int, length: int, slot: int) -> None:
    """A group of hit blocks was looked up in the inner-to-outer index; ``slot`` is -1 when it had no entry."""
    if state.server[0].has_events == 0:
        return
    at = begin_event(state, EV_MAPPING_SEARCH, CALLER_NONE, row, 1, length, 0, 0)
    state.events[at] = slot
    for i in range(length):
        state.events[at + 1 + i] = state.prefix[first_hit + i].hit


@jit
def log_lookup(state: EngineState, row: int, cached_tokens: int, block_tokens: int) -> None:
    """What the look-up gave: CACHE_PARTIAL when it fell short of the hash hits, CACHE_HIT when it gave anything.

    A CACHE_HIT carries, per slot, how many leading hit blocks its length stands for, then the hit blocks.
    """
    if state.server[0].has_events == 0:
        return
    hit_tokens = state.server[0].hit_tokens
    if cached_tokens < hit_tokens:
        begin_event(state, EV_CACHE_PARTIAL, CALLER_NONE, row, 0, 0, cached_tokens, hit_tokens)
    matched = state.server[0].num_cached_slots
    if matched == 0:
        return
    longest = 0
    for i in range(matched):
        longest = max(longest, state.prefix[i].cached_tokens // block_tokens)
    at = begin_event(state, EV_CACHE_HIT, CALLER_NONE, row, matched, matched + longest, cached_tokens, hit_tokens)
    for i in range(matched):
        state.events[at + i] = state.prefix[i].cached_slot
        state.events[at + matched + i] = state.prefix[i].cached_tokens // block_tokens
    for i in range(longest):
        state.events[at + 2 * matched + i] = state.prefix[i].hit


@jit
def log_free_request(state: EngineState, row: int, seat: int, num_slots: int, is_preemption: int) -> None:
    """A request leaves its slots. x: 1 for a preemption."""
    if state.server[0].has_events == 0:
        return
    caller = CALLER_PREEMPT if is_preemption else CALLER_NONE
    at = begin_event(state, EV_FREE_REQUEST, caller, row, num_slots, 0, is_preemption, 0)
    for i in range(num_slots):
        state.events[at + i] = state.seat_slots[seat, i]


@jit
def log_preempt(state: EngineState, row: int, seat: int, num_blocks: int, output: int) -> None:
    """A running request went back to the head of the queue; its inner blocks. x: tokens generated so far."""
    if state.server[0].has_events == 0:
        return
    at = begin_event(state, EV_PREEMPT, CALLER_PREEMPT, row, 0, num_blocks, output, 0)
    for i in range(num_blocks):
        state.events[at + i] = state.seat_blocks[seat, i]
