"""The process that makes the runs of one device of this host.

It ends when its driver ends: it gives up the current run and stops its server.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from queue import SimpleQueue

from harness.clock import NS_PER_MS, NS_PER_S, MonotonicClock, ScaledClock
from harness.errors import HarnessError, ServerError
from harness.measure.client.self_audit import self_audit
from harness.model.experiment import PlannedRun
from harness.runner.experiment import perform_in_order
from harness.runner.fleet.driver import Audited, BlockCommand, BlockEnded, FleetJob, Gate, Message, RemainingBlock
from harness.runner.progress import ProgressEvent, RequestFinished, StopFlag
from harness.runner.run import RunContext

# Time for a worker whose driver is gone to stop its server in order.
ORPHAN_GRACE_S = 20.0
# On a fast plan many requests end at once; the driver does not need a message for each.
COUNT_EVERY_NS = 100 * NS_PER_MS
STOP_POLL_S = 0.2


class DeviceProcess:
    """The job of this process, and the connection to its driver."""

    def __init__(self, job: FleetJob, connection: Connection) -> None:
        self._job, self._connection, self._clock = job, connection, MonotonicClock()
        self._send_lock, self._stop, self._go = threading.Lock(), StopFlag(), threading.Event()
        self._blocks: SimpleQueue[RemainingBlock | None] = SimpleQueue()
        self._counted_ns = 0

    def listen(self) -> None:
        """Take what the driver sends until it is gone; then end this process."""
        try:
            while True:
                message: RemainingBlock | BlockCommand = self._connection.recv()
                if isinstance(message, RemainingBlock):
                    self._blocks.put(message)
                elif message is BlockCommand.GO:
                    self._go.set()
                elif message is BlockCommand.ABORT:
                    self._stop.abort()
                elif not self._stop.after_run:  # a second request would abort the run
                    self._stop.request()
        except (EOFError, OSError):
            self._blocks.put(None)
            self._stop.abort()
            self._clock.sleep_until_ns(self._clock.now_ns() + int(ORPHAN_GRACE_S * NS_PER_S))
            os._exit(1)

    def work(self) -> None:
        """Make one block after another, and report how each ended."""
        while (block := self._blocks.get()) is not None:
            try:
                self._send(self._audit(block.runs[0]) if block.is_audit else self._make_runs(block))
            except HarnessError as error:
                self._send(BlockEnded(error))
            except Exception as error:
                self._send(BlockEnded(ServerError(f"{type(error).__name__}: {error}", where=str(self._job.slot.place))))

    def _make_runs(self, block: RemainingBlock) -> BlockEnded:
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
        for run in block.runs:
            if run.period is not None:
                self._wait_at(Gate.START, lambda: self._stop.after_run)
            for event in perform_in_order([run], context, block.again):
                self._send(event)
            if self._stop.after_run:
                break
        return BlockEnded()

    def _audit(self, run: PlannedRun) -> Audited:
        self._wait_at(Gate.REPLAY, self._stop.now.is_set)
        with self._job.slot.held(self._job.runs_root):
            figures = self_audit(run.plan, run.spec.client, ScaledClock(1.0))
        lag, spread = figures["rearrival_dispatch_lag_ns"], figures["start_spread_ns"]
        return Audited(lag.get("p99", 0) / NS_PER_MS, spread.get("max", 0) / NS_PER_MS)

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


def main(fd: str) -> None:
    """Make the runs that the driver at the other end of the line ``fd`` sends, until it ends."""
    connection: Connection = Connection(int(fd))
    try:
        job: FleetJob = connection.recv()
    except (EOFError, OSError):  # the driver was killed before it sent one
        return
    sys.argv = list(job.argv)
    process = DeviceProcess(job, connection)
    threading.Thread(target=process.listen, name="driver", daemon=True).start()
    process.work()
    # The listener holds the connection in a read that nothing ends.
    os._exit(0)
