"""What vllm-rbln decides for one request: admission, look-up, decode growth, release, preemption.

Allocation comes first, then eviction, then the look-up; prefill hashes blocks, decode never does. Whose turn it is
is not decided here. Next: ``steps`` calls these functions in the order of the vendor's schedule().
"""

from __future__ import annotations

from harness.compiled import inner
from harness.engine.events import log_alloc, log_free_request, log_lookup, log_mapping_search, log_preempt
from harness.engine.pools import (
    append_to_slot,
    evict_slot,
    hash_block,
    make_room,
    note_use,
    pop_block,
    push_free_block,
    push_free_block_first,
    take_slot,
    unlink_matched,
)
from harness.engine.state import (
    B_HASHED,
    B_OLDER,
    B_SLOT,
    C_BLOCK_TOKENS,
    C_BLOCKS_PER_SLOT,
    C_CACHING,
    C_INDEX_REPAIRED,
    C_KEEPS_MATCHED,
    C_MAX_MODEL_LEN,
    CALLER_PREEMPT,
    CALLER_REQUEST,
    HASHED_MATCHED,
    HASHED_UNLINKED,
    Q_COMPUTED,
    Q_OUTPUT,
    Q_PROMPT,
    Q_SEAT,
    R_CACHED,
    R_CALLER,
    R_FREE_BLOCKS,
    R_FREE_SEATS,
    R_HIT_TOKENS,
    R_NUM_CACHED_SLOTS,
    R_NUM_HIT_BLOCKS,
    S_ACTIVE,
    S_LEN,
    SLOT_INACTIVE,
    EngineState,
)


@inner
def vendor_admit(state: EngineState, row: int) -> bool:
    """Give a waiting request its blocks and slots and look up what it can reuse; False changes nothing.

    ``state.keys`` holds the chain keys of its full blocks.
    """
    cfg, reg, rows = state.cfg, state.reg, state.rows
    block_tokens, per_slot = cfg[C_BLOCK_TOKENS], cfg[C_BLOCKS_PER_SLOT]
    num_tokens = rows[row, Q_PROMPT] + rows[row, Q_OUTPUT]
    num_blocks = (min(num_tokens, cfg[C_MAX_MODEL_LEN]) + block_tokens - 1) // block_tokens
    if num_blocks > reg[R_FREE_BLOCKS]:
        return False
    num_slots = 0
    if cfg[C_CACHING]:
        num_slots = (num_blocks + per_slot - 1) // per_slot
        reg[R_CALLER] = CALLER_REQUEST
        if not make_room(state, int(num_slots)):
            return False
    reg[R_FREE_SEATS] -= 1
    seat = int(state.free_seats[reg[R_FREE_SEATS]])
    rows[row, Q_SEAT] = seat
    rows[row, Q_COMPUTED] = 0
    state.seat_fill[seat, 0] = num_blocks
    state.seat_fill[seat, 1] = num_slots
    reg[R_CACHED] = 0
    reg[R_HIT_TOKENS] = 0
    reg[R_NUM_CACHED_SLOTS] = 0
    for i in range(num_blocks):
        state.seat_blocks[seat, i] = pop_block(state)
    if cfg[C_CACHING]:
        for i in range(num_slots):
            slot = take_slot(state, row)
            state.seat_slots[seat, i] = slot
            for j in range(i * per_slot, min((i + 1) * per_slot, num_blocks)):
                append_to_slot(state, slot, state.seat_blocks[seat, j])
        log_alloc(state, row, seat, 0, num_slots, 0, num_blocks)
        for i in range(num_tokens // block_tokens):
            hash_block(state, state.seat_blocks[seat, i], state.keys[i])
        look_up(state, row, seat, (num_tokens - 1) // block_tokens)
    return True


@inner
def look_up(state: EngineState, row: int, seat: int, most_blocks: int) -> None:
    """Find the reusable prefix: for each block the most recent *other* holder, then the slots behind those blocks.

    Groups of one slot's blocks are matched independently, so a partial match followed by a full one leaves a hole.
    """
    reg, block_tokens = state.reg, state.cfg[C_BLOCK_TOKENS]
    num_hits = 0
    # The request's own block was registered last, so the other holder is the one just older.
    while num_hits < most_blocks:
        other = state.blocks[state.seat_blocks[seat, num_hits], B_OLDER]
        if other == 0:
            break
        state.hits[num_hits] = other
        num_hits += 1
    cached = 0
    matched = 0
    first = 0
    while first < num_hits:
        length = min(state.cfg[C_BLOCKS_PER_SLOT], num_hits - first)
        slot = int(state.blocks[state.hits[first], B_SLOT])
        log_mapping_search(state, row, first, length, slot)
        if slot < 0:
            break
        common = 0
        longest = min(length, state.slots[slot, S_LEN])
        while common < longest and state.slot_blocks[slot, common] == state.hits[first + common]:
            common += 1
        if common == 0:
            break
        state.cached_slots[matched, 0] = slot
        state.cached_slots[matched, 1] = common * block_tokens
        matched += 1
        cached += common * block_tokens
        first += length
    reg[R_NUM_HIT_BLOCKS] = num_hits
    reg[R_HIT_TOKENS] = num_hits * block_tokens
    reg[R_NUM_CACHED_SLOTS] = matched
    reg[R_CACHED] = cached
    for i in range(matched - 1, -1, -1):
        note_use(state, int(state.cached_slots[i, 0]))
    if state.cfg[C_KEEPS_MATCHED]:
        keep_matched_blocks(state, matched)
    log_lookup(state, row, cached, block_tokens)


@inner
def keep_matched_blocks(state: EngineState, num_slots: int) -> None:
    """Move the inner blocks just matched to the tail of the free queue, those that nobody holds, in reverse order."""
    block_tokens, per_slot = state.cfg[C_BLOCK_TOKENS], state.cfg[C_BLOCKS_PER_SLOT]
    for i in range(num_slots):
        for j in range(state.cached_slots[i, 1] // block_tokens):
            state.blocks[state.hits[i * per_slot + j], B_HASHED] = HASHED_MATCHED
    unlink_matched(state)
    for i in range(num_slots - 1, -1, -1):
        for j in range(state.cached_slots[i, 1] // block_tokens - 1, -1, -1):
            block = int(state.hits[i * per_slot + j])
            if state.blocks[block, B_HASHED] == HASHED_UNLINKED:
                push_free_block(state, block)
            state.blocks[block, B_HASHED] = 1


@inner
def vendor_grow(state: EngineState, row: int) -> bool:
    """Room for one more token of a running request: most often nothing, else one inner block, rarely a slot."""
    cfg, rows = state.cfg, state.rows
    seat = rows[row, Q_SEAT]
    num_tokens = min(rows[row, Q_PROMPT] + rows[row, Q_OUTPUT], cfg[C_MAX_MODEL_LEN])
    have = state.seat_fill[seat, 0]
    if num_tokens <= have * cfg[C_BLOCK_TOKENS]:
        return True
    if state.reg[R_FREE_BLOCKS] == 0:
        return False
    if not cfg[C_CACHING]:
        state.seat_blocks[seat, have] = pop_block(state)
        state.seat_fill[seat, 0] = have + 1
        return True
    starts_slot = (rows[row, Q_COMPUTED] // cfg[C_BLOCK_TOKENS]) % cfg[C_BLOCKS_PER_SLOT] == 0
    if starts_slot:
        state.reg[R_CALLER] = CALLER_REQUEST
        if not make_room(state, 1):
            return False
    block = pop_block(state)
    state.seat_blocks[seat, have] = block
    state.seat_fill[seat, 0] = have + 1
    last = state.seat_fill[seat, 1]
    if starts_slot:
        state.seat_slots[seat, last] = take_slot(state, row)
        state.seat_fill[seat, 1] = last + 1
        append_to_slot(state, int(state.seat_slots[seat, last]), block)
        log_alloc(state, row, seat, last, 1, have, 1)
    else:
        append_to_slot(state, int(state.seat_slots[seat, last - 1]), block)
    return True


@inner
def vendor_release(state: EngineState, row: int, is_preemption: int) -> None:
    """A running request gives its memory back: its slots stay mapped for reuse, unless it is preempted."""
    reg = state.reg
    seat = state.rows[row, Q_SEAT]
    num_blocks, num_slots = state.seat_fill[seat, 0], state.seat_fill[seat, 1]
    if state.cfg[C_CACHING]:
        log_free_request(state, row, seat, num_slots, is_preemption)
        for i in range(num_slots):
            if is_preemption:
                reg[R_CALLER] = CALLER_PREEMPT
                evict_slot(state, int(state.seat_slots[seat, i]))
            else:
                state.slots[state.seat_slots[seat, i], S_ACTIVE] = SLOT_INACTIVE
        for i in range(num_slots - 1, -1, -1):
            if not is_preemption:
                note_use(state, int(state.seat_slots[seat, i]))
    if is_preemption:
        log_preempt(state, row, seat, num_blocks, state.rows[row, Q_OUTPUT])
    unhashed_first = state.cfg[C_INDEX_REPAIRED]
    if unhashed_first:
        for i in range(num_blocks):
            if not state.blocks[state.seat_blocks[seat, i], B_HASHED]:
                push_free_block_first(state, state.seat_blocks[seat, i])
    for i in range(num_blocks - 1, -1, -1):
        if not unhashed_first or state.blocks[state.seat_blocks[seat, i], B_HASHED]:
            push_free_block(state, state.seat_blocks[seat, i])
    state.free_seats[reg[R_FREE_SEATS]] = seat
    reg[R_FREE_SEATS] += 1
    state.rows[row, Q_SEAT] = -1
