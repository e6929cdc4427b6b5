"""The visits of a client to its sockets, and the earliest instant at which what it reads can have come.

A visit is one poll. What a poll shows came after the poll before, which did not show it. Nothing is received here.
"""

from __future__ import annotations

from harness.clock import NS_PER_US, monotonic_ns
from harness.measure.client.host import RunDelay

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
