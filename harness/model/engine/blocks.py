"""KV blocks of paged memory: who holds them, what they contain, which are used again first; pins, and a second memory.

Free blocks without a key are used first, the latest freed of them before all; the others by last use. A block keeps its
key, and can be matched, until it is used again. Several blocks may have the same key; the first registered is matched.
Source: vLLM 0.30.0, v1/core/block_pool.py.

A pinned block is used again only when no other is free, or when its time is over; then it goes before all others. Of
several the pin that ends first goes first. A pin ends early when a request holds the block. Content of which the last
block is overwritten moves to the second memory, from which later prompts load it; the least recently used goes first.
Both are models of what servers offer under several names; vLLM by itself has neither. Compiled.
"""

from __future__ import annotations

from harness.compiled import always_inline, jit
from harness.compiled.records import Records
from harness.model.engine.paged_state import NO_KEY, NO_PIN, NOT_FIRST, PagedBlock, PagedSecond, PagedState
from harness.model.engine.pools import bucket_of

PIN_FACTOR = 2
"""A pin lasts so many times what a request expects until its session returns."""


@always_inline
def link_between(ring: Records[PagedBlock] | Records[PagedSecond], before: int, place: int, after: int) -> None:
    """A place that is in no ring stands between two neighbours from now on."""
    ring[place].prev = before
    ring[place].next = after
    ring[before].next = place
    ring[after].prev = place


@always_inline
def unlink(ring: Records[PagedBlock] | Records[PagedSecond], place: int) -> None:
    """Take a place out of its ring."""
    after, before = ring[place].next, ring[place].prev
    ring[before].next = after
    ring[after].prev = before


@jit
def reset_retention(state: PagedState) -> None:
    """No pins, and an empty second memory."""
    for block in range(len(state.pins)):
        state.pins[block].place = NO_PIN
    for bucket in range(len(state.second_buckets)):
        state.second_buckets[bucket] = 0
    if len(state.second) > 0:
        state.second[0].next = 0
        state.second[0].prev = 0


@jit
def ends_before(state: PagedState, block: int, other: int) -> bool:
    """Whether the pin of a block ends before that of another; of those that end together the first pinned."""
    ours, theirs = state.pins[block], state.pins[other]
    if ours.until_ns != theirs.until_ns:
        return bool(ours.until_ns < theirs.until_ns)
    return bool(ours.serial < theirs.serial)


@jit
def put_pin(state: PagedState, place: int, block: int) -> None:
    """The pin of a block stands at a place of the heap."""
    state.pins[place].heap = block
    state.pins[block].place = place


@jit
def sift_pin(state: PagedState, place: int, block: int) -> None:
    """Find the place of a block's pin in the heap, from a free place on."""
    size = state.server[0].num_pinned
    while place > 0:
        above = int(state.pins[(place - 1) >> 1].heap)
        if not ends_before(state, block, above):
            break
        put_pin(state, place, above)
        place = (place - 1) >> 1
    while True:
        child = 2 * place + 1
        if child >= size:
            break
        below = int(state.pins[child].heap)
        if child + 1 < size and ends_before(state, int(state.pins[child + 1].heap), below):
            child += 1
            below = int(state.pins[child].heap)
        if not ends_before(state, below, block):
            break
        put_pin(state, place, below)
        place = child
    put_pin(state, place, block)


@jit
def add_pin(state: PagedState, block: int, until_ns: int) -> None:
    """Pin a block that is not pinned."""
    server, pin = state.server[0], state.pins[block]
    pin.until_ns = until_ns
    pin.serial = server.pin_serial
    server.pin_serial += 1
    server.num_pinned += 1
    sift_pin(state, int(server.num_pinned - 1), block)


@jit
def remove_pin(state: PagedState, block: int) -> None:
    """End the pin of a block."""
    server, place = state.server[0], int(state.pins[block].place)
    state.pins[block].place = NO_PIN
    server.num_pinned -= 1
    last = int(state.pins[server.num_pinned].heap)
    if last != block:
        sift_pin(state, place, last)


@jit
def order_pins(state: PagedState) -> None:
    """All pins end at once: in the order in which they were made."""
    server = state.server[0]
    server.num_pinned = 0
    for block in range(len(state.pins)):
        if state.pins[block].place != NO_PIN:
            state.pins[block].until_ns = 0
    for block in range(len(state.pins)):
        if state.pins[block].place != NO_PIN:
            server.num_pinned += 1
            sift_pin(state, int(server.num_pinned - 1), block)


@jit
def next_pinned(state: PagedState) -> int:
    """The pinned block that is used next, its pin ended; 0 where another block goes first."""
    server = state.server[0]
    if server.num_pinned == 0:
        return 0
    block = int(state.pins[0].heap)
    if state.pins[block].until_ns > server.now_ns and state.blocks[0].next != 0:
        return 0
    remove_pin(state, block)
    return block


@jit
def find_second(state: PagedState, key: int) -> int:
    """The place of a key in the second memory; 0: it is not there."""
    place = int(state.second_buckets[bucket_of(key, len(state.second_buckets) - 1)])
    while place != 0 and state.second[place].key != key:
        place = int(state.second[place].chain)
    return place


@jit
def use_second(state: PagedState, place: int) -> None:
    """A linked place of the second memory is used now: it goes last."""
    unlink(state.second, place)
    link_between(state.second, int(state.second[0].prev), place, 0)


@jit
def drop_second(state: PagedState) -> int:
    """Forget the key that was used least recently; returns its place."""
    second = state.second
    place = int(second[0].next)
    unlink(second, place)
    bucket = bucket_of(int(second[place].key), len(state.second_buckets) - 1)
    walk = int(state.second_buckets[bucket])
    if walk == place:
        state.second_buckets[bucket] = second[place].chain
        return place
    while second[walk].chain != place:
        walk = int(second[walk].chain)
    second[walk].chain = second[place].chain
    return place


@jit
def put_second(state: PagedState, key: int) -> None:
    """Keep content of this key in the second memory."""
    server = state.server[0]
    place = find_second(state, key)
    if place != 0:
        use_second(state, place)
        return
    if server.num_second < server.second_room:
        server.num_second += 1
        place = int(server.num_second)
    else:
        place = drop_second(state)
    bucket = bucket_of(key, len(state.second_buckets) - 1)
    state.second[place].key = key
    state.second[place].chain = state.second_buckets[bucket]
    state.second_buckets[bucket] = place
    link_between(state.second, int(state.second[0].prev), place, 0)


@jit
def match_second(state: PagedState, first: int, last: int) -> int:
    """How many keys of ``state.prefix`` from ``first`` on, below ``last``, are in the second memory; used now."""
    for at in range(first, last):
        place = find_second(state, int(state.prefix[at].key))
        if place == 0:
            return at - first
        use_second(state, place)
    return last - first


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
