"""The device's KV memory: physical slots of a fixed number of positions, and per position a hash of all tokens so far.

The next token is drawn from the sum of a sequence's hashes, as attention reads every position: a wrong, missing or
stale position changes every later token. Nothing is random. A read of an unwritten position is counted, never repaired.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

MASK = (1 << 64) - 1
EMPTY = 0x9E3779B97F4A7C15
"""The hash before a sequence's first position."""
UNWRITTEN = 0
"""Content of a position that was never written."""


def fold(before: int, token: int, position: int) -> int:
    """The hash at ``position`` for ``token``; before: the hash of the previous position."""
    value = (before ^ ((token + 1) * 0xD6E8FEB86659FD93) ^ ((position + 1) * 0xA0761D6478BD642F)) & MASK
    value = ((value ^ (value >> 32)) * 0xE7037ED1A0B428DB) & MASK
    value = ((value ^ (value >> 29)) * 0x8EBC6AF09C88C6E3) & MASK
    return (value ^ (value >> 32)) or 1


def draw(total: int, low: int, high: int) -> int:
    """The token in [low, high) that follows a sequence whose hashes sum to ``total``, modulo 2**64."""
    return low + fold(total & MASK, 0, 0) % (high - low)


def expected_tokens(prompt: Sequence[int], count: int, low: int, high: int) -> list[int]:
    """The ``count`` tokens that a device without faults generates after ``prompt``."""
    number, total = EMPTY, 0
    for position, token in enumerate(prompt):
        number = fold(number, int(token), position)
        total += number
    tokens: list[int] = []
    for position in range(len(prompt), len(prompt) + count):
        tokens.append(draw(total, low, high))
        number = fold(number, tokens[-1], position)
        total += number
    return tokens


class KvMemory:
    """``num_slots`` physical slots of ``slot_tokens`` positions each, all unwritten at first.

    unwritten_reads: unwritten positions that steps attended to, summed over steps.
    """

    def __init__(self, num_slots: int, slot_tokens: int) -> None:
        self.slot_tokens = slot_tokens
        self.unwritten_reads = 0
        self._slots = np.full((num_slots, slot_tokens), UNWRITTEN, dtype=np.uint64)

    @property
    def num_slots(self) -> int:
        return len(self._slots)

    def write(self, table: Sequence[int], first: int, tokens: Sequence[int]) -> None:
        """Put ``tokens`` at positions ``first``, first + 1, ... of a sequence.

        table: the sequence's physical slots in order. Raises IndexError for a slot or position out of range.
        """
        number = EMPTY if first == 0 else self.number_at(table, first - 1)
        for position, token in enumerate(tokens, first):
            number = fold(number, token, position)
            self._slots[self._slot(table, position), position % self.slot_tokens] = number

    def attend(self, table: Sequence[int], last: int) -> int:
        """The sum of a sequence's hashes over positions 0 .. last, modulo 2**64, which decides its next token."""
        total = 0
        for start in range(0, last + 1, self.slot_tokens):
            numbers = self._slots[self._slot(table, start), : last + 1 - start]
            total += int(numbers.sum(dtype=np.uint64))
            self.unwritten_reads += int(np.count_nonzero(numbers == UNWRITTEN))
        return total & MASK

    def number_at(self, table: Sequence[int], position: int) -> int:
        """The hash at ``position`` of a sequence."""
        return int(self._slots[self._slot(table, position), position % self.slot_tokens])

    def copy(self, source: int, target: int, num_tokens: int) -> None:
        """Copy the first ``num_tokens`` positions of one slot to another."""
        self._slots[self._checked(target), :num_tokens] = self._slots[self._checked(source), :num_tokens]

    def _slot(self, table: Sequence[int], position: int) -> int:
        return self._checked(table[position // self.slot_tokens])

    def _checked(self, slot: int) -> int:
        # A negative index would silently address the memory's end.
        if not 0 <= slot < len(self._slots):
            raise IndexError(f"physical slot {slot} of {len(self._slots)}")
        return slot
