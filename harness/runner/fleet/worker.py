"""``python -m harness.runner.fleet.worker FD``: the process that makes the runs of one device of this host.

It ends when its driver ends: it gives up the current run and stops its server.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection

from harness.client.self_audit import self_audit
from harness.clock import NS_PER_MS, NS_PER_S, MonotonicClock, clock_for
from harness.errors import HarnessError, ServerError
from harness.runner.experiment import perform_in_order
from harness.runner.fleet.process import Audited, Command, Ended, Gate, Job, Message
from harness.runner.progress import ProgressEvent, RequestFinished, StopFlag
from harness.runner.run import RunContext

# Time for a worker whose driver is gone to stop its server in order.
ORPHAN_GRACE_S = 20.0
# On a fast plan many requests end at once; the driver does not need a message for each.
COUNT_EVERY_NS = 100 * NS_PER_MS
STOP_POLL_S = 0.2


class Worker:
    """The job of this process, and the connection to its driver."""

    def __init__(self, job: Job, connection: Connection) -> None:
        self._job, self._connection, self._clock = job, connection, MonotonicClock()
        self._send_lock, self._stop, self._go = threading.Lock(), StopFlag(), threading.Event()
        self._counted_ns = 0

    def listen(self) -> None:
        """Take the driver's commands until it is gone; then end this process."""
        try:
            while True:
                command: Command = self._connection.recv()
                if command is Command.GO:
                    self._go.set()
                elif command is Command.ABORT:
                    self._stop.abort()
                elif not self._stop.after_run:  # a second request would abort the run
                    self._stop.request()
        except (EOFError, OSError):
            self._stop.abort()
            self._clock.sleep_until_ns(self._clock.now_ns() + int(ORPHAN_GRACE_S * NS_PER_S))
            os._exit(1)

    def work(self) -> None:
        """Do the job and report how it ended."""
        error: HarnessError | None = None
        try:
            self._audit() if self._job.is_audit else self._make_runs()
        except HarnessError as problem:
            error = problem
        except Exception as problem:
            error = ServerError(f"{type(problem).__name__}: {problem}", where=str(self._job.slot.place))
        self._send(Ended(error))

    def _make_runs(self) -> None:
        job = self._job
        context = RunContext(
            job.runs_root,
            job.spec_source,
            job.authorization,
            self._report,
            self._stop,
            worker_slot=job.slot,
            await_others=lambda: self._wait_at(Gate.REPLAY, self._stop.now.is_set),
        )
        for run in job.runs:
            if run.period is not None:
                self._wait_at(Gate.START, lambda: self._stop.after_run)
            for event in perform_in_order([run], context, job.again):
                self._send(event)
            if self._stop.after_run:
                return

    def _audit(self) -> None:
        """Report the lateness of this client, measured when the clients of all devices are ready."""
        job = self._job
        self._wait_at(Gate.REPLAY, self._stop.now.is_set)
        with job.slot.held(job.runs_root):
            figures = self_audit(job.runs[0].plan, job.runs[0].spec.client, clock_for(1.0))
        lag, spread = figures["rearrival_dispatch_lag_ns"], figures["start_spread_ns"]
        self._send(Audited(lag.get("p99", 0) / NS_PER_MS, spread.get("max", 0) / NS_PER_MS))

    def _wait_at(self, gate: Gate, is_over: Callable[[], bool]) -> None:
        self._go.clear()
        self._send(gate)
        while not (self._go.wait(STOP_POLL_S) or is_over()):
            pass

    def _report(self, event: ProgressEvent) -> None:
        if isinstance(event, RequestFinished) and event.num_finished < event.num_requests:
            now_ns = self._clock.now_ns()
            if now_ns - self._counted_ns < COUNT_EVERY_NS:
                return
            self._counted_ns = now_ns
        self._send(event)

    def _send(self, message: Message) -> None:
        with self._send_lock, suppress(OSError):
            self._connection.send(message)


def main() -> None:
    connection: Connection = Connection(int(sys.argv[1]))
    try:
        job: Job = connection.recv()
    except (EOFError, OSError):  # the driver was killed before it sent one
        return
    sys.argv = list(job.argv)
    worker = Worker(job, connection)
    threading.Thread(target=worker.listen, name="driver", daemon=True).start()
    worker.work()
    # The listener holds the connection in a read that nothing ends.
    os._exit(0)


if __name__ == "__main__":
    main()
