"""The message forms of the serving stack's log, as a table, and one event class per form.

A message either is one of these forms from its first byte to its last, with consistent numbers, or it is not read at
all. Events start with the place of their line: ``end_offset`` (bytes of the stream up to and including its newline),
``created_ns`` (realtime ns of the logging call; None in the default format, whose stamps lack the year and have 1 s
steps) and ``pid`` (0 when the line names none). A new line of the stack is a new row of the table.
Source of the forms: vllm 0.22.0 to 0.31.0, vllm-rbln 0.11.1 to 0.12.1a8 (module and line as in the oldest that has it).
"""

from __future__ import annotations

import re
from collections.abc import Callable
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
    """A slot lost its KV. The line has no request id and no cause; ``derive`` infers the cause from the order."""

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
    """A request freed its slots: they become evictable, or are evicted at once by a preemption."""

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
    """A line that the vendor's code writes only when its bookkeeping is inconsistent."""

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
    """An engine iteration. ``elapsed_ms`` covers only sampling on this stack: use the counts, never the time.

    is_from_engine: written by the engine core, in the order of its steps. From vLLM 0.30 on the API server writes the
    line, which may come before or after the engine core's next lines. is_dummy: a step of another data-parallel rank.
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
    """A known line that no table uses, so that it does not count as unread. about: its form."""

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

# A line's content without its place: the event class and its other fields.
LineContent = tuple[Any, tuple[Any, ...]]


# Python's own rendering of a list of ints; a torn list lacks its last bracket.
_LIST = rb"(\[(?:\d+(?:, \d+)*)?\])"
_NESTED = rb"(\[(?:\[(?:\d+(?:, \d+)*)?\](?:, )?)*\])"
_PERCENT = rb"\d+\.\d%"
_QUOTED = re.compile(rb"'([^']*)'")
_ITERATION = (
    rb"Iteration\((\d+)\): (\d+) context requests, (\d+) context tokens, (\d+) generation requests, "
    rb"(\d+) generation tokens, iteration elapsed time: (\d+\.\d\d) ms( \(dummy\))?"
)


class LineForm(NamedTuple):
    """A message form. ``build`` returns the event's other fields, or None when its numbers are inconsistent."""

    event: Any
    pattern: re.Pattern[bytes]
    build: Callable[[tuple[bytes, ...]], tuple[Any, ...] | None]


def _ids(text: bytes) -> tuple[int, ...]:
    inner = text[1:-1]
    return tuple(map(int, inner.split(b", "))) if inner else ()


def _count(text: bytes) -> int:
    """How many numbers a flat or nested list has, without converting them."""
    return text.count(b",") + 1 if text[1:2].isdigit() or text[2:3].isdigit() else 0


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "backslashreplace")


def _slots_and_blocks(groups: tuple[bytes, ...]) -> tuple[Any, ...] | None:
    request_id, slot_count, slots_text, block_count, blocks_text = groups
    slots, num_blocks = _ids(slots_text), int(block_count)
    if len(slots) != int(slot_count) or _count(blocks_text) != num_blocks:
        return None
    return _text(request_id), slots, num_blocks


def _eviction(groups: tuple[bytes, ...]) -> tuple[Any, ...] | None:
    slot, num_blocks, free_after, inactive = groups
    return int(slot), int(num_blocks), int(free_after), _ids(inactive)


def _partial(groups: tuple[bytes, ...]) -> tuple[Any, ...] | None:
    request_id, reused, hash_hit, missed = groups
    numbers = int(reused), int(hash_hit), int(missed)
    return (_text(request_id), *numbers) if numbers[0] + numbers[2] == numbers[1] else None


def _free(groups: tuple[bytes, ...]) -> tuple[Any, ...] | None:
    request_id, is_preemption, slots = groups
    return _text(request_id), is_preemption == b"True", _ids(slots)


def _mapping_remove(groups: tuple[bytes, ...]) -> tuple[Any, ...] | None:
    slot, num_blocks, blocks = groups
    return (int(slot), int(num_blocks)) if _count(blocks) == int(num_blocks) else None


def _mapping_search(groups: tuple[bytes, ...]) -> tuple[Any, ...] | None:
    size, segment = groups
    return ("mapping search",) if _count(segment) == int(size) else None


def _other(about: str) -> Callable[[tuple[bytes, ...]], tuple[Any, ...]]:
    return lambda _groups: (about,)


def _bucket(groups: tuple[bytes, ...]) -> tuple[Any, ...] | None:
    num_seqs, bucket = int(groups[0]), int(groups[1])
    # A bucket below the batch cannot be: such a line was cut inside its last number.
    return (num_seqs, bucket) if 0 < num_seqs <= bucket else None


def _iteration(groups: tuple[bytes, ...], *, is_from_engine: bool) -> tuple[Any, ...] | None:
    return (*map(int, groups[:5]), float(groups[5]), bool(groups[6]), is_from_engine)


def _engine_iteration(groups: tuple[bytes, ...]) -> tuple[Any, ...] | None:
    return _iteration(groups, is_from_engine=True)


def _server_iteration(groups: tuple[bytes, ...]) -> tuple[Any, ...] | None:
    return _iteration(groups, is_from_engine=False)


def _failed_copy(groups: tuple[bytes, ...]) -> tuple[Any, ...] | None:
    return (tuple(_text(one) for one in _QUOTED.findall(groups[0])),)


def _texts(groups: tuple[bytes, ...]) -> tuple[Any, ...] | None:
    return tuple(map(_text, groups))


def _fault(groups: tuple[bytes, ...]) -> tuple[Any, ...] | None:
    return _text(groups[0]), int(groups[1])


def _form(event: Any, pattern: bytes, build: Callable[[tuple[bytes, ...]], tuple[Any, ...] | None]) -> LineForm:
    # Nine digits: every count fits the tables' 32 bits, and a damaged line with thousands of them is no number.
    return LineForm(event, re.compile(pattern.replace(rb"\d+", rb"\d{1,9}")), build)


# Bytes that open a message of ours -> its forms. A message with such an opening and no matching form is "unread".
FORMS: dict[bytes, tuple[LineForm, ...]] = {
    # Observation patch in models/optimum/model_base.py, preprocess_for_decoder.
    b"[BUCKET] ": (_form(BucketEvent, rb"\[BUCKET\] request_nums=(\d+) padded_batch_size=(\d+)", _bucket),),
    # prefix_cache_manager/optimum_prefix_cache_manager.py:308
    b"[PFX] [ALLOC]": (
        _form(
            AllocEvent,
            rb"\[PFX\] \[ALLOC\] REQUEST=(.+) \| OB_COUNT=(\d+) OB=" + _LIST + rb" \| IB_COUNT=(\d+) IB=" + _LIST,
            _slots_and_blocks,
        ),
    ),
    # :361
    b"[PFX] [EVICTION]": (
        _form(
            EvictionEvent,
            rb"\[PFX\] \[EVICTION\] OB=(\d+) \| IB_COUNT=(\d+) \| FREE_BLOCKS_AFTER=(\d+) \| INACTIVE_MAPPINGS_AFTER="
            + _LIST,
            _eviction,
        ),
    ),
    # :172; IB is a list with one list of inner blocks per slot.
    b"[PFX] [CACHE-HIT]": (
        _form(
            CacheHitEvent,
            rb"\[PFX\] \[CACHE-HIT\] REQUEST=(.+) \| OB_COUNT=(\d+) OB=" + _LIST + rb" \| IB_COUNT=(\d+) IB=" + _NESTED,
            _slots_and_blocks,
        ),
    ),
    # :150
    b"[PFX] [CACHE-PARTIAL]": (
        _form(
            CachePartialEvent,
            rb"\[PFX\] \[CACHE-PARTIAL\] REQUEST=(.+) \| REUSED=(\d+)/(\d+) tokens \("
            + _PERCENT
            + rb"\) \| MISSED=(\d+) tokens \("
            + _PERCENT
            + rb"\) \| REASON=partial_cache_miss",
            _partial,
        ),
    ),
    # :407
    b"[PFX] [FREE-REQUEST]": (
        _form(
            FreeRequestEvent,
            rb"\[PFX\] \[FREE-REQUEST\] REQUEST=(.+) \| PREEMPTION=(True|False) \| OUTER_BLOCKS=" + _LIST,
            _free,
        ),
    ),
    # optimum_block_mapping_manager.py:106 and :176
    b"[PFX] [MAPPING-REMOVE]": (
        _form(
            MappingRemoveEvent,
            rb"\[PFX\] \[MAPPING-REMOVE\] OB=(\d+) \| IB_COUNT=(\d+) IB=" + _LIST,
            _mapping_remove,
        ),
    ),
    b"[PFX] [MAPPING-SEARCH]": (
        _form(
            OtherEvent,
            rb"\[PFX\] \[MAPPING-SEARCH\] QUERY_IB=-?\d+ \| SEGMENT_SIZE=(\d+) SEGMENT="
            + _LIST
            + rb" \| MATCHED_OB=(?:\d+|None)",
            _mapping_search,
        ),
    ),
    # optimum_prefix_cache_manager.py:97 and :375
    b"[PFX] [DEALLOCATE-WARNING]": (
        _form(KvFaultEvent, rb"\[PFX\] \[(DEALLOCATE-WARNING)\] BLOCK=(\d+) \| REASON=unallocated_block", _fault),
    ),
    b"[PFX] [EVICTION-ERROR]": (
        _form(
            KvFaultEvent,
            rb"\[PFX\] \[(EVICTION-ERROR)\] OB=(\d+) \| REASON=block_not_found_in_allocator",
            _fault,
        ),
    ),
    # optimum_scheduler.py:674, optimum_model_runner.py:638 and :845
    b"Request ": (
        _form(
            OtherEvent,
            rb"Request (.+) is preempted\. Freed block\(s\): \[[-\d, ]*\] Already generated tokens: (\d+)",
            _other("preempted"),
        ),
        _form(
            OtherEvent,
            rb"Request (.+) is now scheduled\. Prompt tokens: (\d+), Already generated tokens: (\d+), "
            rb"Allocated block\(s\): [\[(][-\d, \[\]()]*[\])]",
            _other("scheduled"),
        ),
        _form(
            OtherEvent,
            rb"Request (.+) is finished\. Prompt tokens: (\d+), Generated tokens: (\d+), "
            rb"Freed block\(s\): [\[(][-\d, \[\]()]*[\])]",
            _other("finished"),
        ),
    ),
    # models/optimum/model_base.py:452
    b"Successfully copied KV cache ": (
        _form(OtherEvent, rb"Successfully copied KV cache from block (\d+) to block (\d+)", _other("KV copied")),
    ),
    # v1/worker/optimum_model_runner.py:481 of 0.12.0; a traceback follows on lines of its own
    b"Copying prefix-cached KV failed ": (
        _form(
            KvCopyFailedEvent,
            rb"Copying prefix-cached KV failed for request\(s\) (\['[^']+'(?:, '[^']+')*\])\. "
            rb"Falling back to a full prefill without prefix-cache reuse\.",
            _failed_copy,
        ),
    ),
    # vllm/v1/engine/core.py:407, to vLLM 0.24
    b"Iteration(": (_form(IterationEvent, _ITERATION, _engine_iteration),),
    # vllm/v1/metrics/loggers.py:271; the iteration line from vLLM 0.30 on, :185
    b"Engine ": (
        _form(
            IterationEvent,
            rb"Engine \d+: "
            + _ITERATION
            + rb", [A-Z]+ KV cache usage: "
            + _PERCENT
            + rb"(?:, encoder inputs: \d+, encoder output embeddings: \d+)?",
            _server_iteration,
        ),
        _form(
            OtherEvent,
            rb"Engine \d+: Avg prompt throughput: [\d.]+ tokens/s, Avg generation throughput: [\d.]+ tokens/s, "
            rb"Running: (\d+) reqs, Waiting: (\d+) reqs, (?:Deferred: \d+ reqs, )?(?:Preemptions: (\d+), )?"
            rb"[A-Z]+ KV cache usage: (\d+\.\d)%(?:, Prefix cache hit rate: (\d+\.\d)%)?"
            rb"(?:, (?:Corrupted: \d+ reqs|[A-Za-z ]+ rate: \d+\.\d%))*",
            _other("engine statistics"),
        ),
    ),
    # utils/optimum/converter/from_optimum.py:87
    b"Updating ": (_form(SettingEvent, rb"Updating ([\w.]+) from (\S+) to (\S+) based on rbln_config\.json", _texts),),
    # vllm, with --enable-log-requests
    b"Received request ": (
        _form(OtherEvent, rb"Received request (\S+): params: .*, lora_request: .*\.", _other("request received")),
    ),
    b"Added request ": (_form(OtherEvent, rb"Added request (\S+)\.", _other("request added")),),
}

# Openings that other programs' lines share, each with a pattern that only lines of the stack match. Without a match the
# line is foreign, not unread.
AMBIGUOUS_OPENINGS = {
    b"Request ": re.compile(rb"Request \S+ is (?:preempted\. |now scheduled\. |finished\. )"),
    b"Engine ": re.compile(rb"Engine \d+: (?:Avg prompt throughput|Iteration\()"),
    b"Updating ": re.compile(rb"Updating .* based on rbln_config\.json"),
    b"Received request ": re.compile(rb"Received request \S+: params: "),
    b"Added request ": None,
}


def looks_needed(message: bytes) -> bool:
    """Whether a message without a fitting form starts like a needed form, so that it must be reported."""
    opening = opening_of(message)
    if opening is None:
        return False
    hint = AMBIGUOUS_OPENINGS.get(opening)
    return opening not in AMBIGUOUS_OPENINGS or (hint is not None and hint.match(message) is not None)


def opening_of(message: bytes) -> bytes | None:
    """The key of FORMS that ``message`` starts with; an unknown [PFX] kind gives ``[PFX] ``; None for foreign text."""
    if message.startswith(b"[PFX] ["):
        opening = message[: message.find(b"]", 7) + 1]
        return opening if opening in FORMS else b"[PFX] "
    for opening in _BY_FIRST_BYTE.get(message[:1], ()):
        if message.startswith(opening):
            return opening
    return None


def _by_first_byte() -> dict[bytes, tuple[bytes, ...]]:
    others = [opening for opening in FORMS if not opening.startswith(b"[PFX]")]
    return {first: tuple(o for o in others if o[:1] == first) for first in {o[:1] for o in others}}


_BY_FIRST_BYTE = _by_first_byte()


def read_message(message: bytes) -> LineContent | None:
    """The event class and fields of a whole message; None when it is not exactly one of the forms."""
    for event, pattern, build in FORMS.get(opening_of(message) or b"", ()):
        if match := pattern.fullmatch(message):
            fields = build(match.groups())
            return None if fields is None else (event, fields)
    return None
