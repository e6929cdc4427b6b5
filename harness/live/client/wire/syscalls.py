"""The C library's calls that the compiled wire loop makes, and memory at an address, for code without an interpreter.

Every pointer is an int64 address of memory that Python owns for the whole replay; nothing here allocates or decides.
Linux on a 64-bit machine only. Next: ``core`` sends, receives and waits with these.
"""

from __future__ import annotations

import platform
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.core.types.functions import ExternalFunction
from numba.extending import intrinsic

from harness.compiled import inner_viewing as inner
from harness.live.client.wire.layout import (
    R_ARMED_NS,
    R_CONTROL,
    R_IOV,
    R_MESSAGE,
    R_NAP_END,
    R_SELF,
    R_TIMER_FD,
    R_TIMER_SPEC,
    R_TIMESPEC,
    BytesArray,
    IntArray,
)

_long, _int = types.int64, types.int32
_external: Any = ExternalFunction

# An int32 as the int64 that everything else is: a function is compiled once for each type it is called with.
wide: Any = np.int64

epoll_wait: Any = _external("epoll_wait", _int(_int, _long, _int, _int))
recvmsg: Any = _external("recvmsg", _long(_int, _long, _int))
sendmsg: Any = _external("sendmsg", _long(_int, _long, _int))
memcpy: Any = _external("memcpy", _long(_long, _long, _long))
memcmp: Any = _external("memcmp", _int(_long, _long, _long))
memchr: Any = _external("memchr", _long(_long, _int, _long))
memmem: Any = _external("memmem", _long(_long, _long, _long, _long))
_clock_gettime: Any = _external("clock_gettime", _int(_int, _long))
_clock_nanosleep: Any = _external("clock_nanosleep", _int(_int, _int, _long, _long))
_timerfd_settime: Any = _external("timerfd_settime", _int(_int, _int, _long, _long))
_errno_location: Any = _external("__errno_location", _long())

CLOCK_MONOTONIC = 1
TFD_TIMER_ABSTIME = TIMER_ABSTIME = 1
NS_PER_S = 1_000_000_000
EAGAIN = 11
EINTR = 4
MSG_DONTWAIT, MSG_NOSIGNAL = 0x40, 0x4000
# struct epoll_event is packed on x86-64 alone: 12 bytes, else 16 with the data at 8.
IS_EVENT_PACKED = platform.machine() == "x86_64"
EVENT_WORDS = 3 if IS_EVENT_PACKED else 4
EVENT_DATA_WORD = 1 if IS_EVENT_PACKED else 2
# First word of a control message that carries SO_TIMESTAMPNS: level SOL_SOCKET in its low half, the type in the high.
STAMP_MARK = 1 | 35 << 32
CONTROL_BYTES = 64


_package: Any = numba
_carray: Any = _package.carray


@intrinsic
def _pointer(_context: Any, address: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(address), generate


_as_pointer: Any = _pointer


@inner
def ints_at(address: int, count: int) -> IntArray:
    """``count`` int64 that lie at an address."""
    return _carray(_as_pointer(address), (count,), np.int64)


@inner
def table_at(address: int, count: int, width: int) -> IntArray:
    """A table of int64, shape (count, width), that lies at an address."""
    return _carray(_as_pointer(address), (count, width), np.int64)


@inner
def words_at(address: int, count: int) -> Any:
    """``count`` int32 that lie at an address."""
    return _carray(_as_pointer(address), (count,), np.int32)


@inner
def bytes_at(address: int, count: int) -> BytesArray:
    """``count`` bytes that lie at an address."""
    return _carray(_as_pointer(address), (count,), np.uint8)


@inner
def errno() -> int:
    """Why the last call failed."""
    return wide(words_at(_errno_location(), 1)[0])


@inner
def clock_ns(reg: IntArray) -> int:
    """CLOCK_MONOTONIC, as ``harness.clock.monotonic_ns`` reads it."""
    _clock_gettime(CLOCK_MONOTONIC, reg[R_SELF] + 8 * R_TIMESPEC)
    return reg[R_TIMESPEC] * NS_PER_S + reg[R_TIMESPEC + 1]


@inner
def nap(reg: IntArray, until_ns: int) -> None:
    """Sleep until an instant, whatever arrives."""
    reg[R_NAP_END] = until_ns // NS_PER_S
    reg[R_NAP_END + 1] = until_ns % NS_PER_S
    _clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, reg[R_SELF] + 8 * R_NAP_END, 0)


@inner
def arm_timer(reg: IntArray, deadline_ns: int) -> None:
    """Make the timer's descriptor readable at an instant; 0 disarms and clears it."""
    if deadline_ns == reg[R_ARMED_NS]:
        return
    reg[R_ARMED_NS] = deadline_ns
    reg[R_TIMER_SPEC] = reg[R_TIMER_SPEC + 1] = 0
    reg[R_TIMER_SPEC + 2] = deadline_ns // NS_PER_S
    reg[R_TIMER_SPEC + 3] = deadline_ns % NS_PER_S
    _timerfd_settime(reg[R_TIMER_FD], TFD_TIMER_ABSTIME, reg[R_SELF] + 8 * R_TIMER_SPEC, 0)


@inner
def receive_bytes(reg: IntArray, fd: int, address: int, room: int) -> int:
    """recvmsg into ``room`` bytes at an address, its control message into R_CONTROL; what recvmsg returned."""
    base = reg[R_SELF]
    reg[R_IOV] = address
    reg[R_IOV + 1] = room
    reg[R_MESSAGE] = reg[R_MESSAGE + 1] = 0
    reg[R_MESSAGE + 2] = base + 8 * R_IOV
    reg[R_MESSAGE + 3] = 1
    reg[R_MESSAGE + 4] = base + 8 * R_CONTROL
    reg[R_MESSAGE + 5] = CONTROL_BYTES
    reg[R_MESSAGE + 6] = 0
    reg[R_CONTROL + 1] = 0
    return recvmsg(fd, base + 8 * R_MESSAGE, MSG_DONTWAIT)


@inner
def send_parts(reg: IntArray, fd: int, first: int, count: int) -> int:
    """sendmsg of ``count`` parts described from R_IOV + 2 * first on; what sendmsg returned."""
    base = reg[R_SELF]
    reg[R_MESSAGE] = reg[R_MESSAGE + 1] = 0
    reg[R_MESSAGE + 2] = base + 8 * (R_IOV + 2 * first)
    reg[R_MESSAGE + 3] = count
    reg[R_MESSAGE + 4] = reg[R_MESSAGE + 5] = reg[R_MESSAGE + 6] = 0
    return sendmsg(fd, base + 8 * R_MESSAGE, MSG_DONTWAIT | MSG_NOSIGNAL)


# What stands for an address when there was no room; whatever is put there is refused too, so that one look at the last
# address tells whether all was written.
NO_ROOM = -1


@inner
def put(to: int, end: int, source: int, count: int) -> int:
    """Copy bytes, up to the address ``end``; the address after the copy, NO_ROOM when nothing was written."""
    if to == NO_ROOM or count < 0 or to + count > end:
        return NO_ROOM
    memcpy(to, source, count)
    return to + count


@inner
def put_byte(to: int, end: int, byte: int) -> int:
    """Write one byte; as ``put``."""
    if to == NO_ROOM or to >= end:
        return NO_ROOM
    bytes_at(to, 1)[0] = byte
    return to + 1


@inner
def put_number(to: int, end: int, number: int) -> int:
    """Write a non-negative number in decimal; as ``put``."""
    digits = 1
    rest = number // 10
    while rest > 0:
        digits += 1
        rest //= 10
    if to == NO_ROOM or number < 0 or to + digits > end:
        return NO_ROOM
    text = bytes_at(to, digits)
    for place in range(digits - 1, -1, -1):
        text[place] = 48 + number % 10
        number //= 10
    return to + digits
