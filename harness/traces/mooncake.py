"""Mooncake's and Bailian's production traces: every request by itself, at its recorded arrival, with named blocks.

Equal names of blocks mean equal tokens up to and including that block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from harness.clock import NS_PER_MS, NS_PER_S
from harness.traces.base import Progress, Read, Record, TraceFormat, list_of, parsed_lines, seconds_ns, tokens_of
from harness.traces.form import ReadNotes, RecordedRequest, Recording, hidden_name

MOONCAKE_BLOCK_TOKENS = 512
BAILIAN_BLOCK_TOKENS = 16
Arrival = tuple[int, RecordedRequest]


class BlockNames:
    """The file's own block names as numbers from 0, in order of appearance."""

    def __init__(self) -> None:
        self._numbers: dict[object, int] = {}

    def numbers(self, names: Iterable[object]) -> tuple[int, ...] | None:
        """None where a name is neither a number nor a text."""
        found: list[int] = []
        for name in names:
            if not isinstance(name, (int, str)):
                return None
            found.append(self._numbers.setdefault(name, len(self._numbers)))
        return tuple(found)


def kept_tokens(blocks: tuple[int, ...], before: tuple[int, ...], block_tokens: int, streamed: int, prompt: int) -> int:
    """How much of the stream before a prompt begins with, by the blocks of both.

    streamed: tokens of the previous prompt and its answer. Where all whole blocks of the previous prompt come again, so
    does its answer; else only the blocks that both begin with (a compaction or an edit).
    """
    common = 0
    for mine, theirs in zip(blocks, before, strict=False):
        if mine != theirs:
            break
        common += 1
    if common == len(before) and prompt >= streamed:
        return streamed
    return min(common * block_tokens, streamed, prompt)


def _reader(block_tokens: int, unit_ns: int) -> Read:
    """unit_ns: of ``timestamp``."""

    def read(files: Iterable[Path], notes: ReadNotes, progress: Progress | None = None) -> Iterator[Recording]:
        names = BlockNames()
        first_ns: int | None = None

        def arrival(record: Record, _: str) -> Arrival | None:
            at_ns, lengths = seconds_ns(record.get("timestamp"), unit_ns), lengths_of(record)
            numbers = names.numbers(list_of(record.get("hash_ids")))
            if at_ns is None or at_ns < 0 or lengths is None or numbers is None:
                return None
            prompt, generate = lengths
            return at_ns, RecordedRequest(None, (), 0, "none", prompt, 0, generate, numbers[: prompt // block_tokens])

        broken = "a request without its time, lengths or block names"
        for at, (at_ns, one) in parsed_lines(files, notes, progress, arrival, broken):
            first_ns = at_ns if first_ns is None else first_ns
            yield Recording(hidden_name(at), max(at_ns - first_ns, 0), (one,))

    return read


def lengths_of(record: Record) -> tuple[int, int] | None:
    """(prompt, answer) in tokens; None where they make no request."""
    prompt, generate = tokens_of(record.get("input_length")), tokens_of(record.get("output_length"))
    return (prompt, max(generate, 1)) if prompt and generate is not None else None


MOONCAKE = TraceFormat(
    "production requests with 512-token blocks",
    _reader(MOONCAKE_BLOCK_TOKENS, NS_PER_MS),
    (frozenset({"timestamp", "input_length", "output_length", "hash_ids"}),),
    "recorded",
    MOONCAKE_BLOCK_TOKENS,
)
BAILIAN = TraceFormat(
    "production requests with chat ids and 16-token blocks",
    _reader(BAILIAN_BLOCK_TOKENS, NS_PER_S),
    (frozenset({"chat_id", "parent_chat_id", "input_length"}),),
    "recorded",
    BAILIAN_BLOCK_TOKENS,
)
