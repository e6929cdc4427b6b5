"""The tables of an EngineState for one configuration: how large they are, and a fresh server's scalars.

The only place where names of a specification become numbers that compiled functions read.
"""

from __future__ import annotations

import numpy as np

from harness.compiled.records import IntArray, Records, new_records, record_fields, records_of
from harness.engine.config import EngineConfig
from harness.engine.state import EVENT_HEADER, Block, EngineState, Eviction, Place, Prefix, Row, Server, Slot


def new_state(
    config: EngineConfig, num_rows: int, *, with_events: bool = False, evicts_by_last_use: bool = False
) -> EngineState:
    """A fresh server's state with room for ``num_rows`` requests alive at once.

    evicts_by_last_use: whatever the rules say, slots leave by last use (an ablation).
    """
    limit, num_slots = config.max_num_seqs, config.num_usable_slots
    block_tokens = config.block_tokens if config.prefix_caching else config.slot_tokens
    blocks_per_slot = config.region_tokens // block_tokens
    blocks_per_seq, slots_per_seq = config.slot_tokens // block_tokens, config.slots_per_seq
    num_blocks = num_slots * blocks_per_slot if config.has_inner_blocks else 0
    table_size = 1 << max(4, (2 * num_blocks - 1).bit_length())
    event_room = 0
    if with_events:
        # One step allocates once or preempts at most everyone; each eviction logs its blocks and the inactive slots.
        evictions = slots_per_seq * (1 + limit) + limit + 1
        event_room = evictions * (2 * EVENT_HEADER + blocks_per_slot + num_slots + 2)
        event_room += (limit + 2) * (4 * EVENT_HEADER + 3 * blocks_per_seq + 4 * slots_per_seq)
    state = EngineState(
        server=_fresh_server(config, block_tokens, num_blocks, table_size - 1),
        rows=new_records(Row, num_rows),
        places=new_records(Place, limit),
        slots=new_records(Slot, num_slots),
        blocks=new_records(Block, num_blocks + 1),
        prefix=new_records(Prefix, max(blocks_per_seq, slots_per_seq)),
        evicted=new_records(Eviction, num_slots + slots_per_seq + limit),
        buckets=_zeros(table_size),
        seat_blocks=_zeros(limit, blocks_per_seq),
        seat_slots=_zeros(limit, slots_per_seq),
        slot_blocks=_zeros(num_slots, blocks_per_slot),
        events=_zeros(event_room),
    )
    state.server["has_events"][:] = with_events
    if evicts_by_last_use:
        state.server["evicts_by_last_use"][:] = 1
    # As `steps.reset` leaves them.
    state.slots["free"][:] = np.arange(num_slots)
    state.places["free_seat"][:] = np.arange(limit)[::-1]
    return state


def _fresh_server(config: EngineConfig, block_tokens: int, num_blocks: int, table_mask: int) -> Records[Server]:
    rules, num_slots = config.rule_set, config.num_usable_slots
    scalars: dict[str, int] = {
        "limit": config.max_num_seqs,
        "active_limit": config.active_limit,
        "num_slots": num_slots,
        "block_tokens": block_tokens,
        "blocks_per_slot": config.region_tokens // block_tokens,
        "max_model_len": config.slot_tokens,
        "is_full": config.is_full,
        "is_caching": config.prefix_caching,
        "num_blocks": num_blocks,
        "table_mask": table_mask,
        # A flag that the engine's functions ask for bears the same name there.
        **{name: value for name, value in vars(rules).items() if name in record_fields(Server)},
        "wait_head": -1,
        "wait_tail": -1,
        "free_blocks": num_blocks,
        # Blocks never handed out are not linked: they precede every freed block, in ascending order.
        "fresh_block": 1,
        "fifo_head": -1,
        "fifo_tail": -1,
        "free_slots": num_slots,
        "free_seats": config.max_num_seqs,
        "dummy_slot": -1,
    }
    return records_of(Server, dict(scalars), 2)


def _zeros(*shape: int) -> IntArray:
    return np.zeros(shape, dtype=np.int64)
