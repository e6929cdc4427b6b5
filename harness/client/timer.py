"""One absolute CLOCK_MONOTONIC deadline as a file descriptor that epoll can wait for.

``os.timerfd_*`` exists from Python 3.13 on; below it the same three system calls go through ctypes. A timer never fires
early.
"""

from __future__ import annotations

import ctypes
import os
import sys

CLOCK_MONOTONIC = 1
TFD_TIMER_ABSTIME = 1
TFD_FLAGS = os.O_NONBLOCK | os.O_CLOEXEC
NS_PER_S = 1_000_000_000


class _TimerSpec(ctypes.Structure):
    """struct itimerspec of a 64-bit Linux: interval, then first expiration."""

    _fields_ = (
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("value_s", ctypes.c_long),
        ("value_ns", ctypes.c_long),
    )


class DeadlineTimer:
    """Readable once the armed instant has passed; arming again clears it."""

    def __init__(self) -> None:
        self._armed_ns = 0
        if sys.version_info >= (3, 13):
            self.fd = os.timerfd_create(CLOCK_MONOTONIC, flags=TFD_FLAGS)
            return
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.fd = self._libc.timerfd_create(CLOCK_MONOTONIC, TFD_FLAGS)
        if self.fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._spec = _TimerSpec(0, 0, 0, 0)
        self._spec_pointer = ctypes.byref(self._spec)

    def arm(self, deadline_ns: int) -> None:
        """Fire at ``deadline_ns`` (CLOCK_MONOTONIC); 0 disarms. Cheap when nothing changes."""
        if deadline_ns == self._armed_ns:
            return
        self._armed_ns = deadline_ns
        if sys.version_info >= (3, 13):
            os.timerfd_settime_ns(self.fd, flags=os.TFD_TIMER_ABSTIME, initial=deadline_ns)
            return
        self._spec.value_s, self._spec.value_ns = divmod(deadline_ns, NS_PER_S)
        if self._libc.timerfd_settime(self.fd, TFD_TIMER_ABSTIME, self._spec_pointer, None) < 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime")

    def clear(self) -> None:
        """Forget that the timer fired; call when epoll reported it."""
        self.arm(0)

    def __enter__(self) -> DeadlineTimer:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the descriptor back."""
        os.close(self.fd)
