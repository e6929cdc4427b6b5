"""The paper's tables I to XV and S1 to S12, laid out as ``tables.toml`` says. Nothing is computed here.

A table whose runs are missing names the command that makes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field

from harness.errors import SpecError
from harness.extras.paper import rows
from harness.extras.paper.source import NotRunError, PaperRuns, Row, Rows
from harness.kinds import kind_of_run
from harness.model.spec import Spec, load_toml
from harness.table import ABSENT, Cell, Table

NO_NOISE = "Simulated runs of one input are equal: there is no noise to show. Measure it on a server:"


class Column(NamedTuple):
    """One column, or of a table by condition one row."""

    heading: str
    figure: str
    form: str = ""


class TableSpec(Spec):
    """One table of tables.toml, which says what each key means."""

    number: str
    caption: str
    columns: tuple[Column, ...]
    experiments: tuple[str, ...] = ()
    analysis: str = ""
    conditions: dict[str, str] = Field(default_factory=dict)
    rows: str = ""
    where: dict[str, tuple[Cell, ...]] = Field(default_factory=dict)
    first: dict[str, tuple[Cell, ...]] = Field(default_factory=dict)
    notes: tuple[str, ...] = ()
    remark: str = ""
    shows_noise: bool = False


def paper_tables(source: PaperRuns, numbers: Sequence[str] = ()) -> list[Table]:
    """The named tables, or all 27, in the paper's order. SpecError for a number that the paper does not have."""
    tables: list[dict[str, Any]] = load_toml(Path(__file__).with_name("tables.toml"))["table"]
    known = {table["number"]: table for table in tables}
    wanted_numbers = [number.upper() for number in numbers]
    if unknown := [number for number in wanted_numbers if number not in known]:
        raise SpecError(f"the paper has no table {unknown[0]!r}", where="--table", hint=f"Tables: {', '.join(known)}")
    chosen = [table for number, table in known.items() if not wanted_numbers or number in wanted_numbers]
    return [_table(TableSpec.model_validate(table), source) for table in chosen]


def _table(spec: TableSpec, source: PaperRuns) -> Table:
    """One table; where its runs are missing, an empty one that says what to run."""
    name, label = f"Table {spec.number}", f"tab:{spec.number}"
    headings = ("Metric", *spec.conditions) if spec.conditions else tuple(column.heading for column in spec.columns)
    first = spec.experiments[0] if spec.shows_noise else ""
    if first and source.has(first) and all(run.manifest.kind.is_virtual for run in source.runs(first)):
        notes = (f"{NO_NOISE} harness run plans/experiments/{first}.toml --backend rbln",)
        return Table(name, spec.caption, headings, (), _origin(spec, source), notes, label)
    try:
        cells = tuple(tuple(row) for row in _cells(spec, source))
    except NotRunError as missing:
        notes = (f"Not run yet. Make it with: {missing}",)
        return Table(name, spec.caption, headings, (), "", notes, label)
    notes = (getattr(rows, spec.remark)(source), *spec.notes) if spec.remark else spec.notes
    if not cells:
        notes = (*notes, "the runs hold nothing that it shows")
    return Table(name, spec.caption, headings, cells, _origin(spec, source), notes, label)


def _cells(spec: TableSpec, source: PaperRuns) -> list[list[str]]:
    experiment = spec.experiments[0] if spec.experiments else ""
    made: Rows = getattr(rows, spec.rows)(source) if spec.rows else source.rows(experiment, spec.analysis)

    def figure(row: Row, name: str) -> Cell:
        kind, _, factor = name.partition(":")
        if kind == "factor":
            return source.factor(experiment, str(row["condition"]), factor)
        return getattr(rows, name[1:])(source, experiment, row) if name.startswith("@") else row.get(name)

    def matches(row: Row, wanted: Mapping[str, Sequence[Cell]]) -> bool:
        return all(figure(row, name) in values for name, values in wanted.items())

    if spec.conditions:
        by_condition = {row["condition"]: row for row in made}
        sides: list[Row] = [by_condition.get(condition, {}) for condition in spec.conditions.values()]
        return [
            [heading, *(printed(figure(side, name), form) for side in sides)] for heading, name, form in spec.columns
        ]
    shown = sorted((row for row in made if matches(row, spec.where)), key=lambda row: not matches(row, spec.first))
    return [[printed(figure(row, name), form) for _heading, name, form in spec.columns] for row in shown]


def printed(value: Cell, form: str = "") -> str:
    """A cell in the paper's form; a dash for what is absent, and for text where digits are due."""
    if value is None or value == "":
        return ABSENT
    if form in ("capitalised", "upper"):
        return str(value).upper() if form == "upper" else str(value).capitalize()
    if isinstance(value, str):
        return ABSENT if "." in form else value
    return form.format(value) if form else str(value)


def _origin(spec: TableSpec, source: PaperRuns) -> str:
    runs = [run for experiment in spec.experiments if source.has(experiment) for run in source.runs(experiment)]
    backends = sorted({run.manifest.kind.name for run in runs})
    if not backends:
        return ""
    counted = f"{len(runs)} sealed runs of {', '.join(spec.experiments)}, backend {', '.join(backends)}."
    if all(kind_of_run(backend).has_device for backend in backends):
        return counted
    is_predicted = any(kind_of_run(backend).is_virtual for backend in backends)
    return f"No accelerator was measured{': predicted in virtual time' if is_predicted else ''}. {counted}"
