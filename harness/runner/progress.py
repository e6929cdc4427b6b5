"""Progress events of a running experiment, and the flag that stops it.

Sinks render the events in a terminal, a log or a notebook; the runner never prints.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from harness.analysis.planning.stopping import SequentialStatus
from harness.records import RunKey, SealedRun


@dataclass(frozen=True, slots=True)
class ExperimentStarted:
    """An experiment of ``num_planned`` runs begins, of which ``num_sealed`` were sealed before.

    predicted_wall_s: None while the pace of this machine is unknown. is_at_most: a stopping rule may end it sooner.
    is_assumed: the forecast assumes that the server is as fast as its cost model.
    """

    name: str
    num_planned: int
    num_sealed: int
    predicted_wall_s: float | None
    is_at_most: bool = False
    is_assumed: bool = False


@dataclass(frozen=True, slots=True)
class RunStarted:
    """A run begins: its server is about to be started. place: the device of its fleet; "" outside one."""

    label: str
    position: int
    num_planned: int
    num_requests: int
    place: str = ""


@dataclass(frozen=True, slots=True)
class ServerReady:
    """The server answered /health after ``startup_s`` wall seconds."""

    label: str
    startup_s: float


@dataclass(frozen=True, slots=True)
class RequestFinished:
    """A request of the run has ended."""

    label: str
    num_finished: int
    num_requests: int


@dataclass(frozen=True, slots=True)
class RunSealed:
    """A run is sealed. left_s: predicted wall seconds until the experiment ends, once known."""

    label: str
    is_valid: bool
    reasons: tuple[str, ...]
    wall_s: float
    left_s: float | None


@dataclass(frozen=True, slots=True)
class BlockLooked:
    """The stopping rule was applied: after each complete block, and at the start of a continued experiment."""

    status: SequentialStatus


@dataclass(frozen=True, slots=True)
class Began:
    """A run is about to start its server."""

    key: RunKey


@dataclass(frozen=True, slots=True)
class Made:
    """A run is sealed."""

    run: SealedRun


ProgressEvent = ExperimentStarted | RunStarted | ServerReady | RequestFinished | RunSealed | BlockLooked


class ProgressSink(Protocol):
    """Receives every event, in order. May be called from the replay's control thread; must return quickly."""

    def __call__(self, event: ProgressEvent, /) -> None: ...


def silent(_event: ProgressEvent) -> None:
    """A sink that shows nothing."""


class _Flag:
    """Set once. Without a lock: a signal handler may interrupt another one that sets the same flag."""

    def __init__(self) -> None:
        self._is_set = False

    def set(self) -> None:
        self._is_set = True

    def is_set(self) -> bool:
        return self._is_set


class StopFlag:
    """The user's request to end after the current run, or to abort it now. Signal handlers set it."""

    def __init__(self) -> None:
        self._after_run = _Flag()
        self.now = _Flag()
        """Set once the current run must be aborted; handed to the replay client."""

    def request(self) -> None:
        """First call: end after the current run. Second call: abort the current run."""
        if self._after_run.is_set():
            self.now.set()
        self._after_run.set()

    def abort(self) -> None:
        """Abort the current run at once."""
        self._after_run.set()
        self.now.set()

    @property
    def after_run(self) -> bool:
        return self._after_run.is_set()
