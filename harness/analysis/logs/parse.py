"""One parser for the server's log: bytes in, typed events out, in constant memory; and the METRICS table of scrapes.

Two header formats are read (the vendor's default and the precise one of a logging config), with process prefixes and
colours. Only a line that is whole, from its header to its newline, becomes an event; anything else is counted and never
guessed. KV slots are followed line by line: a line that cannot follow from those before shows that one is lost; nothing
is repaired.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pyarrow as pa

from harness.measure.records import schema
from harness.stacks.rbln.rules import log_grammar as ev
from harness.stacks.rbln.rules.log_grammar import LineContent, LogEvent, looks_needed, read_message
from harness.stacks.vllm.step_log import StepLog

# A longer line is foreign (a traceback dump, a model listing): it is skipped, so that memory stays constant.
MAX_LINE_BYTES = 1 << 20
MAX_CACHED_LINES = 8192
MAX_SAMPLES = 5

_LEVEL = rb"(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)"
# "1751364000.123456 12 DEBUG vllm_rbln.v1.core.x message": ten digits, so that a line cut inside its stamp is no line.
_PRECISE_HEADER = rb"(?:\(\w+ pid=\d+\) )?(\d{10})\.(\d{6}) (\d{1,10}) " + _LEVEL + rb" [A-Za-z_][\w.]* "
# "(EngineCore pid=12) [vllm-rbln] DEBUG 07-01 10:00:00 [core/x.py:308] message"; an overlay changes the file part.
_DEFAULT_HEADER = (
    rb"(?:\(\w+ pid=(\d{1,10})\) )?(?:\[vllm-rbln\] )?" + _LEVEL + rb" \d\d-\d\d \d\d:\d\d:\d\d \[[^\]\s]+:\d+\] "
)
_HEADER = re.compile(_PRECISE_HEADER + rb"|" + _DEFAULT_HEADER)
_ANY_HEADER = re.compile(rb"(?=(" + _HEADER.pattern + rb"))")
_A_LEVEL = re.compile(_LEVEL + rb" ")
_COLOUR = re.compile(rb"\x1b\[[0-9;]*m")
_SURE_MARKERS = (b"[BUCKET] ", b"[PFX] ", b"Iteration(")


# (created_ns, pid) of a line.
LineHeader = tuple[int | None, int]


@dataclass(slots=True)
class ParseCounts:
    """What became of the bytes. lines = events + foreign + unread (an unterminated tail is no line).

    unread: lines of ours that were torn, glued or inconsistent. glued: events found whole behind a torn fragment on the
    same line (those fragments count in ``fragments``). tail_bytes: bytes after the last newline.
    """

    lines: int = 0
    events: int = 0
    foreign: int = 0
    unread: int = 0
    glued: int = 0
    fragments: int = 0
    overlong: int = 0
    tail_bytes: int = 0
    is_tail_ours: bool = False
    unread_samples: list[str] = field(default_factory=list)


def parse_log(chunks: Iterable[bytes], counts: ParseCounts | None = None) -> Iterator[LogEvent]:
    """Events of a log given as byte chunks of any size, in order. Memory does not grow with the log.

    counts: what could not be read, filled in when given. Bytes after the last newline are only counted.
    """
    counts = ParseCounts() if counts is None else counts
    reader = _LineReader(counts)
    pending, offset, is_skipping = b"", 0, False
    for chunk in chunks:
        *lines, pending = (pending + chunk).split(b"\n")
        if is_skipping and lines:
            # The end of an overlong line: it was counted when it was given up.
            offset += len(lines.pop(0)) + 1
            is_skipping = False
        counts.lines += len(lines)
        for line in lines:
            offset += len(line) + 1
            event = reader.read(line, offset)
            if event is not None:
                counts.events += 1
                yield event
        if len(pending) > MAX_LINE_BYTES:
            if not is_skipping:
                counts.lines += 1
                counts.overlong += 1
                counts.foreign += 1
            offset += len(pending)
            pending, is_skipping = b"", True
    counts.tail_bytes = len(pending)
    counts.is_tail_ours = any(marker in pending for marker in _SURE_MARKERS)


class _LineReader:
    """Reads single lines, and keeps what repeats: headers within a second, and decode lines."""

    def __init__(self, counts: ParseCounts) -> None:
        self.counts = counts
        self._headers: dict[bytes, LineHeader] = {}
        self._bucket_lines: dict[bytes, LineContent | None] = {}

    def read(self, line: bytes, end_offset: int) -> LogEvent | None:
        if not _may_be_ours(line):
            self.counts.foreign += 1
            return None
        if b"\x1b" in line:
            line = _COLOUR.sub(b"", line)
        if line.endswith(b"\r"):
            line = line[:-1]
        place, message = self._read_header(line)
        content = None if place is None else self._bucket_lines.get(message) or self._read_message(message)
        if content is None or (_A_LEVEL.search(message) and _HEADER.search(message)):
            # A line torn inside a request id, and the next one glued to it, would read as a line with a strange id.
            place, content = self._read_glued(line)
        if place is None or content is None:
            self._count_unread(line, message)
            return None
        event_class, fields = content
        # What NamedTuple._make does, without its call: this line runs for every step of a run.
        return tuple.__new__(event_class, (end_offset, *place, *fields))

    def _read_header(self, line: bytes) -> tuple[LineHeader | None, bytes]:
        """(created_ns, pid) and the message; (None, b"") when the line does not start with a whole header."""
        position = line.find(b"[BUCKET] ")
        # Default headers repeat within their second, and within a step: the text before the message is read once.
        if position > 0 and (place := self._headers.get(line[:position])):
            return place, line[position:]
        header = _HEADER.match(line)
        if header is None:
            return None, b""
        place = _place(header)
        if place[0] is None and position == header.end():
            if len(self._headers) >= MAX_CACHED_LINES:
                self._headers.clear()
            self._headers[line[:position]] = place
        return place, line[header.end() :]

    def _read_message(self, message: bytes) -> LineContent | None:
        content = read_message(message)
        # Decode lines repeat endlessly ("6 requests in bucket 8"): each distinct one is read once.
        is_repeating = content is not None and message.startswith(b"[BUCKET] ")
        if is_repeating and len(self._bucket_lines) < MAX_CACHED_LINES:
            self._bucket_lines[message] = content
        return content

    def _read_glued(self, line: bytes) -> tuple[LineHeader | None, LineContent | None]:
        """A whole line behind a torn one: the last header on the line, if a whole message follows it."""
        # Overlapping matches: a torn header may swallow the start of the whole one behind it.
        headers = [(match.end(1), -match.start()) for match in _ANY_HEADER.finditer(line)]
        if not headers:
            return None, None
        end, minus_start = max(headers)
        content = read_message(line[end:])
        header = _HEADER.match(line, -minus_start)
        if content is None or header is None:
            return None, None
        self.counts.glued += 1
        self.counts.fragments += any(marker in line[:-minus_start] for marker in _SURE_MARKERS)
        return _place(header), content

    def _count_unread(self, line: bytes, message: bytes) -> None:
        if not (any(marker in line for marker in _SURE_MARKERS) or looks_needed(message)):
            self.counts.foreign += 1
            return
        self.counts.unread += 1
        if len(self.counts.unread_samples) < MAX_SAMPLES:
            self.counts.unread_samples.append(line[:200].decode("utf-8", "backslashreplace"))


def _place(header: re.Match[bytes]) -> LineHeader:
    seconds, micros, pid, prefix_pid = header.groups()
    if seconds is None:
        return None, int(prefix_pid) if prefix_pid else 0
    return int(seconds + micros) * 1_000, int(pid)


def _may_be_ours(line: bytes) -> bool:
    """Most foreign lines are recognised here, without looking at their header."""
    # Written out: a loop over the markers would cost a microsecond a line.
    return (
        b"[BUCKET] " in line
        or b"[PFX] " in line
        or b"Iteration(" in line
        or b"Request " in line
        or b"Engine " in line
        or b"KV cache " in line
        or b"Updating " in line
        or b"d request " in line
        or b"-cached KV " in line
    )


# Samples that are kept as Python values: Arrow's own take a tenth of the memory.
BLOCK_SAMPLES = 1 << 15
HTTP_OK = 200
MOST_KNOWN_NAMES = 16
# Ends of the names of samples that only rise, by the type of their family. A sum may fall.
RISING = {"counter": ("_total",), "unknown": ("_total",), "histogram": ("_bucket", "_count")}


class SampleNames(NamedTuple):
    """(name, labels) of each sample of a scrape, in its order, and the places of those that only rise."""

    pairs: list[tuple[str, str]]
    rising: list[int]


_known_names: dict[bytes, SampleNames] = {}


class CounterWatch:
    """Notes counters that fell from one scrape to the next, which no counter of one process does.

    num_fallen: how often; first: the first of them, in words.
    """

    def __init__(self) -> None:
        self.num_fallen = 0
        self.first = ""
        self._last: dict[tuple[str, str], float] = {}

    def add(self, names: SampleNames, values: Sequence[float]) -> None:
        """The next scrape that could be read."""
        for place in names.rising:
            pair, value = names.pairs[place], values[place]
            if value < self._last.get(pair, value):
                self.num_fallen += 1
                self.first = self.first or f"{pair[0]}{{{pair[1]}}} fell from {self._last[pair]:g} to {value:g}"
            self._last[pair] = value


class Scrape(NamedTuple):
    """The samples of a server's metrics at an instant of the run's clock. names: of ``values``, in their order."""

    at_ns: int
    reason: str
    names: SampleNames
    values: Sequence[float]


def metrics_table(lines: Iterable[bytes], watch: CounterWatch | None = None) -> tuple[pa.Table, int, int]:
    """(METRICS table, scrapes, scrapes without a readable body) of the lines of the scrapes' file.

    The table's texts are dictionaries; it has its schema's types once it is written. watch: sees each readable scrape.
    """
    return table_of_scrapes(map(_scraped, lines), watch)


def table_of_scrapes(scrapes: Iterable[Scrape | None], watch: CounterWatch | None = None) -> tuple[pa.Table, int, int]:
    """The same of scrapes that were read; None: one without a readable body."""
    columns: dict[str, list[Any]] = {name: [] for name in schema.METRICS.names}
    blocks: list[pa.Table] = []
    num_scrapes = num_failed = 0
    for scrape in scrapes:
        number = num_scrapes
        num_scrapes += 1
        if scrape is None:
            num_failed += 1
            continue
        at_ns, reason, names, values = scrape
        if watch is not None:
            watch.add(names, values)
        same = ([value] * len(values) for value in (number, at_ns, reason))
        both = ([name for name, _ in names.pairs], [labels for _, labels in names.pairs])
        for column, cells in zip(columns.values(), (*same, *both, values), strict=True):
            column.extend(cells)
        if len(columns["value"]) >= BLOCK_SAMPLES:
            blocks.append(_with_shared_texts(columns))
            columns = {name: [] for name in columns}
    return pa.concat_tables([*blocks, _with_shared_texts(columns)]), num_scrapes, num_failed


def _with_shared_texts(columns: Mapping[str, list[Any]]) -> pa.Table:
    """Samples whose names, labels and reasons are kept once: they take a quarter of the memory."""
    table = pa.table(dict(columns), schema=schema.METRICS)
    for place, column in enumerate(schema.METRICS):
        if column.type == pa.string():
            table = table.set_column(place, column.name, table.column(place).dictionary_encode())
    return table


def _scraped(line: bytes) -> Scrape | None:
    """A line of the scrapes' file; None where it cannot be read."""
    try:
        record = json.loads(line)
        if record["status"] != HTTP_OK:
            return None
        names, values = samples_of(record["body"])
        at_ns, reason = int(record["at_ns"]), str(record["reason"])
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None
    return Scrape(at_ns, reason, names, values) if 0 <= at_ns < 1 << 63 and reason.isprintable() else None


def samples_of(body: str) -> tuple[SampleNames, list[float]]:
    """Names and value of every sample. Scrapes of one server differ in values alone: names are read once."""
    # A body may hold bytes that were no UTF-8, kept as lone surrogates: Arrow strings cannot.
    text = body.encode("utf-8", "replace").decode("utf-8")
    lines = [line.rpartition(" ") for line in text.split("\n") if line and not line.startswith("#")]
    heads = "\n".join(head for head, _space, _value in lines)
    comments = "\n".join(line for line in text.split("\n") if line.startswith("#"))
    key = hashlib.sha256(f"{heads}\n{comments}".encode()).digest()
    known = _known_names.get(key)
    # A line without a space has no head, as has no line.
    if known is not None and len(known.pairs) == len(lines):
        return known, [float(value) for _head, _space, value in lines]
    parsed = list(_parsed(text))
    rising = [place for place, sample in enumerate(parsed) if sample[3]]
    names = SampleNames([(name, labels) for name, labels, *_ in parsed], rising)
    if len(parsed) == len(lines) and all(
        _is_value(line[2], sample[2]) for line, sample in zip(lines, parsed, strict=True)
    ):
        if len(_known_names) >= MOST_KNOWN_NAMES:
            _known_names.clear()
        _known_names[key] = names
    return names, [value for _name, _labels, value, _rises in parsed]


def _is_value(text: str, value: float) -> bool:
    """Whether the last word of a line is its value, and no timestamp."""
    try:
        return repr(float(text)) == repr(value)
    except ValueError:
        return False


def _parsed(text: str) -> Iterator[tuple[str, str, float, bool]]:
    """Name, labels and value of every sample, and whether it only rises while its process lives."""
    # Only what derives tables needs it, and it takes a tenth of the start of a command.
    from prometheus_client.parser import text_string_to_metric_families

    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f'{key}="{sample.labels[key]}"' for key in sorted(sample.labels))
            yield sample.name, labels, float(sample.value), sample.name.endswith(RISING.get(family.type, ()))


class SlotWalk:
    """Follows a log. num_contradictions: lines that the lines before rule out; first: the first of them, in words.

    num_prefill_lines: of prefills. num_unprefilled: requests that got slots without the line of their prefill;
    first_unprefilled: the first of them.
    """

    def __init__(self) -> None:
        self.num_contradictions = 0
        self.first = ""
        self.num_prefill_lines = 0
        self.num_unprefilled = 0
        self.first_unprefilled = ""
        self._has_allocations = False
        self._held: dict[str, set[int]] = {}
        self._holder: dict[int, str] = {}
        self._unprefilled: set[str] = set()

    def add(self, event: LogEvent | ev.EqualSteps) -> None:
        """The next line."""
        if isinstance(event, ev.KvLogEvent):
            self._add_kv(event)
        elif isinstance(event, ev.BucketEvent | ev.EqualSteps):
            # Every running request holds a slot, and nothing else does.
            if self._has_allocations and event.num_seqs != len(self._held):
                self._contradicted(
                    event, f"a decode step of {event.num_seqs} requests, while {len(self._held)} hold slots"
                )
        elif isinstance(event, ev.PrefillEvent):
            self.num_prefill_lines += 1
            self._unprefilled.discard(event.request_id)
            if self._has_allocations and event.request_id not in self._held:
                self._contradicted(event, f"a prefill of {event.request_id}, which holds no slot")

    def _add_kv(self, event: ev.KvLogEvent) -> None:
        request = event.request_id
        if event.kind == "alloc":
            self._has_allocations = True
            for slot in event.slots:
                if (holder := self._holder.get(slot, request)) != request:
                    self._contradicted(event, f"slot {slot} is given to {request}, while {holder} holds it")
                self._holder[slot] = request
            if request not in self._held:
                self._unprefilled.add(request)
            self._held.setdefault(request, set()).update(event.slots)
        elif event.kind == "eviction" and self._holder.get(event.slots[0]):
            self._contradicted(
                event, f"slot {event.slots[0]} is evicted, while {self._holder[event.slots[0]]} holds it"
            )
        elif event.kind == "free_request":
            self._freed(event)

    def _freed(self, event: ev.KvLogEvent) -> None:
        request, freed = event.request_id, set(event.slots)
        held = self._held.pop(request, set())
        # A request that was never admitted frees nothing.
        if held != freed:
            self._contradicted(event, f"{request} frees slots {sorted(freed)}, and was given {sorted(held)}")
        for slot in held | freed:
            if self._holder.get(slot) == request:
                del self._holder[slot]
        if request in self._unprefilled:
            self._unprefilled.discard(request)
            self.num_unprefilled += 1
            self.first_unprefilled = self.first_unprefilled or request

    def _contradicted(self, event: LogEvent | ev.EqualSteps, what: str) -> None:
        self.num_contradictions += 1
        if not self.first:
            offset = 0 if isinstance(event, ev.EqualSteps) else event.end_offset
            self.first = what + (f" (the line that ends at byte {offset} of server.log)" if offset else "")


@dataclass(slots=True)
class Derived:
    """What a run's raw files say. tables: by name, in their schemas; the rest is what the tables cannot hold.

    log_ns_source: "created" (microsecond stamps of the logging call), "received" (when the harness read the line) or
    "none". steps_source: "bucket-log", "iteration-log" (then b is the smallest configured bucket >= n), "step-log" (the
    pure decode steps of ``step_log``) or "none". step_log_problem: why a step log cannot be read. slots: what
    contradicts itself in the lines about slots. counters: of the scrapes, that fell. parts: of several replicas, what
    the files of each say. in_headers: see ``replicas_in_headers``. other_models: left out
    of the same metrics.
    """

    tables: dict[str, pa.Table]
    counts: ParseCounts
    log_ns_source: str = "none"
    steps_source: str = "none"
    num_bucket_lines: int = 0
    num_iteration_lines: int = 0
    num_kv_lines: int = 0
    num_preemptions: int = 0
    num_scrapes: int = 0
    num_failed_scrapes: int = 0
    faults: tuple[str, ...] = ()
    failed_copies: tuple[str, ...] = ()
    settings: dict[str, str] = field(default_factory=dict[str, str])
    step_log: StepLog | None = None
    step_log_problem: str = ""
    slots: SlotWalk = field(default_factory=SlotWalk)
    counters: CounterWatch = field(default_factory=CounterWatch)
    parts: tuple[Derived, ...] = ()
    in_headers: Mapping[str, int] = field(default_factory=dict[str, int])
    other_models: tuple[str, ...] = ()
