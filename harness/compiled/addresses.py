"""Memory at an address, for compiled code that shares it with C and with an interpreter: records by name, and bytes.

An address is an int64; whoever owns the memory keeps it, and nothing here checks a bound. No array is made, so nothing
is counted or allocated. Next: ``harness.live.client.wire`` reads and writes its tables so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from harness.compiled.records import record_dtype

Record = TypeVar("Record")

_BYTE, _WORD = ir.IntType(8), ir.IntType(64)
_type_of: Any = numba.from_dtype


def record_at(record: type[Record], dtype: npt.DTypeLike = None) -> Callable[[int, int], Record]:
    """A function for compiled code: (address of a table of such records, place) -> the record there, by reference.

    dtype: how the record lies in memory, where that is not one int64 after another.
    """
    layout: np.dtype[Any] = record_dtype(record) if dtype is None else np.dtype(dtype)
    kind = _type_of(layout)
    stride = ir.Constant(_WORD, layout.itemsize)

    @intrinsic
    def at(_context: Any, _table: Any, _place: Any) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            address = builder.add(arguments[0], builder.mul(arguments[1], stride))
            return builder.inttoptr(address, context.get_value_type(kind))

        return kind(types.int64, types.int64), generate

    return cast("Callable[[int, int], Record]", at)


@intrinsic
def _byte_at(_context: Any, _address: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.zext(builder.load(builder.inttoptr(arguments[0], _BYTE.as_pointer())), _WORD)

    return types.int64(types.int64), generate


@intrinsic
def _set_byte(_context: Any, _address: Any, _byte: Any) -> Any:
    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        builder.store(builder.trunc(arguments[1], _BYTE), builder.inttoptr(arguments[0], _BYTE.as_pointer()))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


byte_at = cast("Callable[[int], int]", _byte_at)
set_byte = cast("Callable[[int, int], None]", _set_byte)
