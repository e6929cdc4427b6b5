"""Cuts real logs everywhere: at every byte of one line of each kind, and at many places over the whole log.

A cut may lose the line it goes through, never another one, and never makes an event that the whole log does not have.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise
from typing import TypeAlias

from harness.analysis.logs.parse import ParseCounts, parse_log
from harness.stacks.rbln.rules.log_grammar import KvLogEvent, LogEvent, OtherEvent

NUM_RANDOM_CUTS = 300
Said: TypeAlias = tuple[object, ...]


def events_of(*pieces: bytes) -> list[LogEvent]:
    """What the parser reads in a log that arrives in these pieces."""
    return list(parse_log(pieces, ParseCounts()))


def said(event: LogEvent) -> Said:
    """An event without its place in the file and its process, which stands at the very front of a line."""
    return (type(event).__name__, event.created_ns, *event[3:])


def told(content: bytes) -> list[Said]:
    """What the events of a piece of log say."""
    return [said(event) for event in events_of(content)]


def kind_of(event: LogEvent) -> str:
    """What kind of line an event stands for."""
    if isinstance(event, KvLogEvent):
        return event.kind
    return event.about if isinstance(event, OtherEvent) else type(event).__name__


def one_line_of_each_kind(content: bytes, whole: list[LogEvent]) -> Iterator[tuple[str, int, int]]:
    """(kind, start, end) of the first line of every kind that is followed by another event's line; ``end`` is behind
    its newline."""
    seen: set[str] = set()
    for event in whole[:-1]:
        kind = kind_of(event)
        if kind not in seen:
            seen.add(kind)
            yield kind, content.rfind(b"\n", 0, event.end_offset - 1) + 1, event.end_offset


def assert_no_cut_invents_or_loses(content: bytes) -> dict[str, int]:
    """Cut ``content`` in all these ways; how many cuts were made, by kind of line."""
    whole = events_of(content)
    cuts: dict[str, int] = {}
    for kind, start, end in one_line_of_each_kind(content, whole):
        following = content.find(b"\n", end) + 1
        first = _line_before(content, start, 500)
        before, line, after = content[first:start], content[start:end], content[end:following]
        around = told(before), told(after)
        kept = told(before + line + after)
        for place in range(len(line)):
            _assert_line_cut(before, line, after, place, around, kept)
        cuts[kind] = len(line)
    chosen = random.Random(20261123)
    places = sorted(chosen.randrange(len(content) + 1) for _ in range(NUM_RANDOM_CUTS))
    for place in places:
        # Cut off for good; what lies far before is read as it was.
        first = _line_before(content, place, 4000)
        ended = [said(event) for event in whole if first < event.end_offset <= place]
        assert told(content[first:place]) == ended, place
    assert events_of(content[: places[-1]]) == [event for event in whole if event.end_offset <= places[-1]]
    # Cut only by the reader's blocks.
    blocks = [content[start:end] for start, end in pairwise([0, *places, len(content)])]
    assert events_of(*blocks) == whole
    cuts["anywhere"] = NUM_RANDOM_CUTS
    return cuts


def _line_before(content: bytes, place: int, num_bytes: int) -> int:
    """Where the line begins that is at least ``num_bytes`` before ``place``, or the file."""
    return content.rfind(b"\n", 0, max(0, place - num_bytes)) + 1


def _assert_line_cut(
    before: bytes, line: bytes, after: bytes, place: int, around: tuple[list[Said], list[Said]], kept: list[Said]
) -> None:
    """One line cut at ``place``: nothing follows, its head is missing, or the next line is glued to its torn head."""
    what = f"{line!r} cut at {place}"
    assert told(before + line[:place]) == around[0], what
    assert told(line[place:] + after) in (around[1], kept[len(around[0]) :]), what
    assert told(before + line[:place] + after) == [*around[0], *around[1]], what
