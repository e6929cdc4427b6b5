"""The result of an analysis: its tables, intervals and notes, as one page or as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from harness.analysis.method.stats import Interval
from harness.table import Cell, Table, TableForm, written

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
        lines = [*(f"{name}: {interval}" for name, interval in self.intervals.items())]
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
