"""Progress of an experiment while its runs are made: events, counts, the time left, the stopping rule, the stop flag.

Sinks render the events in a terminal, a log or a notebook; the runner never prints. The rule is applied whenever a
block is complete. No run is made here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from harness.analysis.compare.stopping import SequentialStatus, check_can_decide, sequential_status, whole_blocks
from harness.clock import NS_PER_S, MonotonicClock
from harness.errors import SpecError
from harness.kinds import kind_named
from harness.measure.records.run import SealedRun
from harness.model.experiment import PlannedRun, PlannedRuns
from harness.model.sim import simulate
from harness.model.spec import DeviceSlot, ExperimentSpec, StopSpec
from harness.plugins import BackendKind
from harness.run_key import RunKey


@dataclass(frozen=True, slots=True)
class ExperimentStarted:
    """An experiment of ``num_planned`` runs begins, of which ``num_sealed`` were sealed before.

    predicted_wall_s: None while the pace of this machine is unknown. is_at_most: a stopping rule may end it sooner.
    assumed: see ``assumed_pace``. warning: see ``alike_words``.
    """

    name: str
    num_planned: int
    num_sealed: int
    predicted_wall_s: float | None
    is_at_most: bool = False
    assumed: str = ""
    warning: str = ""


@dataclass(frozen=True, slots=True)
class RunStarted:
    """A run begins: its server is about to be started. place: the device of its fleet; "" outside one."""

    label: str
    position: int
    num_planned: int
    num_requests: int
    place: str = ""


@dataclass(frozen=True, slots=True)
class ServerStarting:
    """The server has not answered yet, ``waited_s`` wall seconds after its start; ``limit_s`` ends the wait."""

    label: str
    waited_s: float
    limit_s: float


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


ProgressEvent = (
    ExperimentStarted | RunStarted | ServerStarting | ServerReady | RequestFinished | RunSealed | BlockLooked
)


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
        self.after_run = False
        self.now = _Flag()
        """Set once the current run must be aborted; handed to the replay client."""

    def request(self) -> None:
        """First call: end after the current run. Second call: abort the current run."""
        if self.after_run:
            self.now.set()
        self.after_run = True

    def abort(self) -> None:
        """Abort the current run at once."""
        self.after_run = True
        self.now.set()


def declared_rule(spec: ExperimentSpec, sealed: Iterable[SealedRun], source: str = "") -> StopSpec:
    """The experiment's stopping rule; SpecError where it has none, or where sealed runs did not declare this one.

    source: of the experiment, for the error; default: its name.
    """
    stop = spec.until_decided().stop
    assert stop is not None, "an experiment that runs until decided has a rule"
    for run in sealed:
        if run.spec.stop != stop:
            declared = "no stopping rule" if run.spec.stop is None else f"another one ({run.spec.stop})"
            raise SpecError(
                f"was sealed under {declared}, and a rule is declared before the first run",
                where=str(run.path),
                hint="Give the experiment with the new rule a new name, or write to another --runs folder",
            )
    return check_can_decide(spec, stop, source or spec.name)


class StoppingMonitor:
    """The status of an experiment under its stopping rule, while its runs are sealed."""

    def __init__(self, spec: ExperimentSpec, stop: StopSpec, sealed: Iterable[SealedRun]) -> None:
        self._spec, self._stop = spec, stop
        self._runs: dict[RunKey, SealedRun] = {run.key: run for run in sealed}
        self.status: SequentialStatus = sequential_status(spec, list(self._runs.values()), stop)

    @property
    def is_decided(self) -> bool:
        return self.status.is_decided

    def add(self, run: SealedRun) -> bool:
        """Count a sealed run; whether its block is complete now, so that the rule was applied."""
        self._runs[run.key] = run
        runs = list(self._runs.values())
        if run.replicate not in whole_blocks(self._spec, runs):
            return False
        self.status = sequential_status(self._spec, runs, self._stop)
        return True


# Cost of simulating a run beside its tokens, in tokens; from timing the runs of the catalogue.
SIMULATED_RUN_TOKENS = 4_000
# The load of a machine changes: the pace is that of this many latest runs.
RECENT_RUNS = 12


def alike_words(planned: PlannedRuns) -> str:
    """That all replicates send the same sessions, as of a recording that is replayed whole; "" where they differ."""
    for name, runs in planned.by_condition.items():
        first, *others = (run.plan.sessions for run in runs)
        if others and all(sessions == first for sessions in others):
            what = (
                "simulated, they are equal: one is enough"
                if kind_named(planned.spec.backend).is_virtual
                else "their intervals say how a server repeats itself, and nothing of other workloads"
            )
            return f"the {len(runs)} replicates of {name} send the same sessions with the same waits; {what}"
    return ""


class RunProgress:
    """Counts the runs of an experiment as they begin and are sealed, and reports progress events."""

    def __init__(
        self,
        planned: PlannedRuns,
        todo: Sequence[PlannedRun],
        on_progress: ProgressSink,
        monitor: StoppingMonitor | None,
    ) -> None:
        self._on_progress, self._monitor, self._clock = on_progress, monitor, MonotonicClock()
        self._num_planned, self._num_kept = len(planned), len(planned) - len(todo)
        self._runs = {run.key: run for run in todo}
        self._forecast = Forecast(todo)
        self._began_ns: dict[RunKey, int] = {}
        self.performed: list[RunKey] = []
        on_progress(
            ExperimentStarted(
                planned.spec.name,
                self._num_planned,
                self._num_kept,
                self._forecast.left_s(),
                is_at_most=monitor is not None,
                assumed=assumed_pace(kind_named(planned.spec.backend)),
                warning=alike_words(planned),
            )
        )
        if monitor is not None and self._num_kept:
            on_progress(BlockLooked(monitor.status))

    @property
    def is_decided(self) -> bool:
        """Whether the stopping rule has decided, so that no run is needed any more."""
        return self._monitor is not None and self._monitor.is_decided

    def add(self, event: Began | Made) -> None:
        """Count an event of a run and report it."""
        if isinstance(event, Began):
            self._began_ns[event.key] = self._clock.now_ns()
            run = self._runs[event.key]
            place = "" if run.place is None else str(run.place)
            self._on_progress(RunStarted(run.label, run.position, self._num_planned, run.plan.num_requests, place))
            return
        run = event.run
        wall_s = (self._clock.now_ns() - self._began_ns[run.key]) / NS_PER_S
        self.performed.append(run.key)
        self._forecast.finished(run.key, wall_s)
        left_s = self._forecast.left_s()
        self._on_progress(RunSealed(run.label, run.is_valid, tuple(run.invalid_reasons), wall_s, left_s))
        if self._monitor is not None and self._monitor.add(run):
            self._on_progress(BlockLooked(self._monitor.status))


class Forecast:
    """Wall seconds left: the prediction of each run, corrected by the finished runs.

    A modelled server keeps the simulator's pace: the mean difference, its set-up, is added. A device or an attached
    server has another pace: its prediction is scaled. Of simulated runs only the work is known: their pace is that of
    the runs after the first, which loads code; before that there is no forecast. Devices work in parallel, so the
    slowest counts: of each period where they start together, else of all.
    """

    def __init__(self, runs: Iterable[PlannedRun]) -> None:
        self._runs = {run.key: run for run in runs}
        kinds = {kind_named(run.spec.backend) for run in self._runs.values()}
        self._is_virtual = any(kind.is_virtual for kind in kinds)
        self._keeps_pace = all(kind.has_device is False and not kind.is_virtual for kind in kinds)
        self._predicted = {key: predicted_work(run) for key, run in self._runs.items()}
        self._wall_s: dict[RunKey, float] = {}

    def of(self, key: RunKey) -> float | None:
        """Wall seconds of an unfinished run; None while no pace is known."""
        first, recent = self._predicted[key], [*self._wall_s][int(self._is_virtual) :][-RECENT_RUNS:]
        if not recent:
            return None if self._is_virtual else first
        wall_s = sum(self._wall_s[key] for key in recent)
        predicted = sum(self._predicted[key] for key in recent)
        if self._keeps_pace:
            return max(0.0, first + (wall_s - predicted) / len(recent))
        return first * wall_s / predicted

    def left_s(self) -> float | None:
        """Wall seconds of all unfinished runs; None while no pace is known."""
        periods, lanes = defaultdict[int, float](float), defaultdict[DeviceSlot | None, float](float)
        for key in self._runs.keys() - self._wall_s.keys():
            run, wall_s = self._runs[key], self.of(key)
            if wall_s is None:
                return None
            if self._is_virtual or run.period is None:
                # Simulated devices share this machine.
                lanes[None if self._is_virtual else run.place] += wall_s
            else:
                periods[run.period.number] = max(periods[run.period.number], wall_s)
        return sum(periods.values()) + max(lanes.values(), default=0.0)

    def finished(self, key: RunKey, wall_s: float) -> None:
        """Add a run that took ``wall_s`` from its beginning to its seal."""
        self._wall_s[key] = wall_s


def predicted_work(run: PlannedRun) -> float:
    """Work of a run: wall seconds of its replay and set-up; of a simulated run, tokens."""
    kind = kind_named(run.spec.backend)
    if kind.is_virtual:
        return SIMULATED_RUN_TOKENS + sum(request.generate_tokens for request in run.plan.requests)
    return predicted_replay_s(run) + kind.lifecycle_s


def assumed_pace(kind: BackendKind) -> str:
    """What a first forecast assumes of a server whose pace nobody knows, a clause; "" of a modelled server."""
    if kind.has_device is False:
        return ""
    starts = f"each server starts and stops in {kind.lifecycle_s:g} s (a guess) and " if kind.is_restarted else "it "
    return f", if {starts}keeps the pace of its cost model"


def predicted_replay_s(run: PlannedRun) -> float:
    """Predicted wall seconds of a replay; 0 in virtual time."""
    return 0.0 if kind_named(run.spec.backend).is_virtual else predicted_end_s(run) / run.spec.time_scale


def predicted_end_s(run: PlannedRun) -> float:
    """Predicted seconds of a replay, of the clock of its server."""
    costs = run.cost_model
    if run.server.is_paged and costs.chunk_step_fs is None:
        # A first estimate: a token of a prompt costs what it costs in a whole device call.
        costs = replace(costs, chunk_step_fs=0, chunk_token_fs=costs.call_fs // costs.chunk_tokens)
    return simulate(run.plan, run.server.replica, costs).end_ns / NS_PER_S
