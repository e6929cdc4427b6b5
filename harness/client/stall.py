"""Marks the moments in which this machine did not run a process that was ready to run: host stalls.

A process of its own asks to be woken every 2 ms and notes each waking that is more than 2 ms late. It touches nothing
else.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys

from harness.client.scheduler_slice import SHORT_SLICE_NS, SchedulerSlice
from harness.clock import NS_PER_MS, MonotonicClock, ScaledClock, monotonic_ns

PERIOD_NS = 2 * NS_PER_MS
# The kernel's own scheduling on a busy machine is part of what is marked; timer slack (50 us) and Python (20 us) are
# not.
THRESHOLD_NS = 2 * NS_PER_MS
MAX_INTERVALS = 100_000
READY_TIMEOUT_S = 10.0
# Long, for a machine that is busy: a run without its stall marks is INVALID by default.
END_TIMEOUT_S = 20.0


class StallMeter:
    """Watches from ``with`` entry to its end; afterwards ``intervals`` are [start_ns, duration_ns] pairs, clock ns."""

    def __init__(self, clock: ScaledClock) -> None:
        self._clock = clock
        self.scale = clock.scale
        self.intervals: list[list[int]] = []
        self.cpu_s = 0.0
        self.is_complete = False

    def __enter__(self) -> StallMeter:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "harness.client.stall"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # A Ctrl-C in the terminal is the harness's to answer.
            start_new_session=True,
        )
        assert self._process.stdout is not None
        # Its start-up must be over before the measurement, or it would itself be a disturbance.
        ready, _, _ = select.select([self._process.stdout], [], [], READY_TIMEOUT_S)
        if ready:
            self._process.stdout.readline()
        return self

    @property
    def pid(self) -> int:
        """Process id of the watching process."""
        return self._process.pid

    def __exit__(self, *_exception: object) -> None:
        try:
            output, _ = self._process.communicate(timeout=END_TIMEOUT_S)
            report = json.loads(output)
        except (subprocess.TimeoutExpired, ValueError):
            # A measurement is not lost for want of its stall marks: ``is_complete`` says that there are none.
            self._process.kill()
            self._process.communicate()
            return
        to_clock = self._clock.from_monotonic_ns
        self.intervals = [[to_clock(start), to_clock(start + late) - to_clock(start)] for start, late in report["late"]]
        self.cpu_s = report["cpu_s"]
        self.is_complete = True


def watch() -> None:
    """Note late wakings until standard input is closed, then print them."""
    import resource

    clock = MonotonicClock()
    late: list[tuple[int, int]] = []
    poller = select.poll()
    poller.register(0, select.POLLIN | select.POLLHUP)
    deadline_ns = monotonic_ns() + PERIOD_NS
    _say("ready")
    while not poller.poll(0):
        clock.sleep_until_ns(deadline_ns)
        now_ns = monotonic_ns()
        if now_ns - deadline_ns > THRESHOLD_NS and len(late) < MAX_INTERVALS:
            late.append((deadline_ns, now_ns - deadline_ns))
        deadline_ns = now_ns + PERIOD_NS
    usage = resource.getrusage(resource.RUSAGE_SELF)
    _say(json.dumps({"late": late, "cpu_s": usage.ru_utime + usage.ru_stime}))


def _say(line: str) -> None:
    """A line for the harness; one that was killed reads no more, and no word is left for the interpreter to flush."""
    left = line.encode() + b"\n"
    with contextlib.suppress(BrokenPipeError):
        while left:
            left = left[os.write(1, left) :]


if __name__ == "__main__":
    # What the replay holds, so that marks mean what would have held the replay up.
    with SchedulerSlice() as turns:
        turns.ask(SHORT_SLICE_NS)
        watch()
