"""Marks host stalls: moments in which this machine did not run a process that was ready to run.

A separate process asks to be woken every 2 ms and notes each wake-up that is more than 2 ms late.
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
# Scheduling on a busy machine counts as a stall; timer slack (50 us) and Python (20 us) do not.
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
            # The harness alone answers Ctrl-C.
            start_new_session=True,
        )
        assert self._process.stdout is not None
        # Its start-up would disturb the measurement, so wait until it is over.
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
            # The measurement is kept without stall marks; ``is_complete`` stays False.
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
    _write_line("ready")
    while not poller.poll(0):
        clock.sleep_until_ns(deadline_ns)
        now_ns = monotonic_ns()
        if now_ns - deadline_ns > THRESHOLD_NS and len(late) < MAX_INTERVALS:
            late.append((deadline_ns, now_ns - deadline_ns))
        deadline_ns = now_ns + PERIOD_NS
    usage = resource.getrusage(resource.RUSAGE_SELF)
    _write_line(json.dumps({"late": late, "cpu_s": usage.ru_utime + usage.ru_stime}))


def _write_line(line: str) -> None:
    """Write past Python's buffer, so that nothing is left to flush when the harness was killed."""
    left = line.encode() + b"\n"
    with contextlib.suppress(BrokenPipeError):
        while left:
            left = left[os.write(1, left) :]


if __name__ == "__main__":
    # The slice of the replay, so that marks show what would have delayed the replay.
    with SchedulerSlice() as turns:
        turns.ask(SHORT_SLICE_NS)
        watch()
