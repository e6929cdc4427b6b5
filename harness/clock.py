"""Time: the only file that reads it or waits for it.

Every instant is an int of nanoseconds from a passed Clock. A ScaledClock runs *model* time faster than wall time;
everything above it (plans, records, reports) then uses model time and says so.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import datetime, timezone
from fractions import Fraction
from typing import Protocol

NS_PER_S = 1_000_000_000
NS_PER_MS = 1_000_000
NS_PER_US = 1_000
_TIMER_ABSTIME = 1  # sys/timerfd.h

# The bare C function, for loops in which a Python call per stamp would itself be the measurement error.
monotonic_ns = time.monotonic_ns


class Clock(Protocol):
    """A source of monotonic int64 nanoseconds, and ways to wait for an instant of it."""

    @property
    def scale(self) -> float:
        """Clock nanoseconds per wall nanosecond (1.0 unless scaled)."""
        ...

    def now_ns(self) -> int:
        """The current instant."""
        ...

    def sleep_until_ns(self, deadline_ns: int) -> None:
        """Block the calling thread until ``deadline_ns``; return at once when it has passed."""
        ...

    async def wait_until_ns(self, deadline_ns: int) -> None:
        """Suspend the calling task until ``deadline_ns``; never returns early."""
        ...


async def _yield_s(seconds: float) -> None:
    # Imported where something is awaited: commands that read records start without it.
    import asyncio

    await asyncio.sleep(seconds)


class MonotonicClock:
    """The machine's CLOCK_MONOTONIC, the same in every process of one host."""

    scale = 1.0

    def now_ns(self) -> int:
        return time.monotonic_ns()

    def sleep_until_ns(self, deadline_ns: int) -> None:
        while (remaining_ns := deadline_ns - time.monotonic_ns()) > 0:
            time.sleep(remaining_ns / NS_PER_S)

    async def wait_until_ns(self, deadline_ns: int) -> None:
        # asyncio timers may fire up to one clock resolution early, hence the loop.
        while (remaining_ns := deadline_ns - time.monotonic_ns()) > 0:
            await _yield_s(remaining_ns / NS_PER_S)


class ScaledClock:
    """Model time that runs ``scale`` times as fast as CLOCK_MONOTONIC: model = monotonic * scale; 1.0: the same.

    No origin is kept, so client and emulator processes with the same scale agree on every instant.
    """

    def __init__(self, scale: float) -> None:
        if not scale > 0:
            raise ValueError(f"scale must be positive, got {scale}")
        # Integer ratio: 100 days of uptime in ns exceed the 53 bits of a double.
        ratio = Fraction(scale).limit_denominator(10_000)
        self._numerator, self._denominator = ratio.numerator, ratio.denominator
        self.scale = float(ratio)

    @property
    def ratio(self) -> tuple[int, int]:
        """The scale as an exact fraction: numerator, denominator."""
        return self._numerator, self._denominator

    def from_monotonic_ns(self, monotonic_ns: int) -> int:
        """Model instant of a CLOCK_MONOTONIC stamp."""
        return monotonic_ns * self._numerator // self._denominator

    def to_monotonic_ns(self, model_ns: int) -> int:
        """CLOCK_MONOTONIC instant of a model stamp, rounded up so that waits never end early."""
        return -(-model_ns * self._denominator // self._numerator)

    def now_ns(self) -> int:
        return self.from_monotonic_ns(time.monotonic_ns())

    def sleep_until_ns(self, deadline_ns: int) -> None:
        while (remaining_ns := deadline_ns - self.now_ns()) > 0:
            time.sleep(remaining_ns / self.scale / NS_PER_S)

    async def wait_until_ns(self, deadline_ns: int) -> None:
        while (remaining_ns := deadline_ns - self.now_ns()) > 0:
            await _yield_s(remaining_ns / self.scale / NS_PER_S)


class DeadlineTimer:
    """An absolute CLOCK_MONOTONIC deadline as a file descriptor that epoll and asyncio can wait for; Linux only.

    It never fires early. Before Python 3.13 the same system calls go through ctypes.
    """

    def __init__(self) -> None:
        self._armed_ns = 0
        if sys.version_info >= (3, 13):
            self.fd = os.timerfd_create(time.CLOCK_MONOTONIC, flags=os.O_NONBLOCK | os.O_CLOEXEC)
            return
        import ctypes

        self._errno = ctypes.get_errno
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.fd = self._libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self.fd < 0:
            raise OSError(self._errno(), "timerfd_create")
        # struct itimerspec of a 64-bit Linux: interval, then first expiration, each in seconds and nanoseconds.
        self._spec = (ctypes.c_long * 4)()

    def arm(self, deadline_ns: int) -> None:
        """Fire at ``deadline_ns`` (CLOCK_MONOTONIC), at once where that has passed; does nothing when armed for it."""
        # The kernel refuses instants before the clock's zero, which is the machine's start, and takes 0 as "disarm".
        self._set(max(deadline_ns, 1))

    def clear(self) -> None:
        """Disarm: nothing fires, and the descriptor of a timer that fired is no longer readable."""
        self._set(0)

    def _set(self, deadline_ns: int) -> None:
        if deadline_ns == self._armed_ns:
            return
        self._armed_ns = deadline_ns
        if sys.version_info >= (3, 13):
            os.timerfd_settime_ns(self.fd, flags=os.TFD_TIMER_ABSTIME, initial=deadline_ns)
            return
        self._spec[2], self._spec[3] = divmod(deadline_ns, NS_PER_S)
        if self._libc.timerfd_settime(self.fd, _TIMER_ABSTIME, self._spec, None) < 0:
            raise OSError(self._errno(), "timerfd_settime")

    def __enter__(self) -> DeadlineTimer:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self.fd)


def realtime_minus_monotonic_ns() -> int:
    """Offset of CLOCK_REALTIME over CLOCK_MONOTONIC, from the tightest of five bracketed reads."""
    best_width_ns, best_offset_ns = 1 << 62, 0
    for _ in range(5):
        before_ns = time.monotonic_ns()
        realtime_ns = time.time_ns()
        after_ns = time.monotonic_ns()
        if after_ns - before_ns < best_width_ns:
            best_width_ns, best_offset_ns = after_ns - before_ns, realtime_ns - (before_ns + after_ns) // 2
    return best_offset_ns


def utc_now() -> datetime:
    """Wall-clock UTC, for provenance and file names only; never for a measurement."""
    return datetime.now(timezone.utc)


def process_cpu_ns() -> int:
    """CPU time this process has used, ns: what a benchmark of one core's work counts on a shared machine."""
    return time.process_time_ns()
