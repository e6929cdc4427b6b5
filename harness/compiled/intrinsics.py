"""What ``addresses`` and ``asked`` stand for, in numba's own terms; imported only where something is compiled.

An address is an int64, and nothing here checks a bound, counts or allocates. Next: ``linked`` tells numba their types.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.core.types.functions import ExternalFunction
from numba.extending import intrinsic

_BYTE, _WORD = ir.IntType(8), ir.IntType(64)
_type_of: Any = numba.from_dtype
_external: Any = ExternalFunction
_INTEGERS: Mapping[str, Any] = {"int32": types.int32, "int64": types.int64}


def external_function(symbol: str, result: str, arguments: Sequence[str]) -> Any:
    """A function of the C library by the names of its integer types."""
    return _external(symbol, _INTEGERS[result](*(_INTEGERS[one] for one in arguments)))


def record_reference(layout: np.dtype[Any]) -> Any:
    """(address of a table of such records, place) -> the record there, by reference."""
    kind = _type_of(layout)
    stride = ir.Constant(_WORD, layout.itemsize)

    @intrinsic
    def at(_context: Any, _table: Any, _place: Any) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            address = builder.add(arguments[0], builder.mul(arguments[1], stride))
            return builder.inttoptr(address, context.get_value_type(kind))

        return kind(types.int64, types.int64), generate

    return at


@intrinsic
def byte_at(_context: Any, _address: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.zext(builder.load(builder.inttoptr(arguments[0], _BYTE.as_pointer())), _WORD)

    return types.int64(types.int64), generate


@intrinsic
def set_byte(_context: Any, _address: Any, _byte: Any) -> Any:
    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        builder.store(builder.trunc(arguments[1], _BYTE), builder.inttoptr(arguments[0], _BYTE.as_pointer()))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate
