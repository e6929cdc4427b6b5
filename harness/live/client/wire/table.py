"""The shared tables as compiled code sees them: views at the addresses in the registers, which cost nothing to make.

Passing the registers alone keeps calls small, and compiling short. Next: ``core`` and ``scan`` read and write them.
"""

from __future__ import annotations

from typing import Any

from harness.compiled import inner_viewing as inner
from harness.live.client.wire import layout as at
from harness.live.client.wire.layout import IntArray
from harness.live.client.wire.syscalls import ints_at, table_at, words_at


@inner
def conns(reg: IntArray) -> IntArray:
    """Connections, by file descriptor."""
    return table_at(reg[at.R_CONN], reg[at.R_NUM_CONN], at.CONN_WIDTH)


@inner
def sessions(reg: IntArray) -> IntArray:
    """Sessions, by index."""
    return table_at(reg[at.R_SESS], reg[at.R_NUM_SESS], at.SESS_WIDTH)


@inner
def rows(reg: IntArray) -> IntArray:
    """Requests, in plan order."""
    return table_at(reg[at.R_ROW], reg[at.R_NUM_ROW], at.ROW_WIDTH)


@inner
def deadlines(reg: IntArray) -> IntArray:
    """The heap of deadlines."""
    return table_at(reg[at.R_HEAP], 2 * reg[at.R_NUM_ROW] + 1, at.HEAP_WIDTH)


@inner
def journal(reg: IntArray) -> IntArray:
    """The journal of receives."""
    return table_at(reg[at.R_JOURNAL], at.JOURNAL_ENTRIES, at.JOURNAL_WIDTH)


@inner
def trigger_ns(reg: IntArray) -> IntArray:
    """The column of that name, clock ns."""
    return ints_at(reg[at.R_TRIGGER], reg[at.R_NUM_ROW])


@inner
def due_ns(reg: IntArray) -> IntArray:
    """The column of that name, clock ns."""
    return ints_at(reg[at.R_DUE], reg[at.R_NUM_ROW])


@inner
def sent_ns(reg: IntArray) -> IntArray:
    """The column of that name, CLOCK_MONOTONIC ns."""
    return ints_at(reg[at.R_SENT], reg[at.R_NUM_ROW])


@inner
def first_byte_ns(reg: IntArray) -> IntArray:
    """The column of that name, CLOCK_MONOTONIC ns."""
    return ints_at(reg[at.R_FIRST_BYTE], reg[at.R_NUM_ROW])


@inner
def done_ns(reg: IntArray) -> IntArray:
    """The column of that name, CLOCK_MONOTONIC ns."""
    return ints_at(reg[at.R_DONE], reg[at.R_NUM_ROW])


@inner
def http_status(reg: IntArray) -> Any:
    """The column of that name, int32."""
    return words_at(reg[at.R_HTTP_STATUS], reg[at.R_NUM_ROW])
