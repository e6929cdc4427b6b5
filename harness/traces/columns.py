"""Sessions as a table (CSV): TraceLab's replay columns, a plan one to one.

session_id, arrival_time (ms), round_idx, prefix_len, input_len (new tokens), output_len, tool_wait_after_ms. A row
whose numbers are missing or negative is counted and left out with the rest of its session.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from harness.clock import NS_PER_MS
from harness.errors import SpecError
from harness.inputs import open_unpacked
from harness.plan.model import WaitKind
from harness.traces.base import Progress, TraceFormat, tokens_of
from harness.traces.recording import ReadNotes, RecordedRequest, Recording, hidden_name

COLUMNS = ("arrival_time", "round_idx", "prefix_len", "input_len", "output_len", "tool_wait_after_ms")
MOST = 1e15  # a larger number is a slip, and not exact as a float


class _Row(NamedTuple):
    """The values of ``COLUMNS`` in a row."""

    arrival_ms: int
    round: int
    prefix: int
    new: int
    generate: int
    wait_after_ms: int


def _recordings(files: Iterable[Path], notes: ReadNotes, progress: Progress | None = None) -> Iterator[Recording]:
    """One recording per session id, its rounds in order."""
    for path in files:
        sessions: dict[str, list[_Row]] = {}
        broken: set[str] = set()
        for name, at, row in _rows(path, notes, progress):
            if row is None:
                notes.line_broken("a row without its numbers", at)
                broken.add(name)
            else:
                sessions.setdefault(name, []).append(row)
        for name in sorted(broken & sessions.keys()):
            notes.drop("sessions with a broken row", hidden_name(name))
            del sessions[name]
        first_ms = min((rows[0].arrival_ms for rows in sessions.values()), default=0)
        for name, rows in sessions.items():
            start_ns = (rows[0].arrival_ms - first_ms) * NS_PER_MS
            rows.sort(key=lambda row: row.round)
            yield Recording(hidden_name(name), start_ns, tuple(_requests(rows)))


def _rows(path: Path, notes: ReadNotes, progress: Progress | None) -> Iterator[tuple[str, str, _Row | None]]:
    try:
        with open_unpacked(path) as stream:
            reader = csv.DictReader(io.TextIOWrapper(stream, newline="", encoding="utf-8", errors="replace"))
            columns = set(reader.fieldnames or ())
            key = "session_id" if "session_id" in columns else "id"
            if missing := sorted({*COLUMNS, key} - columns):
                raise SpecError(f"has no column {', '.join(missing)}", where=str(path), hint="See docs/traces.md")
            for cells in reader:
                notes.num_lines += 1
                if progress is not None:
                    progress(sum(len(cell) for cell in cells.values() if isinstance(cell, str)))
                yield cells.get(key) or "", f"line {reader.line_num}", _numbers(cells)
    except (OSError, csv.Error) as error:
        raise SpecError(f"cannot be read as CSV ({error})", where=str(path), hint="Give TraceLab's columns") from error


def _numbers(cells: dict[str, str | None]) -> _Row | None:
    try:
        values = [float(cells.get(column) or "") for column in COLUMNS]
    except ValueError:
        return None
    if not all(abs(value) <= MOST for value in values):  # a NaN fails too
        return None
    row = _Row(*map(round, values))
    is_sound = min(row) >= 0 and tokens_of(row.prefix + row.new) is not None and tokens_of(row.generate) is not None
    return row if is_sound else None


def _requests(rows: list[_Row]) -> Iterator[RecordedRequest]:
    stream_tokens = 0
    wait_ns = 0
    for place, row in enumerate(rows):
        keep = min(row.prefix, stream_tokens)
        prompt, generate = max(row.prefix + row.new, 1), max(row.generate, 1)
        kind: WaitKind = "tool" if place else "none"
        yield RecordedRequest(
            place - 1 if keep else None, (place - 1,) if place else (), wait_ns, kind, prompt, keep, generate
        )
        stream_tokens = prompt + generate
        wait_ns = row.wait_after_ms * NS_PER_MS


FORMAT = TraceFormat("TraceLab's replay columns", _recordings, (), "recorded", suffixes=(".csv",))
