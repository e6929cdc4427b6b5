"""What an experiment has done and has still to do, while its runs are made: in one process or in several.

Turns what happened to a run into progress, and a block that became whole into a look of the stopping rule. Makes no
run itself. Next: ``harness.runner.experiment`` returns what it counted.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence

from harness.clock import NS_PER_S, MonotonicClock
from harness.experiment import PlannedRun, PlannedRuns
from harness.kinds import kind_named
from harness.records import RunKey, SealedRun
from harness.runner.deciding import Watch
from harness.runner.lane import Began, Made
from harness.runner.progress import BlockLooked, ExperimentStarted, ProgressSink, RunSealed, RunStarted
from harness.sim import simulate

# What a simulated run and each of its tokens take, in rows that could be encoded meanwhile; found by timing both.
SIMULATED_RUN_ROWS, SIMULATED_TOKEN_ROWS = 7_000, 4.3
TIMED_ROWS = 4_000


class Account:
    """The runs that are still to be made, and those that were."""

    def __init__(
        self, planned: PlannedRuns, todo: Sequence[PlannedRun], on_progress: ProgressSink, watch: Watch | None
    ) -> None:
        self._on_progress, self._watch, self._clock = on_progress, watch, MonotonicClock()
        self._num_planned, self._num_kept = len(planned), len(planned) - len(todo)
        self._runs = {run.key: run for run in todo}
        self._forecast = Forecast(todo)
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


class Forecast:
    """Wall seconds still to go: what is predicted of each run, corrected by the runs that have finished.

    A modelled server keeps the simulator's pace, and its runs differ from what was predicted by their set-up, which is
    added. What runs at a pace of its own (a device, somebody's server, this machine simulating) is multiplied.
    Devices work side by side, so the slowest of them counts.
    """

    def __init__(self, runs: Iterable[PlannedRun]) -> None:
        runs = list(runs)
        self._place = {run.key: run.place for run in runs}
        row_s = _row_s()
        self._predicted_s = {run.key: _predicted_wall_s(run, row_s) for run in runs}
        self._wall_s: dict[RunKey, float] = {}
        self._keeps_pace = all(
            kind.has_device is False and not kind.is_virtual for kind in (kind_named(run.spec.backend) for run in runs)
        )

    def of(self, key: RunKey) -> float:
        """One run that has not finished."""
        first_s = self._predicted_s[key]
        if not self._wall_s:
            return first_s
        seen_s, said_s = sum(self._wall_s.values()), sum(self._predicted_s[done] for done in self._wall_s)
        if self._keeps_pace:
            return max(0.0, first_s + (seen_s - said_s) / len(self._wall_s))
        return first_s * seen_s / said_s

    def left_s(self) -> float:
        """All that have not finished."""
        return max(self._left_s_by_place(), default=0.0)

    def _left_s_by_place(self) -> Iterator[float]:
        for place in set(self._place.values()):
            pending = self._predicted_s.keys() - self._wall_s.keys()
            yield sum(self.of(key) for key in pending if self._place[key] == place)

    def finished(self, key: RunKey, wall_s: float) -> None:
        """Learn from a run that took ``wall_s`` from its begin to its seal."""
        self._wall_s[key] = wall_s


def _predicted_wall_s(run: PlannedRun, row_s: float) -> float:
    """Wall seconds of one run before any was timed: its replay and what lies around it, or what simulating it costs."""
    kind = kind_named(run.spec.backend)
    if kind.is_virtual:
        tokens = sum(request.generate_tokens for session in run.plan.sessions for request in session.requests)
        return (SIMULATED_RUN_ROWS + SIMULATED_TOKEN_ROWS * tokens) * row_s
    return predicted_replay_s(run) + kind.lifecycle_s


def _row_s() -> float:
    """Wall seconds in which this machine encodes one small row now: idle ones and busy ones differ tenfold."""
    clock = MonotonicClock()
    began_ns = clock.now_ns()
    for number in range(TIMED_ROWS):
        json.dumps({"session": number, "request": 2, "trigger_ns": began_ns, "status": "ok", "wait": [1, 2, 3, 4]})
    return (clock.now_ns() - began_ns) / NS_PER_S / TIMED_ROWS


def predicted_replay_s(run: PlannedRun) -> float:
    """Simulated wall seconds of one replay; none pass in virtual time."""
    if kind_named(run.spec.backend).is_virtual:
        return 0.0
    return simulate(run.plan, run.server, run.cost_model).end_ns / NS_PER_S / run.spec.time_scale
