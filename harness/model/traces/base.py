"""What every reader is built on: a format, the account of its rows, files as streams, and checked values of JSON.

Every row of a recording is exactly one of ``ROWS``, and every call becomes a request or is dropped with a reason; the
sums are asserted. One line is in memory at a time. A line that is too long, no JSON or no object is counted with its
number and skipped; its text is never shown.
"""

from __future__ import annotations

import hashlib
import re
import zlib
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar, cast

from pydantic_core import from_json

from harness.errors import SpecError
from harness.inputs import open_regular, open_unpacked
from harness.model.traces.recording import DEFAULT_WAITS, MOST_TOKENS, Arrivals, Recording

MAX_LINE_BYTES = 64 << 20
READ_BYTES = 1 << 20
Progress = Callable[[int], None]
Record = dict[str, Any]
Read = Callable[[Iterable[Path], "ReadNotes", "Progress | None"], Iterator[Recording]]
Parsed = TypeVar("Parsed")
PARQUET = b"PAR1"
ROWS_A_BATCH = 64
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
ROWS = ("calls", "parts of calls", "passed over", "broken", "unknown")
# Of more unknown rows than this the waits of a session are unknown.
SHARE_OF_UNKNOWN = 0.01
MOST_TYPES = 20
MOST_DIGITS = 12
# A type's name is shown only where it can be no text of a person.
TYPE_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.:/ -]{0,60}")


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """What the person says of files that do not say it themselves.

    block_tokens: size of a named block, 0 where not given; time_unit_ns: of bare numbers of time, 0 for the format's
    own; waits: a wait distribution, by name or path, for waits that are not known; lengths: whether rows of a
    session count their "whole" prompt or what is "new", "" where not given.
    """

    block_tokens: int = 0
    time_unit_ns: int = 0
    waits: str = DEFAULT_WAITS
    lengths: str = ""


@dataclass
class ReadNotes:
    """The account of a reading: what each row was, what became of each call, and what had to be assumed.

    A row is a line, or a span, step, event or message of a document. passed, broken, unknown: rows by reason, or by
    type; num_more: calls beyond the first that one row holds; dropped: calls by reason; left: files, links between
    sessions, and rows that stand twice (num_twice). stated: (what a file states, what its calls sum to) by label.
    block_tokens, arrivals: set by a reader that finds them in the files rather than in the format.
    A place names a file, so it is shown to the person who gave the files, and stored nowhere.
    """

    options: ReadOptions = field(default_factory=ReadOptions)
    num_files: int = 0
    num_rows: int = 0
    num_calls: int = 0
    num_parts: int = 0
    num_more: int = 0
    num_twice: int = 0
    passed: Counter[str] = field(default_factory=Counter[str])
    broken: Counter[str] = field(default_factory=Counter[str])
    unknown: Counter[str] = field(default_factory=Counter[str])
    dropped: Counter[str] = field(default_factory=Counter[str])
    left: Counter[str] = field(default_factory=Counter[str])
    assumed: Counter[str] = field(default_factory=Counter[str])
    stated: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    first_at: dict[str, str] = field(default_factory=dict[str, str])
    block_tokens: int | None = None
    arrivals: Arrivals | None = None

    def holds(self, num_rows: int) -> None:
        """The row that was read last is a document of so many rows."""
        self.num_rows += num_rows - 1

    def call(self, num_calls: int = 1) -> None:
        """A row is a call, or holds so many."""
        self.num_calls += 1
        self.num_more += num_calls - 1

    def part(self, num_rows: int = 1) -> None:
        """Rows are parts of calls, or what came between two."""
        self.num_parts += num_rows

    def pass_over(self, reason: str, num_rows: int = 1) -> None:
        """Rows are known, and say nothing of a call, or what another row says too."""
        self.passed[reason] += num_rows

    def row_broken(self, reason: str, at: str, *, was_call: bool = False) -> None:
        """A row cannot be read. was_call: it was counted as a call."""
        self.num_calls -= was_call
        self.broken[reason] += 1
        self.first_at.setdefault(reason, at)

    def row_unknown(self, kind: str, at: str) -> None:
        """A row is of a type that the reader does not know."""
        name = kind if TYPE_NAME.fullmatch(kind) else "a type without a plain name"
        name = name if name in self.unknown or len(self.unknown) < MOST_TYPES else "other types"
        self.unknown[name] += 1
        self.first_at.setdefault(name, at)

    def drop(self, reason: str, at: str, count: int = 1) -> None:
        """Calls are left out."""
        self.dropped[reason] += count
        self.first_at.setdefault(reason, at)

    def leave(self, reason: str, at: str, num_rows: int = 0) -> None:
        """A file, a link, a call without a row of its own, or rows that stand twice are left out."""
        self.left[reason] += max(num_rows, 1)
        self.num_twice += num_rows
        self.first_at.setdefault(reason, at)

    def assume(self, what: str, count: int = 1) -> None:
        """Label the trace with ``what``; nothing happens where ``count`` is 0."""
        if count:
            self.assumed[what] += count

    def hold(self, what: str, stated: int, summed: int) -> None:
        """Label a sum that a file states and that its calls do not have; ``what`` says which sum it is."""
        if stated != summed:
            self.assumed[what] += 1
            before = self.stated.get(what, (0, 0))
            self.stated[what] = (before[0] + stated, before[1] + summed)

    def check_release(self, what: str, found: str, held: str) -> None:
        """Label rows of a release that is newer than the one that the reader was held to."""
        if _release(found) > _release(held):
            self.assume(f"rows of {what} {found[:20]}: newer than {held}, which this reader was held to")

    def take_over(self, other: ReadNotes) -> None:
        """Add what another reading counted."""
        for name in ("num_files", "num_rows", "num_calls", "num_parts", "num_more", "num_twice"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("passed", "broken", "unknown", "dropped", "left", "assumed"):
            getattr(self, name).update(getattr(other, name))
        for what, (stated, summed) in other.stated.items():
            before = self.stated.get(what, (0, 0))
            self.stated[what] = (before[0] + stated, before[1] + summed)
        self.first_at = {**other.first_at, **self.first_at}

    @property
    def rows(self) -> dict[str, int]:
        """How many rows were each of ``ROWS``."""
        rest = (self.passed.total() + self.num_twice, self.broken.total(), self.unknown.total())
        return dict(zip(ROWS, (self.num_calls, self.num_parts, *rest), strict=True))

    def check(self, num_requests: int) -> None:
        """Assert that every row was counted once, and that every call is a request or dropped."""
        if not any(self.rows.values()):
            # The reader of another package, which counts nothing.
            return
        assert sum(self.rows.values()) == self.num_rows, (self.rows, self.num_rows)
        assert self.num_calls + self.num_more == num_requests + self.dropped.total(), (num_requests, self)

    @property
    def labels(self) -> tuple[str, ...]:
        """What was assumed or not known, each with how often."""
        found = {what: f"{count} x {what}{self._sums(what)}" for what, count in self.assumed.items()}
        unknown = (f"{count} x rows of the unknown type {kind!r}" for kind, count in sorted(self.unknown.items()))
        return (*(found[what] for what in sorted(found)), *unknown)

    def _sums(self, what: str) -> str:
        stated, summed = self.stated.get(what, (0, 0))
        return f": {stated} stated, {summed} counted" if what in self.stated else ""


def _release(version: str) -> tuple[int, ...]:
    """The numbers that a release begins with; () for any other text."""
    found = re.match(r"v?(\d{1,6}(?:\.\d{1,6}){0,3})", version)
    return tuple(map(int, found[1].split("."))) if found else ()


@dataclass(frozen=True, slots=True)
class TraceFormat:
    """One format. keys: sets of keys by which a record is recognised; suffixes: of the files taken from a folder.

    is_special: has keys of another format too, and is tried before it. not_promised: what files of this format may get
    wrong or leave out, and what the reader does then. passed: the types of rows that say nothing of a call, each with
    its reason; held_to: the newest release, or the revision of the format, that the reader was tried with.
    """

    description: str
    read: Read
    not_promised: tuple[str, ...] = ()
    keys: tuple[frozenset[str], ...] = ()
    arrivals: Arrivals = "together"
    block_tokens: int = 0
    suffixes: tuple[str, ...] = (".jsonl", ".jsonl.gz")
    is_special: bool = False
    passed: Mapping[str, str] = field(default_factory=dict[str, str])
    held_to: str = ""


class TraceLine(NamedTuple):
    """One JSON object. at: its file and line, for notes."""

    at: str
    record: Record


def json_lines(path: Path, notes: ReadNotes, progress: Progress | None = None) -> Iterator[TraceLine]:
    """Every line of a file that is a JSON object; other lines are counted in ``notes``.

    Raises SpecError where the file cannot be read to its end.
    """
    notes.num_files += 1
    with opened(path) as stream:
        for number, line in enumerate(bounded_lines(stream), 1):
            if progress is not None:
                progress(len(line))
            if number == 1:
                line = line.removeprefix(BYTE_ORDER_MARK)
            if not line.strip():
                continue
            notes.num_rows += 1
            at = f"{path}, line {number}"
            record = parsed_json(line)
            if isinstance(record, dict):
                yield TraceLine(at, cast("Record", record))
            else:
                is_long = len(line) >= MAX_LINE_BYTES
                notes.row_broken("longer than 64 MiB" if is_long else "no JSON object", at)


@contextmanager
def opened(path: Path, opener: Callable[[Path], IO[bytes]] = open_unpacked) -> Generator[IO[bytes]]:
    """The content of a file, unpacked by default; SpecError where it cannot be read to its end."""
    try:
        with opener(path) as stream:
            yield stream
    except (OSError, EOFError, zlib.error) as error:
        raise SpecError(f"cannot be read to its end ({error})", where=str(path), hint="Copy it again") from error


def parsed_lines(
    files: Iterable[Path],
    notes: ReadNotes,
    progress: Progress | None,
    parse: Callable[[Record, str], Parsed | None],
    broken: str,
) -> Iterator[tuple[str, Parsed]]:
    """(place, ``parse(record)``) of every line of ``files``: a call, or ``broken`` where that gives None."""
    for path in files:
        for at, record in json_lines(path, notes, progress):
            value = parse(record, at)
            if value is None:
                notes.row_broken(broken, at)
            else:
                notes.call()
                yield at, value


def json_records(path: Path, notes: ReadNotes, progress: Progress | None = None) -> Iterator[TraceLine]:
    """The objects of a file of JSON lines or of Parquet rows, or of one JSON document: itself, or those of an array.

    A file whose first line is no JSON object by itself is read as a document, where it is one of at most 64 MiB.
    """
    with opened(path) as stream:
        first = next((line for line in bounded_lines(stream) if line.strip()), b"")
    if first.startswith(PARQUET):
        yield from _parquet_rows(path, notes, progress)
        return
    document = None if isinstance(parsed_json(first.removeprefix(BYTE_ORDER_MARK)), dict) else _document(path)
    if document is None:
        yield from json_lines(path, notes, progress)
        return
    notes.num_files += 1
    if progress is not None:
        progress(path.stat().st_size)
    for number, record in enumerate(document if isinstance(document, list) else [document], 1):
        notes.num_rows += 1
        if isinstance(record, dict):
            yield TraceLine(f"{path}, record {number}", cast("Record", record))
        else:
            notes.row_broken("no JSON object", f"{path}, record {number}")


def _parquet_rows(path: Path, notes: ReadNotes, progress: Progress | None) -> Iterator[TraceLine]:
    """The rows of a Parquet file as objects; SpecError where it is none."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    notes.num_files += 1
    if progress is not None:
        progress(path.stat().st_size)
    number = 0
    try:
        for batch in pq.ParquetFile(path).iter_batches(batch_size=ROWS_A_BATCH):
            for record in batch.to_pylist():
                number += 1
                notes.num_rows += 1
                yield TraceLine(f"{path}, row {number}", record)
    except (OSError, pa.ArrowException) as error:
        what = f"cannot be read as Parquet ({str(error).splitlines()[0]})"
        raise SpecError(what, where=str(path), hint="Copy it again") from error


def _document(path: Path) -> Record | list[object] | None:
    """The JSON object or array that the whole file is; None where it is neither, or too large for one document."""
    with opened(path) as stream:
        content = stream.read(MAX_LINE_BYTES + 1)
    value = parsed_json(content.removeprefix(BYTE_ORDER_MARK)) if len(content) <= MAX_LINE_BYTES else None
    return cast("Record | list[object]", value) if isinstance(value, (dict, list)) else None


def sha256_of(source: Path) -> str:
    """Hex digest of a file; SpecError when it cannot be read."""
    digest = hashlib.sha256()
    with opened(source, open_regular) as stream:
        while part := stream.read(READ_BYTES):
            digest.update(part)
    return digest.hexdigest()


def bounded_lines(stream: IO[bytes]) -> Iterator[bytes]:
    """Lines cut off after MAX_LINE_BYTES; the rest of a longer line is skipped."""
    while line := stream.readline(MAX_LINE_BYTES):
        yield line
        while len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
            line = stream.readline(MAX_LINE_BYTES)


def parsed_json(line: bytes) -> object:
    """The value of a JSON text; None where it is not JSON."""
    try:
        return from_json(line, allow_inf_nan=False)
    except ValueError:
        return None


def tokens_of(value: object) -> int | None:
    """A number of tokens, also where a text has its digits; None for other values (fractions, negative, absurd)."""
    if isinstance(value, str) and len(value) <= MOST_DIGITS and value.isascii() and value.isdecimal():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= MOST_TOKENS:
        return None
    return int(value) if value == int(value) else None


def counts_of(usage: object, names: Iterable[str]) -> list[int] | None:
    """The counts of a usage object by name, 0 where a name is missing; None where it is empty or holds other values."""
    table = record_of(usage)
    counts = [tokens_of(table.get(name, 0)) for name in names]
    return [count for count in counts if count is not None] if table and None not in counts else None


def seconds_ns(value: object, unit_ns: int = 1_000_000_000) -> int | None:
    """A duration or instant in ``unit_ns`` as ns; None for any other value than a finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or abs(value) > 1e15:
        return None
    return round(value * unit_ns)


def instant_ns(text: object) -> int | None:
    """An ISO 8601 instant as ns since 1970, UTC where it names no zone; None for any other value."""
    if not isinstance(text, str) or len(text) > 64:
        return None
    try:
        moment = datetime.fromisoformat(_six_digits(text.replace("Z", "+00:00")))
    except ValueError:
        return None
    moment = moment if moment.tzinfo is not None else moment.replace(tzinfo=timezone.utc)
    since = moment - EPOCH
    return (since.days * 86_400 + since.seconds) * 1_000_000_000 + since.microseconds * 1_000


def _six_digits(text: str) -> str:
    """Fractions of a second in 3 or 6 digits, which is what Python 3.10 reads."""
    head, dot, tail = text.partition(".")
    if not dot:
        return text
    digits = next((place for place, letter in enumerate(tail) if not letter.isdigit()), len(tail))
    return f"{head}.{tail[:digits][:6].ljust(6, '0')}{tail[digits:]}"


def text_of(record: Record, *path: str) -> str:
    """The string at a path of keys, "" where there is no string."""
    value: object = record
    for key in path:
        value = record_of(value).get(key)
    return value if isinstance(value, str) else ""


def record_of(value: object) -> Record:
    """A JSON object, {} for anything else."""
    return cast("Record", value) if isinstance(value, dict) else {}


def list_of(value: object) -> list[object]:
    """A JSON array, [] for anything else."""
    return cast("list[object]", value) if isinstance(value, list) else []
