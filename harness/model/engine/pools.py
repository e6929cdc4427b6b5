"""Two-level KV memory as vllm-rbln 0.11.1 keeps it: 128-token inner blocks, and the slots that really hold the KV.

Inner blocks carry hashes and an LRU free queue; slots carry an ordered list of inner ids and are evicted first-in
first-out. Nothing here decides when.
"""

from __future__ import annotations

from harness.compiled import jit
from harness.model.engine.events import log_eviction, log_mapping_remove
from harness.model.engine.state import HASHED_MATCHED, HASHED_UNLINKED, SLOT_ACTIVE, SLOT_INACTIVE, EngineState

# 2**64 divided by the golden ratio, as an int64; the products below wrap.
_MIX = 0x9E3779B97F4A7C15 - (1 << 64)
# So many bits of a key leave its bucket near those of its neighbours.
_RUN_BITS = 6


@jit
def bucket_of(key: int, mask: int) -> int:
    """The bucket of a chain key. Keys that follow each other are used together, and so are their buckets."""
    mixed = (key >> _RUN_BITS) * _MIX
    return ((mixed ^ (mixed >> 29)) + key) & mask


@jit
def hash_block(state: EngineState, block: int, key: int) -> None:
    """Register a full block under its chain key, as the key's most recent holder: only that one is in a bucket."""
    blocks = state.blocks
    bucket = bucket_of(key, int(state.server[0].table_mask))
    before, older = 0, int(state.buckets[bucket])
    while older != 0 and blocks[older].key != key:
        before, older = older, int(blocks[older].chain)
    blocks[block].hashed = 1
    blocks[block].key = key
    blocks[block].older = older
    blocks[block].newer = 0
    if older == 0:
        blocks[block].chain = state.buckets[bucket]
        state.buckets[bucket] = block
        return
    blocks[older].newer = block
    replace_in_bucket(state, bucket, before, block, int(blocks[older].chain))


@jit
def replace_in_bucket(state: EngineState, bucket: int, before: int, block: int, chain: int) -> None:
    """``block`` stands behind ``before`` (0: first) in a bucket, and ``chain`` behind it."""
    if block != 0:
        state.blocks[block].chain = chain
    follows = block if block != 0 else chain
    if before == 0:
        state.buckets[bucket] = follows
    else:
        state.blocks[before].chain = follows


@jit
def unhash_block(state: EngineState, block: int) -> None:
    """Take a block out of its key's holders; the others keep their order."""
    blocks = state.blocks
    older, newer = int(blocks[block].older), blocks[block].newer
    if older != 0:
        blocks[older].newer = newer
    blocks[block].hashed = 0
    if newer != 0:
        blocks[newer].older = older
        return
    bucket = bucket_of(blocks[block].key, int(state.server[0].table_mask))
    before, walk = 0, int(state.buckets[bucket])
    while walk != block:
        before, walk = walk, int(blocks[walk].chain)
    replace_in_bucket(state, bucket, before, older, int(blocks[block].chain))


@jit
def pop_block(state: EngineState) -> int:
    """The least recently freed inner block; it forgets its hash here, not when it was freed."""
    server = state.server[0]
    server.free_blocks -= 1
    front = int(server.front_block)
    if front != 0:
        server.front_block = state.blocks[front].next_free
        return front
    fresh = server.fresh_block
    if fresh <= state.server[0].num_blocks:
        server.fresh_block = fresh + 1
        state.blocks[fresh].hashed = 0
        state.blocks[fresh].slot = -1
        return fresh
    block = int(server.free_block_head)
    server.free_block_head = 0 if block == server.free_block_tail else state.blocks[block].next_free
    if state.blocks[block].hashed:
        unhash_block(state, block)
    return block


@jit
def push_free_block(state: EngineState, block: int) -> None:
    """Put a block at the tail of the free queue; it keeps its hash and its place in the index."""
    server = state.server[0]
    if server.free_block_head == 0:
        server.free_block_head = block
    else:
        state.blocks[server.free_block_tail].next_free = block
    server.free_block_tail = block
    server.free_blocks += 1


@jit
def unlink_matched(state: EngineState) -> None:
    """Take the matched blocks out of the free queue, wherever they stand; they have a hash, so none is at its front."""
    server, blocks = state.server[0], state.blocks
    last = 0
    block = int(server.free_block_head)
    while block != 0:
        after = 0 if block == server.free_block_tail else int(blocks[block].next_free)
        if blocks[block].hashed == HASHED_MATCHED:
            blocks[block].hashed = HASHED_UNLINKED
            server.free_blocks -= 1
        else:
            if last == 0:
                server.free_block_head = block
            else:
                blocks[last].next_free = block
            last = block
        block = after
    if last == 0:
        server.free_block_head = 0
    server.free_block_tail = last


@jit
def push_free_block_first(state: EngineState, block: int) -> None:
    """Put a block before all free ones, also those never used: what vLLM 0.24 does with blocks that have no hash."""
    state.blocks[block].next_free = state.server[0].front_block
    state.server[0].front_block = block
    state.server[0].free_blocks += 1


@jit
def detach_block(state: EngineState, block: int, new_slot: int) -> None:
    """Take a reused block out of the list of the slot that the index still names: the repair of vllm-rbln 0.11.2."""
    old_slot = state.blocks[block].slot
    if old_slot < 0 or old_slot == new_slot:
        return
    length = state.slots[old_slot].length
    place = 0
    while place < length and state.slot_blocks[old_slot, place] != block:
        place += 1
    if place == length:
        return
    for i in range(place, length - 1):
        state.slot_blocks[old_slot, i] = state.slot_blocks[old_slot, i + 1]
    state.slots[old_slot].length = length - 1


@jit
def take_slot(state: EngineState, row: int) -> int:
    """Map the slot that has been free longest to ``row``; it becomes the youngest in eviction order."""
    server, slots = state.server[0], state.slots
    slot = int(state.slots[server.free_slot_head].free)
    head = server.free_slot_head + 1
    server.free_slot_head = 0 if head == state.server[0].num_slots else head
    server.free_slots -= 1
    slots[slot].length = 0
    slots[slot].status = SLOT_ACTIVE
    slots[slot].row = row
    slots[slot].next = -1
    slots[slot].prev = server.fifo_tail
    if server.fifo_tail >= 0:
        slots[server.fifo_tail].next = slot
    else:
        server.fifo_head = slot
    server.fifo_tail = slot
    return slot


@jit
def append_to_slot(state: EngineState, slot: int, block: int) -> None:
    """Write an inner block into a slot's list and point the index at the slot, whatever it pointed at before."""
    if state.server[0].is_index_repaired:
        detach_block(state, block, slot)
    state.slot_blocks[slot, state.slots[slot].length] = block
    state.slots[slot].length += 1
    state.blocks[block].slot = slot


@jit
def fill_slot(state: EngineState, slot: int, seat: int, first: int, last: int) -> None:
    """Write the seat's inner blocks [first, last) into the list of a slot just taken, as ``append_to_slot``."""
    is_repaired = state.server[0].is_index_repaired
    for i in range(first, last):
        block = int(state.seat_blocks[seat, i])
        if is_repaired and state.blocks[block].slot >= 0:
            detach_block(state, block, slot)
        state.slot_blocks[slot, i - first] = block
        state.blocks[block].slot = slot
    state.slots[slot].length = last - first


@jit
def evict_slot(state: EngineState, slot: int) -> None:
    """Drop a slot's contents and return it to the free slots; server.caller says who wants that.

    The index entries of *all* its inner ids go, also of ids that meanwhile belong to a younger slot: that is the
    stale-index defect of 0.11.1, and the younger slot's reuse is lost with it.
    """
    server, slots = state.server[0], state.slots
    log_mapping_remove(state, slot)
    length = slots[slot].length
    for i in range(length):
        state.blocks[state.slot_blocks[slot, i]].slot = -1
    before, after = slots[slot].prev, slots[slot].next
    if before >= 0:
        slots[before].next = after
    else:
        server.fifo_head = after
    if after >= 0:
        slots[after].prev = before
    else:
        server.fifo_tail = before
    tail = server.free_slot_head + server.free_slots
    num_slots = state.server[0].num_slots
    state.slots[tail - num_slots if tail >= num_slots else tail].free = slot
    server.free_slots += 1
    evicted = server.num_evicted
    state.evicted[evicted].slot = slot
    state.evicted[evicted].caller = server.caller
    state.evicted[evicted].row = slots[slot].row
    server.num_evicted = evicted + 1
    slots[slot].length = 0
    slots[slot].status = SLOT_INACTIVE
    log_eviction(state, slot, int(length))


@jit
def oldest_inactive(state: EngineState) -> int:
    """The mapped slot that was allocated first among those no request holds; -1 when there is none."""
    walk = int(state.server[0].fifo_head)
    while walk >= 0 and state.slots[walk].status != SLOT_INACTIVE:
        walk = int(state.slots[walk].next)
    return walk


@jit
def note_use(state: EngineState, slot: int) -> None:
    """A slot was read or filled: it becomes the youngest in eviction order if that order is by use (an ablation).

    The vendor's order is by allocation, and use changes nothing.
    """
    server, slots = state.server[0], state.slots
    if state.server[0].evicts_by_last_use == 0 or server.fifo_tail == slot:
        return
    before, after = slots[slot].prev, slots[slot].next
    if before >= 0:
        slots[before].next = after
    else:
        server.fifo_head = after
    slots[after].prev = before
    slots[slot].prev = server.fifo_tail
    slots[slot].next = -1
    slots[server.fifo_tail].next = slot
    server.fifo_tail = slot


@jit
def make_room(state: EngineState, needed: int) -> bool:
    """Evict until ``needed`` slots are free; evict nothing and return False when there are too few inactive ones."""
    missing = needed - state.server[0].free_slots
    if missing <= 0:
        return True
    inactive = 0
    walk = state.server[0].fifo_head
    while walk >= 0 and inactive < missing:
        if state.slots[walk].status == SLOT_INACTIVE:
            inactive += 1
        walk = state.slots[walk].next
    if inactive < missing:
        return False
    for _ in range(missing):
        evict_slot(state, oldest_inactive(state))
    return True
