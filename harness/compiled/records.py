"""Tables of named int64 fields, one record a place: what compiled functions read and write by name.

A record is declared as a class of annotated fields; the array of it is a numpy structured array, which numba indexes
as ``table[place].field``. Nothing is computed here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, Generic, Protocol, TypeVar, cast, overload

import numpy as np
import numpy.typing as npt

IS_PLAIN_PYTHON = os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0")
"""Nothing is compiled: the same functions run in the interpreter, slowly, with every index checked."""
IntArray = npt.NDArray[np.int64]
Record = TypeVar("Record")


class _PlainRecords(np.recarray):  # pyright: ignore[reportMissingTypeArgument, reportIncompatibleVariableOverride]
    """Records for the interpreter: no index is out of range or, since compiled code looks at no sign, below zero."""

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, int | np.integer) and place < 0:
            raise IndexError(f"place {place} of a table")
        return super().__getitem__(place)


class Records(Protocol[Record]):
    """A structured array. ``[int].field`` in compiled code; ``["field"]``, a view of one column, elsewhere."""

    @overload
    def __getitem__(self, place: int | np.int64) -> Record: ...
    @overload
    def __getitem__(self, place: str) -> IntArray: ...
    @overload
    def __getitem__(self, place: slice) -> Records[Record]: ...
    @overload
    def __getitem__(self, place: npt.NDArray[np.bool_]) -> Records[Record]: ...
    def __setitem__(self, place: int, value: Record) -> None: ...
    def __len__(self) -> int: ...
    def copy(self) -> Records[Record]:
        """The same records in memory of their own."""
        ...

    def tolist(self) -> list[tuple[int, ...]]:
        """Every record as a tuple, in the order of the fields."""
        ...


def record_fields(record: type) -> tuple[str, ...]:
    """Names of a record's fields, in order."""
    return tuple(record.__annotations__)


@lru_cache(maxsize=128)
def record_dtype(record: type) -> np.dtype[np.void]:
    """How a record lies in memory: one int64 after another, in the order of its fields."""
    return np.dtype([(name, np.int64) for name in record_fields(record)])


def new_records(record: type[Record], count: int) -> Records[Record]:
    """``count`` records of zeros."""
    records = np.zeros(count, dtype=record_dtype(record))
    return cast("Records[Record]", records.view(_PlainRecords) if IS_PLAIN_PYTHON else records)


def records_of(record: type[Record], columns: Mapping[str, npt.ArrayLike], count: int) -> Records[Record]:
    """``count`` records with these columns; a field that is not given is zero."""
    records = new_records(record, count)
    for name, values in columns.items():
        records[name][:] = values
    return records


def records_from(record: type[Record], rows: Sequence[tuple[int, ...]]) -> Records[Record]:
    """One record per row, values in the order of the fields."""
    records = new_records(record, len(rows))
    names = record_fields(record)
    table = np.array(rows, dtype=np.int64).reshape(len(rows), len(names))
    for place, name in enumerate(names):
        records[name][:] = table[:, place]
    return records


def sums(record: type[Record], records: Records[Record]) -> dict[str, int]:
    """The sum of each field over a table, as Python integers."""
    table = cast("npt.NDArray[Any]", records).view(np.int64).reshape(len(records), -1)
    return dict(zip(record_fields(record), table.sum(axis=0).tolist(), strict=True))


def record_as_dict(records: Records[Record], place: int) -> dict[str, int]:
    """One record by name, as Python integers."""
    names = cast("npt.NDArray[np.void]", records).dtype.names or ()
    return dict(zip(names, records[place : place + 1].tolist()[0], strict=True))


Tables = TypeVar("Tables", bound=tuple[Any, ...])


class Several(Generic[Tables]):
    """Named tuples of tables, all of one kind, as one argument of a compiled function: ``several[place].table``.

    words: addresses and shapes of all tables, which must stay where they are.
    """

    def __init__(self, members: Sequence[Tables]) -> None:
        self.members = tuple(members)
        self.words: IntArray = np.array(list(chain.from_iterable(map(table_words, self.members))), dtype=np.int64)

    def __getitem__(self, place: int) -> Tables:
        return self.members[place]

    def __len__(self) -> int:
        return len(self.members)


def table_words(tables: Sequence[Any]) -> list[int]:
    """Of each array its address and its shape; a named tuple of tables may hold others."""
    words: list[int] = []
    for table in tables:
        words += table_words(table) if isinstance(table, tuple) else (table.ctypes.data, *table.shape)
    return words
