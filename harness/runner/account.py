"""What an experiment has done and has still to do, while its runs are made: in one process or in several.

Turns what happened to a run into progress, and a block that became whole into a look of the stopping rule. Makes no
run itself. Next: ``harness.runner.experiment`` returns what it counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from harness.clock import NS_PER_S, MonotonicClock
from harness.experiment import PlannedRun, PlannedRuns
from harness.kinds import kind_named
from harness.records import RunKey, SealedRun
from harness.runner.deciding import Watch
from harness.runner.lane import Began, Made
from harness.runner.progress import BlockLooked, ExperimentStarted, ProgressSink, RunSealed, RunStarted
from harness.sim import simulate

# Wall seconds to start and stop one emulator process, before any run of this experiment has been timed.
FIRST_GUESS_LIFECYCLE_S = 3.0


class Account:
    """The runs that are still to be made, and those that were."""

    def __init__(
        self, planned: PlannedRuns, todo: Sequence[PlannedRun], on_progress: ProgressSink, watch: Watch | None
    ) -> None:
        self._on_progress, self._watch, self._clock = on_progress, watch, MonotonicClock()
        self._num_planned, self._num_kept = len(planned), len(planned) - len(todo)
        self._runs = {run.key: run for run in todo}
        self._forecast = _Forecast(todo)
        self._began_ns: dict[RunKey, int] = {}
        self.performed: list[RunKey] = []
        left_s = self._forecast.left_s()
        on_progress(
            ExperimentStarted(
                planned.spec.name, self._num_planned, self._num_kept, left_s, is_at_most=watch is not None
            )
        )
        if watch is not None and self._num_kept:
            on_progress(BlockLooked(watch.standing))

    @property
    def is_decided(self) -> bool:
        """Whether the stopping rule wants no further run."""
        return self._watch is not None and self._watch.is_decided

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
                self._forecast.of(key),
                place="" if run.place is None else str(run.place),
            )
        )

    def _made(self, run: SealedRun) -> None:
        wall_s = (self._clock.now_ns() - self._began_ns[run.key]) / NS_PER_S
        self.performed.append(run.key)
        self._forecast.finished(run.key, wall_s)
        left_s = self._forecast.left_s()
        self._on_progress(RunSealed(run.label, run.is_valid, tuple(run.invalid_reasons), wall_s, left_s))
        if self._watch is not None and self._watch.add(run):
            self._on_progress(BlockLooked(self._watch.standing))


class _Forecast:
    """Wall seconds still to go: simulated model time of each run, plus the lifecycle cost seen so far.

    Devices work side by side, so the slowest of them counts.
    """

    def __init__(self, runs: Iterable[PlannedRun]) -> None:
        runs = list(runs)
        self._place = {run.key: run.place for run in runs}
        self._replay_s = {run.key: predicted_replay_s(run) for run in runs}
        self._lifecycle_s = [FIRST_GUESS_LIFECYCLE_S]
        self._pending = dict(self._replay_s)

    def of(self, key: RunKey) -> float:
        return self._replay_s[key] + sum(self._lifecycle_s) / len(self._lifecycle_s)

    def left_s(self) -> float:
        return max(self._left_s_by_place(), default=0.0)

    def _left_s_by_place(self) -> Iterator[float]:
        for place in set(self._place.values()):
            yield sum(self.of(key) for key in self._pending if self._place[key] == place)

    def finished(self, key: RunKey, wall_s: float) -> None:
        self._pending.pop(key)
        if FIRST_GUESS_LIFECYCLE_S in self._lifecycle_s:
            self._lifecycle_s.remove(FIRST_GUESS_LIFECYCLE_S)
        self._lifecycle_s.append(max(0.0, wall_s - self._replay_s[key]))


def predicted_replay_s(run: PlannedRun) -> float:
    """Simulated wall seconds of one replay."""
    result = simulate(run.plan, run.server, run.cost_model)
    return 0.0 if kind_named(run.spec.backend).is_virtual else result.end_ns / NS_PER_S / run.spec.time_scale
