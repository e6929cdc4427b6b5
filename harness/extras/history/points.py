"""One figure over many sets of runs, by date. Nothing is decided, and no run is made.

Definitions: docs/guides/gate.md, "History of a figure".
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from harness.analysis.compare.measures import log_values, mean_of
from harness.analysis.cost.devices import estimate_of
from harness.analysis.stats import MIN_REPLICATES, Interval, grouped
from harness.errors import SpecError
from harness.judge.decisions.gate import FIGURES, GateRun, log_bounds, same_run
from harness.measure.records import layout
from harness.measure.records.manifest import LaunchReport, table_at
from harness.measure.records.run import origin_of

MIN_POINTS = 2


@dataclass(frozen=True, slots=True)
class HistoryPoint:
    """One set of runs. date: of its first run (UTC, ISO 8601). release: of what served. value: mean.

    interval: over the runs, and wider by what late reads, or power that was sampled, leave open.
    """

    place: str
    date: str
    release: str
    num_runs: int
    value: float
    interval: Interval | None


@dataclass(frozen=True, slots=True)
class History:
    """One figure of one condition, points by date. notes: what a reader must know of them."""

    experiment: str
    condition: str
    figure: str
    points: tuple[HistoryPoint, ...]
    notes: tuple[str, ...]
    origin: str


@dataclass(frozen=True, slots=True)
class PlacedRuns:
    """The valid runs of one condition in one place: a folder of runs or a saved baseline."""

    place: str
    runs: tuple[GateRun, ...]

    @property
    def key(self) -> tuple[str, str]:
        """Experiment and condition."""
        return self.runs[0].manifest.experiment, self.runs[0].condition

    @property
    def date(self) -> str:
        return min(str(run.manifest.provenance.get("captured_at_utc", "")) for run in self.runs)

    @property
    def release(self) -> str:
        """Versions of what served, each once."""
        return ", ".join(dict.fromkeys(map(_release, self.runs)))


def _release(run: GateRun) -> str:
    """The release of what served: of a started stack, of a vLLM that says its version, else the rules of a stand-in."""
    made = run.manifest
    vllm = LaunchReport.tolerant(table_at(made.effective, "launch")).vllm
    if served := made.stack or (f"vllm {vllm}" if vllm else ""):
        return served
    rules = made.server_spec.get("rules")
    return f"{made.kind.name}, rules {rules}" if rules else made.kind.name


def histories(placed: Iterable[PlacedRuns], figures: Sequence[str]) -> list[History]:
    """A history for each figure of each condition; SpecError for what is no figure, or is in one place alone."""
    for name in figures:
        if name not in FIGURES:
            raise SpecError(f"{name!r} is no figure", where="history", hint=f"Use {', '.join(FIGURES)}")
    made = [
        _history(key, sorted(places, key=lambda place: place.date), name)
        for key, places in grouped(placed, lambda place: place.key).items()
        for name in figures
        if len(places) > 1
    ]
    known = [history for history in made if history is not None]
    if not known:
        hint = "Name two or more folders with runs of the same experiment and condition, or baselines"
        raise SpecError("no condition has this figure in more than one place", where="history", hint=hint)
    return known


def refuse_same_runs(placed: Sequence[PlacedRuns]) -> None:
    """Raises SpecError where two points are of the same runs."""
    for one, other in combinations(placed, 2):
        if same := same_run(one.runs, other.runs):
            raise SpecError(
                f"holds the same runs as {one.place} (first {same})",
                where=other.place,
                hint="Name each folder once: a history has one point for each",
            )


def _history(key: tuple[str, str], places: Sequence[PlacedRuns], figure: str) -> History | None:
    chosen, notes = _of_same_plans(places)
    points = [
        point for one, runs in zip(places, chosen, strict=True) if (point := _point(one, runs, figure)) is not None
    ]
    if len(points) < MIN_POINTS:
        return None
    kinds = sorted({run.manifest.kind.name for runs in chosen for run in runs})
    if len(kinds) > 1:
        notes = [*notes, f"several kinds of server: {', '.join(kinds)}; a change may be from one to another"]
    if len({FIGURES[figure].target_of(run.manifest) for runs in chosen for run in runs}) > 1:
        notes = [*notes, f"the points have other targets: [slo] {FIGURES[figure].target}"]
    notes = [*notes, *_of_costs([run for runs in chosen for run in runs])]
    origin = origin_of(run for runs in chosen for run in runs)
    return History(*key, figure, tuple(points), tuple(notes), origin)


def _of_costs(runs: Sequence[GateRun]) -> list[str]:
    """What figures without a device hold: the step times of their cost models."""
    modelled = [run.manifest for run in runs if run.manifest.kind.has_device is False]
    if not modelled:
        return []
    names = dict.fromkeys(str(made.server_spec.get("cost_model", "")) for made in modelled)
    files = {entry.sha256 for made in modelled if (entry := made.files.get(layout.COST_MODEL)) is not None}
    if len(files) < 2:
        return ["no device: every figure is given the step times of its cost model"]
    return [f"no device, and several cost models ({', '.join(names)}): a change may be from one to another"]


def _of_same_plans(places: Sequence[PlacedRuns]) -> tuple[list[list[GateRun]], list[str]]:
    """The runs of plans that every place has, so that plans do not scatter; all runs where these are too few."""
    plans = [{run.manifest.plan_hash for run in one.runs} for one in places]
    common = set[str].intersection(*plans)
    if len(common) >= MIN_REPLICATES or all(of_place == common for of_place in plans):
        left = sum(run.manifest.plan_hash not in common for one in places for run in one.runs)
        notes = [f"{left} runs of plans that not every point has were left out"] if left else []
        return [[run for run in one.runs if run.manifest.plan_hash in common] for one in places], notes
    return [list(one.runs) for one in places], ["the points are of different plans, which scatter too"]


def _point(one: PlacedRuns, runs: Sequence[GateRun], figure: str) -> HistoryPoint | None:
    known = [run.values.get(figure) for run in runs]
    values = [value for value in known if value is not None and FIGURES[figure].has_ratio(value)]
    if len(values) < len(runs) or not any(value.amount for value in values):
        return None
    estimate = estimate_of(log_values(values).tolist(), list(runs))
    interval = None if estimate is None else estimate.interval()
    if interval is not None:
        down, up = map(math.exp, log_bounds(figure, runs))
        interval = replace(interval, low=interval.low * down, high=interval.high * up)
    return HistoryPoint(one.place, one.date, one.release, len(runs), mean_of(values), interval)
