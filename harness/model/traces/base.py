"""What every reader is built on: a format, files as streams, and checked values of JSON.

One line is in memory at a time. A line that is too long, no JSON or no object is counted with its number and skipped;
its text is never shown.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from pydantic_core import from_json

from harness.errors import SpecError
from harness.inputs import open_regular, open_unpacked
from harness.model.spec.base import tomllib
from harness.model.traces.account import ReadNotes
from harness.model.traces.recording import MOST_TOKENS, Arrivals, Recording

MAX_LINE_BYTES = 64 << 20
READ_BYTES = 1 << 20
Progress = Callable[[int], None]
Record = dict[str, Any]
Read = Callable[[Iterable[Path], ReadNotes, "Progress | None"], Iterator[Recording]]
PARQUET = b"PAR1"
ROWS_A_BATCH = 64
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
MOST_DIGITS = 12
CHARACTERS_PER_TOKEN = 4
# No answer packs so many characters into a token; the slack is for short answers of one long run, as "=====".
MOST_CHARACTERS_PER_TOKEN = 12
CHARACTERS_OF_SLACK = 24


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


def json_records(path: Path, notes: ReadNotes, progress: Progress | None = None) -> Iterator[TraceLine]:
    """The objects of a file of JSON lines or of Parquet rows, or of one JSON document: itself, or those of an array.

    A file whose first line is no JSON object by itself is read as a document, or as objects of several lines each: of
    at most 64 MiB.
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
    """The JSON object or array that a file is, or its objects of several lines; None for others and too large ones."""
    with opened(path) as stream:
        content = stream.read(MAX_LINE_BYTES + 1)
    content = content.removeprefix(BYTE_ORDER_MARK) if len(content) <= MAX_LINE_BYTES else b""
    value = parsed_json(content)
    return cast("Record | list[object]", value) if isinstance(value, (dict, list)) else _objects(content)


def _objects(content: bytes) -> list[object] | None:
    """JSON objects that stand one after another, then None for a rest that is none; None where the first is none."""
    text, found, place = content.decode("utf-8", "replace").strip(), list[object](), 0
    decoder = json.JSONDecoder(parse_constant=lambda _: None)
    while text.startswith("{", place):
        try:
            value, place = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            break
        found.append(value)
        place = next((at for at in range(place, len(text)) if not text[at].isspace()), len(text))
    return [*found, *([None] if place < len(text) else [])] if found else None


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


def tokens_in(characters: int) -> int:
    """The estimated tokens of so many characters, 4 to a token."""
    return -(-characters // CHARACTERS_PER_TOKEN)


def is_placeholder(tokens: int, characters: int) -> bool:
    """Whether so few tokens cannot be an answer of so many characters."""
    return characters > MOST_CHARACTERS_PER_TOKEN * tokens + CHARACTERS_OF_SLACK


def counts_of(usage: object, names: Iterable[str]) -> list[int] | None:
    """The counts of a usage object by name, 0 where there is none; None where it is empty or holds other values."""
    table = record_of(usage)
    counts = [tokens_of(0 if table.get(name) is None else table[name]) for name in names]
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


@lru_cache
def read_tables(path: Path) -> dict[str, Any]:
    """The tables of a reader: types of rows, or names, by what they are to it; or the facts of formats."""
    return tomllib.loads(path.read_text(encoding="utf-8"))


def trace_format(reader: str, name: str, read: Read, **more: Any) -> TraceFormat:
    """A format whose facts stand in ``formats.toml`` beside its reader."""
    facts: dict[str, Any] = read_tables(Path(reader).with_name("formats.toml"))[name] | more
    lists = {fact: tuple(value) for fact, value in facts.items() if isinstance(value, list)}
    facts.update(lists, keys=tuple(map(frozenset, facts.get("keys", ()))))
    return TraceFormat(read=read, **facts)


def types_of(reader: str) -> dict[str, dict[str, str]]:
    """The tables in the file beside a reader, each by type: why it is passed over, or what it is."""
    return {name: by_type(table) for name, table in read_tables(Path(reader).with_suffix(".toml")).items()}


def by_type(reasons: Mapping[str, Iterable[str]]) -> dict[str, str]:
    """The reason of each type."""
    return {kind: reason for reason, kinds in reasons.items() for kind in kinds}


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
