"""What several formats share: rows that are parsed one by one, and calls that a file only repeats."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from harness.model.traces.account import ReadNotes
from harness.model.traces.base import Progress, Record, json_lines
from harness.model.traces.calls import BURST_NS, Log

Parsed = TypeVar("Parsed")


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


def mark_replay(log: Log, closed_ns: Sequence[int], start_ns: int, *, is_fork: bool) -> None:
    """Mark the calls at the start of a file that are older than the file, or were written down again in a burst.

    closed_ns: when each call was complete; start_ns: the file's first row. A file that does not say that it is a fork
    needs two such calls and one that follows; a file that is all burst has no times at all.
    """
    num_burst, before_ns = 0, start_ns
    num_older = next((place for place, moment in enumerate(closed_ns) if moment >= start_ns), len(log))
    while num_burst < len(log) and (num_burst < num_older or closed_ns[num_burst] - before_ns < BURST_NS):
        before_ns = max(closed_ns[num_burst], start_ns)
        num_burst += 1
    for turn in log[:num_burst]:
        turn.is_in_burst = True
    if is_fork or num_older or 2 <= num_burst < len(log):
        for turn in log[:num_burst]:
            turn.is_replay = True
        for turn in log[num_burst : num_burst + 1]:
            turn.submitted_ns = max(turn.submitted_ns, start_ns)
