"""Memory that the compiled loop writes by address: every table lies between guards, which nothing may ever touch.

Bounds are checked before each write; the guards are there to notice where such a check is missing, in tests and in
every replay. Nothing is written here after a table was made. Next: ``layout`` and ``streams`` make their tables in it.
"""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
from numpy.typing import DTypeLike, NDArray

from harness.errors import HarnessError

BytesArray = NDArray[np.uint8]

# A multiple of a cache line, so that tables keep their alignment.
GUARD_BYTES = 256
_GUARD = bytes((place * 37 + 0xA5) & 0xFF for place in range(GUARD_BYTES))


class GuardedMemory:
    """Tables by name, each between two guards; ``require_intact`` says whether anything was written beside them."""

    def __init__(self) -> None:
        self._blocks: dict[str, BytesArray] = {}

    def table(self, name: str, shape: int | tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """A table of zeros; one of the same name before it is given up."""
        kind = np.dtype(dtype)
        size = int(np.prod(shape)) * kind.itemsize
        block = np.zeros(size + 2 * GUARD_BYTES, dtype=np.uint8)
        block[:GUARD_BYTES] = block[GUARD_BYTES + size :] = np.frombuffer(_GUARD, dtype=np.uint8)
        self._blocks[name] = block
        return block[GUARD_BYTES : GUARD_BYTES + size].view(kind).reshape(shape)

    def give_up(self, name: str) -> None:
        """Forget a table, after a last look at its guards."""
        block = self._blocks.pop(name, None)
        if block is not None:
            _require_guards(name, block)

    def require_intact(self) -> None:
        """HarnessError naming the first table beside which something was written."""
        for name, block in self._blocks.items():
            _require_guards(name, block)


def refuse_to_write() -> NoReturn:
    """What would have been written does not fit its table, which the plan's numbers say cannot be."""
    raise HarnessError(
        "the replay client has no room for what a table must hold, and wrote nothing",
        hint="This is a defect of the harness; client.name = 'aiohttp' does not have it",
    )


def _require_guards(name: str, block: BytesArray) -> None:
    # Bytes, which take a tenth of the time of a comparison by numpy: each session asks this while the replay runs.
    if block[:GUARD_BYTES].tobytes() != _GUARD or block[-GUARD_BYTES:].tobytes() != _GUARD:
        raise HarnessError(
            f"the replay client wrote beside its table of {name}: what it recorded cannot be trusted",
            hint="This is a defect of the harness; client.name = 'aiohttp' does not have it",
        )
