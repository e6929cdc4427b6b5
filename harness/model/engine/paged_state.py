"""The tables of a server with paged KV memory: one PagedState is one server from its start.

It holds no times: the drivers own those.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from harness.compiled.records import IntArray, Records, new_records, record_fields, records_of
from harness.model.engine.config import EngineConfig
from harness.model.engine.state import Queue, new_queues

ROW_SKIPPED = 3
"""Status of a row that waits for a token of a step before its preemption; the others are those of ``state``."""

# Places of ``PagedState.queues``; the first is ``QUEUED`` of ``state``.
SKIPPED = 1
ASIDE = 2

# Block.chain of a block without a key, and of one that is not the first registered under its key.
NO_KEY = -2
NOT_FIRST = -1
NO_PIN = -1
"""PagedPin.place of a block that is not pinned."""


class PagedServer:
    """The scalars: first what the configuration fixes, then what changes, then those of the step being decided.

    num_blocks: with the placeholder. chunk_limit: most tokens of a prompt in a step, 0: as many as fit.
    num_waiting: of all queues. Of those SKIPPED come before those QUEUED; ASIDE: those that this step passes over.
    current: the place of the running step among ``PagedState.steps``; is_ahead: the other one is decided too.
    keep_kv_ns: longest that blocks are pinned. second_room: blocks of the second memory; num_second: of them in use.
    num_drafts: tokens drafted for a request in each decode step; lookahead_tokens: more that its blocks have room for.
    drops_last_match: the last block that is found is computed again. key_lookahead: tokens after a block that its key
    names. draft_slots: of the budget, that a request takes beside its tokens. registers_drafts: accepted drafts can be
    matched when their step is over, else when the next is decided. trims_computed: what lies behind the end counts as
    not computed. never_mixes: a step decodes, or computes a part of one prompt. has_parts: a running request computes a
    part of its prompt in the step being decided.
    num_free: pinned blocks too. now_ns: set by the driver before a step is decided, and before it is over.
    draw_seed, num_draws: of acceptance, where ``PagedState.rates`` has some.
    queries, hits: tokens looked up at admissions and tokens found; those after a preemption apart, as in vLLM.
    num_futile: prompts that gave way to nobody but themselves since the last token.
    """

    limit: int
    active_limit: int
    num_blocks: int
    block_tokens: int
    max_step_tokens: int
    max_model_len: int
    is_caching: int
    is_async: int
    caps_lone_requests: int
    long_prefill_tokens: int
    table_mask: int
    keep_kv_ns: int
    second_room: int
    num_drafts: int
    lookahead_tokens: int
    drops_last_match: int
    key_lookahead: int
    draft_slots: int
    registers_drafts: int
    trims_computed: int
    never_mixes: int

    num_running: int
    num_waiting: int
    free_seats: int
    num_free: int
    num_evicted: int
    current: int
    is_ahead: int
    now_ns: int
    num_pinned: int
    pin_serial: int
    num_second: int
    draw_seed: int
    num_draws: int
    queries: int
    hits: int
    preempted_queries: int
    preempted_hits: int
    num_futile: int

    budget: int
    chunk_limit: int
    has_parts: int
    num_newly_preempted: int
    num_finished: int
    num_first: int


class PagedRow:
    """One request. next, prev: neighbours in its queue. seat: where its blocks stand while it runs.

    output: tokens generated. end_output: with so many it ends. most_output: that it may generate. computed: tokens
    computed, with those of decided steps; in_flight: of these, in steps that have not ended; stale: of these, from
    before a preemption. placeholders: tokens that steps in flight will give at most. registered: blocks that can be
    matched. keep_ns: how long its blocks are pinned when it ends. drafts: tokens drafted for its next step. is_part:
    its prompt was not computed when a step was last decided for it.
    """

    prompt: int
    output: int
    end_output: int
    most_output: int
    computed: int
    in_flight: int
    stale: int
    placeholders: int
    registered: int
    num_blocks: int
    keep_ns: int
    drafts: int
    is_part: int
    was_preempted: int
    status: int
    seat: int
    next: int
    prev: int


class PagedPlace:
    """One place of every list that the limit bounds: rows running, finished, with their first token; free seats."""

    running: int
    finished: int
    first: int
    free_seat: int


class PagedStep:
    """A decided step. context_tokens: of its decodes, attended_tokens: of its parts of prompts, summed.

    draft_tokens: of its decodes, beside a token for each.
    num_loaded: blocks that are loaded from the second memory before it; asked_tokens: tokens that it was asked for.
    """

    num_scheduled: int
    num_decodes: int
    draft_tokens: int
    num_chunk_tokens: int
    context_tokens: int
    attended_tokens: int
    num_preempted: int
    num_admitted: int
    num_loaded: int
    asked_tokens: int


class PagedPart:
    """One place of a step's lists: a row and the tokens that it computes; a row preempted; a row admitted.

    is_unfinished: its prompt is not computed at the end of the step. cached_tokens: of the row admitted. drafts: of its
    tokens; accepted: of these, known when the step is over. is_padded: they only fill its batch, and none is accepted.
    """

    row: int
    tokens: int
    is_unfinished: int
    drafts: int
    accepted: int
    is_padded: int
    preempted: int
    admitted: int
    cached_tokens: int


class PagedBlock:
    """One KV block; block 0 is the placeholder, and both ends of the ring of free blocks.

    next, prev: neighbours among the free blocks, the next to be used first. holders: requests. newer, older: blocks of
    the same key, a ring in the order of registration. chain: next first block of its bucket, 0: none.
    """

    next: int
    prev: int
    holders: int
    key: int
    newer: int
    older: int
    chain: int


class PagedPrefix:
    """A place of the request at the head of the queue: key of its i-th block, and the block that has it."""

    key: int
    hit: int


class PagedPin:
    """The pin of the block of this number: when it ends, its number, and its place in the heap (NO_PIN: none).

    heap: a list of its own: the blocks of the heap, the pin that ends first before all.
    """

    until_ns: int
    serial: int
    place: int
    heap: int


class PagedSecond:
    """A place of the second memory; place 0 is both ends of the ring by use. chain: next of its bucket, 0: none."""

    key: int
    next: int
    prev: int
    chain: int


class PagedState(NamedTuple):
    """All tables of one server.

    server (2,): the live scalars, and those of a fresh server. rows (num_rows,); fresh_row (1,): one that nobody used.
    places (limit,). steps (3,): the running one and the one after it, in turn, and an empty one. parts (4 x limit,):
    lists of the first step, then of the other. blocks (num_blocks,). prefix (blocks of the longest request,). buckets
    (a power of 2,): by key, the first registered block of each key; 0: none. seat_blocks, seat_keys (limit, blocks of
    the longest request): what running requests hold. queues (3,): see ``PagedServer``. pins (num_blocks,), second (its
    blocks + 1,), second_buckets (a power of 2,): empty where the server has neither. rates (drafts,): of 2**32 draws so
    many accept at least the first draft, the first two, and so on; empty: what is accepted is told.
    """

    server: Records[PagedServer]
    rows: Records[PagedRow]
    fresh_row: Records[PagedRow]
    queues: Records[Queue]
    places: Records[PagedPlace]
    steps: Records[PagedStep]
    parts: Records[PagedPart]
    blocks: Records[PagedBlock]
    prefix: Records[PagedPrefix]
    buckets: IntArray
    seat_blocks: IntArray
    seat_keys: IntArray
    pins: Records[PagedPin]
    second: Records[PagedSecond]
    second_buckets: IntArray
    rates: IntArray


def new_paged_state(config: EngineConfig, num_rows: int) -> PagedState:
    """Tables of a server with room for ``num_rows`` requests; ``paged_steps.reset`` makes it a fresh one."""
    limit, longest = config.max_num_seqs, config.blocks_of(config.slot_tokens)
    # Two blocks a bucket: the chains stay short, and a block costs no more than its record and half a word.
    num_buckets = 1 << max(4, (config.num_blocks // 2).bit_length())
    scalars = {
        "limit": limit,
        "active_limit": limit,
        "num_blocks": config.num_blocks,
        "block_tokens": config.block_tokens,
        "max_step_tokens": config.max_num_batched_tokens,
        "max_model_len": config.slot_tokens,
        "is_caching": config.prefix_caching,
        "is_async": config.async_scheduling,
        "caps_lone_requests": config.rule_set.caps_lone_requests,
        "long_prefill_tokens": config.long_prefill_tokens,
        "table_mask": num_buckets - 1,
        "keep_kv_ns": config.keep_kv_ns if config.prefix_caching else 0,
        "second_room": config.offload_blocks if config.prefix_caching else 0,
        # What is decided by how it drafts has the same names there.
        **{name: value for name, value in vars(config.drafts).items() if name in record_fields(PagedServer)},
        "never_mixes": config.rule_set.never_mixes,
        "free_seats": limit,
        "num_free": config.num_blocks - 1,
    }
    return PagedState(
        server=records_of(PagedServer, scalars, 2),
        rows=new_records(PagedRow, num_rows),
        fresh_row=records_of(PagedRow, {"seat": -1}, 1),
        queues=new_queues(3),
        places=new_records(PagedPlace, limit),
        steps=new_records(PagedStep, 3),
        parts=new_records(PagedPart, 4 * limit),
        blocks=new_records(PagedBlock, config.num_blocks),
        prefix=new_records(PagedPrefix, longest),
        buckets=np.zeros(num_buckets, dtype=np.int64),
        seat_blocks=np.zeros((limit, longest), dtype=np.int64),
        seat_keys=np.zeros((limit, longest), dtype=np.int64),
        pins=new_records(PagedPin, config.num_blocks if config.keep_kv_ns else 0),
        second=new_records(PagedSecond, config.offload_blocks + 1 if config.offload_blocks else 0),
        second_buckets=np.zeros(
            1 << max(4, config.offload_blocks.bit_length()) if config.offload_blocks else 0, dtype=np.int64
        ),
        rates=np.array([round(rate * (1 << 32)) for rate in config.drafts.rates], dtype=np.int64),
    )
