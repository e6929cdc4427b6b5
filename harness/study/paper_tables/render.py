"""A paper table as Markdown, CSV or LaTeX: the same cells, nothing computed and nothing rounded.

Next: ``harness tables`` prints it.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Literal

from harness.study.paper_tables.table import PaperTable

TableFormat = Literal["markdown", "md", "csv", "latex"]
_LATEX = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "%": r"\%",
    "&": r"\&",
    "_": r"\_",
    "#": r"\#",
    "$": r"\$",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
}
_AFTER = {
    **{"->": r"$\rightarrow$", "<=": r"$\le$", "\u2264": r"$\le$", "\u00d7": r"$\times$", "\u03c4": r"$\tau$"},
    **{"\u2020": r"\dag{}", "\u2013": "--"},
}


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


def to_latex(
    caption: str, columns: Sequence[str], rows: Sequence[Sequence[str]], remarks: Sequence[str], label: str = ""
) -> str:
    """A booktabs table as in the paper; needs \\usepackage{booktabs}."""
    lines = [r"\begin{table*}[!t]", rf"\caption{{{latex_text(caption)}}}", *([rf"\label{{{label}}}"] if label else [])]
    if rows:
        lines += [
            r"\centering\small",
            rf"\begin{{tabular}}{{l{'c' * (len(columns) - 1)}}}",
            r"\toprule",
            _ampersands(columns),
            r"\midrule",
            *map(_ampersands, rows),
            r"\bottomrule",
            r"\end{tabular}",
        ]
    lines += [rf"\par\footnotesize {latex_text(remark)}" for remark in remarks]
    return "\n".join([*lines, r"\end{table*}", ""])


def _ampersands(cells: Sequence[str]) -> str:
    return " & ".join(latex_text(cell) for cell in cells) + r" \\"


def latex_text(words: str) -> str:
    """Escaped; a number's minus and arrows in math."""
    escaped = "".join(_LATEX.get(letter, letter) for letter in words)
    for plain, math in _AFTER.items():
        escaped = escaped.replace(plain, math)
    is_negative = escaped.startswith("-") and escaped[1:2].isdigit()
    return f"$-${escaped[1:]}" if is_negative else escaped
