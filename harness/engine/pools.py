"""Two-level KV memory as vllm-rbln 0.11.1 keeps it: 128-token inner blocks, and the slots that really hold the KV.

Inner blocks carry hashes and an LRU free queue; slots carry an ordered list of inner ids and are evicted first-in
first-out. Nothing here decides when. Next: ``vendor`` allocates, looks up and frees through these functions.
"""

from __future__ import annotations

from harness.compiled import inner
from harness.engine.events import log_eviction, log_mapping_remove
from harness.engine.state import (
    B_HASHED,
    B_KEY,
    B_NEWER,
    B_NEXT_FREE,
    B_OLDER,
    B_SLOT,
    C_INDEX_REPAIRED,
    C_LRU_SLOTS,
    C_NUM_BLOCKS,
    C_NUM_SLOTS,
    C_TABLE_MASK,
    CALLER_DUMMY,
    CALLER_REQUEST,
    HASHED_MATCHED,
    HASHED_UNLINKED,
    R_CALLER,
    R_EVICTIONS_DUMMY,
    R_EVICTIONS_PREEMPT,
    R_EVICTIONS_REQUEST,
    R_FIFO_HEAD,
    R_FIFO_TAIL,
    R_FREE_BLOCK_HEAD,
    R_FREE_BLOCK_TAIL,
    R_FREE_BLOCKS,
    R_FREE_SLOT_HEAD,
    R_FREE_SLOTS,
    R_FRESH_BLOCK,
    R_FRONT_BLOCK,
    R_NUM_EVICTED,
    S_ACTIVE,
    S_LEN,
    S_NEXT,
    S_PREV,
    S_ROW,
    SLOT_ACTIVE,
    SLOT_INACTIVE,
    EngineState,
)

# 2**64 divided by the golden ratio, as an int64; the products below wrap.
_MIX = 0x9E3779B97F4A7C15 - (1 << 64)


@inner
def table_home(key: int, mask: int) -> int:
    """Where a chain key's entry would be in an empty table."""
    mixed = key * _MIX
    return (mixed ^ (mixed >> 29)) & mask


@inner
def table_find(state: EngineState, key: int) -> int:
    """The place of ``key``, or of the empty place where it belongs."""
    mask = state.cfg[C_TABLE_MASK]
    place = table_home(key, mask)
    while state.table_newest[place] != 0 and state.table_key[place] != key:
        place = (place + 1) & mask
    return place


@inner
def table_delete(state: EngineState, place: int) -> None:
    """Empty a place and close the gap, so that probing needs no tombstones."""
    mask = state.cfg[C_TABLE_MASK]
    hole = place
    walk = (place + 1) & mask
    while state.table_newest[walk] != 0:
        home = table_home(int(state.table_key[walk]), mask)
        # The entry may move into the hole unless its home lies cyclically after the hole.
        if ((walk - home) & mask) >= ((walk - hole) & mask):
            state.table_key[hole] = state.table_key[walk]
            state.table_newest[hole] = state.table_newest[walk]
            hole = walk
        walk = (walk + 1) & mask
    state.table_newest[hole] = 0


@inner
def hash_block(state: EngineState, block: int, key: int) -> None:
    """Register a full block under its chain key, as the key's most recent holder."""
    place = table_find(state, key)
    older = state.table_newest[place]
    state.table_key[place] = key
    state.table_newest[place] = block
    state.blocks[block, B_HASHED] = 1
    state.blocks[block, B_KEY] = key
    state.blocks[block, B_OLDER] = older
    state.blocks[block, B_NEWER] = 0
    if older != 0:
        state.blocks[older, B_NEWER] = block


@inner
def unhash_block(state: EngineState, block: int) -> None:
    """Take a block out of its key's holders; the others keep their order."""
    older, newer = state.blocks[block, B_OLDER], state.blocks[block, B_NEWER]
    if older != 0:
        state.blocks[older, B_NEWER] = newer
    if newer != 0:
        state.blocks[newer, B_OLDER] = older
    else:
        place = table_find(state, state.blocks[block, B_KEY])
        if older != 0:
            state.table_newest[place] = older
        else:
            table_delete(state, place)
    state.blocks[block, B_HASHED] = 0


@inner
def pop_block(state: EngineState) -> int:
    """The least recently freed inner block; it forgets its hash here, not when it was freed."""
    reg = state.reg
    reg[R_FREE_BLOCKS] -= 1
    front = int(reg[R_FRONT_BLOCK])
    if front != 0:
        reg[R_FRONT_BLOCK] = state.blocks[front, B_NEXT_FREE]
        return front
    fresh = reg[R_FRESH_BLOCK]
    if fresh <= state.cfg[C_NUM_BLOCKS]:
        reg[R_FRESH_BLOCK] = fresh + 1
        state.blocks[fresh, B_HASHED] = 0
        state.blocks[fresh, B_SLOT] = -1
        return fresh
    block = int(reg[R_FREE_BLOCK_HEAD])
    reg[R_FREE_BLOCK_HEAD] = 0 if block == reg[R_FREE_BLOCK_TAIL] else state.blocks[block, B_NEXT_FREE]
    if state.blocks[block, B_HASHED]:
        unhash_block(state, block)
    return block


@inner
def push_free_block(state: EngineState, block: int) -> None:
    """Put a block at the tail of the free queue; it keeps its hash and its place in the index."""
    reg = state.reg
    if reg[R_FREE_BLOCK_HEAD] == 0:
        reg[R_FREE_BLOCK_HEAD] = block
    else:
        state.blocks[reg[R_FREE_BLOCK_TAIL], B_NEXT_FREE] = block
    reg[R_FREE_BLOCK_TAIL] = block
    reg[R_FREE_BLOCKS] += 1


@inner
def unlink_matched(state: EngineState) -> None:
    """Take the matched blocks out of the free queue, wherever they stand; they have a hash, so none is at its front."""
    reg, blocks = state.reg, state.blocks
    last = 0
    block = int(reg[R_FREE_BLOCK_HEAD])
    while block != 0:
        after = 0 if block == reg[R_FREE_BLOCK_TAIL] else int(blocks[block, B_NEXT_FREE])
        if blocks[block, B_HASHED] == HASHED_MATCHED:
            blocks[block, B_HASHED] = HASHED_UNLINKED
            reg[R_FREE_BLOCKS] -= 1
        else:
            if last == 0:
                reg[R_FREE_BLOCK_HEAD] = block
            else:
                blocks[last, B_NEXT_FREE] = block
            last = block
        block = after
    if last == 0:
        reg[R_FREE_BLOCK_HEAD] = 0
    reg[R_FREE_BLOCK_TAIL] = last


@inner
def push_free_block_first(state: EngineState, block: int) -> None:
    """Put a block before all free ones, also those never used: what vLLM 0.24 does with blocks that have no hash."""
    state.blocks[block, B_NEXT_FREE] = state.reg[R_FRONT_BLOCK]
    state.reg[R_FRONT_BLOCK] = block
    state.reg[R_FREE_BLOCKS] += 1


@inner
def detach_block(state: EngineState, block: int, new_slot: int) -> None:
    """Take a reused block out of the list of the slot that the index still names: the repair of vllm-rbln 0.11.2."""
    old_slot = state.blocks[block, B_SLOT]
    if old_slot < 0 or old_slot == new_slot:
        return
    length = state.slots[old_slot, S_LEN]
    place = 0
    while place < length and state.slot_blocks[old_slot, place] != block:
        place += 1
    if place == length:
        return
    for i in range(place, length - 1):
        state.slot_blocks[old_slot, i] = state.slot_blocks[old_slot, i + 1]
    state.slots[old_slot, S_LEN] = length - 1


@inner
def take_slot(state: EngineState, row: int) -> int:
    """Map the slot that has been free longest to ``row``; it becomes the youngest in eviction order."""
    reg, slots = state.reg, state.slots
    slot = int(state.free_slots[reg[R_FREE_SLOT_HEAD]])
    head = reg[R_FREE_SLOT_HEAD] + 1
    reg[R_FREE_SLOT_HEAD] = 0 if head == state.cfg[C_NUM_SLOTS] else head
    reg[R_FREE_SLOTS] -= 1
    slots[slot, S_LEN] = 0
    slots[slot, S_ACTIVE] = SLOT_ACTIVE
    slots[slot, S_ROW] = row
    slots[slot, S_NEXT] = -1
    slots[slot, S_PREV] = reg[R_FIFO_TAIL]
    if reg[R_FIFO_TAIL] >= 0:
        slots[reg[R_FIFO_TAIL], S_NEXT] = slot
    else:
        reg[R_FIFO_HEAD] = slot
    reg[R_FIFO_TAIL] = slot
    return slot


@inner
def append_to_slot(state: EngineState, slot: int, block: int) -> None:
    """Write an inner block into a slot's list and point the index at the slot, whatever it pointed at before."""
    if state.cfg[C_INDEX_REPAIRED]:
        detach_block(state, block, slot)
    state.slot_blocks[slot, state.slots[slot, S_LEN]] = block
    state.slots[slot, S_LEN] += 1
    state.blocks[block, B_SLOT] = slot


@inner
def evict_slot(state: EngineState, slot: int) -> None:
    """Drop a slot's contents and return it to the free slots; reg[R_CALLER] says who wants that.

    The index entries of *all* its inner ids go, also of ids that meanwhile belong to a younger slot: that is the
    stale-index defect of 0.11.1, and the younger slot's reuse is lost with it.
    """
    reg, slots = state.reg, state.slots
    log_mapping_remove(state, slot)
    caller = reg[R_CALLER]
    length = slots[slot, S_LEN]
    for i in range(length):
        state.blocks[state.slot_blocks[slot, i], B_SLOT] = -1
    before, after = slots[slot, S_PREV], slots[slot, S_NEXT]
    if before >= 0:
        slots[before, S_NEXT] = after
    else:
        reg[R_FIFO_HEAD] = after
    if after >= 0:
        slots[after, S_PREV] = before
    else:
        reg[R_FIFO_TAIL] = before
    tail = reg[R_FREE_SLOT_HEAD] + reg[R_FREE_SLOTS]
    num_slots = state.cfg[C_NUM_SLOTS]
    state.free_slots[tail - num_slots if tail >= num_slots else tail] = slot
    reg[R_FREE_SLOTS] += 1
    evicted = reg[R_NUM_EVICTED]
    state.evicted[evicted, 0] = slot
    state.evicted[evicted, 1] = caller
    state.evicted[evicted, 2] = slots[slot, S_ROW]
    reg[R_NUM_EVICTED] = evicted + 1
    if caller == CALLER_REQUEST:
        reg[R_EVICTIONS_REQUEST] += 1
    elif caller == CALLER_DUMMY:
        reg[R_EVICTIONS_DUMMY] += 1
    else:
        reg[R_EVICTIONS_PREEMPT] += 1
    slots[slot, S_LEN] = 0
    slots[slot, S_ACTIVE] = SLOT_INACTIVE
    log_eviction(state, slot, int(length))


@inner
def oldest_inactive(state: EngineState) -> int:
    """The mapped slot that was allocated first among those no request holds; -1 when there is none."""
    walk = int(state.reg[R_FIFO_HEAD])
    while walk >= 0 and state.slots[walk, S_ACTIVE] != SLOT_INACTIVE:
        walk = int(state.slots[walk, S_NEXT])
    return walk


@inner
def note_use(state: EngineState, slot: int) -> None:
    """A slot was read or filled: it becomes the youngest in eviction order if that order is by use (an ablation).

    The vendor's order is by allocation, and use changes nothing.
    """
    reg, slots = state.reg, state.slots
    if state.cfg[C_LRU_SLOTS] == 0 or reg[R_FIFO_TAIL] == slot:
        return
    before, after = slots[slot, S_PREV], slots[slot, S_NEXT]
    if before >= 0:
        slots[before, S_NEXT] = after
    else:
        reg[R_FIFO_HEAD] = after
    slots[after, S_PREV] = before
    slots[slot, S_PREV] = reg[R_FIFO_TAIL]
    slots[slot, S_NEXT] = -1
    slots[reg[R_FIFO_TAIL], S_NEXT] = slot
    reg[R_FIFO_TAIL] = slot


@inner
def make_room(state: EngineState, needed: int) -> bool:
    """Evict until ``needed`` slots are free; evict nothing and return False when there are too few inactive ones."""
    missing = needed - state.reg[R_FREE_SLOTS]
    if missing <= 0:
        return True
    inactive = 0
    walk = state.reg[R_FIFO_HEAD]
    while walk >= 0 and inactive < missing:
        if state.slots[walk, S_ACTIVE] == SLOT_INACTIVE:
            inactive += 1
        walk = state.slots[walk, S_NEXT]
    if inactive < missing:
        return False
    for _ in range(missing):
        evict_slot(state, oldest_inactive(state))
    return True
