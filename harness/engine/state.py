"""The engine's whole state: a tuple of int64 arrays, and the names of their places.

One EngineState is one server from its start; `reset` makes it a fresh server again without allocating. It holds no
times: the drivers own those. Next: ``pools`` (blocks and slots), ``vendor`` and ``paper`` (decisions) change it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from harness.compiled import compiled
from harness.engine.config import EngineConfig

IntArray = npt.NDArray[np.int64]

# Places in EngineState.cfg: constants of the configuration.
C_LIMIT = 0
C_NUM_SLOTS = 1
C_BLOCK_TOKENS = 2
C_BLOCKS_PER_SLOT = 3
C_MAX_MODEL_LEN = 4
C_IS_FULL = 5
C_CACHING = 6
C_NUM_BLOCKS = 7
C_SETS_SLOT_ASIDE = 8
C_TABLE_MASK = 9
C_EVENT_LEVEL = 10
C_HAS_BLOCKS = 11
C_INDEX_REPAIRED = 12
C_LRU_SLOTS = 13
C_ACTIVE_LIMIT = 14
C_KEEPS_MATCHED = 15
NUM_CFG = 16

# Places in EngineState.reg: the scalars that change.
R_NUM_RUNNING = 0
R_NUM_WAITING = 1
R_WAIT_HEAD = 2
R_WAIT_TAIL = 3
R_FREE_BLOCKS = 4
R_FREE_BLOCK_HEAD = 5
R_FREE_BLOCK_TAIL = 6
R_FRESH_BLOCK = 7
R_FREE_SLOTS = 8
R_FREE_SLOT_HEAD = 9
R_FIFO_HEAD = 10
R_FIFO_TAIL = 11
R_FREE_SEATS = 12
R_PENDING_RELEASES = 13
R_EVENTS_LEN = 14
R_NUM_EVICTED = 15
R_EVICTIONS_REQUEST = 16
R_EVICTIONS_DUMMY = 17
R_EVICTIONS_PREEMPT = 18
# The last schedule():
R_KIND = 19
R_BATCH = 20
R_CACHED = 21
R_COMPUTED = 22
R_HIT_TOKENS = 23
R_CONTEXT = 24
R_DUMMY = 25
R_NUM_PREEMPTED = 26
R_NUM_CACHED_SLOTS = 27
R_NUM_FINISHED = 28
R_NUM_HIT_BLOCKS = 29
R_CALLER = 30
R_FRONT_BLOCK = 31
NUM_REG = 32

# Kinds of steps.
STEP_IDLE = 0
STEP_PREFILL = 1
STEP_DECODE = 2

# Columns of EngineState.rows.
Q_PROMPT = 0
Q_MAX_TOKENS = 1
Q_STOP_TOKENS = 2
Q_OUTPUT = 3
Q_COMPUTED = 4
Q_STATUS = 5
Q_SEAT = 6
Q_NEXT = 7
Q_PREV = 8
Q_SESSION = 9
NUM_Q = 10

ROW_GONE = 0
ROW_WAITING = 1
ROW_RUNNING = 2

# Columns of EngineState.slots.
S_LEN = 0
S_ACTIVE = 1
S_NEXT = 2
S_PREV = 3
S_ROW = 4
S_SESSION = 5
S_PROMPT = 6
NUM_S = 7

SLOT_INACTIVE = 0
SLOT_ACTIVE = 1
SLOT_PENDING = 2

# Columns of EngineState.blocks.
B_NEXT_FREE = 0
B_HASHED = 1
B_KEY = 2
B_OLDER = 3
B_NEWER = 4
B_SLOT = 5
NUM_B = 6

# Values of B_HASHED beside 0 and 1, only while a look-up moves what it matched.
HASHED_MATCHED = 2
HASHED_UNLINKED = 3

# Kinds of records in EngineState.events, and who asked for an eviction.
EV_ALLOC = 0
EV_EVICTION = 1
EV_CACHE_HIT = 2
EV_CACHE_PARTIAL = 3
EV_FREE_REQUEST = 4
EV_MAPPING_REMOVE = 5
EV_MAPPING_SEARCH = 6
EV_PREEMPT = 7
# Places in the header of a record, after its kind.
E_ROW = 1
E_CALLER = 2
E_NUM_SLOTS = 3
E_NUM_BLOCKS = 4
E_X = 5
E_Y = 6
EVENT_HEADER = 7

CALLER_NONE = 0
CALLER_REQUEST = 1
CALLER_DUMMY = 2
CALLER_PREEMPT = 3

EVENTS_OFF = 0
EVENTS_ON = 1


class EngineState(NamedTuple):
    """All arrays of one server. Every array is int64 and C-contiguous.

    cfg (NUM_CFG,), reg (NUM_REG,): scalars, see C_* and R_*. running, batch, preempted, finished (limit,): rows.
    rows (num_rows, NUM_Q): one per request. seat_blocks (limit, blocks per request), seat_slots (limit, slots per
    request), seat_fill (limit, 2): inner blocks and slots of running requests and how many; free_seats (limit,).
    slots (num_slots, NUM_S), slot_blocks (num_slots, blocks per slot), free_slots (num_slots,) a ring.
    blocks (num_blocks + 1, NUM_B): id 0 is the vendor's null block. table_key, table_newest (a power of two,):
    open-addressing map from chain key to its most recent holder (0: empty place). hits (blocks per request,): inner
    ids of the last look-up. cached_slots (slots per request, 2): slot and tokens matched. keys (blocks per
    request,): chain keys of the request being admitted. evicted (.., 3): slot, caller, row of the last call.
    events: variable-length records.
    """

    cfg: IntArray
    reg: IntArray
    running: IntArray
    batch: IntArray
    preempted: IntArray
    finished: IntArray
    rows: IntArray
    seat_blocks: IntArray
    seat_slots: IntArray
    seat_fill: IntArray
    free_seats: IntArray
    slots: IntArray
    slot_blocks: IntArray
    free_slots: IntArray
    blocks: IntArray
    table_key: IntArray
    table_newest: IntArray
    hits: IntArray
    cached_slots: IntArray
    keys: IntArray
    evicted: IntArray
    events: IntArray


def new_state(config: EngineConfig, num_rows: int, *, with_events: bool) -> EngineState:
    """A fresh server's state with room for ``num_rows`` requests alive at once."""
    limit, num_slots = config.max_num_seqs, config.num_usable_slots
    block_tokens = config.block_tokens if config.prefix_caching else config.slot_tokens
    blocks_per_slot = config.region_tokens // block_tokens
    blocks_per_seq = config.slot_tokens // block_tokens
    slots_per_seq = config.slots_per_seq
    num_blocks = num_slots * blocks_per_slot if config.has_inner_blocks else 0
    table_size = 1 << max(4, (2 * num_blocks - 1).bit_length())
    most_evictions = num_slots + slots_per_seq + limit
    event_room = 0
    if with_events:
        # One step allocates once or preempts at most everyone; each eviction logs its blocks and the inactive slots.
        evictions = slots_per_seq * (1 + limit) + limit + 1
        event_room = evictions * (2 * EVENT_HEADER + blocks_per_slot + num_slots + 2)
        event_room += (limit + 2) * (4 * EVENT_HEADER + 3 * blocks_per_seq + 4 * slots_per_seq)

    def zeros(*shape: int) -> IntArray:
        return np.zeros(shape, dtype=np.int64)

    cfg = zeros(NUM_CFG)
    cfg[C_LIMIT] = limit
    cfg[C_NUM_SLOTS] = num_slots
    cfg[C_BLOCK_TOKENS] = block_tokens
    cfg[C_BLOCKS_PER_SLOT] = blocks_per_slot
    cfg[C_MAX_MODEL_LEN] = config.slot_tokens
    cfg[C_IS_FULL] = config.is_full
    cfg[C_CACHING] = config.prefix_caching
    cfg[C_NUM_BLOCKS] = num_blocks
    cfg[C_SETS_SLOT_ASIDE] = config.rule_set.sets_slot_aside
    cfg[C_TABLE_MASK] = table_size - 1
    cfg[C_HAS_BLOCKS] = config.has_inner_blocks
    cfg[C_INDEX_REPAIRED] = config.rule_set.is_index_repaired
    cfg[C_LRU_SLOTS] = config.rule_set.evicts_by_last_use
    cfg[C_KEEPS_MATCHED] = config.rule_set.keeps_matched_blocks
    cfg[C_ACTIVE_LIMIT] = config.active_limit
    cfg[C_EVENT_LEVEL] = EVENTS_ON if with_events else EVENTS_OFF
    state = EngineState(
        cfg=cfg,
        reg=zeros(NUM_REG),
        running=zeros(limit),
        batch=zeros(limit),
        preempted=zeros(limit),
        finished=zeros(limit),
        rows=zeros(num_rows, NUM_Q),
        seat_blocks=zeros(limit, blocks_per_seq),
        seat_slots=zeros(limit, slots_per_seq),
        seat_fill=zeros(limit, 2),
        free_seats=zeros(limit),
        slots=zeros(num_slots, NUM_S),
        slot_blocks=zeros(num_slots, blocks_per_slot),
        free_slots=zeros(num_slots),
        blocks=zeros(num_blocks + 1, NUM_B),
        table_key=zeros(table_size),
        table_newest=zeros(table_size),
        hits=zeros(blocks_per_seq),
        cached_slots=zeros(slots_per_seq, 2),
        keys=zeros(blocks_per_seq),
        evicted=zeros(most_evictions, 3),
        events=zeros(event_room),
    )
    reset(state)
    return state


@compiled
def reset(state: EngineState) -> None:
    """Make ``state`` a freshly started server. Rows are left alone: `submit` writes them whole."""
    cfg, reg = state.cfg, state.reg
    for place in range(NUM_REG):
        reg[place] = 0
    reg[R_WAIT_HEAD] = -1
    reg[R_WAIT_TAIL] = -1
    reg[R_FREE_BLOCKS] = cfg[C_NUM_BLOCKS]
    # Blocks never handed out are not linked: they precede every freed block, in ascending order.
    reg[R_FRESH_BLOCK] = 1
    reg[R_FIFO_HEAD] = -1
    reg[R_FIFO_TAIL] = -1
    reg[R_FREE_SLOTS] = cfg[C_NUM_SLOTS]
    reg[R_FREE_SEATS] = cfg[C_LIMIT]
    reg[R_DUMMY] = -1
    for slot in range(cfg[C_NUM_SLOTS]):
        state.free_slots[slot] = slot
        state.slots[slot, S_LEN] = 0
        state.slots[slot, S_ACTIVE] = SLOT_INACTIVE
    for seat in range(cfg[C_LIMIT]):
        state.free_seats[seat] = cfg[C_LIMIT] - 1 - seat
    state.table_newest[:] = 0
