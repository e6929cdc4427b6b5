"""How one table of the paper is laid out: which figure stands in which cell, and with how many digits.

Nothing is computed here. A table whose runs are missing names the command that makes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from harness.kinds import kind_of_run
from harness.paper.source import NotRunError, Source
from harness.table import ABSENT, Cell, Table

Row = Mapping[str, Cell]
Rows = Sequence[Sequence[str]]
Figure = str | Callable[[Source, Row], Cell]
"""A column of an analysis' table, or a function of its row."""


def text(value: Cell) -> str:
    """A cell as it is; a dash for what is absent or empty."""
    return ABSENT if value in (None, "") else str(value)


def decimals(value: Cell, digits: int, *, sign: bool = False) -> str:
    """A number with the paper's digits; a dash for what is absent."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ABSENT
    return f"{value:+.{digits}f}" if sign else f"{value:.{digits}f}"


def percent(value: Cell, digits: int = 2, *, sign: bool = False) -> str:
    """A share in percent."""
    return ABSENT if not isinstance(value, int | float) else f"{decimals(100 * value, digits, sign=sign)}%"


def whole(value: Cell) -> str:
    """A count with its thousands apart; text as it is."""
    return f"{value:,}" if isinstance(value, int) else text(value)


def seconds(value: Cell) -> str:
    """Seconds with three decimals and their unit."""
    return f"{decimals(value, 3)} s"


def capitalised(value: Cell) -> str:
    """A word as the paper begins a cell."""
    return text(value).capitalize()


def upper(value: Cell) -> str:
    """A name as the paper writes artifacts."""
    return text(value).upper()


ONE, TWO, THREE, FOUR = (partial(decimals, digits=digits) for digits in (1, 2, 3, 4))
SIGNED_THREE, SIGNED_FOUR = (partial(decimals, digits=digits, sign=True) for digits in (3, 4))
SIGNED_PERCENT = partial(percent, sign=True)


class Column(NamedTuple):
    """One column: its heading in the paper, the figure in its cells, and how that is printed."""

    heading: str
    figure: Figure
    show: Callable[[Cell], str] = text

    def cell(self, source: Source, row: Row) -> str:
        """The figure of one row, as printed. A row without it has a dash."""
        return self.show(row.get(self.figure) if isinstance(self.figure, str) else self.figure(source, row))


@dataclass(frozen=True, slots=True)
class TableSpec:
    """How one table is made. experiments: whose runs it shows. remark: a note that depends on the runs."""

    number: str
    caption: str
    columns: tuple[str, ...]
    build: Callable[[Source], Rows]
    experiments: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    remark: Callable[[Source], str] | None = None


def by_row(  # noqa: PLR0913  # one argument a property of a table
    number: str,
    caption: str,
    figures: tuple[str, str],
    columns: tuple[Column, ...],
    *,
    where: Callable[[Row], bool] = lambda _row: True,
    first: Callable[[Row], bool] = lambda _row: True,
    notes: tuple[str, ...] = (),
    remark: Callable[[Source], str] | None = None,
) -> TableSpec:
    """A row per row of an analysis' table. figures: the experiment and the name of that table.

    where: rows to show. first: rows that stand above the others.
    """
    experiment, table = figures

    def build(source: Source) -> Rows:
        rows = [row for row in source.rows(experiment, table) if where(row)]
        ordered = sorted(rows, key=lambda row: not first(row))
        return [[column.cell(source, row) for column in columns] for row in ordered]

    headings = tuple(column.heading for column in columns)
    return TableSpec(number, caption, headings, build, (experiment,), notes, remark)


def by_condition(  # noqa: PLR0913  # one argument a property of a table
    number: str,
    caption: str,
    figures: tuple[str, str],
    conditions: Mapping[str, str],
    rows: tuple[Column, ...],
    *,
    notes: tuple[str, ...] = (),
) -> TableSpec:
    """A row per figure and a column per condition. conditions: heading -> condition of the experiment."""
    experiment, table = figures

    def build(source: Source) -> Rows:
        found = {row["condition"]: row for row in source.rows(experiment, table)}
        sides = [found.get(condition, {}) for condition in conditions.values()]
        return [[row.heading, *(row.cell(source, side) for side in sides)] for row in rows]

    return TableSpec(number, caption, ("Metric", *conditions), build, (experiment,), notes)


def make_table(spec: TableSpec, source: Source) -> Table:
    """One table; where its runs are missing, an empty one that says what to run."""
    name, label = f"Table {spec.number}", f"tab:{spec.number}"
    try:
        rows = tuple(tuple(row) for row in spec.build(source))
    except NotRunError as missing:
        notes = (f"Not run yet. Make it with: {missing.command}",)
        return Table(name, spec.caption, spec.columns, (), "", notes, label)
    notes = (*(() if spec.remark is None else (spec.remark(source),)), *spec.notes)
    if not rows:
        notes = (*notes, "the runs hold nothing that it shows")
    return Table(name, spec.caption, spec.columns, rows, _origin(spec, source), notes, label)


def _origin(spec: TableSpec, source: Source) -> str:
    runs = [run for experiment in spec.experiments if source.has(experiment) for run in source.runs(experiment)]
    backends = sorted({run.manifest.backend for run in runs})
    if not backends:
        return ""
    counted = f"{len(runs)} sealed runs of {', '.join(spec.experiments)}, backend {', '.join(backends)}."
    if all(kind_of_run(backend).has_device for backend in backends):
        return counted
    is_predicted = any(kind_of_run(backend).is_virtual for backend in backends)
    return f"No NPU was measured{': predicted in virtual time' if is_predicted else ''}. {counted}"
