"""What an experiment has done and has still to do, while its runs are made: in one process or in several.

Turns what happened to a run into progress, and a block that became whole into a look of the stopping rule. Makes no
run itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from harness.analysis.method.sequential import check_can_decide
from harness.analysis.method.stopping import SequentialStatus, sequential_status, whole_blocks
from harness.clock import NS_PER_S, MonotonicClock
from harness.errors import SpecError
from harness.experiment import PlannedRun, PlannedRuns
from harness.kinds import kind_named
from harness.records import RunKey, SealedRun
from harness.runner.lane import Began, Made
from harness.runner.progress import BlockLooked, ExperimentStarted, ProgressSink, RunSealed, RunStarted
from harness.sim import simulate
from harness.spec import ExperimentSpec, Place, StopSpec


def declared_rule(spec: ExperimentSpec, sealed: Iterable[SealedRun], source: str = "") -> StopSpec:
    """The experiment's stopping rule; SpecError where it has none, or where sealed runs did not declare this one.

    source: where the experiment was written, for what is refused; default: its name.
    """
    stop = spec.until_decided().stop
    assert stop is not None, "an experiment that runs until decided has a rule"
    for run in sealed:
        if run.spec.stop != stop:
            told = "no stopping rule" if run.spec.stop is None else f"another one ({run.spec.stop})"
            raise SpecError(
                f"was sealed under {told}, and a rule is declared before the first run",
                where=str(run.path),
                hint="Give the experiment with the new rule a new name, or write to another --runs folder",
            )
    return check_can_decide(stop, source or spec.name)


class StoppingMonitor:
    """Where an experiment stands under its rule while its runs are sealed one by one."""

    def __init__(self, spec: ExperimentSpec, stop: StopSpec, sealed: Iterable[SealedRun]) -> None:
        self._spec, self._stop = spec, stop
        self._runs: dict[RunKey, SealedRun] = {run.key: run for run in sealed}
        self.status: SequentialStatus = sequential_status(spec, list(self._runs.values()), stop)

    @property
    def is_decided(self) -> bool:
        return self.status.is_decided

    def add(self, run: SealedRun) -> bool:
        """Count one more run; whether that made its block whole, so that the rule was applied again."""
        self._runs[run.key] = run
        runs = list(self._runs.values())
        if run.replicate not in whole_blocks(self._spec, runs):
            return False
        self.status = sequential_status(self._spec, runs, self._stop)
        return True


# What simulating a run takes beside its tokens, in tokens: found by timing the runs of the catalogue.
SIMULATED_RUN_TOKENS = 4_000
# A machine may be busier or less busy than it was: only so many of the latest runs tell its pace.
RECENT_RUNS = 12


class RunProgress:
    """The runs that are still to be made, and those that were."""

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
                is_assumed=kind_named(planned.spec.backend).has_device is not False,
            )
        )
        if monitor is not None and self._num_kept:
            on_progress(BlockLooked(monitor.status))

    @property
    def is_decided(self) -> bool:
        """Whether the stopping rule wants no further run."""
        return self._monitor is not None and self._monitor.is_decided

    def add(self, said: Began | Made) -> None:
        """Count what happened to a run and tell of it."""
        if isinstance(said, Began):
            self._began(said.key)
        else:
            self._made(said.run)

    def _began(self, key: RunKey) -> None:
        self._began_ns[key] = self._clock.now_ns()
        run = self._runs[key]
        self._on_progress(
            RunStarted(
                run.label,
                run.position,
                self._num_planned,
                run.plan.num_requests,
                place="" if run.place is None else str(run.place),
            )
        )

    def _made(self, run: SealedRun) -> None:
        wall_s = (self._clock.now_ns() - self._began_ns[run.key]) / NS_PER_S
        self.performed.append(run.key)
        self._forecast.finished(run.key, wall_s)
        left_s = self._forecast.left_s()
        self._on_progress(RunSealed(run.label, run.is_valid, tuple(run.invalid_reasons), wall_s, left_s))
        if self._monitor is not None and self._monitor.add(run):
            self._on_progress(BlockLooked(self._monitor.status))


class Forecast:
    """Wall seconds still to go: what is predicted of each run, corrected by the runs that have finished.

    A modelled server keeps the simulator's pace, and its runs differ from what was predicted by their set-up, which is
    added. What runs at a pace of its own (a device, somebody's server) is multiplied. Of what this machine simulates
    only the work is known: its pace is that of the runs after the first, which loads code; before, nothing is said.
    Devices work side by side, so the slowest of them counts: of each period where they keep step, else of all.
    """

    def __init__(self, runs: Iterable[PlannedRun]) -> None:
        self._runs = {run.key: run for run in runs}
        kinds = {kind_named(run.spec.backend) for run in self._runs.values()}
        self._is_virtual = any(kind.is_virtual for kind in kinds)
        self._keeps_pace = all(kind.has_device is False and not kind.is_virtual for kind in kinds)
        self._predicted = {key: predicted_work(run) for key, run in self._runs.items()}
        self._wall_s: dict[RunKey, float] = {}

    def of(self, key: RunKey) -> float | None:
        """One run that has not finished; None while no pace is known."""
        first, recent = self._predicted[key], [*self._wall_s][int(self._is_virtual) :][-RECENT_RUNS:]
        if not recent:
            return None if self._is_virtual else first
        seen_s, said = sum(self._wall_s[done] for done in recent), sum(self._predicted[done] for done in recent)
        return max(0.0, first + (seen_s - said) / len(recent)) if self._keeps_pace else first * seen_s / said

    def left_s(self) -> float | None:
        """All that have not finished; None while no pace is known."""
        periods, lanes = defaultdict[int, float](float), defaultdict[Place | None, float](float)
        for key in self._runs.keys() - self._wall_s.keys():
            run, wall_s = self._runs[key], self.of(key)
            if wall_s is None:
                return None
            if self._is_virtual or run.period is None:
                # Simulated devices take turns on this one machine.
                lanes[None if self._is_virtual else run.place] += wall_s
            else:
                periods[run.period.number] = max(periods[run.period.number], wall_s)
        return sum(periods.values()) + max(lanes.values(), default=0.0)

    def finished(self, key: RunKey, wall_s: float) -> None:
        """Learn from a run that took ``wall_s`` from its begin to its seal."""
        self._wall_s[key] = wall_s


def predicted_work(run: PlannedRun) -> float:
    """What one run takes: wall seconds of its replay and what lies around it; of a simulated one, in tokens' worth."""
    kind = kind_named(run.spec.backend)
    if kind.is_virtual:
        sessions = run.plan.sessions
        return SIMULATED_RUN_TOKENS + sum(request.generate_tokens for one in sessions for request in one.requests)
    return predicted_replay_s(run) + kind.lifecycle_s


def predicted_replay_s(run: PlannedRun) -> float:
    """Simulated wall seconds of one replay; none pass in virtual time."""
    if kind_named(run.spec.backend).is_virtual:
        return 0.0
    return simulate(run.plan, run.server, run.cost_model).end_ns / NS_PER_S / run.spec.time_scale
