"""The device's KV memory: physical slots of a fixed number of positions, one rolling number each.

A read of a position that nobody wrote is counted, never repaired.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .rolling import EMPTY, MASK, UNWRITTEN, fold


class KvMemory:
    """``num_slots`` physical slots of ``slot_tokens`` positions each, all unwritten at first.

    unwritten_reads: positions that a step attended to although nobody had written them, summed over steps.
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

        table: the sequence's physical slots in order. Raises IndexError for a slot or position outside the memory.
        """
        number = EMPTY if first == 0 else self.number_at(table, first - 1)
        for position, token in enumerate(tokens, first):
            number = fold(number, token, position)
            self._slots[self._slot(table, position), position % self.slot_tokens] = number

    def attend(self, table: Sequence[int], last: int) -> int:
        """The sum of a sequence's numbers over positions 0 .. last, modulo 2**64: what its next token depends on."""
        total = 0
        for start in range(0, last + 1, self.slot_tokens):
            numbers = self._slots[self._slot(table, start), : last + 1 - start]
            total += int(numbers.sum(dtype=np.uint64))
            self.unwritten_reads += int(np.count_nonzero(numbers == UNWRITTEN))
        return total & MASK

    def number_at(self, table: Sequence[int], position: int) -> int:
        """The number at ``position`` of a sequence."""
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
