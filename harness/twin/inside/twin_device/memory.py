"""The device's KV memory: physical slots of a fixed number of positions, one rolling number each.

A read of a position that nobody wrote is counted, never repaired. Next: ``device`` writes it chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Sequence

from .rolling import EMPTY, UNWRITTEN, fold


class KvMemory:
    """``num_slots`` physical slots of ``slot_tokens`` positions each, all unwritten at first."""

    def __init__(self, num_slots: int, slot_tokens: int) -> None:
        self.slot_tokens = slot_tokens
        self.unwritten_reads = 0
        self._slots = [[UNWRITTEN] * slot_tokens for _ in range(num_slots)]

    @property
    def num_slots(self) -> int:
        return len(self._slots)

    def write(self, table: Sequence[int], first: int, tokens: Sequence[int]) -> int:
        """Put ``tokens`` at positions ``first``, first + 1, ... of a sequence; the last number written.

        table: the sequence's physical slots in order. Raises IndexError for a slot or position outside the memory.
        """
        number = EMPTY if first == 0 else self.read(table, first - 1)
        for position, token in enumerate(tokens, first):
            number = fold(number, token, position)
            self._slot(table, position)[position % self.slot_tokens] = number
        return number

    def read(self, table: Sequence[int], position: int) -> int:
        """The number at ``position`` of a sequence."""
        number = self._slot(table, position)[position % self.slot_tokens]
        if number == UNWRITTEN:
            self.unwritten_reads += 1
        return number

    def copy(self, source: int, target: int, num_tokens: int) -> None:
        """Copy the first ``num_tokens`` positions of one slot to another."""
        self._check(source)
        self._check(target)
        self._slots[target][:num_tokens] = self._slots[source][:num_tokens]

    def _slot(self, table: Sequence[int], position: int) -> list[int]:
        slot = table[position // self.slot_tokens]
        self._check(slot)
        return self._slots[slot]

    def _check(self, slot: int) -> None:
        # A negative index would silently address the memory's end.
        if not 0 <= slot < len(self._slots):
            raise IndexError(f"physical slot {slot} of {len(self._slots)}")
