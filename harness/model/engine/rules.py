"""What the rules decide for one request: admission, look-up, decode growth, release, preemption.

``vendor_*``: vllm-rbln. Allocation comes first, then eviction, then the look-up; prefill hashes blocks, decode never
does. ``paper_*``: the paper's own rules of KV slots, so that its printed predictions can be reproduced; not what the
stack does. One slot per admission, first-in first-out; a completed request's slot cannot be evicted before the next
admission has chosen its victim; no inner blocks, no dummy block. Whose turn it is is not decided here.
"""

from __future__ import annotations

from harness.compiled import jit
from harness.model.engine.events import log_alloc, log_free_request, log_lookup, log_mapping_search, log_preempt
from harness.model.engine.pools import (
    append_to_slot,
    evict_slot,
    fill_slot,
    hash_block,
    make_room,
    note_use,
    oldest_inactive,
    pop_block,
    push_free_block,
    push_free_block_first,
    take_slot,
    unlink_matched,
)
from harness.model.engine.state import (
    CALLER_PREEMPT,
    CALLER_REQUEST,
    HASHED_MATCHED,
    HASHED_UNLINKED,
    SLOT_INACTIVE,
    SLOT_PENDING,
    EngineState,
)


@jit
def vendor_admit(state: EngineState, row: int) -> bool:
    """Give a waiting request its blocks and slots and look up what it can reuse; False changes nothing.

    ``state.prefix`` holds the chain keys of its full blocks.
    """
    server, rows = state.server[0], state.rows
    block_tokens, per_slot = server.block_tokens, server.blocks_per_slot
    num_tokens = rows[row].prompt + rows[row].output
    num_blocks = (min(num_tokens, server.max_model_len) + block_tokens - 1) // block_tokens
    if num_blocks > server.free_blocks:
        return False
    num_slots = 0
    if server.is_caching:
        num_slots = (num_blocks + per_slot - 1) // per_slot
        server.caller = CALLER_REQUEST
        if not make_room(state, int(num_slots)):
            return False
    server.free_seats -= 1
    seat = int(state.places[server.free_seats].free_seat)
    rows[row].seat = seat
    rows[row].room_output = num_blocks * block_tokens - rows[row].prompt
    state.places[seat].num_blocks = num_blocks
    state.places[seat].num_slots = num_slots
    server.cached_tokens = 0
    server.hit_tokens = 0
    server.num_cached_slots = 0
    for i in range(num_blocks):
        state.seat_blocks[seat, i] = pop_block(state)
    if server.is_caching:
        for i in range(num_slots):
            slot = take_slot(state, row)
            state.seat_slots[seat, i] = slot
            fill_slot(state, slot, seat, i * per_slot, int(min((i + 1) * per_slot, num_blocks)))
        log_alloc(state, row, seat, 0, num_slots, 0, num_blocks)
        for i in range(num_tokens // block_tokens):
            hash_block(state, state.seat_blocks[seat, i], state.prefix[i].key)
        look_up(state, row, seat, (num_tokens - 1) // block_tokens)
    return True


@jit
def look_up(state: EngineState, row: int, seat: int, most_blocks: int) -> None:
    """Find the reusable prefix: for each block the most recent *other* holder, then the slots behind those blocks.

    Groups of one slot's blocks are matched independently, so a partial match followed by a full one leaves a hole.
    """
    server, block_tokens = state.server[0], state.server[0].block_tokens
    num_hits = 0
    # The request's own block was registered last, so the other holder is the one just older.
    while num_hits < most_blocks:
        other = state.blocks[state.seat_blocks[seat, num_hits]].older
        if other == 0:
            break
        state.prefix[num_hits].hit = other
        num_hits += 1
    cached = 0
    matched = 0
    first = 0
    while first < num_hits:
        length = min(state.server[0].blocks_per_slot, num_hits - first)
        slot = int(state.blocks[state.prefix[first].hit].slot)
        log_mapping_search(state, row, first, length, slot)
        if slot < 0:
            break
        common = 0
        longest = min(length, state.slots[slot].length)
        while common < longest and state.slot_blocks[slot, common] == state.prefix[first + common].hit:
            common += 1
        if common == 0:
            break
        state.prefix[matched].cached_slot = slot
        state.prefix[matched].cached_tokens = common * block_tokens
        matched += 1
        cached += common * block_tokens
        first += length
    server.hit_tokens = num_hits * block_tokens
    server.num_cached_slots = matched
    server.cached_tokens = cached
    for i in range(matched - 1, -1, -1):
        note_use(state, int(state.prefix[i].cached_slot))
    if state.server[0].keeps_matched_blocks:
        keep_matched_blocks(state, matched)
    log_lookup(state, row, cached, block_tokens)


@jit
def keep_matched_blocks(state: EngineState, num_slots: int) -> None:
    """Move the inner blocks just matched to the tail of the free queue, those that nobody holds, in reverse order."""
    block_tokens, per_slot = state.server[0].block_tokens, state.server[0].blocks_per_slot
    for i in range(num_slots):
        for j in range(state.prefix[i].cached_tokens // block_tokens):
            state.blocks[state.prefix[i * per_slot + j].hit].hashed = HASHED_MATCHED
    unlink_matched(state)
    for i in range(num_slots - 1, -1, -1):
        for j in range(state.prefix[i].cached_tokens // block_tokens - 1, -1, -1):
            block = int(state.prefix[i * per_slot + j].hit)
            if state.blocks[block].hashed == HASHED_UNLINKED:
                push_free_block(state, block)
            state.blocks[block].hashed = 1


@jit
def vendor_grow(state: EngineState, row: int) -> bool:
    """One inner block more for a running request that has filled those it holds, and rarely a slot."""
    server, rows = state.server[0], state.rows
    seat = rows[row].seat
    have = state.places[seat].num_blocks
    if server.free_blocks == 0:
        return False
    if not server.is_caching:
        state.seat_blocks[seat, have] = pop_block(state)
        state.places[seat].num_blocks = have + 1
        rows[row].room_output += server.block_tokens
        return True
    # The newest token has no KV yet.
    num_computed = rows[row].prompt + rows[row].output - 1
    starts_slot = (num_computed // server.block_tokens) % server.blocks_per_slot == 0
    if starts_slot:
        state.server[0].caller = CALLER_REQUEST
        if not make_room(state, 1):
            return False
    block = pop_block(state)
    state.seat_blocks[seat, have] = block
    state.places[seat].num_blocks = have + 1
    rows[row].room_output += server.block_tokens
    last = state.places[seat].num_slots
    if starts_slot:
        state.seat_slots[seat, last] = take_slot(state, row)
        state.places[seat].num_slots = last + 1
        append_to_slot(state, int(state.seat_slots[seat, last]), block)
        log_alloc(state, row, seat, last, 1, have, 1)
    else:
        append_to_slot(state, int(state.seat_slots[seat, last - 1]), block)
    return True


@jit
def vendor_release(state: EngineState, row: int, is_preemption: int) -> None:  # noqa: C901  # the order of the vendor's own function
    """A running request gives its memory back: its slots stay mapped for reuse, unless it is preempted."""
    server = state.server[0]
    seat = state.rows[row].seat
    num_blocks, num_slots = state.places[seat].num_blocks, state.places[seat].num_slots
    if state.server[0].is_caching:
        log_free_request(state, row, seat, num_slots, is_preemption)
        for i in range(num_slots):
            if is_preemption:
                server.caller = CALLER_PREEMPT
                evict_slot(state, int(state.seat_slots[seat, i]))
            else:
                state.slots[state.seat_slots[seat, i]].status = SLOT_INACTIVE
        for i in range(num_slots - 1, -1, -1):
            if not is_preemption:
                note_use(state, int(state.seat_slots[seat, i]))
    if is_preemption:
        log_preempt(state, row, seat, num_blocks, state.rows[row].output)
    num_last = num_blocks
    if state.server[0].is_index_repaired:
        # Blocks with a hash come before those without: the full ones of the prompt.
        while num_last > 0 and not state.blocks[state.seat_blocks[seat, num_last - 1]].hashed:
            num_last -= 1
        for i in range(num_last, num_blocks):
            push_free_block_first(state, state.seat_blocks[seat, i])
    for i in range(num_last - 1, -1, -1):
        push_free_block(state, state.seat_blocks[seat, i])
    state.places[server.free_seats].free_seat = seat
    server.free_seats += 1
    state.rows[row].seat = -1


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
