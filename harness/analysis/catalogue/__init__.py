"""The analyses that an experiment can name. Each module here registers those in its ``ANALYSES`` by being here.

An analysis turns valid sealed runs into a few small tables. It decides nothing.
Definitions: docs/method.md, "Experiments".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import NamedTuple

from harness.analysis.method import stats
from harness.analysis.method.compare import compare
from harness.analysis.method.predictions import Predictions
from harness.analysis.method.result import AnalysisResult
from harness.analysis.method.speeds import device_tables, speeds
from harness.analysis.method.stats import Interval
from harness.analysis.method.verdicts import ExperimentRuns
from harness.errors import SpecError
from harness.kinds import kind_of_run
from harness.records import SealedRun, origin_of
from harness.table import Table

DEFAULT = "general"
Tables = tuple[Table, ...]


class AnalysisOutput(NamedTuple):
    """What an analysis computes. notes: what limits its figures."""

    tables: Tables
    intervals: Mapping[str, Interval] = {}
    notes: tuple[str, ...] = ()


class Analysis(NamedTuple):
    """One analysis. meaning: what it shows, in one line."""

    name: str
    meaning: str
    compute: Callable[[ExperimentRuns], AnalysisOutput]


def of_tables(
    *tables: Callable[[ExperimentRuns], Table],
    notes: tuple[str, ...] = (),
    intervals: Callable[[ExperimentRuns], Mapping[str, Interval]] = lambda _experiment: {},
) -> Callable[[ExperimentRuns], AnalysisOutput]:
    """Computes the given tables in order, and intervals where they are asked for."""

    def compute(experiment: ExperimentRuns) -> AnalysisOutput:
        return AnalysisOutput(tuple(table(experiment) for table in tables), intervals(experiment), notes)

    return compute


@cache
def analyses() -> dict[str, Analysis]:
    """Every analysis by name, in the order of the names."""
    modules = [import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__)]
    registered: list[Analysis] = [analysis for module in modules for analysis in getattr(module, "ANALYSES", ())]
    return {analysis.name: analysis for analysis in sorted(registered, key=lambda analysis: analysis.name)}


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
    tables, intervals, notes = analysis.compute(experiment)
    fewest = min(len({run.replicate for run in group}) for group in experiment.runs.values())
    if fewest < stats.MIN_REPLICATES:
        notes = (*notes, f"{fewest} valid replicates of a condition: too few for an interval of a ratio or a mean")
    if num_invalid := sum(not run.is_valid for run in runs):
        notes = (*notes, f"{num_invalid} invalid runs are left out")
    kept = tuple(table for table in (*tables, *_by_device(experiment)) if table.rows)
    origin = origin_of(runs)
    is_simulated = kind_of_run(runs[0].manifest.backend).is_virtual
    return AnalysisResult(runs[0].experiment, analysis.name, kept, notes, intervals, origin, is_simulated)


def _by_device(experiment: ExperimentRuns) -> list[Table]:
    """Devices and comparisons on each of them; nothing where fewer than two made the runs."""
    by_device = speeds([figures for condition in experiment.runs for figures in experiment.figures(condition)])
    if by_device is None:
        return []
    comparisons = {
        name: compare(baseline, experiment.figures(name), experiment.figures(baseline))
        for name, baseline in experiment.compared()
    }
    return device_tables(by_device, comparisons)
