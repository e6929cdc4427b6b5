"""The analyses that an experiment can name, and their results; plug-ins have them (``harness.plugins``).

An analysis turns valid sealed runs into a few small tables. It decides nothing.
Definitions: docs/reference/method.md, "Experiments".
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps

from harness.analysis import stats
from harness.analysis.compare.answer import ExperimentRuns, source_of, source_of_prediction
from harness.analysis.compare.drawn import DrawnCosts, Predictions, predicted_ratio
from harness.analysis.figures import cells, totals
from harness.analysis.speeds import device_tables, speeds
from harness.analysis.stats import Interval
from harness.errors import SpecError
from harness.measure.records.run import SealedRun, origin_of
from harness.plugins import Registry
from harness.table import Cell, Table, TableForm, table_of, written

# What a simulation has twice, or as a difference of equals.
CHANNEL_TABLE = "tau sensitivity"
CHANNEL_COLUMNS = {"B_s", "r_s", "ratio_B", "saving_B", "difference", "tau"}
ONE_COST = {
    "A_s": "cost_s",
    "baseline_A_s": "baseline_cost_s",
    "changed_A_s": "changed_cost_s",
    "ratio_A": "ratio",
    "saving_A": "saving",
}


@dataclass(frozen=True, slots=True)
class AnalysisResult:
    """What an analysis of one experiment computed. notes: what limits it. intervals: by name, self-describing.

    origin: what must stand beside its figures where no device was measured.
    """

    experiment: str
    analysis: str
    tables: tuple[Table, ...]
    notes: tuple[str, ...] = ()
    intervals: Mapping[str, Interval] = field(default_factory=dict[str, Interval])
    origin: str = ""
    is_simulated: bool = False

    @property
    def shown(self) -> tuple[Table, ...]:
        """The tables as people read them: simulated runs show one cost, as both channels are equal by construction."""
        if not self.is_simulated:
            return self.tables
        return tuple(_one_cost(table) for table in self.tables if table.name != CHANNEL_TABLE)

    def table(self, name: str) -> Table:
        """The table of that name; KeyError when there is none."""
        return {table.name: table for table in self.tables}[name]

    def to_markdown(self) -> str:
        """The whole result as one page."""
        heading = [f"# {self.experiment}: {self.analysis}", *([self.origin] if self.origin else [])]
        parts = ["\n\n".join(heading) + "\n", *(written([table], TableForm.markdown) for table in self.shown)]
        if self.intervals:
            parts.append("".join(f"- {name}: {interval}\n" for name, interval in self.intervals.items()))
        if self.notes:
            parts.append("".join(f"- {note}\n" for note in self.notes))
        return "\n".join(parts)

    def _repr_markdown_(self) -> str:
        """What a notebook shows."""
        return self.to_markdown()

    def to_text(self, width: int) -> str:
        """The whole result for a terminal."""
        parts = [self.origin + "\n"] if self.origin else []
        parts.append(written(self.shown, TableForm.text, width))
        lines = [f"{name}: {interval}" for name, interval in self.intervals.items()]
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(parts) + "\n" + "".join(f"{line}\n" for line in lines)

    def to_json(self) -> str:
        """The whole result, floats unrounded."""
        content = {
            "experiment": self.experiment,
            "analysis": self.analysis,
            "origin": self.origin,
            "tables": [
                {"name": table.name, "caption": table.caption, "rows": table.records()} for table in self.tables
            ],
            "intervals": {name: interval_record(interval) for name, interval in self.intervals.items()},
            "notes": list(self.notes),
        }
        return json.dumps(content, indent=2) + "\n"


def _one_cost(table: Table) -> Table:
    kept = [place for place, name in enumerate(table.columns) if name not in CHANNEL_COLUMNS]
    columns = tuple(ONE_COST.get(table.columns[place], table.columns[place]) for place in kept)
    return replace(table, columns=columns, rows=tuple(tuple(row[place] for place in kept) for row in table.rows))


def interval_record(interval: Interval) -> dict[str, Cell]:
    """An interval with everything that says what it means."""
    return {name: getattr(interval, name) for name in Interval.__slots__}


DEFAULT = "general"


TableOf = Callable[[ExperimentRuns], Table]
Rows = Iterator[Mapping[str, Cell]]


@dataclass(frozen=True, slots=True)
class Analysis:
    """One analysis. meaning: what it shows, in one line. tables: in their order.

    notes: what limits its figures. computed_notes: notes that the runs themselves give. intervals: by name.
    """

    name: str
    meaning: str
    tables: tuple[TableOf, ...]
    notes: tuple[str, ...] = ()
    computed_notes: Callable[[ExperimentRuns], Iterable[str]] = lambda _experiment: ()
    intervals: Callable[[ExperimentRuns], Mapping[str, Interval]] = lambda _experiment: {}


def table(name: str, caption: str) -> Callable[[Callable[[ExperimentRuns], Rows]], TableOf]:
    """Makes a table of the rows that a function yields."""

    def decorate(rows: Callable[[ExperimentRuns], Rows]) -> TableOf:
        @wraps(rows)
        def build(experiment: ExperimentRuns) -> Table:
            return table_of(name, caption, rows(experiment))

        return build

    return decorate


def analyses() -> dict[str, Analysis]:
    """Every analysis by name, in the order of the names."""
    return dict(sorted(Registry("analyses", {}).items()))


def analysis_named(name: str, where: str) -> Analysis:
    """The analysis of that name, or the default for an empty one; SpecError with the known names for an unknown one."""
    known = analyses()
    if (name or DEFAULT) not in known:
        raise SpecError(f"unknown analysis {name!r}", where=f"{where}: analysis", hint=f"Use one of {', '.join(known)}")
    return known[name or DEFAULT]


def analyse(runs: Sequence[SealedRun], predictions: Predictions | None = None, name: str = "") -> AnalysisResult:
    """The analysis that an experiment names (or ``name``), over its valid runs.

    predictions: needed only by tables that compare with them. Raises SpecError for an unknown name or no valid run.
    """
    if not any(run.is_valid for run in runs):
        raise SpecError("no valid run to analyse", where="runs", hint="See `harness runs` for why they are invalid")
    analysis = analysis_named(name or runs[0].spec.analysis, runs[0].experiment)
    experiment = ExperimentRuns(runs, predictions)
    tables = [build(experiment) for build in analysis.tables] + _by_device(experiment)
    notes = [*analysis.notes, *analysis.computed_notes(experiment)]
    fewest = min(len({run.replicate for run in group}) for group in experiment.runs.values())
    if fewest < stats.MIN_REPLICATES:
        notes.append(f"{fewest} valid replicates of a condition: too few for an interval of a ratio or a mean")
    if num_invalid := sum(not run.is_valid for run in runs):
        notes.append(f"{num_invalid} invalid runs are left out")
    return AnalysisResult(
        experiment=runs[0].experiment,
        analysis=analysis.name,
        tables=tuple(table for table in tables if table.rows),
        notes=tuple(notes),
        intervals=analysis.intervals(experiment),
        origin=origin_of(runs),
        is_simulated=runs[0].manifest.kind.is_virtual,
    )


def _by_device(experiment: ExperimentRuns) -> list[Table]:
    """Devices and comparisons on each of them; nothing where fewer than two made the runs."""
    by_device = speeds([figures for condition in experiment.runs for figures in experiment.figures(condition)])
    if by_device is None:
        return []
    return device_tables(by_device, {names[0]: experiment.compare(*names) for names in experiment.compared()})


@table(
    "predictions",
    "Cost of the condition over its baseline's, predicted (mean and interval of draws of these plans) and observed "
    "(ratio of sums, and the interval of `harness table`; on channel A, or B where A is missing); error > 0: "
    "the prediction promised too much; has_interpolated_buckets: the cost of some bucket was not measured",
)
def prediction_table(experiment: ExperimentRuns) -> Rows:
    """Table IX: predicted and observed cost ratio, error e, and reuse as predicted and as observed, with intervals."""
    for condition, baseline in experiment.compared():
        pairs = experiment.seen_pairs(condition, baseline)
        compared = experiment.compare(condition, baseline)
        predicted = experiment.predicted(pairs)
        result = experiment.result(condition, baseline)
        if compared is None or predicted is None or result is None:
            continue
        ratio_predicted = predicted_ratio(*predicted)
        own, base = map(DrawnCosts.of, predicted)
        yield {
            "condition": condition,
            "prediction": source_of_prediction(predicted[0]).value,
            "observation": source_of(experiment.runs[condition][0].manifest.kind.name).value,
            "predicted_ratio": ratio_predicted,
            **cells(own.interval_to(base), {"predicted_low": "low", "predicted_high": "high"}),
            "observed_ratio_A": compared.ratio_a,
            "observed_ratio_B": compared.ratio_b,
            **cells(result.interval, {"observed_low": "low", "observed_high": "high"}),
            "error": compared.main.ratio - ratio_predicted,
            "predicted_reuse": sum(run.num_reused for run in predicted[0]),
            "observed_reuse": totals(pairs)[0].reuse.num_reused,
            "has_interpolated_buckets": any(run.interpolated_buckets for run in predicted[0]),
        }
