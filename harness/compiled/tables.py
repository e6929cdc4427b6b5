"""Tables as compiled code knows them: where their words lie, an address and a shape; imported only to compile.

numba's own arrays are structs of seven and more words, passed by value and copied at every index, and most of what LLVM
had to read was that. Nothing is checked: places are never negative, and no table moves during a call.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, cast

import numba
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba.core import cgutils, types
from numba.core.typing import templates
from numba.core.typing.templates import AbstractTemplate, AttributeTemplate, signature
from numba.extending import lower_builtin, lower_getattr_generic, models, register_model

_WORD = ir.IntType(64)
_from_dtype: Any = numba.from_dtype
_types_attributes: Any = templates.infer_getattr
_types_calls_of: Any = templates.infer_global


class Table(types.Type):
    """An array of records or of int64. Its value is the address of its words: of its memory, then of its shape."""

    def __init__(self, item: Any, ndim: int) -> None:
        self.item = item
        self.ndim = ndim
        # Every function is called by the names of its arguments' types: a record's own is as long as its fields.
        super().__init__(name=f"table_{_digest(item.name, ndim)}")


class Tables(types.Type):
    """A named tuple of tables. Its value is the address of the first one's words; the others' follow."""

    def __init__(self, name: str, members: dict[str, Table]) -> None:
        self.members = members
        sizes = [num_words(one) for one in members.values()]
        self.places = dict(zip(members, accumulate(sizes, initial=0), strict=False))
        self.num_words = sum(sizes)
        super().__init__(name=f"{name}_{_digest(*(f'{key} {one.name}' for key, one in members.items()))}")


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:8]


def type_of(argument: Any) -> Any:
    """What compiled code takes for an argument of an entrypoint: see ``aot.kind_of``."""
    if isinstance(argument, np.ndarray):
        array = cast("npt.NDArray[Any]", argument)
        item = _from_dtype(array.dtype)
        if not isinstance(item, types.Record) and item != types.int64:
            raise TypeError(f"an array of {array.dtype}: compiled functions take int64 and records of it")
        return Table(item, array.ndim)
    if isinstance(argument, tuple):
        tables = cast("Any", argument)
        return Tables(type(tables).__qualname__, {name: type_of(getattr(tables, name)) for name in tables._fields})
    return types.int64


def num_words(kind: Any) -> int:
    """How many words an argument of that type has."""
    if isinstance(kind, Tables):
        return kind.num_words
    return 1 + kind.ndim if isinstance(kind, Table) else 1


for _kind in (Table, Tables):
    register_model(_kind)(models.OpaqueModel)


@_types_attributes
class _TablesAttribute(AttributeTemplate):
    key = Tables

    def generic_resolve(self, tables: Tables, name: str) -> Any:
        return tables.members.get(name)


@lower_getattr_generic(Tables)
def _table(_context: Any, builder: Any, tables: Tables, value: Any, name: str) -> Any:
    return builder.gep(value, [_WORD(8 * tables.places[name])], inbounds=True)


@_types_calls_of(len)
class _Length(AbstractTemplate):
    def generic(self, args: Any, _named: Any) -> Any:
        return signature(types.int64, *args) if isinstance(args[0], Table) else None


@lower_builtin(len, Table)
def _length(_context: Any, builder: Any, _signature: Any, args: Sequence[Any]) -> Any:
    return _word(builder, args[0], 1)


@_types_calls_of(operator.getitem)
class _Item(AbstractTemplate):
    def generic(self, args: Any, _named: Any) -> Any:
        table, _ = args
        return signature(table.item, table, _place_type(table)) if isinstance(table, Table) else None


@lower_builtin(operator.getitem, Table, types.Integer)
@lower_builtin(operator.getitem, Table, types.UniTuple)
def _item(context: Any, builder: Any, kinds: Any, args: Sequence[Any]) -> Any:
    address = _address(context, builder, kinds.args, args)
    return address if isinstance(kinds.return_type, types.Record) else builder.load(address)


@_types_calls_of(operator.setitem)
class _SetItem(AbstractTemplate):
    def generic(self, args: Any, _named: Any) -> Any:
        table, *_ = args
        if isinstance(table, Table):
            return signature(types.none, table, _place_type(table), table.item)
        return None


@lower_builtin(operator.setitem, Table, types.Integer, types.Any)
@lower_builtin(operator.setitem, Table, types.UniTuple, types.Any)
def _set_item(context: Any, builder: Any, kinds: Any, args: Sequence[Any]) -> Any:
    table, _, item = kinds.args
    address = _address(context, builder, kinds.args, args)
    if isinstance(item, types.Record):
        cgutils.raw_memcpy(builder, address, args[2], _WORD(1), table.item.size)
    else:
        builder.store(args[2], address)
    return context.get_dummy_value()


def _place_type(table: Table) -> Any:
    """The type of an index: int64, one for each dimension."""
    return types.int64 if table.ndim == 1 else types.UniTuple(types.int64, table.ndim)


def _address(context: Any, builder: Any, kinds: Sequence[Any], args: Sequence[Any]) -> Any:
    """Where an item lies."""
    table, words = kinds[0], args[0]
    place = args[1]
    if table.ndim > 1:
        first, *others = cgutils.unpack_tuple(builder, place)
        place = first
        for dimension, other in enumerate(others, start=2):
            place = builder.add(builder.mul(place, _word(builder, words, dimension)), other)
    pointer = context.get_value_type(table.item) if isinstance(table.item, types.Record) else _WORD.as_pointer()
    start = builder.inttoptr(_word(builder, words, 0), pointer)
    return builder.gep(start, [place], inbounds=True)


def _word(builder: Any, words: Any, place: int) -> Any:
    """A word of a table. Nothing changes it during a call: LLVM may read it once for all uses."""
    word = builder.load(builder.gep(builder.bitcast(words, _WORD.as_pointer()), [_WORD(place)], inbounds=True))
    word.set_metadata("invariant.load", builder.module.add_metadata([]))
    return word
