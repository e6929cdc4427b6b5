"""The driver of a fleet: hands each worker its blocks one after another, and follows them until all have ended.

A worker makes the runs of one device. Here it is a process of this host, reached through a pipe; ``hosts`` reaches
workers through Dask. Messages and checks are the same. No state is kept: the remaining runs are planned minus sealed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from multiprocessing import Pipe
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import psutil

from harness.children import own_command
from harness.errors import HarnessError, ServerError, SpecError
from harness.judge.prereg import RunAuthorization
from harness.measure.records import layout
from harness.measure.records.run import SealedRun
from harness.measure.records.store import Archive, RunStore, received
from harness.model.experiment import PlannedRun
from harness.model.spec import DeviceSlot, FleetSpec, LimitsSpec
from harness.run_key import RunKey
from harness.runner.fleet.slot import WorkerSlot
from harness.runner.progress import Began, Made, ProgressEvent, ServerReady
from harness.runner.run import RunContext

POLL_S = 0.2
END_TIMEOUT_S = 30.0
# A device is given up when its process died more often: then its runs are the likely cause.
ALLOWED_DEATHS = 2
AUDIT_TRIES = 2


@dataclass(frozen=True, slots=True)
class FleetJob:
    """What all blocks of a process have in common. argv: of the driver, for the manifests."""

    runs_root: Path
    spec_source: str
    authorization: RunAuthorization | None
    slot: WorkerSlot
    argv: tuple[str, ...]


class RemainingBlock(NamedTuple):
    """The remaining runs of a block. again: runs that repeat an INVALID run.

    is_audit: make no run; measure the lateness of this client with the plan of the first run.
    """

    runs: tuple[PlannedRun, ...]
    again: frozenset[RunKey] = frozenset()
    is_audit: bool = False


class BlockCommand(Enum):
    """What the driver sends while a block is made."""

    GO = "pass the gate"
    END = "end after the run in flight"
    ABORT = "give up the run in flight"


class Gate(Enum):
    """Where a worker waits for GO when the devices are in lockstep."""

    START = "before the server is started"
    REPLAY = "the server is up"


class Audited(NamedTuple):
    """Wall ms: how late re-arrivals left (p99), and how far apart the first sends were."""

    rearrival_lag_p99_ms: float
    start_spread_ms: float

    def share_of(self, limits: LimitsSpec) -> float:
        """The larger share of its limit that was used up; above 1 a run would be INVALID."""
        return max(
            self.rearrival_lag_p99_ms / limits.rearrival_lag_p99_ms, self.start_spread_ms / limits.start_spread_ms
        )


@dataclass(frozen=True, slots=True)
class BlockEnded:
    """The block is complete, was ended by a command, or failed with ``error``."""

    error: HarnessError | None = None


Message: TypeAlias = Began | Made | Archive | Gate | Audited | BlockEnded | ProgressEvent
"""From a worker. Archive: all runs of a block, from another host."""


class Worker(ABC):
    """What makes the runs of one device. ``left``: its runs that are not sealed. ``gate``: where it waits.

    ``connection``: a ``multiprocessing`` connection from which its messages are read.
    """

    connection: Any

    def __init__(self, place: DeviceSlot, runs: Sequence[PlannedRun]) -> None:
        self.place, self.left, self.num_deaths = place, list(runs), 0
        self.gate: Gate | None = None

    @abstractmethod
    def send(self, message: RemainingBlock | BlockCommand) -> None:
        """Have a block made, or send a command while it is made; a worker that died is noticed by ``receive``."""

    def receive(self) -> Message | None:
        """The next message; None when the worker is dead."""
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            return None

    @abstractmethod
    def end(self) -> int:
        """Close the connection and wait until nothing of the worker is left; its exit status."""

    @property
    def period(self) -> int | None:
        """Number of the period of its next run; None where the devices are not in lockstep."""
        period = self.left[0].period if self.left else None
        return None if period is None else period.number


class Driver:
    """Follows the workers until all have ended, passes on stop requests, and keeps the devices in lockstep.

    count: gets each beginning and each sealed run. check: called while the driver waits; raises where no worker can be
    reached any more.
    """

    def __init__(
        self,
        context: RunContext,
        again: Mapping[RunKey, SealedRun],
        count: Callable[[Began | Made], None],
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._context, self._again, self._count, self._check = context, again, count, check
        self._store, self._stop = RunStore(context.runs_root), context.stop
        self._working: list[Worker] = []
        self._begun: set[RunKey] = set()
        self._error: HarnessError | None = None
        self._sent: BlockCommand | None = None

    def run(self, workers: Sequence[Worker]) -> None:
        """Have all blocks made. Raises the first error of a worker when the others have ended, too."""
        self._working = list(workers)
        for worker in workers:
            self._start_next(worker)
        while self._working:
            ready = wait([worker.connection for worker in self._working], POLL_S)
            for worker in [worker for worker in self._working if worker.connection in ready]:
                self._take(worker, worker.receive())
            self._check()
            self._open_gates()
            self._pass_on()
        if self._error is not None:
            raise self._error

    @property
    def _is_ending(self) -> bool:
        return self._stop.after_run or self._error is not None

    def _start_next(self, worker: Worker) -> None:
        """Start the next block of a worker; no further block once the experiment is ending."""
        if not worker.left or self._is_ending:
            self._working.remove(worker)
            return
        runs = tuple(run for run in worker.left if run.replicate == worker.left[0].replicate)
        # A run that was already set aside for its repetition must not be set aside again.
        there = {run.key for run in runs if layout.run_folder(self._store.root, *run.key).exists()}
        worker.send(RemainingBlock(runs, frozenset(self._again.keys() & there)))

    def _take(self, worker: Worker, message: Message | None) -> None:
        if message is None:
            self._revive(worker)
        elif isinstance(message, Gate):
            worker.gate = message
        elif isinstance(message, BlockEnded):
            self._error = self._error or message.error
            self._start_next(worker)
        elif isinstance(message, Began | Made):
            self._counted(worker, message)
        elif isinstance(message, Archive):
            try:
                for run in received(self._store.root, message):
                    self._counted(worker, Made(run))
            except HarnessError as error:
                self._error = self._error or error
        elif not isinstance(message, Audited):
            self._context.on_progress(message)

    def _counted(self, worker: Worker, event: Began | Made) -> None:
        """Count an event of a run that is left; what another host publishes may be lost, or late."""
        key = event.key if isinstance(event, Began) else event.run.key
        if key not in {run.key for run in worker.left}:
            return
        if isinstance(event, Made):
            worker.left = [run for run in worker.left if run.key != key]
            if key not in self._begun:
                self._count(Began(key))
        self._begun.add(key)
        self._count(event)

    def _revive(self, worker: Worker) -> None:
        """A process died: count the runs that it sealed without a report, and start another process for the rest."""
        status = worker.end()
        worker.gate, worker.num_deaths = None, worker.num_deaths + 1
        for planned in worker.left:
            if (layout.run_folder(self._store.root, *planned.key) / layout.MANIFEST).exists():
                run, before = self._store.run(*planned.key), self._again.get(planned.key)
                if before is None or before.manifest.seal != run.manifest.seal:
                    self._counted(worker, Made(run))
        if worker.num_deaths > ALLOWED_DEATHS and not self._is_ending:
            self._error = ServerError(
                f"its process died {worker.num_deaths} times, the last time with status {status}",
                where=str(worker.place),
                hint="Look for what kills it (memory?), then continue with --resume",
            )
        self._start_next(worker)

    def _open_gates(self) -> None:
        """In lockstep: devices of the earliest period start, and replay once all servers of that period are up."""
        periods = [worker.period for worker in self._working if worker.period is not None]
        current = [worker for worker in self._working if worker.period == min(periods, default=None)]
        are_up = all(worker.gate is Gate.REPLAY for worker in current)
        for worker in current:
            if are_up or worker.gate is Gate.START:
                worker.gate = None
                worker.send(BlockCommand.GO)

    def _pass_on(self) -> None:
        """Send each worker a stop request once; after an error, workers end after their current runs."""
        command = BlockCommand.ABORT if self._stop.now.is_set() else BlockCommand.END
        if self._is_ending and self._sent is not command:
            self._sent = command
            for worker in self._working:
                worker.send(command)


def runs_by_place(todo: Sequence[PlannedRun]) -> dict[DeviceSlot, list[PlannedRun]]:
    """The runs of each device, in order."""
    runs: dict[DeviceSlot, list[PlannedRun]] = {}
    for run in todo:
        assert run.place is not None, "only runs of a fleet are shared out"
        runs.setdefault(run.place, []).append(run)
    return runs


def perform_on_devices(
    todo: Sequence[PlannedRun],
    context: RunContext,
    again: Mapping[RunKey, SealedRun],
    count: Callable[[Began | Made], None],
) -> None:
    """Make the runs of a fleet of this host, each block on its device and the devices at once.

    Raises SpecError when this host cannot drive so many devices in time. Raises the first error of a device after the
    other devices have sealed their current runs.
    """
    if not todo:
        return
    spec = todo[0].spec
    assert spec.fleet is not None
    devices = spec.fleet.devices
    cores = shared_cores(sorted(os.sched_getaffinity(0)), len(devices), spec.client.processes)
    with _workers() as workers:
        for place, runs in runs_by_place(todo).items():
            slot = WorkerSlot(place, cores[devices.index(place.device)])
            job = FleetJob(context.runs_root, context.spec_source, context.authorization, slot, tuple(sys.argv))
            workers.append(ProcessWorker(job, runs))
        require_drivable(workers, spec.fleet, spec.limits)
        Driver(context, again, count).run(workers)


@contextmanager
def _workers() -> Generator[list[ProcessWorker]]:
    """An empty list; the processes of the workers that are added are gone at the end."""
    workers: list[ProcessWorker] = []
    try:
        yield workers
    finally:
        for worker in workers:
            worker.connection.close()  # all before the first wait: stopping takes a moment
        for worker in workers:
            worker.end()


class ProcessWorker(Worker):
    """The process of one device of this host; it is started again when it has died."""

    def __init__(self, job: FleetJob, runs: Sequence[PlannedRun]) -> None:
        super().__init__(job.slot.place, runs)
        self._job = job
        self._servers: list[psutil.Process] = []
        self._start()

    def _start(self) -> None:
        self.connection, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                own_command("harness.runner.fleet.worker:main", theirs.fileno()),
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                # Only the driver handles a Ctrl-C in the terminal.
                start_new_session=True,
            )
        self.send(self._job)

    def send(self, message: FleetJob | RemainingBlock | BlockCommand) -> None:
        if self.connection.closed:
            self._start()
        with suppress(OSError):
            self.connection.send(message)

    def receive(self) -> Message | None:
        message = super().receive()
        if isinstance(message, ServerReady):
            with suppress(psutil.Error):
                self._servers = psutil.Process(self._process.pid).children(recursive=True)
        return message

    def end(self) -> int:
        """As ``Worker.end``; its last server is gone, too: a device serves one server at a time."""
        self.connection.close()
        try:
            status = self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        psutil.wait_procs([server for server in self._servers if server.is_running()], timeout=END_TIMEOUT_S)
        return status


def shared_cores(cores: Sequence[int], num_devices: int, num_processes: int) -> list[tuple[int, ...]]:
    """Cores of each device's client, not shared; empty where less than one core per server would remain."""
    if num_devices < 2 or len(cores) < num_devices * (num_processes + 1):
        return [()] * num_devices
    return [tuple(cores[place * num_processes : (place + 1) * num_processes]) for place in range(num_devices)]


def require_drivable(workers: Sequence[ProcessWorker], fleet: FleetSpec, limits: LimitsSpec) -> None:
    """Raise SpecError, naming how many devices this host can drive, when it cannot drive these in time.

    All clients replay at once against null servers.
    """
    num_devices = len(workers)
    if num_devices < 2 or fleet.overcommit:
        return
    worst = _lateness(workers, limits)
    if worst.share_of(limits) <= 1:
        return
    fewer = range(num_devices - 1, 1, -1)
    num_in_time = next((n for n in fewer if _lateness(workers[:n], limits).share_of(limits) <= 1), 1)
    raise SpecError(
        f"this host drives {num_in_time} of {num_devices} devices in time: with all of them re-arrivals leave "
        f"{worst.rearrival_lag_p99_ms:.3g} ms late (p99, limit {limits.rearrival_lag_p99_ms:g}) and sessions start "
        f"within {worst.start_spread_ms:.3g} ms (limit {limits.start_spread_ms:g})",
        where="fleet.devices",
        hint=f"Use {num_in_time} devices or more cores, or say fleet.overcommit = true and let each run be judged",
    )


def _lateness(workers: Sequence[ProcessWorker], limits: LimitsSpec) -> Audited:
    """The worst lateness of clients that replay at once, in the better of two tries: the host may be busy a moment."""
    tries: list[Audited] = []
    while len(tries) < AUDIT_TRIES and not any(attempt.share_of(limits) <= 1 for attempt in tries):
        for worker in workers:
            worker.send(RemainingBlock((worker.left[0],), is_audit=True))
        for worker in workers:
            _answer(worker)  # the gate
        for worker in workers:
            worker.send(BlockCommand.GO)
        tries.append(Audited(*map(max, zip(*(_answer(worker) for worker in workers), strict=True))))
    return min(tries, key=lambda attempt: attempt.share_of(limits))


def _answer(worker: ProcessWorker) -> Any:
    """The next answer of an audit: a Gate, then what was Audited; its error is raised."""
    message = worker.receive()
    if isinstance(message, Gate | Audited):
        return message
    if isinstance(message, BlockEnded) and message.error is not None:
        raise message.error
    raise ServerError("its process died at once", where=str(worker.place), hint="Look for what kills it")
