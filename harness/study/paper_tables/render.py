"""A paper table as Markdown, CSV or LaTeX: the same cells, nothing computed and nothing rounded."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Literal

from harness.analysis.method.latex import to_latex
from harness.study.paper_tables.table import PaperTable

TableFormat = Literal["markdown", "md", "csv", "latex"]


def render(tables: Sequence[PaperTable], form: TableFormat) -> str:
    """All tables one after another."""
    write = {"csv": to_csv, "latex": _in_latex}.get(form, to_markdown)
    return "\n".join(map(write, tables))


def title(table: PaperTable) -> str:
    """ "Table IV. Elapsed time ..." """
    return f"Table {table.number}. {table.caption}"


def remarks(table: PaperTable) -> list[str]:
    """What stands under a table."""
    made = [f"Not run yet. Make it with: {table.missing}"] if table.missing else []
    return [*made, *table.notes]


def to_markdown(table: PaperTable) -> str:
    lines = [f"**{title(table)}**", ""]
    if table.rows:
        lines += [_bar(table.columns), "|" + "---|" * len(table.columns), *map(_bar, table.rows), ""]
    lines += [f"{remark}  " for remark in remarks(table)]
    return "\n".join(lines).rstrip() + "\n"


def _bar(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def to_csv(table: PaperTable) -> str:
    """Remarks and the title are lines that begin with #."""
    file = io.StringIO()
    file.write(f"# {title(table)}\n")
    file.writelines(f"# {remark}\n" for remark in remarks(table))
    writer = csv.writer(file, lineterminator="\n")
    if table.rows:
        writer.writerows([table.columns, *table.rows])
    return file.getvalue()


def _in_latex(table: PaperTable) -> str:
    return to_latex(table.caption, table.columns, table.rows, remarks(table), f"tab:{table.number}")
