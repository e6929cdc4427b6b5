"""What an experiment has done and has still to do, while its runs are made: in one process or in several.

Turns what happened to a run into progress, and a block that became whole into a look of the stopping rule. Makes no
run itself. Next: ``harness.runner.experiment`` returns what it counted.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from harness.clock import NS_PER_S, MonotonicClock
from harness.experiment import PlannedRun, PlannedRuns
from harness.kinds import kind_named
from harness.records import RunKey, SealedRun
from harness.runner.deciding import Watch
from harness.runner.lane import Began, Made
from harness.runner.progress import BlockLooked, ExperimentStarted, ProgressSink, RunSealed, RunStarted
from harness.sim import simulate
from harness.spec import Place

# What a simulated run, each of its tokens and what the first one loads take, in rows that could be encoded meanwhile;
# and how often a run waits for the disk. Found by timing all of them.
SIMULATED_RUN_ROWS, SIMULATED_TOKEN_ROWS, LOADED_ROWS, SYNCS_OF_RUN = 5_700, 1.5, 40_000, 18
TIMED_ROWS, TIMED_SYNCS = 8_000, 6
# A machine may be busier or less busy than it was: only so many of the latest runs tell its pace.
RECENT_RUNS = 12


class Account:
    """The runs that are still to be made, and those that were."""

    def __init__(
        self,
        planned: PlannedRuns,
        todo: Sequence[PlannedRun],
        on_progress: ProgressSink,
        watch: Watch | None,
        runs_root: Path,
    ) -> None:
        self._on_progress, self._watch, self._clock = on_progress, watch, MonotonicClock()
        self._num_planned, self._num_kept = len(planned), len(planned) - len(todo)
        self._runs = {run.key: run for run in todo}
        self._forecast = Forecast(todo, runs_root)
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
    Devices work side by side, so the slowest of them counts: of each period where they keep step, else of all.
    """

    def __init__(self, runs: Iterable[PlannedRun], runs_root: Path) -> None:
        """runs_root: on the disk where they will lie."""
        self._runs = {run.key: run for run in runs}
        kinds = {kind_named(run.spec.backend) for run in self._runs.values()}
        self._is_virtual = any(kind.is_virtual for kind in kinds)
        self._keeps_pace = all(kind.has_device is False and not kind.is_virtual for kind in kinds)
        row_s, disk_s = (_row_s(), SYNCS_OF_RUN * _sync_s(runs_root)) if self._is_virtual else (0.0, 0.0)
        self._loading_s = LOADED_ROWS * row_s
        self._predicted_s = {key: _predicted_wall_s(run, row_s) + disk_s for key, run in self._runs.items()}
        self._wall_s: dict[RunKey, float] = {}

    def of(self, key: RunKey) -> float:
        """One run that has not finished."""
        first_s, recent = self._predicted_s[key], [*self._wall_s][-RECENT_RUNS:]
        if not recent:
            return first_s
        seen_s, said_s = sum(self._wall_s[done] for done in recent), sum(self._predicted_s[done] for done in recent)
        if self._keeps_pace:
            return max(0.0, first_s + (seen_s - said_s) / len(recent))
        loading_s = self._loading_s if len(recent) == len(self._wall_s) else 0.0
        return first_s * seen_s / (said_s + loading_s)

    def left_s(self) -> float:
        """All that have not finished."""
        periods, lanes = defaultdict[int, float](float), defaultdict[Place | None, float](float)
        for key in self._runs.keys() - self._wall_s.keys():
            run = self._runs[key]
            if self._is_virtual or run.period is None:
                # Simulated devices take turns on this one machine.
                lanes[None if self._is_virtual else run.place] += self.of(key)
            else:
                periods[run.period.number] = max(periods[run.period.number], self.of(key))
        loading_s = self._loading_s if lanes and not self._wall_s else 0.0
        return sum(periods.values()) + max(lanes.values(), default=0.0) + loading_s

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


def _sync_s(folder: Path) -> float:
    """Wall seconds in which the disk below ``folder`` takes a small file for good now; 0 where nothing may be written.

    Disks differ a hundredfold, and a run that is simulated waits for them longer than it computes.
    """
    above = next(one for one in (folder.absolute(), *folder.absolute().parents) if one.is_dir())
    clock = MonotonicClock()
    began_ns = clock.now_ns()
    with suppress(OSError), tempfile.NamedTemporaryFile(dir=above) as file:
        for _ in range(TIMED_SYNCS):
            file.write(b"." * 4096)
            file.flush()
            os.fsync(file.fileno())
        return (clock.now_ns() - began_ns) / NS_PER_S / TIMED_SYNCS
    return 0.0


def predicted_replay_s(run: PlannedRun) -> float:
    """Simulated wall seconds of one replay; none pass in virtual time."""
    if kind_named(run.spec.backend).is_virtual:
        return 0.0
    return simulate(run.plan, run.server, run.cost_model).end_ns / NS_PER_S / run.spec.time_scale
