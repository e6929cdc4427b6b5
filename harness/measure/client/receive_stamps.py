"""When what a client reads can have come: the kernel's stamp of its receive, and the poll that did not show it yet.

Kernel stamps (SO_TIMESTAMPNS, CLOCK_REALTIME) are converted to CLOCK_MONOTONIC. The offset of the two clocks is sampled
through the run. A stamp between two samples that disagree is not trusted: the realtime clock was stepped there, and no
stamp is better than a wrong one. Nothing is received here.
"""

from __future__ import annotations

import socket
import struct
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

from harness.clock import NS_PER_MS, NS_PER_S, NS_PER_US, monotonic_ns, realtime_minus_monotonic_ns
from harness.measure.client.answer import NO_KERNEL_STAMP
from harness.measure.client.host import RunDelay

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    IntArray = NDArray[np.int64]

# Linux values (asm-generic/socket.h); Python does not export them. The *_OLD option, which carries a plain timespec on
# 64 bit.
SO_TIMESTAMPNS = 35
ANCILLARY_BYTES = socket.CMSG_SPACE(16)
SAMPLE_INTERVAL_NS = 100 * NS_PER_MS
# NTP slews at most 500 ppm: 50 us per interval. More than that, plus reading noise, is a step.
STEP_NS_PER_INTERVAL = 80_000
_timespec = struct.Struct("qq").unpack


def enable_kernel_stamps(sock: socket.socket) -> None:
    """Ask the kernel to stamp what ``sock`` receives."""
    sock.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)


def kernel_stamp_ns(ancillary: Sequence[tuple[int, int, bytes]]) -> int:
    """When the kernel received the data of a ``recvmsg`` (CLOCK_REALTIME ns), from its control messages."""
    if not ancillary:
        return NO_KERNEL_STAMP
    seconds, nanoseconds = _timespec(ancillary[0][2])
    return seconds * NS_PER_S + nanoseconds


class OffsetLog:
    """Samples of realtime minus monotonic, in time order."""

    def __init__(self) -> None:
        self.at_ns = array("q")
        self.offset_ns = array("q")
        self.next_ns = 0

    def sample(self) -> None:
        """Take one sample now (about 2 us)."""
        offset_ns = realtime_minus_monotonic_ns()
        now_ns = monotonic_ns()
        self.at_ns.append(now_ns)
        self.offset_ns.append(offset_ns)
        self.next_ns = now_ns + SAMPLE_INTERVAL_NS

    def to_monotonic(self, realtime_ns: IntArray, received_ns: IntArray) -> tuple[IntArray, NDArray[np.bool_]]:
        """Kernel stamps as CLOCK_MONOTONIC, and which of them can be trusted.

        realtime_ns: int64, -1 where there is none. received_ns: the user-clock stamp of the same receive; a kernel
        stamp later than it (by more than reading noise) is refused too, and a stamp from before a step whose data was
        read after it. Both of shape (n,).
        """
        import numpy as np

        at = np.frombuffer(self.at_ns, dtype=np.int64)
        offset = np.frombuffer(self.offset_ns, dtype=np.int64)
        if len(at) == 0:
            return realtime_ns, np.zeros(len(realtime_ns), dtype=np.bool_)
        after = np.clip(np.searchsorted(at, received_ns), 0, len(at) - 1)
        before = np.maximum(after - 1, 0)
        # The stamp was taken before ``received_ns``; within an interval the sample nearest in time is at most 50 ms
        # away.
        use_before = received_ns - at[before] < at[after] - received_ns
        monotonic = realtime_ns - np.where(use_before, offset[before], offset[after])
        follows_step = self._follows_step()
        last_step_ns = np.maximum.accumulate(np.where(follows_step, at, np.iinfo(np.int64).min))
        is_trusted = (realtime_ns >= 0) & ~follows_step[after] & (monotonic <= received_ns + 5_000)
        is_trusted &= monotonic >= last_step_ns[before]
        return np.minimum(monotonic, received_ns), is_trusted

    def some(self, count: int) -> list[list[int]]:
        """About ``count`` [instant, offset] samples, evenly chosen, with the first and the last."""
        stride = max(1, len(self.at_ns) // count)
        places = sorted({*range(0, len(self.at_ns), stride), max(0, len(self.at_ns) - 1)})
        return [[self.at_ns[place], self.offset_ns[place]] for place in places if place < len(self.at_ns)]

    def steps(self) -> list[int]:
        """Instants (CLOCK_MONOTONIC) before which the realtime clock was stepped."""
        return [at_ns for at_ns, is_step in zip(self.at_ns, self._follows_step(), strict=True) if is_step]

    def _follows_step(self) -> NDArray[np.bool_]:
        """For each sample, whether the realtime clock was stepped between the sample before and it."""
        import numpy as np

        at, offset = (np.frombuffer(values, dtype=np.int64) for values in (self.at_ns, self.offset_ns))
        intervals = np.maximum(1, np.diff(at, prepend=at[:1]) // SAMPLE_INTERVAL_NS)
        return np.abs(np.diff(offset, prepend=offset[:1])) > STEP_NS_PER_INTERVAL * intervals


# A thread that slept runs so soon after its wake-up, besides the time that it waits for a core.
WAKE_NS = 100 * NS_PER_US


class PollTimes:
    """Polls of one thread. Call ``begin`` and ``end`` around each; use it in the thread that made it alone."""

    def __init__(self) -> None:
        self._run_delay = RunDelay()
        # When the latest poll returned that showed all that was there; the same of the poll before; when the latest
        # poll began to sleep (0: it did not); the bound of this visit (0: not computed yet).
        self._polled_ns = self._not_before_ns = self._slept_from_ns = self._bound_ns = 0

    def close(self) -> None:
        self._run_delay.close()

    def begin(self, now_ns: int) -> None:
        """A poll follows. now_ns: the present instant where it may sleep, else 0."""
        self._not_before_ns, self._slept_from_ns, self._bound_ns = self._polled_ns, now_ns, 0

    def end(self, *, is_all: bool = True) -> None:
        """The poll has returned. is_all: it showed all that was there."""
        if is_all:
            self._polled_ns = monotonic_ns()

    def forget_waits(self) -> None:
        """Call it now and then between visits: the time for which the thread waited until now counts for no visit."""
        self._run_delay.since_last_ns()

    def earliest_ns(self) -> int:
        """The earliest instant (CLOCK_MONOTONIC) at which what this visit receives can have come.

        After the poll before. A poll that slept was woken by the first that came: then it was not before this thread
        could run again. The time that a hypervisor takes from the core is not seen.
        """
        if not self._bound_ns:
            self._bound_ns, waited_ns = self._not_before_ns, self._run_delay.since_last_ns()
            if self._slept_from_ns and waited_ns is not None:
                woken_ns = self._polled_ns - waited_ns - WAKE_NS
                if woken_ns > self._slept_from_ns + WAKE_NS:
                    self._bound_ns = max(self._not_before_ns, woken_ns)
        return self._bound_ns
