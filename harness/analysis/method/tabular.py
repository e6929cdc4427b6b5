"""Results of an analysis as small tables: names, units in the column names, and what a reader must know.

Values only; rendering is text, Markdown, CSV or JSON of the same cells.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from harness.analysis.method.stats import Interval

Cell = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class ResultTable:
    """One table. columns carry their unit; caption says what a row is and how it was computed."""

    name: str
    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]

    def records(self) -> list[dict[str, Cell]]:
        """Rows by column name."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]

    def column(self, name: str) -> list[Cell]:
        """One column."""
        place = self.columns.index(name)
        return [row[place] for row in self.rows]

    def to_markdown(self) -> str:
        """A GitHub table under its caption."""
        lines = [
            f"**{self.name}.** {self.caption}",
            "",
            "| " + " | ".join(self.columns) + " |",
            "|" + "|".join("---" for _ in self.columns) + "|",
            *("| " + " | ".join(cell_text(cell) for cell in row) + " |" for row in self.rows),
        ]
        return "\n".join(lines)

    def to_html(self) -> str:
        """A plain HTML table under its caption."""
        head = "".join(f"<th>{escape(name)}</th>" for name in self.columns)
        body = "".join(
            f"<tr>{''.join(f'<td>{escape(cell_text(cell))}</td>' for cell in row)}</tr>" for row in self.rows
        )
        return f"<table><caption>{escape(f'{self.name}. {self.caption}')}</caption><tr>{head}</tr>{body}</table>"


def table_of(name: str, caption: str, records: Iterable[Mapping[str, Cell]]) -> ResultTable:
    """A table from rows by name; a row without a column leaves it empty."""
    listed = list(records)
    columns = tuple(dict.fromkeys(key for record in listed for key in record))
    return ResultTable(name, caption, columns, tuple(tuple(row.get(key) for key in columns) for row in listed))


@dataclass(frozen=True, slots=True)
class AnalysisResult:
    """What an analysis of one experiment found. notes: what limits it. intervals: by name, self-describing.

    origin: what must stand beside its figures where no device was measured.
    """

    experiment: str
    analysis: str
    tables: tuple[ResultTable, ...]
    notes: tuple[str, ...] = ()
    intervals: Mapping[str, Interval] = field(default_factory=dict[str, Interval])
    origin: str = ""

    def table(self, name: str) -> ResultTable:
        """The table of that name; KeyError when there is none."""
        return {table.name: table for table in self.tables}[name]

    def to_markdown(self) -> str:
        """The whole result as one page."""
        told = [self.origin] if self.origin else []
        parts = [f"# {self.experiment}: {self.analysis}", *told, *(table.to_markdown() for table in self.tables)]
        if self.intervals:
            parts.append("\n".join(f"- {name}: {interval}" for name, interval in self.intervals.items()))
        if self.notes:
            parts.append("\n".join(f"- {note}" for note in self.notes))
        return "\n\n".join(parts) + "\n"

    def _repr_markdown_(self) -> str:
        """What a notebook shows."""
        return self.to_markdown()

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


def interval_record(interval: Interval) -> dict[str, Cell]:
    """An interval with everything that says what it means."""
    return {name: getattr(interval, name) for name in Interval.__slots__}


def cell_text(cell: Cell) -> str:
    """A cell as people read it: four decimals, yes and no, a dash for what is absent."""
    if cell is None:
        return "-"
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, float):
        return f"{cell:.4f}" if abs(cell) < 1000 else f"{cell:.1f}"
    return str(cell)


def four_digits(value: float) -> str:
    """A figure of any size as people read it: 0.004975, 12.91, 2,831."""
    places = 3 - math.floor(math.log10(abs(value))) if value else 3
    return f"{value:,.{max(0, places)}f}"


def rows_as_text(rows: Sequence[Sequence[Cell]]) -> list[list[str]]:
    """Cells of several rows as text."""
    return [[cell_text(cell) for cell in row] for row in rows]
