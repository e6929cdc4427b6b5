"""Sessions as a table (CSV): TraceLab's replay columns, a plan one to one.

session_id, arrival_time (ms), round_idx, prefix_len, input_len (new tokens), output_len, tool_wait_after_ms. A row
whose numbers are missing or negative is counted and left out with the rest of its session.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Iterator
from pathlib import Path

from harness.clock import NS_PER_MS
from harness.errors import SpecError
from harness.inputs import open_unpacked
from harness.plan.model import WaitKind
from harness.traces.base import Progress, TraceFormat, seconds_ns, tokens_of
from harness.traces.recording import ReadNotes, RecordedRequest, Recording, hidden_name

COLUMNS = ("input_len", "output_len", "arrival_time", "round_idx", "tool_wait_after_ms", "prefix_len")
Row = tuple[int, int, int, int, int, int]


def _recordings(files: Iterable[Path], notes: ReadNotes, progress: Progress | None = None) -> Iterator[Recording]:
    """One recording per session id, its rounds in order."""
    for path in files:
        sessions: dict[str, list[Row]] = {}
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
        first = min((rows[0][0] for rows in sessions.values()), default=0)
        for name, rows in sessions.items():
            yield Recording(
                hidden_name(name), (rows[0][0] - first) * NS_PER_MS, tuple(_requests(sorted(rows, key=_round)))
            )


def _round(row: Row) -> int:
    return row[1]


def _rows(path: Path, notes: ReadNotes, progress: Progress | None) -> Iterator[tuple[str, str, Row | None]]:
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


def _numbers(cells: dict[str, str | None]) -> Row | None:
    found: list[int] = []
    for column in ("arrival_time", "round_idx", "prefix_len", "input_len", "output_len", "tool_wait_after_ms"):
        try:
            value = float(cells.get(column) or "")
        except ValueError:
            return None
        number = None if math.isnan(value) else seconds_ns(value, 1)
        if number is None or number < 0:
            return None
        found.append(number)
    if tokens_of(found[2] + found[3]) is None or tokens_of(found[4]) is None:
        return None
    return (found[0], found[1], found[2], found[3], found[4], found[5])


def _requests(rows: list[Row]) -> Iterator[RecordedRequest]:
    stream_tokens = 0
    wait_ns = 0
    for place, (_, _, prefix, new, generate, wait_after_ms) in enumerate(rows):
        keep = min(prefix, stream_tokens)
        prompt = max(prefix + new, 1)
        kind: WaitKind = "tool" if place else "none"
        yield RecordedRequest(
            place - 1 if keep else None, (place - 1,) if place else (), wait_ns, kind, prompt, keep, max(generate, 1)
        )
        stream_tokens = prompt + max(generate, 1)
        wait_ns = wait_after_ms * NS_PER_MS


FORMAT = TraceFormat("TraceLab's replay columns", _recordings, (), "recorded", suffixes=(".csv",))
