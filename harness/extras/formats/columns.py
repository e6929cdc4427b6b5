"""Sessions as a table (CSV): TraceLab's replay columns, a plan one to one. ``arrival_time`` is in ms."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from harness.clock import NS_PER_MS
from harness.errors import SpecError
from harness.model.traces.account import ReadNotes
from harness.model.traces.base import opened, trace_format
from harness.model.traces.calls import Call, Log
from harness.model.traces.links import through_calls
from harness.model.traces.values import tokens_of

NO_TOOL = "waits of 0, after rounds without a tool: what a person took then is not in the file"
NO_ARRIVAL = "rounds without an arrival: 0 is taken, as TraceLab's runner does"
COLUMNS = ("arrival_time", "round_idx", "prefix_len", "input_len", "output_len", "tool_wait_after_ms")


class _Row(NamedTuple):
    """The values of ``COLUMNS`` in a row, times in ns."""

    arrival_ns: int
    round: int
    prefix: int
    new: int
    generate: int
    wait_after_ns: int


def csv_logs(files: Iterable[Path], notes: ReadNotes) -> Iterator[Log]:
    """The rounds of each session id of each file, in order."""
    held: set[tuple[str, tuple[_Row, ...]]] = set()
    num_kept = 0
    for place, path in enumerate(files):
        sessions = _sessions(path, notes)
        for name in [name for name, rows in sessions.items() if (name, rows) in held]:
            notes.drop("rows of sessions that another file holds already", str(path), len(sessions.pop(name)))
        num_kept += bool(sessions)
        first_ns = min((rows[0].arrival_ns for rows in sessions.values()), default=0)
        for name, rows in sessions.items():
            yield _calls(rows, f"{place}/{name}" if place else name, rows[0].arrival_ns - first_ns, notes)
        held |= sessions.items()
    is_dated = notes.assumed[NO_ARRIVAL] < notes.num_rows
    notes.assume("sessions whose arrivals the exporter of TraceLab made up", len(held) * is_dated)
    notes.arrivals = "recorded" if is_dated else "together"
    notes.assume("files whose arrivals are counted from the first of each", num_kept * (num_kept > 1))


def _sessions(path: Path, notes: ReadNotes) -> dict[str, tuple[_Row, ...]]:
    """The rounds of each session of a file, in order, each once."""
    sessions: dict[str, dict[int, _Row]] = {}
    broken: dict[str, str] = {}
    for name, at, row in _rows(path, notes):
        rounds = sessions.setdefault(name, {})
        if row is None or rounds.get(row.round, row) != row:
            what = "a second row of a round, with other numbers" if row else "a row without its numbers"
            notes.row_broken(what, at)
            broken.setdefault(name, at)
            continue
        notes.num_calls += 1
        if row.round in rounds:
            notes.drop("rows that came before", at)
        else:
            notes.assume("rows out of order of their round: sorted", bool(rounds) and row.round < max(rounds))
            rounds[row.round] = row
    for name, at in broken.items():
        notes.drop("rows of sessions with a broken row", at, len(sessions.pop(name)))
    for rounds in filter(None, sessions.values()):
        notes.assume("rounds that are missing by their index", max(rounds) + 1 - len(rounds))
    return {name: tuple(rounds[place] for place in sorted(rounds)) for name, rounds in sessions.items() if rounds}


def _rows(path: Path, notes: ReadNotes) -> Iterator[tuple[str, str, _Row | None]]:
    notes.num_files += 1
    try:
        with opened(path) as stream:
            reader = csv.DictReader(io.TextIOWrapper(stream, newline="", encoding="utf-8-sig", errors="replace"))
            columns = set(reader.fieldnames or ())
            key = "session_id" if "session_id" in columns else "id"
            if missing := sorted({*COLUMNS[1:], key} - columns):
                raise SpecError(f"has no column {', '.join(missing)}", where=str(path), hint="docs/guides/traces.md")
            for cells in reader:
                notes.num_rows += 1
                notes.look(cells, "line")
                notes.assume(NO_ARRIVAL, not cells.get(COLUMNS[0]))
                notes.progress(sum(len(cell) for cell in cells.values() if isinstance(cell, str)))
                yield cells.get(key) or "", f"{path}, line {reader.line_num}", _numbers(cells)
    except csv.Error as error:
        raise SpecError(f"cannot be read as CSV ({error})", where=str(path), hint="Give TraceLab's columns") from error


def _numbers(cells: dict[str, str | None]) -> _Row | None:
    try:
        values = [float(cells.get(column) or "0" * (column == COLUMNS[0])) for column in COLUMNS]
    except ValueError:
        return None
    if not all(0 <= value <= 1e15 for value in values):  # a larger one is a slip, and a NaN fails too
        return None
    units = (NS_PER_MS, 1, 1, 1, 1, NS_PER_MS)
    row = _Row._make(round(value * unit) for value, unit in zip(values, units, strict=True))
    return row if tokens_of(row.prefix + row.new) and tokens_of(row.generate) is not None else None


def _calls(rows: Sequence[_Row], session: str, at_ns: int, notes: ReadNotes) -> Log:
    """The calls of a session that begins at ``at_ns``; calls take no time."""
    log: Log = []
    for place, row in enumerate(rows):
        before = rows[place - 1] if place else row._replace(wait_after_ns=0, round=row.round - 1)
        at_ns += before.wait_after_ns
        call = Call(session, at_ns, at_ns, row.prefix + row.new, row.prefix, row.generate, index=place)
        call.wait_ns, call.kind = before.wait_after_ns, "tool" if before.wait_after_ns else "none"
        call.is_prefix_given = call.is_unstated = True
        call.unknown_wait = "a round before theirs is missing" if row.round != before.round + 1 else ""
        notes.assume(NO_TOOL, not (place == 0 or before.wait_after_ns or call.unknown_wait))
        log.append(call)
    return log


FORMAT = trace_format(__file__, "csv", through_calls(csv_logs))
