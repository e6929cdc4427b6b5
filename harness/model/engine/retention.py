"""What becomes of KV blocks that nobody holds, beyond last use: pins with a time limit, and a second memory.

A pinned block is used again only when no other is free, or when its time is over; then it goes before all others. Of
several the pin that ends first goes first. A pin ends early when a request holds the block: of requests that share a
block, the last to end decides. Content of which the last block is overwritten moves to the second memory, from which
later prompts load it; writing takes no time. Both are models of what servers offer under several names; vLLM by itself
has neither.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable
from itertools import count

from harness.model.engine.blocks import BlockPool

PIN_FACTOR = 2
"""A pin lasts so many times what a request expects until its session returns."""


class SecondMemory:
    """Keys of blocks outside the device's memory; the least recently used go first."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._keys: OrderedDict[int, None] = OrderedDict()

    def put(self, key: int) -> None:
        """Keep a block of this content."""
        self._keys[key] = None
        self._keys.move_to_end(key)
        if len(self._keys) > self.num_blocks:
            self._keys.popitem(last=False)

    def num_matched(self, keys: Iterable[int]) -> int:
        """How many of these keys are there, from the first on; they are used now."""
        num = 0
        for key in keys:
            if key not in self._keys:
                break
            self._keys.move_to_end(key)
            num += 1
        return num

    def clear(self) -> None:
        """Forget everything."""
        self._keys.clear()


class RetainingPool(BlockPool):
    """A pool with pins and, where ``second`` has blocks, a second memory. now_ns: set before each call that counts on
    it."""

    def __init__(self, num_gpu_blocks: int, *, num_second_blocks: int = 0, keeps_keys: bool = True) -> None:
        super().__init__(num_gpu_blocks, keeps_keys=keeps_keys)
        self.second = SecondMemory(num_second_blocks)
        self.now_ns = 0
        # Pinned free blocks, which are not among the others: when the pin ends, and which pin it is.
        self._pinned: dict[int, tuple[int, int]] = {}
        # The same as a heap; entries of pins that are no more stay until they come up.
        self._ends: list[tuple[int, int, int]] = []
        self._serial = count()

    @property
    def num_free(self) -> int:
        return super().num_free + len(self._pinned)

    @property
    def free_order(self) -> tuple[int, ...]:
        ends = sorted((until_ns, serial, block) for block, (until_ns, serial) in self._pinned.items())
        ended = [block for until_ns, _serial, block in ends if until_ns <= self.now_ns]
        pinned = [block for until_ns, _serial, block in ends if until_ns > self.now_ns]
        return (*ended, *super().free_order, *pinned)

    def pin(self, blocks: Iterable[int], until_ns: int) -> None:
        """Keep those of these blocks that are free and can be matched, until an instant; the first given go first."""
        for block in blocks:
            if self.holders(block) == 0 and self._is_matchable(block) and until_ns > self.now_ns:
                self._free.pop(block, None)
                self._pinned[block] = until_ns, next(self._serial)
                heapq.heappush(self._ends, (*self._pinned[block], block))

    def hold(self, blocks: Iterable[int]) -> None:
        """Count one more holder of each of these matched blocks; that ends its pin."""
        for block in blocks:
            if self._pinned.pop(block, None) is not None:
                self._free[block] = None
            super().hold((block,))

    def reset(self) -> bool:
        if not super().reset():
            return False
        self._free.update(dict.fromkeys(self._pinned))
        self._pinned.clear()
        self._ends.clear()
        self.second.clear()
        return True

    def _next_free(self) -> int:
        while self._ends and self._pinned.get(self._ends[0][2]) != self._ends[0][:2]:
            heapq.heappop(self._ends)
        if self._ends and (self._ends[0][0] <= self.now_ns or not self._free):
            block = heapq.heappop(self._ends)[2]
            del self._pinned[block]
            return block
        return super()._next_free()

    def _forget(self, block: int) -> None:
        key = self._keys[block]
        super()._forget(block)
        if key is not None and self.second.num_blocks and not self.match((key,)):
            self.second.put(key)
