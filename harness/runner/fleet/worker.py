"""The process that works for one device of this host: it makes the runs of its blocks and tells the driver.

Ends with its driver, however that ends: the run in flight is given up, its server stopped. It decides nothing about
what comes next. Next: ``local`` starts it as ``python -m harness.runner.fleet.worker FD``.
"""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from queue import SimpleQueue

from harness.clock import NS_PER_MS, NS_PER_S, MonotonicClock, clock_for
from harness.errors import HarnessError, ServerError
from harness.live.audit.replay import self_audit
from harness.runner.fleet.work import Audit, Audited, Block, Go, Idle, Job, Told, Wish
from harness.runner.lane import perform_in_order
from harness.runner.progress import ProgressEvent, RequestFinished, StopFlag
from harness.runner.run import Invocation

# A worker whose driver is gone has this long to stop its server in good order.
ORPHAN_GRACE_S = 20.0
# Many requests end at once on a fast plan; the driver has other things to do than to count them one by one.
COUNT_EVERY_NS = 100 * NS_PER_MS
WISH_POLL_S = 0.2

Inbox = SimpleQueue[Audit | Block | None]


class _Teller:
    """Sends what happened to the driver, from whichever thread; a driver that is gone hears nothing."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._lock, self._clock = connection, threading.Lock(), MonotonicClock()
        self._counted_ns = 0

    def __call__(self, said: Told) -> None:
        with self._lock, suppress(OSError):
            self._connection.send(said)

    def progress(self, event: ProgressEvent) -> None:
        if isinstance(event, RequestFinished) and event.num_finished < event.num_requests:
            now_ns = self._clock.now_ns()
            if now_ns - self._counted_ns < COUNT_EVERY_NS:
                return
            self._counted_ns = now_ns
        self(event)


def listen(connection: Connection, inbox: Inbox, stop: StopFlag, go: threading.Event) -> None:
    """Take what the driver sends until it is gone; then see to it that this process goes too."""
    try:
        while True:
            said: Audit | Block | Go | Wish | None = connection.recv()
            if isinstance(said, Wish):
                wish(stop, is_now=said.is_now)
            elif isinstance(said, Go):
                go.set()
            else:
                inbox.put(said)
    except (EOFError, OSError):
        stop.abort()
        inbox.put(None)
        clock = MonotonicClock()
        clock.sleep_until_ns(clock.now_ns() + int(ORPHAN_GRACE_S * NS_PER_S))
        os._exit(1)


def wish(stop: StopFlag, *, is_now: bool) -> None:
    if is_now:
        stop.abort()
    elif not stop.after_run:  # asked for twice it would abort
        stop.request()


def work(job: Job, inbox: Inbox, stop: StopFlag, go: threading.Event, tell: _Teller) -> None:
    """Perform what arrives, one thing at a time, until there is nothing more."""

    def await_others() -> None:
        while not (go.wait(WISH_POLL_S) or stop.now.is_set()):
            pass
        go.clear()

    invocation = Invocation(
        job.runs_root, job.spec_source, job.ticket, tell.progress, stop, station=job.station, await_others=await_others
    )
    while (task := inbox.get()) is not None:
        error: HarnessError | None = None
        try:
            if isinstance(task, Audit):
                tell(audited(task, job))
                continue
            for said in perform_in_order(task.runs, invocation, task.again):
                tell(said)
        except HarnessError as found:
            error = found
        except Exception as found:
            error = ServerError(f"{type(found).__name__}: {found}", where=str(job.station.place))
        tell(Idle(error))


def audited(task: Audit, job: Job) -> Audited | Idle:
    """The lateness of this process on this host now, in the shape of a run."""
    with job.station.held(job.runs_root):
        found = self_audit(task.run.plan, task.run.spec.client, clock_for(1.0))
    lag, spread = found["rearrival_dispatch_lag_ns"], found["start_spread_ns"]
    return Audited(lag.get("p99", 0) / NS_PER_MS, spread.get("max", 0) / NS_PER_MS)


def main() -> None:
    connection: Connection = Connection(int(sys.argv[1]))
    try:
        job: Job = connection.recv()
    except (EOFError, OSError):  # the driver was killed before it could say
        return
    sys.argv = list(job.argv)
    inbox: Inbox = SimpleQueue()
    stop, go = StopFlag(), threading.Event()
    threading.Thread(target=listen, args=(connection, inbox, stop, go), name="driver", daemon=True).start()
    work(job, inbox, stop, go, _Teller(connection))
    # The listener holds the connection in a read that nothing ends.
    os._exit(0)


if __name__ == "__main__":
    main()
