"""What compiled code uses and only numba can make: intrinsics and the C library's functions, made when it asks.

A process that finds its machine code on disk never imports numba for them. Nothing is compiled here.
Next: ``addresses`` and ``harness.live.client.wire.syscalls`` name them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Asked:
    """Stands in Python for a function that exists in compiled code alone."""

    def __init__(self, make: Callable[[], Any]) -> None:
        """make: numba's own object, on the first call of a compiler."""
        self._make = make
        self._type: Any = None

    @property
    def _numba_type_(self) -> Any:
        from harness.compiled.linked import type_of_made

        if self._type is None:
            self._type = type_of_made(self._make())
        return self._type


def external(symbol: str, result: str, *arguments: str) -> Any:
    """A function of the C library that takes and gives "int32" and "int64"; it must not need the interpreter."""

    def make() -> Any:
        from harness.compiled.intrinsics import external_function

        return external_function(symbol, result, arguments)

    return Asked(make)
