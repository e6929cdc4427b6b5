"""One-shot alarms on CLOCK_MONOTONIC that wake an asyncio loop within tens of microseconds.

asyncio's own timers are rounded to a millisecond by epoll; a timerfd is a file that becomes readable at an instant.
An alarm never fires early.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
from collections.abc import Callable

from harness.clock import NS_PER_S

_CLOCK_MONOTONIC = 1  # linux/time.h
_TIMER_ABSTIME = 1  # sys/timerfd.h: the instant is absolute
_TIMER_BYTES = 8  # a read returns one uint64, the number of expirations


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _TimerSpec(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("value", _Timespec))


class Alarm:
    """Calls ``callback`` once at each instant it is set for; setting it again moves it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        self._loop = loop
        self._callback = callback
        self._handle: asyncio.TimerHandle | None = None
        self._fd = -1
        if sys.platform == "linux":
            # ctypes, because os.timerfd_create came with Python 3.13.
            self._libc = ctypes.CDLL(None, use_errno=True)
            self._fd = self._libc.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd >= 0:
            loop.add_reader(self._fd, self._fired)

    def set(self, monotonic_ns: int) -> None:
        """Fire at ``monotonic_ns`` (CLOCK_MONOTONIC), at once when it has passed."""
        if self._fd < 0:
            self.cancel()
            self._handle = self._loop.call_at(monotonic_ns / NS_PER_S, self._callback)
            return
        # The zero value would disarm the timer instead of firing at once.
        seconds, nanoseconds = divmod(max(monotonic_ns, 1), NS_PER_S)
        spec = _TimerSpec(_Timespec(0, 0), _Timespec(seconds, nanoseconds))
        if self._libc.timerfd_settime(self._fd, _TIMER_ABSTIME, ctypes.byref(spec), None) != 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime failed")

    def cancel(self) -> None:
        """Forget the instant it is set for."""
        if self._fd >= 0:
            self._libc.timerfd_settime(self._fd, 0, ctypes.byref(_TimerSpec()), None)
        elif self._handle is not None:
            self._handle.cancel()

    def close(self) -> None:
        """Release the timer; it never fires again."""
        self.cancel()
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _fired(self) -> None:
        try:
            os.read(self._fd, _TIMER_BYTES)
        except BlockingIOError:
            return  # it was set again between becoming readable and this call
        self._callback()
