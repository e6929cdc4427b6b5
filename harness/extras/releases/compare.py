"""Releases of a stack: two of them over the same plans, and a figure over many, by date.

Two releases: which decisions differ, which figures, which names of log and metrics. Many: a point with its interval for
each set of runs, and where the level changed; change points come from ruptures (the extra "history"). Nothing is
decided, and no run is made: `harness gate` compares two releases.
Definitions: docs/releases.md, "Two releases side by side"; docs/history.md, "Over many releases".
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, zip_longest
from typing import Any

import numpy as np

from harness.analysis.cost.devices import estimate_of
from harness.analysis.stats import DEFAULT_LEVEL, MIN_REPLICATES, Interval, grouped
from harness.errors import SpecError
from harness.judge.compare.measures import Kind, Value, log_values
from harness.judge.decisions.gate import FIGURES, GateRun, estimate_at, gate_run
from harness.records import SealedRun, layout, origin_of
from harness.records.manifest import LaunchReport, table_at
from harness.table import Cell, Table, table_of

# "[PFX] ALLOC": what a line of the log is about.
_LOG_NAME = re.compile(rb"\[[A-Z][A-Z0-9_]+\](?: \[?[A-Z][A-Z_]+\b)?")


def compare_releases(
    old: Sequence[SealedRun], new: Sequence[SealedRun], names: tuple[str, str]
) -> tuple[Table, Table, Table]:
    """Tables of decisions, figures and names, over the valid runs that both releases have; SpecError without any."""
    pairs = [(base, run) for base in old for run in new if _is_pair(base, run)]
    if not pairs:
        raise SpecError("no plan ran validly on both releases", where="stack compare", hint="See `harness runs`")
    origin = origin_of(run for pair in pairs for run in pair)
    titles = f"{names[0]} and {names[1]}"
    decisions = table_of(
        f"Decisions of {titles}",
        "first_step: the first decode step whose (n, b) differs; steps: how many differ, place by place; first_event "
        "and events: the same of slot events (kind, slots, reused tokens, caller).",
        (_decisions(base, run) for base, run in pairs),
        origin,
    )
    rows = _figures([(gate_run(run), gate_run(base)) for base, run in pairs])
    figures = table_of(
        f"Figures of {titles}",
        f"ratio: {names[1]} over {names[0]}, over pairs of runs of one plan, with an interval of 95 % for all of them "
        "together; differs: whether it leaves 1 out; a dash: too few runs or requests. "
        + "; ".join(f"{name}: {figure.meaning}" for name, figure in FIGURES.items())
        + ".",
        rows,
        origin,
    )
    return (
        decisions,
        figures,
        table_of(f"Names of {titles}", "What only one of them shows.", _names(pairs, names), origin),
    )


def _is_pair(one: SealedRun, other: SealedRun) -> bool:
    return (
        one.is_valid and other.is_valid and one.key == other.key and one.manifest.plan_hash == other.manifest.plan_hash
    )


def _decisions(base: SealedRun, run: SealedRun) -> dict[str, Cell]:
    steps = [_rows(each, "steps", ("n", "b")) for each in (base, run)]
    events = [_rows(each, "kv_events", ("kind", "slots", "reused_tokens", "caller")) for each in (base, run)]
    first_step, num_steps = _different(*steps)
    first_event, num_events = _different(*events)
    return {
        "run": base.label,
        "decode_steps": f"{len(steps[0])} : {len(steps[1])}",
        "first_step": first_step,
        "at_first_step": "" if first_step is None else f"{_at(steps[0], first_step)} : {_at(steps[1], first_step)}",
        "steps": num_steps,
        "first_event": first_event,
        "at_first_event": ""
        if first_event is None
        else f"{_at(events[0], first_event)} : {_at(events[1], first_event)}",
        "events": num_events,
    }


def _rows(run: SealedRun, table: str, columns: Sequence[str]) -> list[tuple[object, ...]]:
    return [tuple(row.values()) for row in run.table(table).select(list(columns)).to_pylist()]


def _different(old: Sequence[object], new: Sequence[object]) -> tuple[int | None, int]:
    """The first place at which two sequences differ, and at how many they do."""
    places = [place for place, (one, other) in enumerate(zip_longest(old, new)) if one != other]
    return (places[0] if places else None), len(places)


def _at(rows: Sequence[tuple[object, ...]], place: int) -> str:
    return str(rows[place]) if place < len(rows) else "ended"


def _figures(pairs: Sequence[tuple[GateRun, GateRun]]) -> list[dict[str, Cell]]:
    """A row for each figure of each condition that some run shows."""
    by_condition = grouped(pairs, lambda pair: pair[0].condition)
    shown = [
        (condition, name, of_condition)
        for condition, of_condition in by_condition.items()
        for name in FIGURES
        if any(run.values.get(name) for pair in of_condition for run in pair)
    ]
    return [_figure(condition, name, of_condition, len(shown)) for condition, name, of_condition in shown]


def _figure(condition: str, name: str, pairs: Sequence[tuple[GateRun, GateRun]], family: int) -> dict[str, Cell]:
    estimate = estimate_at(FIGURES[name], pairs)
    interval = None if estimate is None else estimate.interval(level=1 - (1 - DEFAULT_LEVEL) / family)
    new, old = (_mean([run.values.get(name) for run in side]) for side in zip(*pairs, strict=True))
    return {
        "condition": condition,
        "figure": name,
        "pairs": len(pairs),
        "old": old,
        "new": new,
        "ratio": None if interval is None else interval.estimate,
        "low": None if interval is None else interval.low,
        "high": None if interval is None else interval.high,
        "differs": None if interval is None else not interval.contains(1.0),
    }


def _mean(values: Sequence[Value | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(v.amount for v in known) / sum(v.units for v in known) if len(known) == len(values) else None


def _names(pairs: Iterable[tuple[SealedRun, SealedRun]], releases: tuple[str, str]) -> list[dict[str, Cell]]:
    """Metrics and log lines that every paired run of one release together shows, and the other does not."""
    seen = {"metric": (set[str](), set[str]()), "log line": (set[str](), set[str]())}
    for pair in pairs:
        for side, run in enumerate(pair):
            seen["metric"][side].update(run.table("metrics").column("name").to_pylist())
            log = run.file(layout.SERVER_LOG)
            if log.is_file():
                seen["log line"][side].update(name.decode() for name in _LOG_NAME.findall(log.read_bytes()))
    return [
        {"kind": kind, "name": name, "only_in": release}
        for kind, (old, new) in seen.items()
        for release, names in zip(releases, (old - new, new - old), strict=True)
        for name in sorted(names)
    ]


MIN_POINTS = 6
MIN_BETWEEN = 2
# Of the variance of a point. With it at most one null series in twenty shows a change (`python -m benchmarks history`).
PENALTY = 10.5


@dataclass(frozen=True, slots=True)
class HistoryPoint:
    """One set of runs. date: of its first run (UTC, ISO 8601). release: of what served. value: mean.

    change: the level from this point on over the level before it; None where no change is shown.
    """

    place: str
    date: str
    release: str
    num_runs: int
    value: float
    interval: Interval | None
    change: float | None = None


@dataclass(frozen=True, slots=True)
class History:
    """One figure of one condition, points by date. notes: what a reader must know of them."""

    experiment: str
    condition: str
    figure: str
    points: tuple[HistoryPoint, ...]
    notes: tuple[str, ...]
    origin: str

    @property
    def changes(self) -> tuple[HistoryPoint, ...]:
        return tuple(point for point in self.points if point.change is not None)


@dataclass(frozen=True, slots=True)
class Placed:
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


def histories(placed: Iterable[Placed], figures: Sequence[str]) -> list[History]:
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


def _history(key: tuple[str, str], places: Sequence[Placed], figure: str) -> History | None:
    chosen, notes = _of_same_plans(places)
    points = [
        point for one, runs in zip(places, chosen, strict=True) if (point := _point(one, runs, figure)) is not None
    ]
    if len(points) < MIN_BETWEEN:
        return None
    kinds = sorted({run.manifest.kind.name for runs in chosen for run in runs})
    if len(kinds) > 1:
        notes = [*notes, f"several kinds of server: {', '.join(kinds)}; a change may be from one to another"]
    if len({FIGURES[figure].target_of(run.manifest) for runs in chosen for run in runs}) > 1:
        notes = [*notes, f"the points have other targets: [slo] {FIGURES[figure].target}"]
    if len(points) < MIN_POINTS:
        notes = [*notes, f"{len(points)} points: change points are sought from {MIN_POINTS} on"]
    origin = origin_of(run for runs in chosen for run in runs)
    return History(*key, figure, tuple(_with_changes(points)), tuple(notes), origin)


def _of_same_plans(places: Sequence[Placed]) -> tuple[list[list[GateRun]], list[str]]:
    """The runs of plans that every place has, so that plans do not scatter; all runs where these are too few."""
    plans = [{run.manifest.plan_hash for run in one.runs} for one in places]
    common = set[str].intersection(*plans)
    if len(common) >= MIN_REPLICATES or all(of_place == common for of_place in plans):
        left = sum(run.manifest.plan_hash not in common for one in places for run in one.runs)
        notes = [f"{left} runs of plans that not every point has were left out"] if left else []
        return [[run for run in one.runs if run.manifest.plan_hash in common] for one in places], notes
    return [list(one.runs) for one in places], ["the points are of different plans, which scatter too"]


def _point(one: Placed, runs: Sequence[GateRun], figure: str) -> HistoryPoint | None:
    known = [run.values.get(figure) for run in runs]
    values = [value for value in known if value is not None and FIGURES[figure].has_ratio(value)]
    if len(values) < len(runs) or not any(value.amount for value in values):
        return None
    logs = log_values(values) if FIGURES[figure].kind is Kind.SUM else np.log([value.amount for value in values])
    estimate = estimate_of(logs.tolist(), list(runs))
    interval = None if estimate is None else estimate.interval()
    return HistoryPoint(one.place, one.date, one.release, len(runs), math.exp(float(logs.mean())), interval)


def _with_changes(points: Sequence[HistoryPoint]) -> list[HistoryPoint]:
    logs = [math.log(point.value) for point in points]
    bounds = [0, *change_points(logs), len(points)]
    levels = [float(np.mean(logs[first:last])) for first, last in pairwise(bounds)]
    changes = {bounds[place]: math.exp(levels[place] - levels[place - 1]) for place in range(1, len(levels))}
    return [replace(point, change=changes.get(place)) for place, point in enumerate(points)]


def change_points(values: Sequence[float]) -> list[int]:
    """Places from which on the level is another one; none below MIN_POINTS values, or where all are equal.

    PELT on squared deviations. The variance of a point is taken from the differences of neighbours, so that a single
    change of level hardly enters it. Source: Killick, Fearnhead and Eckley (2012), Optimal detection of changepoints
    with a linear computational cost.
    """
    if len(values) < MIN_POINTS:
        return []
    try:
        import ruptures  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        hint = "pip install 'rbln-harness[history]'"
        raise SpecError("ruptures is not installed, which finds change points", where="history", hint=hint) from error
    series = np.asarray(values, dtype=np.float64)
    sd = math.sqrt(float((np.diff(series) ** 2).mean()) / 2)
    if sd == 0:
        return []
    search: Any = ruptures.KernelCPD(kernel="linear", min_size=MIN_BETWEEN)
    places: list[int] = search.fit_predict(((series - series.mean()) / sd)[:, None], pen=PENALTY)
    return [int(place) for place in places[:-1]]
