"""The devices of this host side by side: a worker process each, and what is left of its blocks.

A worker that dies costs the run in flight and is started again; what was sealed counts. This process makes no run and
holds no state: it hands out planned minus sealed. Next: ``harness.runner.account`` counts what the workers tell.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import groupby
from multiprocessing import Pipe
from multiprocessing.connection import wait
from typing import Protocol

import psutil

from harness.errors import HarnessError, ServerError
from harness.experiment import PlannedRun
from harness.records import RunKey, RunStore, SealedRun, layout
from harness.runner.fleet.capacity import require_drivable, shared_cores
from harness.runner.fleet.station import Station
from harness.runner.fleet.work import Audit, Audited, Block, Go, Idle, Job, Told, Wish
from harness.runner.lane import Began, Made
from harness.runner.progress import ServerReady
from harness.runner.run import Invocation
from harness.spec import Place

POLL_S = 0.2
END_TIMEOUT_S = 30.0
# A block whose worker died so often is given up: it, not the worker, is then the likely cause.
ALLOWED_DEATHS = 2


class Counter(Protocol):
    """Who counts the runs that were made."""

    def add(self, said: Began | Made, /) -> None: ...


class Worker:
    """The process of one device, and the blocks that are still to be made on it, the one in hand first."""

    def __init__(self, job: Job, blocks: Sequence[Block]) -> None:
        self.place, self.blocks, self.num_deaths = job.station.place, deque(blocks), 0
        self._job, self.awaits_others = job, False
        self._server_pids: list[int] = []
        self._start()

    def _start(self) -> None:
        self.connection, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "harness.runner.fleet.worker", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                # A Ctrl-C in the terminal is the driver's to answer.
                start_new_session=True,
            )
        self.send(self._job)

    def send(self, said: Job | Audit | Block | Go | Wish) -> None:
        with suppress(OSError):  # one that just died is found by its silence
            self.connection.send(said)

    def received(self) -> Told | None:
        """What it says; None when it is dead."""
        try:
            said: Told = self.connection.recv()
        except (EOFError, OSError):
            return None
        if isinstance(said, ServerReady):
            self.awaits_others = self.period is not None
            with suppress(psutil.Error):
                self._server_pids = [child.pid for child in psutil.Process(self._process.pid).children(recursive=True)]
        return said

    @property
    def period(self) -> int | None:
        """When its next block is due, where the devices keep step; None where it is due at any time."""
        period = self.blocks[0].runs[0].period if self.blocks else None
        return None if period is None else period.number

    def takes_next(self) -> bool:
        """Give it the block that is next; whether there was one."""
        self.awaits_others = False
        if self.blocks:
            self.send(self.blocks[0])
        return bool(self.blocks)

    def restart(self) -> None:
        """Start it once more, when nothing of its last server is left: a device serves one at a time."""
        self.end()
        left: list[psutil.Process] = []
        for pid in self._server_pids:
            with suppress(psutil.Error):
                left.append(psutil.Process(pid))
        psutil.wait_procs(left, timeout=END_TIMEOUT_S)
        self._start()

    def end(self) -> int:
        """Close the line and wait until the process is gone; its exit status."""
        self.connection.close()
        try:
            return self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


def perform_side_by_side(
    todo: Sequence[PlannedRun], invocation: Invocation, again: Mapping[RunKey, SealedRun], counter: Counter
) -> None:
    """Make the runs of a fleet, each block on its device, the devices at once; ends as the person wishes.

    Raises SpecError when this host cannot drive so many devices in time; the first error of a worker, when the runs in
    flight on the others are sealed.
    """
    if not todo:
        return
    with _workers(todo, invocation, again) as workers:
        require_drivable(workers, todo[0])
        _Driver(workers, invocation, again, counter).run()


@contextmanager
def _workers(
    todo: Sequence[PlannedRun], invocation: Invocation, again: Mapping[RunKey, SealedRun]
) -> Generator[list[Worker]]:
    """A worker for every device that has something left to do; all gone at the end."""
    blocks = blocks_by_place(todo, again)
    fleet = todo[0].spec.fleet
    assert fleet is not None
    cores = shared_cores(sorted(os.sched_getaffinity(0)), len(fleet.devices), todo[0].spec.client.processes)
    workers: list[Worker] = []
    try:
        for place, own in blocks.items():
            station = Station(place, cores[fleet.devices.index(place.device)])
            job = Job(invocation.runs_root, invocation.spec_source, invocation.ticket, station, tuple(sys.argv))
            workers.append(Worker(job, own))
        yield workers
    finally:
        for worker in workers:
            worker.connection.close()  # all at once: each needs a moment to stop its server
        for worker in workers:
            worker.end()


def blocks_by_place(todo: Sequence[PlannedRun], again: Mapping[RunKey, SealedRun]) -> dict[Place, list[Block]]:
    """What each device still has to do, block by block; run by run where the devices keep step."""
    found: dict[Place, list[Block]] = {}
    for (number, _), group in groupby(todo, key=lambda run: (run.replicate, run.period)):
        runs = tuple(group)
        place = runs[0].place
        assert place is not None, "only runs of a fleet are shared out"
        found.setdefault(place, []).append(Block(number, runs, frozenset(again) & {run.key for run in runs}))
    return found


class _Driver:
    """Hands out blocks until none is left, somebody wishes to stop, or a worker failed."""

    def __init__(
        self, workers: Sequence[Worker], invocation: Invocation, again: Mapping[RunKey, SealedRun], counter: Counter
    ) -> None:
        self._workers, self._invocation, self._again, self._counter = workers, invocation, again, counter
        self._store, self._stop = RunStore(invocation.runs_root), invocation.stop
        self._told: set[RunKey] = set()
        self._error: HarnessError | None = None
        self._wished: Wish | None = None

    def run(self) -> None:
        busy = self._begun(self._workers)
        while busy:
            ready = wait([worker.connection for worker in busy], POLL_S)
            for worker in [worker for worker in busy if worker.connection in ready]:
                said = worker.received()
                if isinstance(said, Began | Made):
                    self._count(said)
                elif said is None or isinstance(said, Idle):
                    is_busy = self._revived(worker) if said is None else self._ended(worker, said)
                    busy = [other for other in busy if other is not worker or is_busy]
                elif not isinstance(said, Audited):
                    self._invocation.on_progress(said)
            busy += self._begun([worker for worker in self._workers if worker not in busy])
            self._let_go(busy)
            self._pass_on(busy)
        if self._error is not None:
            raise self._error

    @property
    def _is_ending(self) -> bool:
        return self._stop.after_run or self._error is not None

    def _begun(self, idle: Sequence[Worker]) -> list[Worker]:
        """Those of idle workers that now have a block: where the devices keep step, one of the earliest period."""
        if self._is_ending:
            return []
        due = min((worker.period for worker in self._workers if worker.period is not None), default=None)
        return [worker for worker in idle if worker.period in (None, due) and worker.takes_next()]

    def _let_go(self, busy: Sequence[Worker]) -> None:
        """Once every server of a period is up, all its replays begin."""
        if busy and all(worker.awaits_others for worker in busy):
            for worker in busy:
                worker.awaits_others = False
                worker.send(Go())

    def _count(self, said: Began | Made) -> None:
        if isinstance(said, Made):
            self._told.add(said.run.key)
        self._counter.add(said)

    def _ended(self, worker: Worker, said: Idle) -> bool:
        """A block is through, or failed; whether its worker has the next one."""
        worker.blocks.popleft()
        self._error = self._error or said.error
        return bool(self._begun([worker]))

    def _revived(self, worker: Worker) -> bool:
        """A worker died: count what it sealed and could not tell, and let another one do the rest of its block."""
        block = worker.blocks.popleft()
        left = [run for run in block.runs if run.key not in self._told and not self._is_sealed_now(run.key)]
        worker.num_deaths += 1
        if self._is_ending:
            return False
        if worker.num_deaths > ALLOWED_DEATHS:
            self._error = ServerError(
                f"its worker died {worker.num_deaths} times, the last time with status {worker.end()}",
                where=str(worker.place),
                hint="Look for what kills it (memory?), then continue with --resume",
            )
            return False
        if left:
            # A run that was set aside for its repetition is not there to be set aside once more.
            there = {key for key in block.again if layout.run_folder(self._store.root, *key).exists()}
            worker.blocks.appendleft(replace(block, runs=tuple(left), again=frozenset(there)))
        worker.restart()
        return bool(self._begun([worker]))

    def _is_sealed_now(self, key: RunKey) -> bool:
        """Whether a run was sealed by a worker that died before it could say so; then it is counted."""
        if not (layout.run_folder(self._store.root, *key) / layout.MANIFEST).exists():
            return False
        run, before = self._store.run(*key), self._again.get(key)
        if before is not None and before.manifest.seal == run.manifest.seal:
            return False
        self._count(Made(run))
        return True

    def _pass_on(self, busy: Sequence[Worker]) -> None:
        """Tell every worker what the person wishes, once; after an error each ends with the run in its hands."""
        if self._is_ending and self._wished != (wish := Wish(is_now=self._stop.now.is_set())):
            self._wished = wish
            for worker in busy:
                worker.send(wish)
