"""Memory at an address, for compiled code that shares it with C and with an interpreter: records by name, and bytes.

An address is an int64; whoever owns the memory keeps it, and nothing here checks a bound. No array is made, so nothing
is counted or allocated. Next: ``harness.live.client.wire`` reads and writes its tables so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from harness.compiled.asked import Asked
from harness.compiled.records import record_dtype

Record = TypeVar("Record")


def record_at(record: type[Record], dtype: npt.DTypeLike = None) -> Callable[[int, int], Record]:
    """A function for compiled code: (address of a table of such records, place) -> the record there, by reference.

    dtype: how the record lies in memory, where that is not one int64 after another.
    """
    layout: np.dtype[Any] = record_dtype(record) if dtype is None else np.dtype(dtype)

    def make() -> Any:
        from harness.compiled.intrinsics import record_reference

        return record_reference(layout)

    return cast("Callable[[int, int], Record]", Asked(make))


def _named(name: str) -> Any:
    def make() -> Any:
        from harness.compiled import intrinsics

        return getattr(intrinsics, name)

    return Asked(make)


byte_at: Callable[[int], int] = _named("byte_at")
set_byte: Callable[[int, int], None] = _named("set_byte")
