"""The message forms of the serving stack's log, as a table, and the events that they become.

A message either is one of these forms from its first byte to its last, with consistent numbers, or it is not read at
all. Events start with the place of their line: ``end_offset`` (bytes of the stream up to and including its newline),
``created_ns`` (realtime ns of the logging call; None in the default format, whose stamps lack the year and have 1 s
steps) and ``pid`` (0 when the line names none). A new line of the stack is a new row of the table.
Source of the forms: vllm 0.22.0 to 0.31.0, vllm-rbln 0.11.1 to 0.12.1a8 (module and line as in the oldest that has it).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import groupby
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


class KvLogEvent(NamedTuple):
    """What happened to KV slots, in the columns of the kv_events table.

    alloc: a request was given slots. eviction: a slot lost its KV; the line has no request id and no cause, ``derive``
    infers the cause from the order. cache_hit: inner blocks were reused from slots. cache_partial: less KV was reused
    than the prefix hashes promised (the false-positive size of prefix_cache_hits). free_request: a request freed its
    slots, which become evictable, or are evicted at once by a preemption. mapping_remove: a slot's list of inner blocks
    was deleted (the first half of an eviction). copy_failed: see KvCopyFailedEvent. fault: a line that the vendor's
    code writes only when its bookkeeping is inconsistent, with its name.
    """

    end_offset: int
    created_ns: int | None
    pid: int
    kind: str
    request_id: str = ""
    slots: tuple[int, ...] = ()
    num_blocks: int = 0
    caller: str = ""
    reused_tokens: int = 0
    fault: str = ""


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


class PrefillEvent(NamedTuple):
    """The worker took a request for its prefill; again where its KV copy failed, or after a preemption."""

    end_offset: int
    created_ns: int | None
    pid: int
    request_id: str


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


LogEvent = BucketEvent | KvLogEvent | KvCopyFailedEvent | IterationEvent | PrefillEvent | SettingEvent | OtherEvent

# A line's content without its place: the event class and its other fields.
LineContent = tuple[Any, tuple[Any, ...]]


_QUOTED = re.compile(rb"'([^']*)'")
Fields = tuple[Any, ...]


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "backslashreplace")


def _ids(text: bytes) -> tuple[int, ...]:
    inner = text[1:-1]
    return tuple(map(int, inner.split(b", "))) if inner else ()


def _count(text: bytes) -> int:
    """How many numbers a flat or nested list has, without converting them."""
    return text.count(b",") + 1 if text[1:2].isdigit() or text[2:3].isdigit() else 0


# What a form may have between "<" and ">": the pattern, and how its group is read. Nine digits: every count fits the
# tables' 32 bits, and a damaged line with thousands of digits is no number. Lists are Python's own rendering.
_HOLES: dict[str, tuple[str, Callable[[bytes], Any]]] = {
    "int": (r"(\d{1,9})", int),
    "float": (r"(\d{1,9}\.\d\d)", float),
    "text": ("(.+)", _text),
    "word": (r"(\S+)", _text),
    "ids": (r"(\[(?:\d{1,9}(?:, \d{1,9})*)?\])", _ids),
    "list": (r"(\[(?:\d{1,9}(?:, \d{1,9})*)?\])", _count),
    "lists": (r"(\[(?:\[(?:\d{1,9}(?:, \d{1,9})*)?\](?:, )?)*\])", _count),
    "names": (r"(\['[^']+'(?:, '[^']+')*\])", lambda text: tuple(map(_text, _QUOTED.findall(text)))),
    "True|False": ("(True|False)", lambda text: text == b"True"),
    " (dummy)": (r"( \(dummy\))?", bool),
}


class LineForm(NamedTuple):
    """A message form. opening: the bytes that only such messages begin with, or that AMBIGUOUS_OPENINGS lists.

    read: one reader a group of the pattern. fields: the event's own fields from the values, None when the values are
    inconsistent.
    """

    opening: bytes
    event: Any
    pattern: re.Pattern[bytes]
    read: tuple[Callable[[bytes], Any], ...]
    fields: Callable[[Fields], Fields | None]


def _form(
    event: Any, opening: str, rest: str, fields: Callable[[Fields], Fields | None] = lambda values: values
) -> LineForm:
    """A form from its text. A hole that ``_HOLES`` does not name is a pattern whose match is not read."""
    holes = re.findall("<(.*?)>", rest)
    literals = map(re.escape, re.split("<.*?>", opening + rest))
    patterns = (_HOLES[hole][0] if hole in _HOLES else hole for hole in (*holes, ""))
    pattern = "".join(part for pair in zip(literals, patterns, strict=True) for part in pair)
    readers = tuple(_HOLES[hole][1] for hole in holes if hole in _HOLES)
    return LineForm(opening.encode(), event, re.compile(pattern.encode()), readers, fields)


def _other(about: str, opening: str, rest: str) -> LineForm:
    return _form(OtherEvent, opening, rest, lambda _values: (about,))


def _bucket(values: Fields) -> Fields | None:
    num_seqs, bucket = values
    # A bucket below the batch cannot be: such a line was cut inside its last number.
    return values if 0 < num_seqs <= bucket else None


def _kv(kind: str, request_id: str, slots: tuple[int, ...], num_blocks: int = 0, **others: Any) -> Fields:
    """The fields of a KvLogEvent after its place."""
    return KvLogEvent(0, None, 0, kind, request_id, slots, num_blocks, **others)[3:]


def _with_slots(kind: str, values: Fields, tokens_a_block: int = 0) -> Fields | None:
    """Slots and blocks of a request; nothing where a list is not as long as the line says."""
    request_id, num_slots, slots, num_blocks, num_listed = values
    if (len(slots), num_listed) != (num_slots, num_blocks):
        return None
    return _kv(kind, request_id, slots, num_blocks, reused_tokens=tokens_a_block * num_blocks)


def _cache_partial(values: Fields) -> Fields | None:
    request_id, reused, hash_hit, missed = values
    return _kv("cache_partial", request_id, (), reused_tokens=reused) if reused + missed == hash_hit else None


def _free_request(values: Fields) -> Fields:
    request_id, is_preemption, slots = values
    return _kv("free_request", request_id, slots, caller="preempt" if is_preemption else "request")


def _mapping_remove(values: Fields) -> Fields | None:
    slot, num_blocks, num_listed = values
    return _kv("mapping_remove", "", (slot,), num_blocks) if num_listed == num_blocks else None


def _mapping_search(values: Fields) -> Fields | None:
    size, num_listed = values
    return ("mapping search",) if num_listed == size else None


_ITERATION = (
    "Iteration(",
    "<int>): <int> context requests, <int> context tokens, <int> generation requests, <int> generation tokens, "
    "iteration elapsed time: <float> ms< (dummy)>",
)
_USAGE = r"<[A-Z]+> KV cache usage: <\d{1,9}\.\d>%"
_BLOCKS = r"<[\[(][-\d, \[\]()]*[\])]>"
_FORMS = (
    # Observation patch in models/optimum/model_base.py, preprocess_for_decoder.
    _form(BucketEvent, "[BUCKET] ", "request_nums=<int> padded_batch_size=<int>", _bucket),
    # prefix_cache_manager/optimum_prefix_cache_manager.py:308, :361, :172 (one list of inner blocks a slot), :150, :407
    _form(
        KvLogEvent,
        "[PFX] [ALLOC]",
        " REQUEST=<text> | OB_COUNT=<int> OB=<ids> | IB_COUNT=<int> IB=<list>",
        lambda values: _with_slots("alloc", values),
    ),
    _form(
        KvLogEvent,
        "[PFX] [EVICTION]",
        r" OB=<int> | IB_COUNT=<int> | FREE_BLOCKS_AFTER=<\d{1,9}> | "
        r"INACTIVE_MAPPINGS_AFTER=<\[(?:\d{1,9}(?:, \d{1,9})*)?\]>",
        lambda values: _kv("eviction", "", values[:1], values[1]),
    ),
    _form(
        KvLogEvent,
        "[PFX] [CACHE-HIT]",
        " REQUEST=<text> | OB_COUNT=<int> OB=<ids> | IB_COUNT=<int> IB=<lists>",
        lambda values: _with_slots("cache_hit", values, BLOCK_TOKENS),
    ),
    _form(
        KvLogEvent,
        "[PFX] [CACHE-PARTIAL]",
        r" REQUEST=<text> | REUSED=<int>/<int> tokens (<\d{1,9}\.\d>%) | MISSED=<int> tokens (<\d{1,9}\.\d>%) | "
        "REASON=partial_cache_miss",
        _cache_partial,
    ),
    _form(
        KvLogEvent,
        "[PFX] [FREE-REQUEST]",
        " REQUEST=<text> | PREEMPTION=<True|False> | OUTER_BLOCKS=<ids>",
        _free_request,
    ),
    # optimum_block_mapping_manager.py:106 and :176
    _form(KvLogEvent, "[PFX] [MAPPING-REMOVE]", " OB=<int> | IB_COUNT=<int> IB=<list>", _mapping_remove),
    _form(
        OtherEvent,
        "[PFX] [MAPPING-SEARCH]",
        r" QUERY_IB=<-?\d{1,9}> | SEGMENT_SIZE=<int> SEGMENT=<list> | MATCHED_OB=<(?:\d{1,9}|None)>",
        _mapping_search,
    ),
    # optimum_prefix_cache_manager.py:97 and :375
    _form(
        KvLogEvent,
        "[PFX] [DEALLOCATE-WARNING]",
        " BLOCK=<int> | REASON=unallocated_block",
        lambda values: _kv("fault", "", values, fault="DEALLOCATE-WARNING"),
    ),
    _form(
        KvLogEvent,
        "[PFX] [EVICTION-ERROR]",
        " OB=<int> | REASON=block_not_found_in_allocator",
        lambda values: _kv("fault", "", values, fault="EVICTION-ERROR"),
    ),
    # optimum_scheduler.py:674, optimum_model_runner.py:638 and :845
    _other(
        "preempted", "Request ", r"<.+> is preempted. Freed block(s): [<[-\d, ]*>] Already generated tokens: <\d{1,9}>"
    ),
    _form(
        PrefillEvent,
        "Request ",
        r"<text> is now scheduled. Prompt tokens: <\d{1,9}>, Already generated tokens: <\d{1,9}>, "
        f"Allocated block(s): {_BLOCKS}",
    ),
    _other(
        "finished",
        "Request ",
        r"<.+> is finished. Prompt tokens: <\d{1,9}>, Generated tokens: <\d{1,9}>, "
        f"Freed block(s): {_BLOCKS}",
    ),
    # models/optimum/model_base.py:452
    _other("KV copied", "Successfully copied KV cache ", r"from block <\d{1,9}> to block <\d{1,9}>"),
    # v1/worker/optimum_model_runner.py:481 of 0.12.0; a traceback follows on lines of its own
    _form(
        KvCopyFailedEvent,
        "Copying prefix-cached KV failed ",
        "for request(s) <names>. Falling back to a full prefill without prefix-cache reuse.",
    ),
    # vllm/v1/engine/core.py:407, to vLLM 0.24
    _form(IterationEvent, *_ITERATION, lambda values: (*values, True)),
    # vllm/v1/metrics/loggers.py:271; the iteration line from vLLM 0.30 on, :185
    _form(
        IterationEvent,
        "Engine ",
        rf"<\d{{1,9}}>: {''.join(_ITERATION)}, {_USAGE}"
        r"<(?:, encoder inputs: \d{1,9}, encoder output embeddings: \d{1,9})?>",
        lambda values: (*values, False),
    ),
    _other(
        "engine statistics",
        "Engine ",
        r"<\d{1,9}>: Avg prompt throughput: <[\d.]+> tokens/s, Avg generation throughput: <[\d.]+> tokens/s, "
        r"Running: <\d{1,9}> reqs, Waiting: <\d{1,9}> reqs, "
        rf"<(?:Deferred: \d{{1,9}} reqs, )?(?:Preemptions: \d{{1,9}}, )?>{_USAGE}"
        r"<(?:, Prefix cache hit rate: \d{1,9}\.\d%)?>"
        r"<(?:, (?:Corrupted: \d{1,9} reqs|[A-Za-z ]+ rate: \d{1,9}\.\d%))*>",
    ),
    # utils/optimum/converter/from_optimum.py:87
    _form(SettingEvent, "Updating ", "<word> from <word> to <word> based on rbln_config.json"),
    # vllm, with --enable-log-requests
    _other("request received", "Received request ", r"<\S+>: params: <.*>, lora_request: <.*>."),
    _other("request added", "Added request ", r"<\S+>."),
)
FORMS = {opening: tuple(forms) for opening, forms in groupby(_FORMS, lambda form: form.opening)}
"""A message with such an opening that fits none of its forms is "unread"."""

# Openings that other programs' lines share, each with a pattern that only lines of the stack match. Without a match the
# line is foreign, not unread.
AMBIGUOUS_OPENINGS = {
    b"Request ": re.compile(rb"Request \S+ is (?:preempted\. |now scheduled\. |finished\. )"),
    b"Engine ": re.compile(rb"Engine \d+: (?:Avg prompt throughput|Iteration\()"),
    b"Updating ": re.compile(rb"Updating .* based on rbln_config\.json"),
    b"Received request ": re.compile(rb"Received request \S+: params: "),
    b"Added request ": None,
}
_PLAIN_OPENINGS = tuple(opening for opening in FORMS if not opening.startswith(b"[PFX]"))


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
    return next((opening for opening in _PLAIN_OPENINGS if message.startswith(opening)), None)


def read_message(message: bytes) -> LineContent | None:
    """The event class and fields of a whole message; None when it is not exactly one of the forms."""
    for form in FORMS.get(opening_of(message) or b"", ()):
        if match := form.pattern.fullmatch(message):
            fields = form.fields(tuple(read(group) for read, group in zip(form.read, match.groups(), strict=True)))
            return None if fields is None else (form.event, fields)
    return None
