"""The paper's tables from a user's own sealed runs: numbers I to XV and S1 to S12, in the paper's columns and digits.

Cells are only laid out and rounded here; every figure is computed by ``harness.analysis`` and its neighbours. A table
whose runs are not there names the command that makes it. Next: ``paper_tables_format`` renders Markdown, CSV, LaTeX.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from harness.analysis.catalogue import analyse
from harness.analysis.decide import Decision
from harness.analysis.rules import load_rule
from harness.analysis.tabular import AnalysisResult, Cell
from harness.analysis.verdicts import Evidence
from harness.errors import SpecError
from harness.prereg import check_sealed_runs, judge, predict_runs
from harness.records import RunStore, SealedRun

NPU_BACKENDS = ("rbln", "attached")
NONE = "-"


@dataclass(frozen=True, slots=True)
class PaperTable:
    """One table. number: as the paper counts it, "XII" or "S4". missing: what to run where there is nothing to show.

    notes: what a reader must know, first of all whether an NPU was measured.
    """

    number: str
    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    missing: str = ""


class NotRunError(Exception):
    """A table's runs are not there. command: what makes them."""

    def __init__(self, command: str) -> None:
        super().__init__(command)
        self.command = command


@dataclass(frozen=True)
class Source:
    """Where tables find their runs: one experiment of the catalogue each, computed once.

    search: folder of the configuration search; artifacts: folder of compiled artifacts (``harness compile``).
    """

    runs_root: Path
    search: Path | None = None
    artifacts: Path | None = None
    _evidence: dict[str, Evidence] = field(default_factory=dict[str, Evidence], repr=False)
    _analyses: dict[str, AnalysisResult] = field(default_factory=dict[str, AnalysisResult], repr=False)

    @cached_property
    def _sealed(self) -> Mapping[str, list[SealedRun]]:
        found: dict[str, list[SealedRun]] = {}
        for run in RunStore(self.runs_root).sealed():
            found.setdefault(run.experiment, []).append(run)
        return found

    @cached_property
    def _by_experiment(self) -> Mapping[str, list[SealedRun]]:
        valid = {name: [run for run in runs if run.is_valid] for name, runs in self._sealed.items()}
        return {name: runs for name, runs in valid.items() if runs}

    def runs(self, experiment: str) -> list[SealedRun]:
        """Valid runs; NotRunError when there is none."""
        found = self._by_experiment.get(experiment)
        if not found:
            raise NotRunError(f"harness run plans/experiments/{experiment}.toml --runs {self.runs_root}")
        return found

    def has(self, experiment: str) -> bool:
        return experiment in self._by_experiment

    def evidence(self, experiment: str) -> Evidence:
        """Runs with what was predicted for them: frozen before, or else predicted now from the plan in each run."""
        if experiment not in self._evidence:
            runs = self.runs(experiment)
            frozen = check_sealed_runs(runs)
            self._evidence[experiment] = Evidence(runs, predict_runs(runs) if frozen is None else frozen.predictions)
        return self._evidence[experiment]

    def is_confirmatory(self, experiment: str) -> bool:
        return all(run.manifest.label == "confirmatory" for run in self.runs(experiment))

    def decisions(self, experiment: str, rule: str) -> list[Decision]:
        """What `harness decide` says by one rule: the frozen one where the runs are confirmatory."""
        names = () if self.is_confirmatory(experiment) else (rule,)
        return [one for one in judge(self._sealed[experiment], names).decisions if one.rule == rule]

    def rows(self, experiment: str, table: str) -> list[dict[str, Cell]]:
        """Rows of one table of the experiment's own analysis; none when it had nothing to show."""
        if experiment not in self._analyses:
            evidence = self.evidence(experiment)
            self._analyses[experiment] = analyse(self.runs(experiment), evidence.predictions)
        found = {one.name: one for one in self._analyses[experiment].tables}
        return found[table].records() if table in found else []


Rows = Sequence[Sequence[str]]
Builder = Callable[[Source], Rows]


@dataclass(frozen=True, slots=True)
class TableSpec:
    """How one table is made. experiments: whose runs it shows, for the note about the backend. remark: a note that
    depends on the runs.
    """

    number: str
    caption: str
    columns: tuple[str, ...]
    build: Builder
    experiments: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    remark: Callable[[Source], str] | None = None


def make_table(spec: TableSpec, source: Source) -> PaperTable:
    """One table; where its runs are missing, an empty one that says what to run."""
    try:
        rows = tuple(tuple(row) for row in spec.build(source))
    except NotRunError as missing:
        return PaperTable(spec.number, spec.caption, spec.columns, (), (), missing.command)
    remarks = () if spec.remark is None else (spec.remark(source),)
    notes = (*_backend_notes(spec, source), *remarks, *spec.notes)
    if not rows:
        return PaperTable(spec.number, spec.caption, spec.columns, (), (*notes, "the runs hold nothing that it shows"))
    return PaperTable(spec.number, spec.caption, spec.columns, rows, notes)


def _backend_notes(spec: TableSpec, source: Source) -> list[str]:
    runs = [run for experiment in spec.experiments if source.has(experiment) for run in source.runs(experiment)]
    backends = sorted({run.manifest.backend for run in runs})
    if not backends:
        return []
    told = f"{len(runs)} sealed runs of {', '.join(spec.experiments)}, backend {', '.join(backends)}"
    is_npu = all(backend in NPU_BACKENDS for backend in backends)
    return [told] if is_npu else [f"No NPU was measured. {told}"]


def paper_tables(source: Source, numbers: Sequence[str] = ()) -> list[PaperTable]:
    """The named tables, or all 27, in the paper's order. SpecError for a number that the paper does not have."""
    from harness.report.paper_tables_main import MAIN_TABLES
    from harness.report.paper_tables_supplement import SUPPLEMENT_TABLES

    known = {spec.number: spec for spec in (*MAIN_TABLES, *SUPPLEMENT_TABLES)}
    asked = [number.upper() for number in numbers]
    if unknown := [number for number in asked if number not in known]:
        raise SpecError(f"the paper has no table {unknown[0]!r}", where="--table", hint=f"Tables: {', '.join(known)}")
    return [make_table(spec, source) for number, spec in known.items() if not asked or number in asked]


def cost_rules(source: Source, experiment: str) -> list[str]:
    """Names of the cost rules that judge an experiment: the first one it names."""
    from harness.analysis.runfacts import experiment_of

    names = experiment_of(source.runs(experiment)[0]).rules
    return [name for name in names if load_rule(name).kind == "cost-validation"][:1]


def decimals(value: Cell, digits: int, *, sign: bool = False) -> str:
    """A number with the paper's digits; a dash for what is absent."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return NONE
    return f"{value:+.{digits}f}" if sign else f"{value:.{digits}f}"


def percent(value: Cell, digits: int = 2, *, sign: bool = False) -> str:
    """A share in percent."""
    return NONE if not isinstance(value, int | float) else f"{decimals(100 * value, digits, sign=sign)}%"


def whole(value: Cell) -> str:
    """A count, thousands apart."""
    return f"{value:,}" if isinstance(value, int) else NONE


def text(value: Cell) -> str:
    return NONE if value is None else str(value)
