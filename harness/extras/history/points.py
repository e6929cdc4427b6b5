"""One figure over many sets of runs, by date: its points, as a table, a page and a file for Apache Otava.

Nothing is decided, and no run is made. Definitions: docs/guides/gate.md, "History of a figure".
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

from harness.analysis.compare.measures import log_values, mean_of
from harness.analysis.cost.devices import estimate_of
from harness.analysis.stats import MIN_REPLICATES, grouped
from harness.errors import SpecError
from harness.html import code, figure, page, section
from harness.judge.decisions.gate import FIGURES, GateRun, log_bounds, same_run
from harness.measure.records.manifest import LaunchReport, Manifest, table_at
from harness.measure.records.run import origin_of
from harness.outputs import write_text
from harness.present.report.svg import PAGE_WIDTH_IN, Sheet, condition_color
from harness.table import Table, table_of, to_csv, to_html

HISTORY_HEIGHT_IN = 2.9


class HistoryPoint(NamedTuple):
    """One set of runs. date: of its first run (UTC, ISO 8601). release: of what served. value: mean.

    low, high: the 95 % interval over the runs, and wider by what late reads, or power that was sampled, leave open.
    """

    experiment: str
    condition: str
    figure: str
    date: str
    release: str
    place: str
    runs: int
    value: float
    low: float | None
    high: float | None


class History(NamedTuple):
    """One figure of one condition, points by date. notes: what a reader must know of them."""

    points: tuple[HistoryPoint, ...]
    notes: tuple[str, ...]
    origin: str


class PlacedRuns(NamedTuple):
    """The valid runs of one condition in one place: a folder of runs or a saved baseline."""

    place: str
    runs: Sequence[GateRun]

    @property
    def date(self) -> str:
        return min(str(run.manifest.provenance.get("captured_at_utc", "")) for run in self.runs)


def release_of(made: Manifest) -> str:
    """The release of what served: of a started stack, of a vLLM that says its version, else the rules of a stand-in."""
    vllm, rules = LaunchReport.tolerant(table_at(made.effective, "launch")).vllm, made.server_spec.get("rules")
    served = made.stack or (f"vllm {vllm}" if vllm else made.kind.name)
    return f"{served}, rules {rules}" if rules and served == made.kind.name else served


def histories(placed: Sequence[PlacedRuns], figures: Sequence[str]) -> list[History]:
    """A history for each figure of each condition.

    SpecError for what is no figure, what is in one place alone, and two places with the same runs.
    """
    for name in figures:
        if name not in FIGURES:
            raise SpecError(f"{name!r} is no figure", where="history", hint=f"Use {', '.join(FIGURES)}")
    for one, other in combinations(placed, 2):
        if same := same_run(one.runs, other.runs):
            what = f"holds the same runs as {one.place} (first {same})"
            raise SpecError(what, where=other.place, hint="Name each folder once: a history has one point for each")
    by_condition = grouped(placed, lambda each: (each.runs[0].manifest.experiment, each.runs[0].condition))
    made = [
        _history((*key, name), sorted(places, key=lambda place: place.date), name)
        for key, places in by_condition.items()
        for name in figures
    ]
    known = [history for history in made if len(history.points) > 1]
    if not known:
        hint = "Name two or more folders with runs of the same experiment and condition, or baselines"
        raise SpecError("no condition has this figure in more than one place", where="history", hint=hint)
    return known


def _history(series: tuple[str, str, str], places: Sequence[PlacedRuns], name: str) -> History:
    plans = [{run.manifest.plan_hash for run in one.runs} for one in places]
    common, notes = set[str].intersection(*plans), list[str]()
    if len(common) >= MIN_REPLICATES or all(of_place == common for of_place in plans):
        # Plans that not every point has would scatter.
        chosen = [[run for run in one.runs if run.manifest.plan_hash in common] for one in places]
        left = sum(len(one.runs) for one in places) - sum(map(len, chosen))
        notes += [f"{left} runs of plans that not every point has were left out"] if left else []
    else:
        chosen = [list(one.runs) for one in places]
        notes.append("the points are of different plans, which scatter too")
    runs = [run for of_place in chosen for run in of_place]
    facts = {
        "kinds of server": (run.manifest.kind.name for run in runs),
        "cost models": (str(run.manifest.server_spec.get("cost_model", "")) for run in runs),
        f"targets ([slo] {FIGURES[name].target})": (str(FIGURES[name].target_of(run.manifest)) for run in runs),
    }
    for what, values in facts.items():
        if len(names := sorted({*values})) > 1:
            notes.append(f"several {what}: {', '.join(names)}; a change may be from one to another")
    points = (_point(series, one, of_place, name) for one, of_place in zip(places, chosen, strict=True))
    return History(
        tuple(filter(None, points)), tuple(f"{series[1]}, {name}: {note}" for note in notes), origin_of(runs)
    )


def _point(series: tuple[str, str, str], one: PlacedRuns, runs: Sequence[GateRun], name: str) -> HistoryPoint | None:
    known = [run.values.get(name) for run in runs]
    values = [value for value in known if value is not None and FIGURES[name].has_ratio(value)]
    if len(values) < len(runs) or not any(value.amount for value in values):
        return None
    ends: tuple[float | None, float | None] = (None, None)
    if (estimate := estimate_of(log_values(values).tolist(), runs)) is not None:
        interval, (down, up) = estimate.interval(), map(math.exp, log_bounds(name, runs))
        ends = interval.low * down, interval.high * up
    release = ", ".join(dict.fromkeys(release_of(run.manifest) for run in one.runs))
    return HistoryPoint(*series, one.date, release, one.place, len(runs), mean_of(values), *ends)


def history_table(made: Iterable[History]) -> Table:
    """A row for each point of each history."""
    listed = list(made)
    rows = (point._asdict() for history in listed for point in history.points)
    origins = " ".join(dict.fromkeys(history.origin for history in listed if history.origin))
    return table_of("Figures over releases", "value: mean over runs, low to high its 95 % interval.", rows, origins)


def write_history(path: Path, made: Sequence[History]) -> None:
    """Writes a page (.html), or a file for Apache Otava (.csv); SpecError for another suffix."""
    if path.suffix not in {".html", ".csv"}:
        raise SpecError("is neither .html nor .csv", where=str(path), hint="Name a file with one of these suffixes")
    write_text(path, _page(made) if path.suffix == ".html" else _otava_csv(made))


def _otava_csv(made: Sequence[History]) -> str:
    """A row for each place by date, a column for each figure of a condition, as Otava's CSV tests read them."""
    rows: dict[str, dict[str, str | float]] = {}
    for point in sorted((point for history in made for point in history.points), key=lambda point: point.date):
        row = rows.setdefault(point.place, {"time": point.date, "release": point.release, "place": point.place})
        row[f"{point.experiment}.{point.condition}.{point.figure}"] = point.value
    return to_csv(table_of("", "", rows.values()))


def _page(made: Sequence[History]) -> str:
    with Sheet() as sheet:
        plots = [_picture(sheet, history.points, place) for place, history in enumerate(made)]
    notes = "\n".join(note for history in made for note in history.notes)
    title = f"History of {', '.join(dict.fromkeys(history.points[0].experiment for history in made))}"
    return page(title, [*plots, to_html(history_table(made)), code(notes)])


def _picture(sheet: Sheet, points: Sequence[HistoryPoint], place: int) -> str:
    """One plot below its heading."""
    drawn, color = sheet.figure(PAGE_WIDTH_IN, HISTORY_HEIGHT_IN), condition_color(1)
    axes = drawn.subplots()
    axes.plot([point.value for point in points], color=color, marker="o", markersize=4, linewidth=0.9)
    for at, point in enumerate(points):
        if point.low is not None and point.high is not None:
            axes.vlines(at, point.low, point.high, color=color, linewidth=1.4)
    axes.set_xticks(range(len(points)), [f"{point.date[:10]}\n{point.release}" for point in points], fontsize=7)
    axes.grid(visible=True, axis="y")
    title = f"{points[0].condition}: {FIGURES[points[0].figure].meaning}"
    picture = sheet.render(drawn, name=f"history{place}", label=f"{title}, by date; the table has its numbers")
    return section(title, figure(picture))
