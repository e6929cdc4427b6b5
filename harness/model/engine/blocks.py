"""KV blocks of paged memory: who holds them, what they contain, which are used again first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable


class BlockPool:
    """KV blocks by number: who holds them, what they contain, and in which order the free ones are used again.

    Free blocks without a key are used first, the latest freed of them before all; the others by last use. A block
    keeps its key, and can be matched, until it is used again. Several blocks may have the same key.
    Source: vLLM 0.30.0, v1/core/block_pool.py.
    """

    def __init__(self, num_gpu_blocks: int, *, keeps_keys: bool = True) -> None:
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_gpu_blocks))
        self._holders = [0] * num_gpu_blocks
        self._keys: list[int | None] = [None] * num_gpu_blocks
        self._by_key: dict[int, dict[int, None]] = {}
        self._keeps_keys = keeps_keys
        self.num_evicted = 0

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, those with a key included."""
        return len(self._free)

    @property
    def free_order(self) -> tuple[int, ...]:
        """Free blocks, the next to be used first."""
        return tuple(self._free)

    def holders(self, block: int) -> int:
        """How many requests hold a block."""
        return self._holders[block]

    def match(self, keys: Iterable[int]) -> list[int]:
        """The longest run of blocks with these keys, from the first on; of equal blocks the one registered first."""
        matched: list[int] = []
        for key in keys:
            blocks = self._by_key.get(key)
            if blocks is None:
                break
            matched.append(next(iter(blocks)))
        return matched

    def num_unheld(self, blocks: Iterable[int]) -> int:
        """How many of these blocks are free."""
        return sum(self._holders[block] == 0 for block in blocks)

    def hold(self, blocks: Iterable[int]) -> None:
        """Count one more holder of each of these matched blocks."""
        for block in blocks:
            if self._holders[block] == 0:
                del self._free[block]
            self._holders[block] += 1

    def take(self, num_blocks: int) -> list[int]:
        """The first free blocks, for new content; at most ``num_free``."""
        taken = [self._next_free() for _ in range(num_blocks)]
        for block in taken:
            self._forget(block)
            self._holders[block] = 1
        return taken

    def register(self, block: int, key: int) -> None:
        """A held block is full, and its content has this key."""
        self._keys[block] = key
        self._by_key.setdefault(key, {})[block] = None

    def free(self, blocks: Iterable[int]) -> None:
        """One holder less of each; ``blocks`` in the order in which they are to be used again."""
        unheld: list[int] = []
        for block in blocks:
            self._holders[block] -= 1
            if self._holders[block] == 0:
                unheld.append(block)
        for block in unheld:
            if self._is_matchable(block):
                self._free[block] = None
        for block in reversed(unheld):
            if not self._is_matchable(block):
                self._free[block] = None
                self._free.move_to_end(block, last=False)

    def reset(self) -> bool:
        """Forget all keys; False, and nothing happens, while a block is held."""
        if any(self._holders):
            return False
        self._keys = [None] * len(self._keys)
        self._by_key.clear()
        return True

    def _next_free(self) -> int:
        return self._free.popitem(last=False)[0]

    def _is_matchable(self, block: int) -> bool:
        return self._keeps_keys and self._keys[block] is not None

    def _forget(self, block: int) -> None:
        key = self._keys[block]
        if key is None:
            return
        self._keys[block] = None
        self.num_evicted += 1
        same = self._by_key[key]
        del same[block]
        if not same:
            del self._by_key[key]
