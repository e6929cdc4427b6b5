"""The engine's whole state: tables of named records. One EngineState is one server from its start.

It holds no times: the drivers own those.
"""

from __future__ import annotations

from typing import NamedTuple

from harness.compiled.records import IntArray, Records, records_of

# Costs are summed in femtoseconds before the one rounding to nanoseconds.
FS_PER_NS = 1_000_000

# Kinds of steps.
STEP_IDLE = 0
STEP_PREFILL = 1
STEP_DECODE = 2

# Row.status
ROW_GONE = 0
ROW_WAITING = 1
ROW_RUNNING = 2

# The place of those who wait among the queues.
QUEUED = 0

# Slot.status
SLOT_INACTIVE = 0
SLOT_ACTIVE = 1
SLOT_PENDING = 2

# Block.hashed is 0 or 1; these two only while a look-up moves the blocks that it matched.
HASHED_MATCHED = 2
HASHED_UNLINKED = 3

# The cause of an eviction.
CALLER_NONE = 0
CALLER_REQUEST = 1
CALLER_DUMMY = 2
CALLER_PREEMPT = 3

# Kinds of KV events.
EV_ALLOC = 0
EV_EVICTION = 1
EV_CACHE_HIT = 2
EV_CACHE_PARTIAL = 3
EV_FREE_REQUEST = 4
EV_MAPPING_REMOVE = 5
EV_MAPPING_SEARCH = 6
EV_PREEMPT = 7
EVENT_HEADER = 7
"""Numbers before an event's slots and blocks: kind, row, caller, number of slots, number of block ids, x, y."""


class Server:
    """The scalars: first what the configuration fixes, then what changes, then the particulars of the last step.

    equal_steps: decode steps exactly like the last that can follow each other, it included: until the first finish, or
    until a request needs another inner block. An arrival may end them before.
    """

    limit: int
    active_limit: int
    num_slots: int
    block_tokens: int
    blocks_per_slot: int
    max_model_len: int
    is_full: int
    is_caching: int
    num_blocks: int
    table_mask: int
    has_events: int
    has_inner_blocks: int
    is_index_repaired: int
    evicts_by_last_use: int
    keeps_matched_blocks: int
    sets_slot_aside: int

    num_running: int
    num_waiting: int
    free_blocks: int
    free_block_head: int
    free_block_tail: int
    front_block: int
    fresh_block: int
    free_slots: int
    free_slot_head: int
    fifo_head: int
    fifo_tail: int
    free_seats: int
    pending_releases: int

    kind: int
    num_batch: int
    cached_tokens: int
    computed_tokens: int
    hit_tokens: int
    context_tokens: int
    equal_steps: int
    dummy_slot: int
    num_preempted: int
    num_evicted: int
    num_finished: int
    num_cached_slots: int
    caller: int
    events_len: int


class Row:
    """One request. next, prev: neighbours in the waiting queue. seat: where its memory stands while it runs.

    end_output: with so many tokens generated it is finished. room_output: so many fit the blocks that it holds.
    """

    prompt: int
    output: int
    end_output: int
    room_output: int
    status: int
    seat: int
    next: int
    prev: int
    session: int


class Queue:
    """The first and the last row of a queue; -1: none."""

    head: int
    tail: int


class Place:
    """One place of every list that the limit bounds: rows running, in the batch, preempted, finished; seats.

    free_seat: a stack of seats. num_blocks, num_slots: how much of the seat's blocks and slots is in use.
    """

    running: int
    batch: int
    preempted: int
    finished: int
    free_seat: int
    num_blocks: int
    num_slots: int


class Slot:
    """One KV slot. length: inner blocks it lists. next, prev: neighbours in eviction order. free: ring of free slots.

    session, prompt: whose prompt it holds, for the paper's rules. pending: a stack of slots that wait to be settled.
    """

    length: int
    status: int
    next: int
    prev: int
    row: int
    session: int
    prompt: int
    free: int
    pending: int


class Block:
    """One inner block; id 0 is the vendor's null block. slot: the index.

    older, newer: other holders of its key. chain: next block of the same bucket, when it is its key's newest holder.
    """

    next_free: int
    hashed: int
    key: int
    older: int
    newer: int
    slot: int
    chain: int


class Prefix:
    """A place of the request being admitted: key of its i-th block, block hit there; i-th slot matched, its tokens."""

    key: int
    hit: int
    cached_slot: int
    cached_tokens: int


class Eviction:
    """One slot evicted by the last call, the cause, and the row that had filled it."""

    slot: int
    caller: int
    row: int


class EngineState(NamedTuple):
    """All tables of one server.

    server (2,): the live scalars, and those of a fresh server. rows (num_rows,). queues (1,). places (limit,).
    slots (num_slots,). blocks (num_blocks + 1,). prefix (blocks per request,). evicted: of the last call. buckets (a
    power of two,): by chain key, the first of the chained blocks that are most recent holders; 0: none.
    seat_blocks (limit, blocks per request), seat_slots (limit, slots per request): what running requests hold.
    slot_blocks (num_slots, blocks per slot): inner blocks in order. events: variable-length records.
    """

    server: Records[Server]
    rows: Records[Row]
    queues: Records[Queue]
    places: Records[Place]
    slots: Records[Slot]
    blocks: Records[Block]
    prefix: Records[Prefix]
    evicted: Records[Eviction]
    buckets: IntArray
    seat_blocks: IntArray
    seat_slots: IntArray
    slot_blocks: IntArray
    events: IntArray


def new_queues(count: int) -> Records[Queue]:
    """Queues in which nobody waits."""
    return records_of(Queue, {"head": -1, "tail": -1}, count)
