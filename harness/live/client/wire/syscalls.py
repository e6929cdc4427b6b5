"""The C library's calls that the compiled wire loop makes; their arguments lie in memory that Python owns.

Nothing here allocates or decides. Linux on a 64-bit machine only. Next: ``core`` sends, receives and waits with these.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from harness.clock import NS_PER_S
from harness.compiled import inner
from harness.compiled.addresses import record_at
from harness.compiled.asked import external
from harness.live.client.wire.layout import (
    CONTROL_ROOM_BYTES,
    Registers,
    control_at,
    message_at,
    span_at,
    timerspec_at,
    timespec_at,
)

_LONG, _INT = "int64", "int32"

# An int32 as the int64 that everything else is: a function is compiled once for each type it is called with.
wide: Any = np.int64

epoll_wait = external("epoll_wait", _INT, _INT, _LONG, _INT, _INT)
_recvmsg = external("recvmsg", _LONG, _INT, _LONG, _INT)
_sendmsg = external("sendmsg", _LONG, _INT, _LONG, _INT)
memcpy = external("memcpy", _LONG, _LONG, _LONG, _LONG)
memcmp = external("memcmp", _INT, _LONG, _LONG, _LONG)
memchr = external("memchr", _LONG, _LONG, _INT, _LONG)
memmem = external("memmem", _LONG, _LONG, _LONG, _LONG, _LONG)
_clock_gettime = external("clock_gettime", _INT, _INT, _LONG)
_clock_nanosleep = external("clock_nanosleep", _INT, _INT, _INT, _LONG, _LONG)
_timerfd_settime = external("timerfd_settime", _INT, _INT, _INT, _LONG, _LONG)
_errno_location = external("__errno_location", _LONG)

CLOCK_MONOTONIC = 1
TFD_TIMER_ABSTIME = TIMER_ABSTIME = 1
EAGAIN = 11
EINTR = 4
MSG_DONTWAIT, MSG_NOSIGNAL = 0x40, 0x4000
# A control message that carries SO_TIMESTAMPNS: level SOL_SOCKET in its low half, the type in the high.
STAMP_MARK = 1 | 35 << 32


class ErrorNumber:
    """The C library's errno, int32."""

    code: int


_error_number_at = record_at(ErrorNumber, np.dtype([("code", np.int32)]))


@inner
def errno() -> int:
    """Why the last call failed."""
    return wide(_error_number_at(_errno_location(), 0).code)


@inner
def clock_ns(reg: Registers) -> int:
    """CLOCK_MONOTONIC, as ``harness.clock.monotonic_ns`` reads it."""
    now = timespec_at(reg.now_at, 0)
    _clock_gettime(CLOCK_MONOTONIC, reg.now_at)
    return now.seconds * NS_PER_S + now.nanoseconds


@inner
def nap(reg: Registers, until_ns: int) -> None:
    """Sleep until an instant, whatever arrives."""
    end = timespec_at(reg.nap_end_at, 0)
    end.seconds, end.nanoseconds = until_ns // NS_PER_S, until_ns % NS_PER_S
    _clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, reg.nap_end_at, 0)


@inner
def arm_timer(reg: Registers, deadline_ns: int) -> None:
    """Make the timer's descriptor readable at an instant; 0 disarms and clears it."""
    if deadline_ns == reg.armed_ns:
        return
    reg.armed_ns = deadline_ns
    timer = timerspec_at(reg.timer_at, 0)
    timer.seconds, timer.nanoseconds = deadline_ns // NS_PER_S, deadline_ns % NS_PER_S
    _timerfd_settime(reg.timer_fd, TFD_TIMER_ABSTIME, reg.timer_at, 0)


@inner
def receive_bytes(reg: Registers, fd: int, address: int, room: int) -> int:
    """recvmsg into ``room`` bytes at an address, with room for control messages; what recvmsg returned."""
    part, message = span_at(reg.parts_at, 0), message_at(reg.message_at, 0)
    part.start_at, part.num_bytes = address, room
    message.parts_at, message.num_parts = reg.parts_at, 1
    message.control_at = reg.control_at
    message.control_bytes = CONTROL_ROOM_BYTES
    message.flags = 0
    control_at(reg.control_at, 0).mark = 0
    return _recvmsg(fd, reg.message_at, MSG_DONTWAIT)


@inner
def send_parts(reg: Registers, fd: int, parts_at: int, count: int) -> int:
    """sendmsg of ``count`` parts described at an address; what sendmsg returned."""
    message = message_at(reg.message_at, 0)
    message.parts_at, message.num_parts = parts_at, count
    message.control_at = message.control_bytes = message.flags = 0
    return _sendmsg(fd, reg.message_at, MSG_DONTWAIT | MSG_NOSIGNAL)
