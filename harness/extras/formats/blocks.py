"""Rows that are requests with named blocks: equal names are equal tokens, and equal ones before where chained."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar, cast

from harness.errors import SpecError
from harness.model.traces.account import ReadNotes
from harness.model.traces.base import json_records
from harness.model.traces.values import Record, first_of, tokens_of

Parsed = TypeVar("Parsed")
MOONCAKE_BLOCK_TOKENS = 512
SIZES = tuple(1 << power for power in range(2, 15))
# A file in which more of the rows contradict a size was written with another one.
SHARE_OF_SLIPS = 0.05
TOO_MANY_NAMES = "rows with more block names than their prompt has blocks"


class BlockNames:
    """The file's own block names as numbers from 0, in order of appearance."""

    def __init__(self) -> None:
        self._numbers: dict[object, int] = {}

    def numbers(self, names: object, of: object = None) -> tuple[int, ...] | None:
        """None where names are no list of numbers and texts; () where they are null. of: whose, where not all's."""
        given = cast("Sequence[object]", () if names is None else names)
        if not isinstance(given, (list, tuple)) or not all(isinstance(name, (int, str)) for name in given):
            return None
        return tuple(self._numbers.setdefault((of, name), len(self._numbers)) for name in given)


@dataclass
class NameOrder:
    """What the order of a file's block names says of them.

    is_numbered: they count from 0 in order of appearance, so that another file's names may be the same numbers of other
    blocks. num_unchained: names that came after another name than before, so that they do not say what is before them.
    """

    is_numbered: bool = True
    num_unchained: int = 0
    _highest: int = -1
    before: dict[int, int] = field(default_factory=dict[int, int])

    def add(self, names: Sequence[object], numbers: Sequence[int]) -> None:
        """The names of the next row, and the numbers that they got."""
        before = -1
        for name, number in zip(names, numbers, strict=True):
            self.num_unchained += self.before.setdefault(number, before) != before
            before = number
            self.is_numbered = self.is_numbered and isinstance(name, int) and 0 <= name <= self._highest + 1
            self._highest = max(self._highest, name if isinstance(name, int) else -1)


def are_anew(orders: Sequence[NameOrder], notes: ReadNotes, *, is_one_set: bool) -> bool:
    """Whether the names of each file are of other blocks than those of the others; labelled, where several have any."""
    num_named = sum(bool(order.before) for order in orders)
    is_anew = num_named > 1 and not is_one_set and all(order.is_numbered for order in orders)
    what = "other blocks than those of the other files" if is_anew else "the same blocks in all files"
    notes.assume(f"files whose block names are taken as {what}", num_named * (num_named > 1))
    notes.assume("files whose instants are taken to be of one clock", num_named * (num_named > 1))
    return is_anew


def lengths_of(record: Record) -> tuple[int, int] | None:
    """(prompt, answer) in tokens, by either name that Mooncake's writers use; None where they make no request."""
    prompt = tokens_of(first_of(record, "input_length", "input_tokens"))
    generate = tokens_of(first_of(record, "output_length", "output_tokens"))
    return (prompt, generate) if prompt and generate is not None else None


def settled_block_tokens(lengths: Iterable[tuple[int, int]], usual: int, notes: ReadNotes, where: str) -> int:
    """Tokens of a block, from the (prompt tokens, number of block names) of all rows.

    A row names its whole blocks, and the part at its end or not. usual: the size in the format's own traces, taken
    unless the person gave a size. Raises SpecError where more than SHARE_OF_SLIPS of the rows contradict it.
    """
    given = list(lengths)
    rows = [(prompt, names) for prompt, names in given if names]
    notes.assume("rows that name no block among others that do", len(given) - len(rows) if rows else 0)
    size = notes.options.block_tokens or usual
    num_above = sum(names > -(-prompt // size) for prompt, names in rows)
    num_below = sum(names < prompt // size for prompt, names in rows)
    fitting = [each for each in SIZES if all(prompt // each <= names <= -(-prompt // each) for prompt, names in rows)]
    others = ", ".join(map(str, fitting))
    if num_above > SHARE_OF_SLIPS * len(rows) or (num_below and fitting and not notes.options.block_tokens):
        wrong = f"{num_above or num_below} of {len(rows)} rows have {'more' if num_above else 'fewer'}"
        hint = f"blocks of {others} tokens fit every row" if fitting else "no power of two fits every row"
        ask = "Say how many tokens a block has: harness trace import --block-tokens N"
        ask = f"--block-tokens {size} does not fit these rows" if notes.options.block_tokens else ask
        wrong += f" block names than their prompt has blocks of {size} tokens"
        raise SpecError(wrong, where=where, hint=f"{ask} ({hint})")
    if rows and not notes.options.block_tokens and len(fitting) > 1:
        others = ", ".join(str(other) for other in fitting if other != size)
        notes.assume(f"blocks taken as {size} tokens, the format's usual size: {others} fit every row too")
    num_part = sum(names > prompt // size for prompt, names in rows)
    notes.assume("rows whose last block name is of a part of a block: it is left out", num_part)
    notes.assume(f"rows whose names cover only a part of their prompt, in blocks of {size} tokens", num_below)
    notes.block_tokens = size
    return size


def parsed_lines(
    files: Iterable[Path],
    notes: ReadNotes,
    parse: Callable[[Record, str], Parsed | None],
    broken: str,
) -> Iterator[tuple[str, Parsed]]:
    """(place, ``parse(record)``) of every line of ``files``: a call, or ``broken`` where that gives None."""
    for path in files:
        for _, at, record in json_records(path, notes):
            value = parse(record, at)
            if value is None:
                notes.row_broken(broken, at)
            else:
                notes.num_calls += 1
                yield at, value
