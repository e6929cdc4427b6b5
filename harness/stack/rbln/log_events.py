"""What one line of a server's log says, typed: one class per line form, fields in the words of the stack.

Every event starts with where it stood: ``end_offset`` (bytes of the stream up to and including its newline),
``created_ns`` (realtime ns of the logging call; None in the default format, whose stamps have no year and 1 s steps)
and ``pid`` (0 when the line does not say). Nothing here reads text.
"""

from __future__ import annotations

from typing import Any, NamedTuple

BLOCK_TOKENS = 128


class BucketEvent(NamedTuple):
    """A decode step: ``num_seqs`` requests ran in compiled batch size ``bucket``."""

    end_offset: int
    created_ns: int | None
    pid: int
    num_seqs: int
    bucket: int


class EqualSteps(NamedTuple):
    """A BucketEvent at each of ``created_ns``: equal steps that a simulator takes at once."""

    created_ns: list[int]
    num_seqs: int
    bucket: int


class AllocEvent(NamedTuple):
    """A request was given KV slots."""

    end_offset: int
    created_ns: int | None
    pid: int
    request_id: str
    slots: tuple[int, ...]
    num_blocks: int


class EvictionEvent(NamedTuple):
    """A slot lost its KV. The line carries no request id and no cause; ``derive`` reads the cause from the order."""

    end_offset: int
    created_ns: int | None
    pid: int
    slot: int
    num_blocks: int
    free_slots_after: int
    inactive_slots_after: tuple[int, ...]


class CacheHitEvent(NamedTuple):
    """KV was reused: ``num_blocks`` inner blocks from ``slots``."""

    end_offset: int
    created_ns: int | None
    pid: int
    request_id: str
    slots: tuple[int, ...]
    num_blocks: int

    @property
    def reused_tokens(self) -> int:
        return BLOCK_TOKENS * self.num_blocks


class CachePartialEvent(NamedTuple):
    """Less KV was reused than the prefix hashes promised (the false-positive size of prefix_cache_hits)."""

    end_offset: int
    created_ns: int | None
    pid: int
    request_id: str
    reused_tokens: int
    hash_hit_tokens: int
    missed_tokens: int


class FreeRequestEvent(NamedTuple):
    """A request let go of its slots: they become evictable, or are evicted at once by a preemption."""

    end_offset: int
    created_ns: int | None
    pid: int
    request_id: str
    is_preemption: bool
    slots: tuple[int, ...]


class MappingRemoveEvent(NamedTuple):
    """A slot's list of inner blocks was deleted (the first half of an eviction)."""

    end_offset: int
    created_ns: int | None
    pid: int
    slot: int
    num_blocks: int


class KvFaultEvent(NamedTuple):
    """A line that the vendor's code writes only when its own bookkeeping is inconsistent."""

    end_offset: int
    created_ns: int | None
    pid: int
    fault: str
    slot: int


class KvCopyFailedEvent(NamedTuple):
    """Reused KV could not be copied: these requests were prefilled in full, while every counter keeps the hit."""

    end_offset: int
    created_ns: int | None
    pid: int
    request_ids: tuple[str, ...]


class IterationEvent(NamedTuple):
    """One engine iteration. ``elapsed_ms`` covers only sampling on this stack: use the counts, never the time.

    is_from_engine: the engine core wrote it in the step's own order. From vLLM 0.30 on the API server does, whose lines
    reach the log before or after what the engine core writes next. is_dummy: a step of another data-parallel rank.
    """

    end_offset: int
    created_ns: int | None
    pid: int
    iteration: int
    context_requests: int
    context_tokens: int
    generation_requests: int
    generation_tokens: int
    elapsed_ms: float
    is_dummy: bool
    is_from_engine: bool


class SettingEvent(NamedTuple):
    """The compiled artifact overruled a setting."""

    end_offset: int
    created_ns: int | None
    pid: int
    setting: str
    before: str
    after: str


class OtherEvent(NamedTuple):
    """A line of the stack that no table is made of: known, so that it does not count as unread. about: which form."""

    end_offset: int
    created_ns: int | None
    pid: int
    about: str


LogEvent = (
    BucketEvent
    | AllocEvent
    | EvictionEvent
    | CacheHitEvent
    | CachePartialEvent
    | FreeRequestEvent
    | MappingRemoveEvent
    | KvFaultEvent
    | KvCopyFailedEvent
    | IterationEvent
    | SettingEvent
    | OtherEvent
)

# What a line's text says, before its place is known: the event class and its own fields.
LineContent = tuple[Any, tuple[Any, ...]]
