"""What every reader is built on: a format, and files as streams, of which one line is in memory at a time."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from harness.errors import SpecError
from harness.inputs import open_regular, open_unpacked
from harness.model.spec.base import tomllib
from harness.model.traces.account import Known, ReadNotes
from harness.model.traces.recording import Arrivals, Recording
from harness.model.traces.values import Record, parsed_json

MAX_LINE_BYTES = 64 << 20
TOO_LONG = "longer than 64 MiB"
READ_BYTES = 1 << 20
Progress = Callable[[int], None]
Read = Callable[[Iterable[Path], ReadNotes], Iterator[Recording]]
PARQUET = b"PAR1"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
CURSORS = ("next_cursor", "nextCursor", "next_page_token", "nextPageToken")
ONE_PAGE = "documents that are one page of several, as their cursors say: what is on the others may be missing"


@dataclass(frozen=True, slots=True)
class TraceFormat:
    """One format. keys: sets of keys by which a record is recognised; suffixes: of the files taken from a folder.

    is_special: has keys of another format too, and is tried before it. not_promised: what files of this format may get
    wrong or leave out, and what the reader does then. passed: the types of rows that say nothing of a call, each with
    its reason; known: what rows may say, all else is labelled; held_to: the newest release that was tried.
    """

    description: str
    read: Callable[[Iterable[Path], ReadNotes, Progress | None], Iterator[Recording]]
    not_promised: tuple[str, ...] = ()
    keys: tuple[frozenset[str], ...] = ()
    arrivals: Arrivals = "together"
    block_tokens: int = 0
    suffixes: tuple[str, ...] = (".jsonl", ".jsonl.gz")
    is_special: bool = False
    passed: Mapping[str, str] = field(default_factory=dict[str, str])
    known: Known = field(default_factory=dict[str, Mapping[str, Collection[str]]])
    held_to: str = ""


class TraceLine(NamedTuple):
    """One JSON object. at: its file and line, for notes."""

    path: Path
    at: str
    record: Record


Lines = Iterable[TraceLine]


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
    at most 64 MiB. Other values are counted in ``notes``. Raises SpecError where the file cannot be read to its end.
    """
    with opened(path) as stream:
        first = next((line for line in bounded_lines(stream) if line.strip()), b"")
    is_in_lines = isinstance(parsed_json(first.removeprefix(BYTE_ORDER_MARK)), dict)
    document = None if is_in_lines or first.startswith(PARQUET) else _document(path)
    notes.num_files += 1
    progress = progress or notes.progress
    if first.startswith(PARQUET):
        what, values = "row", _parquet_rows(path)
    elif document is None:
        what, values = "line", _json_lines(path, progress)
    else:
        what, values = "record", enumerate(document if isinstance(document, list) else [document], 1)
    if what != "line":
        progress(path.stat().st_size)
    for number, value in values:
        notes.num_rows += 1
        at = f"{path}, {what} {number}"
        if isinstance(value, dict):
            record = cast("Record", value)
            notes.assume(ONE_PAGE, any(map(record.get, CURSORS)))
            notes.look(record, "line")
            yield TraceLine(path, at, record)
        else:
            notes.row_broken(TOO_LONG if value == TOO_LONG else "no JSON object", at)


def _json_lines(path: Path, progress: Progress) -> Iterator[tuple[int, object]]:
    """The value of each line that is not blank, by its number."""
    with opened(path) as stream:
        for number, line in enumerate(bounded_lines(stream), 1):
            progress(len(line))
            line = line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line
            if line.strip():
                yield number, TOO_LONG if len(line) >= MAX_LINE_BYTES else parsed_json(line)


def _parquet_rows(path: Path) -> Iterator[tuple[int, object]]:
    """The rows of a Parquet file by their number; SpecError where it is none."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        batches = pq.ParquetFile(path).iter_batches(batch_size=64)
        yield from enumerate((row for batch in batches for row in batch.to_pylist()), 1)
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


@lru_cache
def read_tables(path: Path) -> dict[str, Any]:
    """The tables of a reader: types of rows, or names, by what they are to it; or the facts of formats."""
    return tomllib.loads(path.read_text(encoding="utf-8"))


def trace_format(reader: str, name: str, read: Read, **more: Any) -> TraceFormat:
    """A format whose facts stand in ``formats.toml`` beside its reader."""
    facts: dict[str, Any] = read_tables(Path(reader).with_name("formats.toml"))[name] | more
    lists = {fact: tuple(value) for fact, value in facts.items() if isinstance(value, list)}
    facts.update(lists, keys=tuple(map(frozenset, facts.get("keys", ()))))
    return TraceFormat(read=lambda files, notes, _: read(files, notes), **facts)


def by_type(reasons: Mapping[str, Iterable[str]]) -> dict[str, str]:
    """The reason of each type."""
    return {kind: reason for reason, kinds in reasons.items() for kind in kinds}
