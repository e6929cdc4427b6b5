"""Runs the devices of this host side by side: a process for each device, which makes the remaining runs of its blocks.

Before the first block, all clients replay at once against null servers, to see whether this host can drive so many
devices in time. A process that dies costs its current run and is started again. No state is kept: the remaining runs
are planned minus sealed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import wait
from typing import Protocol, TypeVar

from harness.errors import HarnessError, ServerError, SpecError
from harness.experiment import PlannedRun
from harness.records import RunKey, RunStore, SealedRun, layout
from harness.runner.fleet.process import Audited, Command, DeviceProcess, Ended, Gate, Job, Message
from harness.runner.fleet.slot import WorkerSlot
from harness.runner.progress import Began, Made
from harness.runner.run import RunContext
from harness.spec import FleetSpec, LimitsSpec, Place

TRIES = 2

Measure = Callable[[int], Sequence[Audited]]
"""Lateness of each of a number of clients that replay at once."""


def shared_cores(cores: Sequence[int], num_devices: int, num_processes: int) -> list[tuple[int, ...]]:
    """Cores of each device's client, not shared; empty where less than one core per server would remain."""
    if num_devices < 2 or len(cores) < num_devices * (num_processes + 1):
        return [()] * num_devices
    return [tuple(cores[place * num_processes : (place + 1) * num_processes]) for place in range(num_devices)]


def require_drivable(num_devices: int, fleet: FleetSpec, limits: LimitsSpec, measure: Measure) -> None:
    """Raise SpecError, naming how many devices this host can drive, when it cannot drive ``num_devices`` in time."""
    if num_devices < 2 or fleet.overcommit:
        return
    worst = _lateness(num_devices, limits, measure)
    if worst.share_of(limits) <= 1:
        return
    fewer = range(num_devices - 1, 1, -1)
    num_in_time = next((n for n in fewer if _lateness(n, limits, measure).share_of(limits) <= 1), 1)
    raise SpecError(
        f"this host drives {num_in_time} of {num_devices} devices in time: with all of them re-arrivals leave "
        f"{worst.rearrival_lag_p99_ms:.3g} ms late (p99, limit {limits.rearrival_lag_p99_ms:g}) and sessions start "
        f"within {worst.start_spread_ms:.3g} ms (limit {limits.start_spread_ms:g})",
        where="fleet.devices",
        hint=f"Use {num_in_time} devices or more cores, or say fleet.overcommit = true and let each run be judged",
    )


def _lateness(num_clients: int, limits: LimitsSpec, measure: Measure) -> Audited:
    """The worst lateness of so many clients at once, in the better of two tries: the host may be busy for a moment."""
    tries: list[Audited] = []
    while len(tries) < TRIES and not any(attempt.share_of(limits) <= 1 for attempt in tries):
        tries.append(Audited(*map(max, zip(*measure(num_clients), strict=True))))
    return min(tries, key=lambda attempt: attempt.share_of(limits))


POLL_S = 0.2
# A device is given up when its process died more often: then its runs are the likely cause.
ALLOWED_DEATHS = 2
Expected = TypeVar("Expected", Gate, Audited)


class Counter(Protocol):
    """Counts finished runs."""

    def add(self, event: Began | Made, /) -> None: ...


def perform_side_by_side(
    todo: Sequence[PlannedRun], context: RunContext, again: Mapping[RunKey, SealedRun], counter: Counter
) -> None:
    """Make the runs of a fleet, each block on its device and the devices at once; a person's stop request is passed on.

    Raises SpecError when this host cannot drive so many devices in time. Raises the first error of a device after the
    other devices have sealed their current runs.
    """
    if not todo:
        return
    fleet = todo[0].spec.fleet
    assert fleet is not None
    jobs = _jobs(todo, context, again)
    require_drivable(len(jobs), fleet, todo[0].spec.limits, lambda num_clients: _audited(jobs[:num_clients]))
    with _processes(jobs) as processes:
        _Driver(processes, context, again, counter).run()


def _jobs(todo: Sequence[PlannedRun], context: RunContext, again: Collection[RunKey]) -> list[Job]:
    """The remaining runs of each device, in order."""
    by_place: dict[Place, list[PlannedRun]] = {}
    for run in todo:
        assert run.place is not None, "only runs of a fleet are shared out"
        by_place.setdefault(run.place, []).append(run)
    spec = todo[0].spec
    devices = () if spec.fleet is None else spec.fleet.devices
    cores = shared_cores(sorted(os.sched_getaffinity(0)), len(devices), spec.client.processes)
    return [
        Job(
            context.runs_root,
            context.spec_source,
            context.authorization,
            WorkerSlot(place, cores[devices.index(place.device)]),
            tuple(sys.argv),
            tuple(runs),
            frozenset(again) & {run.key for run in runs},
        )
        for place, runs in by_place.items()
    ]


@contextmanager
def _processes(jobs: Sequence[Job]) -> Generator[list[DeviceProcess]]:
    """A process for each job; all gone at the end."""
    processes: list[DeviceProcess] = []
    try:
        for job in jobs:
            processes.append(DeviceProcess(job))
        yield processes
    finally:
        for process in processes:
            process.connection.close()  # all before the first wait: stopping takes a moment
        for process in processes:
            process.end()


def _audited(jobs: Sequence[Job]) -> list[Audited]:
    """The lateness of each client when all replay at once."""
    with _processes([replace(job, runs=job.runs[:1], is_audit=True) for job in jobs]) as processes:
        for process in processes:
            _expect(process, Gate)
        for process in processes:
            process.pass_gate()
        return [_expect(process, Audited) for process in processes]


def _expect(process: DeviceProcess, kind: type[Expected]) -> Expected:
    message = process.receive()
    if isinstance(message, kind):
        return message
    if isinstance(message, Ended) and message.error is not None:
        raise message.error
    raise ServerError("its process died at once", where=str(process.place), hint="Look for what kills it")


class _Driver:
    """Follows the processes until all have ended, passes on stop requests, and keeps the devices in lockstep."""

    def __init__(
        self,
        processes: Sequence[DeviceProcess],
        context: RunContext,
        again: Mapping[RunKey, SealedRun],
        counter: Counter,
    ) -> None:
        self._working, self._context, self._again, self._counter = list(processes), context, again, counter
        self._store, self._stop = RunStore(context.runs_root), context.stop
        self._error: HarnessError | None = None
        self._sent: Command | None = None

    def run(self) -> None:
        while self._working:
            ready = wait([process.connection for process in self._working], POLL_S)
            for process in [process for process in self._working if process.connection in ready]:
                self._take(process, process.receive())
            self._open_gates()
            self._pass_on()
        if self._error is not None:
            raise self._error

    @property
    def _is_ending(self) -> bool:
        return self._stop.after_run or self._error is not None

    def _take(self, process: DeviceProcess, message: Message | None) -> None:
        if message is None:
            self._revive(process)
        elif isinstance(message, Ended):
            self._error = self._error or message.error
            self._working.remove(process)
        elif isinstance(message, Began | Made):
            self._counter.add(message)
        elif not isinstance(message, Gate | Audited):
            self._context.on_progress(message)

    def _revive(self, process: DeviceProcess) -> None:
        """Replace a dead process: count runs that it sealed without a report, and start a process for the rest."""
        left = [run for run in process.left if not self._is_sealed_now(run.key)]
        process.num_deaths += 1
        if process.num_deaths > ALLOWED_DEATHS and not self._is_ending:
            self._error = ServerError(
                f"its process died {process.num_deaths} times, the last time with status {process.end()}",
                where=str(process.place),
                hint="Look for what kills it (memory?), then continue with --resume",
            )
        if not left or self._is_ending:
            self._working.remove(process)
            return
        # A run that was already set aside for its repetition must not be set aside again.
        there = {key for key in process.job.again if layout.run_folder(self._store.root, *key).exists()}
        process.restart(replace(process.job, runs=tuple(left), again=frozenset(there)))

    def _is_sealed_now(self, key: RunKey) -> bool:
        """Whether a process sealed a run and died before reporting it; such a run is counted here."""
        if not (layout.run_folder(self._store.root, *key) / layout.MANIFEST).exists():
            return False
        run, before = self._store.run(*key), self._again.get(key)
        if before is not None and before.manifest.seal == run.manifest.seal:
            return False
        self._counter.add(Made(run))
        return True

    def _open_gates(self) -> None:
        """In lockstep: devices of the earliest period start, and replay once all servers of that period are up."""
        periods = [process.period for process in self._working if process.period is not None]
        current = [process for process in self._working if process.period == min(periods, default=None)]
        for process in current:
            if process.gate is Gate.START:
                process.pass_gate()
        if all(process.gate is Gate.REPLAY for process in current):
            for process in current:
                process.pass_gate()

    def _pass_on(self) -> None:
        """Send each process a stop request once; after an error, processes end after their current runs."""
        command = Command.ABORT if self._stop.now.is_set() else Command.END
        if self._is_ending and self._sent is not command:
            self._sent = command
            for process in self._working:
                process.send(command)
