"""The process of one device as its driver sees it, and the messages between the two.

The driver sends a job once, then commands. Nothing here decides which run is next.
"""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from multiprocessing import Pipe
from pathlib import Path
from typing import NamedTuple, TypeAlias

import psutil

from harness.errors import HarnessError
from harness.experiment import PlannedRun
from harness.prereg import RunAuthorization
from harness.records import RunKey
from harness.runner.fleet.slot import WorkerSlot
from harness.runner.progress import Began, Made, ProgressEvent, ServerReady
from harness.spec import LimitsSpec

END_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Job:
    """The runs of a device. again: runs that repeat an INVALID run. argv: of the driver, for the manifests.

    is_audit: make no run; measure the lateness of the client with the plan of the first run.
    """

    runs_root: Path
    spec_source: str
    authorization: RunAuthorization | None
    slot: WorkerSlot
    argv: tuple[str, ...]
    runs: tuple[PlannedRun, ...]
    again: frozenset[RunKey] = frozenset()
    is_audit: bool = False


class Command(Enum):
    """Messages of the driver after the job."""

    GO = "pass the gate"
    END = "end after the run in flight"
    ABORT = "give up the run in flight"


class Gate(Enum):
    """Where a device waits for GO when the devices are in lockstep."""

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
class Ended:
    """The job is complete, was ended by a command, or failed with ``error``."""

    error: HarnessError | None = None


Message: TypeAlias = Began | Made | Gate | Audited | Ended | ProgressEvent


class DeviceProcess:
    """The running process of a device. ``left``: its runs that are not sealed. ``gate``: where it waits."""

    def __init__(self, job: Job) -> None:
        self.place, self.num_deaths = job.slot.place, 0
        self._server_pids: list[int] = []
        self._start(job)

    def _start(self, job: Job) -> None:
        self.job, self.left = job, list(job.runs)
        self.gate: Gate | None = None
        self.connection, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "harness.runner.fleet.worker", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                # Only the driver handles a Ctrl-C in the terminal.
                start_new_session=True,
            )
        self.send(job)

    @property
    def period(self) -> int | None:
        """Number of the period of its next run; None where the devices are not in lockstep."""
        period = self.left[0].period if self.left else None
        return None if period is None else period.number

    def send(self, message: Job | Command) -> None:
        with suppress(OSError):  # receive() notices a process that died
            self.connection.send(message)

    def pass_gate(self) -> None:
        self.gate = None
        self.send(Command.GO)

    def receive(self) -> Message | None:
        """Its next message; None when it is dead."""
        try:
            message: Message = self.connection.recv()
        except (EOFError, OSError):
            return None
        if isinstance(message, Gate):
            self.gate = message
        elif isinstance(message, Made):
            self.left = [run for run in self.left if run.key != message.run.key]
        elif isinstance(message, ServerReady):
            with suppress(psutil.Error):
                self._server_pids = [child.pid for child in psutil.Process(self._process.pid).children(recursive=True)]
        return message

    def restart(self, job: Job) -> None:
        """Start it again for ``job`` once its last server is gone: a device serves one server at a time."""
        self.end()
        servers: list[psutil.Process] = []
        for pid in self._server_pids:
            with suppress(psutil.Error):
                servers.append(psutil.Process(pid))
        psutil.wait_procs(servers, timeout=END_TIMEOUT_S)
        self._start(job)

    def end(self) -> int:
        """Close the connection and wait until the process is gone; its exit status."""
        self.connection.close()
        try:
            return self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()
