"""KV blocks of paged memory: who holds them, what they contain, which are used again first. Compiled.

Free blocks without a key are used first, the latest freed of them before all; the others by last use. A block keeps its
key, and can be matched, until it is used again. Several blocks may have the same key; the first registered is matched.
Source: vLLM 0.30.0, v1/core/block_pool.py.
"""

from __future__ import annotations

from harness.compiled import always_inline, jit
from harness.model.engine.paged_state import NO_KEY, NO_PIN, NOT_FIRST, PagedState
from harness.model.engine.pools import bucket_of
from harness.model.engine.retention import (
    add_pin,
    link_between,
    next_pinned,
    order_pins,
    put_second,
    remove_pin,
    reset_retention,
    unlink,
)


@jit
def reset_blocks(state: PagedState) -> None:
    """All blocks free and empty, the lowest number to be used first."""
    blocks, last = state.blocks, len(state.blocks) - 1
    for block in range(last + 1):
        blocks[block].next = block + 1
        blocks[block].prev = block - 1
        blocks[block].holders = 0
        blocks[block].chain = NO_KEY
    blocks[0].prev = last
    blocks[last].next = 0
    for bucket in range(len(state.buckets)):
        state.buckets[bucket] = 0
    reset_retention(state)


@always_inline
def free_between(state: PagedState, before: int, block: int, after: int) -> None:
    """Nobody holds the block: it is used again between two free ones; block 0 is before and after all."""
    link_between(state.blocks, before, block, after)
    state.server[0].num_free += 1


@always_inline
def unfree(state: PagedState, block: int) -> None:
    """Take a block out of the free ones."""
    unlink(state.blocks, block)
    state.server[0].num_free -= 1


@jit
def find_block(state: PagedState, key: int) -> int:
    """The first registered block of a key; 0: none."""
    blocks = state.blocks
    block = int(state.buckets[bucket_of(key, int(state.server[0].table_mask))])
    while block != 0 and blocks[block].key != key:
        block = int(blocks[block].chain)
    return block


@jit
def register_block(state: PagedState, block: int, key: int) -> None:
    """A held block is full, and its content has this key."""
    blocks = state.blocks
    blocks[block].key = key
    first = find_block(state, key)
    if first == 0:
        bucket = bucket_of(key, int(state.server[0].table_mask))
        blocks[block].newer = block
        blocks[block].older = block
        blocks[block].chain = state.buckets[bucket]
        state.buckets[bucket] = block
        return
    last = blocks[first].older
    blocks[block].chain = NOT_FIRST
    blocks[block].older = last
    blocks[block].newer = first
    blocks[last].newer = block
    blocks[first].older = block


@jit
def forget_key(state: PagedState, block: int) -> None:
    """The content of a block is overwritten; the next block registered under its key is matched from now on."""
    blocks, chain = state.blocks, int(state.blocks[block].chain)
    newer, older = int(blocks[block].newer), int(blocks[block].older)
    blocks[older].newer = newer
    blocks[newer].older = older
    blocks[block].chain = NO_KEY
    if chain == NOT_FIRST:
        return
    after = chain
    if newer != block:
        blocks[newer].chain = chain
        after = newer
    bucket = bucket_of(int(blocks[block].key), int(state.server[0].table_mask))
    walk = int(state.buckets[bucket])
    if walk == block:
        state.buckets[bucket] = after
        return
    while blocks[walk].chain != block:
        walk = int(blocks[walk].chain)
    blocks[walk].chain = after


@jit
def take_block(state: PagedState) -> int:
    """The first free block, for new content, held once. There must be one."""
    server, block = state.server[0], next_pinned(state)
    if block == 0:
        block = int(state.blocks[0].next)
        unfree(state, block)
    else:
        server.num_free -= 1
    if state.blocks[block].chain != NO_KEY:
        forget_key(state, block)
        server.num_evicted += 1
        key = int(state.blocks[block].key)
        if server.second_room > 0 and find_block(state, key) == 0:
            put_second(state, key)
    state.blocks[block].holders = 1
    return block


@jit
def hold_block(state: PagedState, block: int) -> None:
    """One more request holds a matched block."""
    if state.blocks[block].holders == 0:
        if state.server[0].num_pinned > 0 and state.pins[block].place != NO_PIN:
            remove_pin(state, block)
            state.server[0].num_free -= 1
        else:
            unfree(state, block)
    state.blocks[block].holders += 1


@jit
def free_seat_blocks(state: PagedState, seat: int, count: int) -> None:
    """One holder less of the blocks of a seat; the last first, so that the beginning of a text is kept longest."""
    blocks, empty = state.blocks, 0
    for place in range(count - 1, -1, -1):
        block = int(state.seat_blocks[seat, place])
        blocks[block].holders -= 1
        if blocks[block].holders == 0:
            if blocks[block].chain == NO_KEY:
                empty += 1
            else:
                free_between(state, int(blocks[0].prev), block, 0)
    place = 0
    while empty > 0:
        block = int(state.seat_blocks[seat, place])
        if blocks[block].holders == 0 and blocks[block].chain == NO_KEY:
            free_between(state, 0, block, int(blocks[0].next))
            empty -= 1
        place += 1


@jit
def pin_seat_blocks(state: PagedState, seat: int, count: int, keep_ns: int) -> None:
    """Keep those blocks of a seat just left that are free and can be matched; the last block goes first."""
    server = state.server[0]
    for place in range(count - 1, -1, -1):
        block = int(state.seat_blocks[seat, place])
        if state.blocks[block].holders == 0 and state.blocks[block].chain != NO_KEY:
            unfree(state, block)
            server.num_free += 1
            add_pin(state, block, server.now_ns + keep_ns)


@jit
def forget_content(state: PagedState) -> None:
    """Forget all keys, pins and the second memory, while nobody holds a block: pinned blocks are used last."""
    server = state.server[0]
    for block in range(len(state.blocks)):
        state.blocks[block].chain = NO_KEY
    for bucket in range(len(state.buckets)):
        state.buckets[bucket] = 0
    order_pins(state)
    while server.num_pinned > 0:
        block = int(state.pins[0].heap)
        remove_pin(state, block)
        server.num_free -= 1
        free_between(state, int(state.blocks[0].prev), block, 0)
    server.num_second = 0
    reset_retention(state)
