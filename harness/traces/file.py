"""Traces in the middle form as files: a header line, then one JSON line per recording; what ``trace import`` writes.

The header says where the numbers come from, what was dropped and how the recordings are meant to arrive; the file is
whole or absent.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from harness.errors import PlanError, SpecError
from harness.plan.files import write_atomic
from harness.plan.model import WAIT_KINDS
from harness.shipped import find_shipped
from harness.traces.form import RecordedRequest, Recording, check_recording

FORMAT = "harness-trace/1"
COLUMNS = ("base", "after", "wait_ns", "wait_kind", "prompt_tokens", "keep_tokens", "generate_tokens")
Arrivals = Literal["together", "recorded"]


@dataclass(frozen=True, slots=True)
class TraceHead:
    """What a trace file says of itself. block_tokens: size of the named blocks, 0 where there are none.

    dropped, broken: how many of what the readers left out; labels: what a reader had to assume.
    """

    name: str
    source_format: str
    arrivals: Arrivals
    block_tokens: int
    dropped: dict[str, int]
    broken: dict[str, int]
    labels: tuple[str, ...]


_HEAD = TypeAdapter(TraceHead)


@dataclass(frozen=True, slots=True)
class TraceFile:
    """A whole trace in memory. sha256: of the file's bytes."""

    head: TraceHead
    recordings: tuple[Recording, ...]
    sha256: str

    @property
    def num_requests(self) -> int:
        return sum(len(recording.requests) for recording in self.recordings)


def write_trace(path: Path, head: TraceHead, recordings: Iterable[Recording]) -> Path:
    """Write the file whole or not at all; raises RecordsError when the disk refuses."""
    return write_atomic(path, _lines(head, recordings), what="the trace")


def _lines(head: TraceHead, recordings: Iterable[Recording]) -> Iterator[bytes]:
    yield _line(
        {
            "format": FORMAT,
            **asdict(head),
            "dropped": dict(sorted(head.dropped.items())),
            "broken": dict(sorted(head.broken.items())),
            "labels": sorted(head.labels),
            "requests": list(COLUMNS),
        }
    )
    for recording in recordings:
        record: dict[str, Any] = {"recording": recording.name, "start_ns": recording.start_ns}
        record["requests"] = [_row(one) for one in recording.requests]
        if any(one.blocks for one in recording.requests):
            record["blocks"] = [one.blocks for one in recording.requests]
        aborts = [(place, one.abort_after_ns, one.abort_after_tokens) for place, one in enumerate(recording.requests)]
        if left := [one for one in aborts if one[1] or one[2]]:
            record["aborts"] = left
        yield _line(record)


def _row(one: RecordedRequest) -> list[Any]:
    lengths = (one.prompt_tokens, one.keep_tokens, one.generate_tokens)
    return [-1 if one.base is None else one.base, one.after, one.wait_ns, WAIT_KINDS.index(one.wait_kind), *lengths]


def _line(record: dict[str, Any]) -> bytes:
    return json.dumps(record, separators=(",", ":")).encode() + b"\n"


def load_trace(name_or_path: str) -> TraceFile:
    """A shipped trace by its name, or a user's own by its path.

    Raises SpecError when there is none, PlanError for a file that was edited or cut off.
    """
    return read_trace(find_shipped("traces", name_or_path, what="trace"))


def read_trace(path: Path) -> TraceFile:
    """The trace in a file that ``write_trace`` wrote."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise SpecError(f"cannot be read ({error.strerror})", where=str(path), hint="Check the path") from error
    lines = content.splitlines()
    head = _head(lines[0] if lines else b"", path)
    try:
        if not content.endswith(b"\n"):
            raise ValueError("its last line is cut off")
        recordings = tuple(_recording(json.loads(line)) for line in lines[1:])
        for recording in recordings:
            check_recording(recording)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError) as error:
        raise PlanError(f"is damaged: {error}", where=str(path), hint="Import the trace again") from error
    if not recordings:
        raise PlanError("holds no recording", where=str(path), hint="Import the trace again")
    return TraceFile(head, recordings, hashlib.sha256(content).hexdigest())


def _head(line: bytes, path: Path) -> TraceHead:
    try:
        record: Any = json.loads(line)
        if record["format"] != FORMAT:
            raise ValueError(record["format"])
        return _HEAD.validate_python({field.name: record[field.name] for field in fields(TraceHead)})
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        hint = "Make one of a recording: harness trace import FILE -o TRACE.jsonl"
        raise SpecError(f"is no {FORMAT} file", where=str(path), hint=hint) from error


def _recording(record: dict[str, Any]) -> Recording:
    blocks: list[list[int]] = record.get("blocks") or [[]] * len(record["requests"])
    rows = zip(record["requests"], blocks, strict=True)
    aborts: dict[int, tuple[int, int]] = {
        int(place): (int(ns), int(num)) for place, ns, num in record.get("aborts", ())
    }
    requests = tuple(_request(row, names, *aborts.get(at, (0, 0))) for at, (row, names) in enumerate(rows))
    if not requests:
        raise ValueError("a recording without a request")
    return Recording(str(record["recording"]), int(record["start_ns"]), requests)


def _request(row: list[Any], blocks: list[int], abort_ns: int, abort_tokens: int) -> RecordedRequest:
    base, after, wait_ns, kind, prompt, keep, generate = row
    if not all(type(number) is int for number in (base, *after, wait_ns, kind, prompt, keep, generate, *blocks)):
        raise ValueError(f"{row} is not [{', '.join(COLUMNS)}]")
    base_or_none = None if base < 0 else base
    lengths, left = (prompt, keep, generate, tuple(blocks)), (abort_ns, abort_tokens)
    return RecordedRequest(base_or_none, tuple(after), wait_ns, WAIT_KINDS[kind], *lengths, *left)
