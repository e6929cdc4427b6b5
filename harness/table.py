"""A table of figures and every form in which it is written: terminal, text, Markdown, LaTeX, HTML, CSV, JSON.

Lines around it fold between words, and commands so that they can be copied.

Forms for people round and carry where the figures are from. CSV and JSON have the cells as they are.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from html import escape
from typing import TYPE_CHECKING, Any, NamedTuple

from harness.errors import SpecError, escape_controls, unknown_name

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table as RichTable

Cell = str | int | float | bool | None
ABSENT = "-"
MOST_MORE = 6


class TableForm(str, Enum):
    """How a table is written."""

    text = "text"
    csv = "csv"
    json = "json"
    markdown = "markdown"
    latex = "latex"


@dataclass(frozen=True, slots=True, repr=False)
class Table:
    """One table. A column's name ends in its unit (``elapsed_ms``); the caption says what a row is.

    origin: where the figures are from, when no device was measured. notes: what stands below. label: for references
    in LaTeX, which then counts the table itself.
    """

    name: str
    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    origin: str = ""
    notes: tuple[str, ...] = ()
    label: str = ""

    def __post_init__(self) -> None:
        """Words are escaped at once; cells in every form for people."""
        for name in ("name", "caption", "origin"):
            object.__setattr__(self, name, escape_controls(getattr(self, name)))
        for name in ("columns", "notes"):
            object.__setattr__(self, name, tuple(map(escape_controls, getattr(self, name))))

    def records(self) -> list[dict[str, Cell]]:
        """Rows by column name."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]

    def column(self, name: str) -> list[Cell]:
        """The cells of one column; SpecError that lists the columns when there is none of that name."""
        if name not in self.columns:
            raise unknown_name("column", name, self.columns)
        place = self.columns.index(name)
        return [row[place] for row in self.rows]

    @property
    def explanation(self) -> str:
        """What stands beside the name: origin and caption; of a labelled table the caption alone."""
        return self.caption if self.label else " ".join(filter(None, (self.origin, self.caption)))

    @property
    def remarks(self) -> tuple[str, ...]:
        """What stands below: the notes; of a labelled table its origin first."""
        return (self.origin, *self.notes) if self.label and self.origin else self.notes

    def to_pandas(self) -> Any:
        """The rows as a pandas DataFrame; SpecError where pandas is not installed."""
        try:
            from pandas import DataFrame  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise SpecError("pandas is not installed", hint="pip install pandas, or use records()") from error
        return DataFrame(self.records(), columns=list(self.columns))

    def __repr__(self) -> str:
        """The table as a terminal shows it."""
        return to_text(self, shutil.get_terminal_size().columns)

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return to_html(self)

    def text_rows(self) -> list[list[str]]:
        """The cells as people read them."""
        pairs = _interval_columns(self.columns)
        return [_told_apart(row, [cell_text(cell) for cell in row], pairs) for row in self.rows]


def table_of(name: str, caption: str, records: Iterable[Mapping[str, Cell]], origin: str = "") -> Table:
    """A table from rows by column name; a row without a column leaves its cell empty."""
    listed = list(records)
    columns = tuple(dict.fromkeys(key for record in listed for key in record))
    return Table(name, caption, columns, tuple(tuple(row.get(key) for key in columns) for row in listed), origin)


def cell_text(cell: Cell) -> str:
    """A cell as people read it: four decimals, yes and no, a dash for what is absent."""
    if cell is None:
        return ABSENT
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, float):
        return f"{cell:.4f}" if abs(cell) < 1000 else f"{cell:.1f}"
    return escape_controls(str(cell))


def _interval_columns(columns: Sequence[str]) -> list[tuple[int, int]]:
    """Where the ends of intervals stand: "low" and "high", "ratio_a_low" and "ratio_a_high"."""
    return [
        (place, columns.index(high))
        for place, low in enumerate(columns)
        if low.endswith("low") and (high := f"{low[:-3]}high") in columns
    ]


def _told_apart(row: Sequence[Cell], texts: list[str], pairs: Iterable[tuple[int, int]]) -> list[str]:
    """The texts of a row's cells, with more digits for ends of an interval that read as one number."""
    for place, other in pairs:
        low, high = row[place], row[other]
        if isinstance(low, float) and isinstance(high, float) and texts[place] == texts[other]:
            digits = len(texts[place].partition(".")[2])
            texts[place], texts[other] = interval_ends(low, high, digits)
    return texts


def four_digits(value: float) -> str:
    """A figure of any size with four digits: 0.004975, 12.91, 2,831."""
    places = 3 - math.floor(math.log10(abs(value))) if value else 3
    return f"{value:,.{max(0, places)}f}"


def with_four_digits(table: Table, columns: Sequence[str]) -> Table:
    """The table with the floats of these columns as text of four digits, for people."""
    places = {table.columns.index(name) for name in columns}
    pairs = [pair for pair in _interval_columns(table.columns) if places.issuperset(pair)]
    rows: list[tuple[Cell, ...]] = []
    for row in table.rows:
        texts = [four_digits(cell) if isinstance(cell, float) else cell_text(cell) for cell in row]
        texts = _told_apart(row, texts, pairs)
        is_text = [place in places and isinstance(cell, float) for place, cell in enumerate(row)]
        rows.append(tuple(texts[place] if is_text[place] else cell for place, cell in enumerate(row)))
    return replace(table, rows=tuple(rows))


def written(tables: Sequence[Table], form: TableForm, width: int = 80) -> str:
    """Tables one below the other. width: of the terminal, for the text form alone.

    Several tables in one CSV stand below comment lines with their titles and notes; a single one has its rows alone.
    """
    if form is TableForm.json:
        content = [table.records() for table in tables]
        return json.dumps(content[0] if len(content) == 1 else content, indent=1) + "\n"
    if form is TableForm.csv and len(tables) > 1:
        return "\n".join(map(to_titled_csv, tables))
    if form is TableForm.text:
        return "\n".join(to_text(table, width) for table in tables)
    write = {TableForm.csv: to_csv, TableForm.latex: to_latex, TableForm.markdown: to_markdown}[form]
    return "\n".join(map(write, tables))


# Below this width of a terminal a single space keeps columns apart.
WIDE = 92
# Words are not folded into a narrower column.
ROOM_OF_WORDS = 12


def to_rich(table: Table, width: int, styles: Mapping[str, str] | None = None) -> RenderableType:
    """The table for a terminal of ``width`` characters, without a frame: words left, numbers right.

    Words fold between words, numbers and intervals never: half of one reads as another number. Columns that then have
    no room go on below, beside the first one. The later lines of a first cell are dim. styles: of whole cells, by
    content.
    """
    from rich.console import Group
    from rich.text import Text

    title, caption = "\n".join(filter(None, (table.name, table.origin))), " ".join((table.caption, *table.notes))
    around = [
        [Text(line, style) for part in text.split("\n") for line in folded(part, width, hang=0)] if text else []
        for text, style in ((title, "italic"), (caption, "dim italic"))
    ]
    gap = 1 if width < WIDE else 2
    headings = [name.replace("_", " ") for name in table.columns]
    columns = [_Column.of(cells) for cells in zip(headings, *table.text_rows(), strict=True)]
    groups = _groups([column.least for column in columns], width, gap) if table.columns else ()
    drawn = [_drawn([columns[place] for place in places], width, gap, styles or {}) for places in groups]
    return Group(*around[0], *drawn, *around[1])


@dataclass(frozen=True, slots=True)
class _Column:
    """A column for a terminal: its heading and cells, and between which widths it can be read."""

    heading: str
    cells: tuple[str, ...]
    is_number: bool
    least: int
    whole: int

    @classmethod
    def of(cls, cells: Sequence[str]) -> _Column:
        heading, *below = cells
        is_number = not any(map(str.isalpha, "".join(below)))
        firm = [line for cell in below for line in cell.split("\n")]
        whole = max(map(len, [*heading.split("\n"), *firm]))
        longest = max(map(len, [*heading.split(), *(firm if is_number else " ".join(below).split())]), default=0)
        return cls(
            heading, tuple(below), is_number, longest if is_number else min(whole, max(longest, ROOM_OF_WORDS)), whole
        )


def _drawn(columns: Sequence[_Column], width: int, gap: int, styles: Mapping[str, str]) -> RichTable:
    """Columns that have room beside each other."""
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    drawn = RichTable(box=box.SIMPLE_HEAD, padding=(0, gap - 1, 0, 0), pad_edge=False, show_edge=False)
    widths = [min(column.least, width) for column in columns]
    spare = width - sum(widths) - gap * (len(columns) - 1)
    while spare > 0 and any(given < column.whole for given, column in zip(widths, columns, strict=True)):
        # The column that has most to fold gets the next character.
        place = max(range(len(columns)), key=lambda place: columns[place].whole / widths[place])
        widths[place] += 1
        spare -= 1
    for place, (column, given) in enumerate(zip(columns, widths, strict=True)):
        justify = "right" if column.is_number and place else "left"
        drawn.add_column(Text(column.heading), justify=justify, overflow="fold", width=max(1, given))
    for first, *others in zip(*(column.cells for column in columns), strict=True):
        name, line_end, rest = first.partition("\n")
        cells = [Text(cell, style=styles.get(cell, "")) for cell in others]
        drawn.add_row(Text.assemble(name, line_end, (rest, "dim")), *cells)
    return drawn


def to_text(table: Table, width: int) -> str:
    """Aligned columns without borders; those beyond ``width`` go on below, the first column repeated."""
    rows = [list(table.columns), *table.text_rows()]
    widths = [max(len(row[place]) for row in rows) for place in range(len(table.columns))]
    lines = folded(": ".join(filter(None, (table.name, table.explanation))), width)
    for places in _groups(widths, width - 2):
        lines += ["".join(f"  {row[place]:>{widths[place]}}" for place in places) for row in rows]
        lines.append("")
    for remark in table.remarks:
        lines += [*folded(remark, width), ""]
    return "\n".join(lines)


def _groups(widths: Sequence[int], width: int, gap: int = 2) -> Iterator[list[int]]:
    """Columns in groups that fit beside the first one."""
    if not widths:
        return
    group, used = [0], widths[0]
    for place in range(1, len(widths)):
        if used + gap + widths[place] > width and len(group) > 1:
            yield group
            group, used = [0], widths[0]
        group.append(place)
        used += gap + widths[place]
    yield group


def to_markdown(table: Table) -> str:
    """A GitHub table under its caption."""
    lines = [f"**{table.name}.** {table.explanation}"]
    if table.rows:
        lines += ["", markdown_rows(table.columns, table.text_rows())]
    if table.remarks:
        lines += ["", *(f"{remark}  " for remark in table.remarks)]
    return "\n".join(lines).rstrip() + "\n"


def markdown_rows(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A GitHub table without a caption, for a page that has its own words."""
    texts = [[escape_controls(str(cell)).replace("|", "\\|") for cell in cells] for cells in (columns, *rows)]
    lines = [f"| {' | '.join(cells)} |" for cells in texts]
    return "\n".join([lines[0], "|" + "---|" * len(columns), *lines[1:]])


def to_csv(table: Table) -> str:
    """The cells unrounded, below the column names."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    if table.rows:
        writer.writerows([table.columns, *table.rows])
    return text.getvalue()


def to_titled_csv(table: Table) -> str:
    """CSV below comment lines: title, origin, notes."""
    comments = filter(None, (f"{table.name}. {table.caption}", table.origin, *table.notes))
    return "".join(f"# {comment}\n" for comment in comments) + to_csv(table)


def to_html(table: Table) -> str:
    """A plain HTML table under its caption."""
    head = "".join(f"<th>{escape(name)}</th>" for name in table.columns)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in table.text_rows())
    caption = escape(f"{table.name}. {table.explanation}")
    return f"<table><caption>{caption}</caption><tr>{head}</tr>{body}</table>"


_LATEX_SIGNS = {
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
    "\u2264": r"$\le$",
    "\u00d7": r"$\times$",
    "\u03c4": r"$\tau$",
    "\u2020": r"\dag{}",
    "\u2013": "--",
}
_LATEX_PAIRS = {"->": r"$\rightarrow$", "<=": r"$\le$"}


def to_latex(table: Table) -> str:
    """A booktabs table; needs \\usepackage{booktabs}. A labelled table leaves its number to LaTeX."""
    lines = [r"\begin{table*}[!t]"]
    if table.label:
        lines += [rf"\caption{{{latex_text(table.caption)}}}", rf"\label{{{table.label}}}"]
        remarks = table.remarks
    else:
        lines.append(rf"\caption{{{latex_text(table.name)}}}")
        remarks = filter(None, (table.explanation, *table.remarks))
    if table.rows:
        lines += [
            r"\centering\small",
            rf"\begin{{tabular}}{{l{'c' * (len(table.columns) - 1)}}}",
            r"\toprule",
            _latex_row(table.columns),
            r"\midrule",
            *map(_latex_row, table.text_rows()),
            r"\bottomrule",
            r"\end{tabular}",
        ]
    lines += [rf"\par\footnotesize {latex_text(remark)}" for remark in remarks]
    return "\n".join([*lines, r"\end{table*}", ""])


def _latex_row(cells: Sequence[str]) -> str:
    return " & ".join(latex_text(cell) for cell in cells) + r" \\"


def latex_text(text: str) -> str:
    """Escaped for LaTeX, with the minus of a number and arrows in math."""
    escaped = "".join(_LATEX_SIGNS.get(letter, letter) for letter in text)
    for plain, math_sign in _LATEX_PAIRS.items():
        escaped = escaped.replace(plain, math_sign)
    is_negative = escaped.startswith("-") and escaped[1:2].isdigit()
    return f"$-${escaped[1:]}" if is_negative else escaped


# A command that ends its line, after the words that lead to it and its indent.
_COMMAND = re.compile(r"^(?P<before> *|.*?[:;,] )(?P<command>harness [a-z][^\u201c\u201d]*)$")
_WORD = re.compile(r"\S+")


class FoldedLine(NamedTuple):
    """A line of the terminal: what stands before and after a part of the line that is folded."""

    before: str
    start: int
    end: int
    after: str = ""


def folded(line: str, width: int, hang: int | None = None) -> list[str]:
    """``line`` in lines of at most ``width`` characters; ``hang``: spaces before the later ones, else two more.

    A longer word stands whole on a line of its own. A command at the end of the line goes on after a backslash, as a
    shell wants it.
    """
    return [piece.before + line[piece.start : piece.end] + piece.after for piece in pieces(line, width, hang)]


def pieces(line: str, width: int, hang: int | None = None) -> Iterator[FoldedLine]:
    """Where ``folded`` breaks a line."""
    if len(line) <= width:
        yield FoldedLine("", 0, len(line))
        return
    indent = len(line) - len(line.lstrip())
    hang = indent + 2 if hang is None else hang
    if max(map(len, line.split()), default=0) > width - hang:
        # A long word may still be whole with less before it.
        hang = min(hang, indent + 2)
    found = _COMMAND.match(line)
    if found is None:
        yield from _filled(line, (0, len(line)), width, (0, hang))
        return
    start, before = found.start("command"), found["before"].rstrip()
    if before:
        *whole, last = _filled(line, (0, len(before)), width, (0, hang))
        yield from whole
        if len(last.before) + len(line) - last.start <= width:
            yield last._replace(end=len(line))
            return
        yield last
        indent = hang
    yield from _filled(line, (start, len(line)), width, (indent, indent + 4), " \\")


def _filled(
    line: str, part: tuple[int, int], width: int, indents: tuple[int, int], after: str = ""
) -> Iterator[FoldedLine]:
    """The words between two places, as many on a line as fit.

    indents: spaces before the first line and before later ones. after: what ends each line but the last.
    """
    begin = last = part[0]
    indent, hang = indents
    for word in _WORD.finditer(line, *part):
        end = word.end()
        if indent + end - begin + (len(after) if end < part[1] else 0) > width and last > begin:
            yield FoldedLine(" " * indent, begin, last, after)
            indent, begin = hang, word.start()
        last = end
    yield FoldedLine(" " * indent, begin, last)


def interval_ends(low: float, high: float, digits: int, form: str = "f") -> tuple[str, str]:
    """Both ends of an interval with so many digits, and up to six more where they would read as one number.

    form: of a number, "f" or "g"; "+f" with its sign.
    """
    sign, kind = form[:-1], form[-1]
    forms = [f"{sign},.{more}{kind}" for more in range(digits, digits + MOST_MORE + 1)]
    ends = [(format(low, each), format(high, each)) for each in forms]
    # "-0.00" and "+0.00" are one number.
    return next((each for each in ends if len({float(end.replace(",", "")) for end in each}) > 1), ends[0])


def interval_text(low: float, high: float, digits: int = 4, between: str = " to ", form: str = "f") -> str:
    """An interval as people read it: "0.9610 to 0.9880"; thousands stand without a comma."""
    return between.join(end.replace(",", "") for end in interval_ends(low, high, digits, form))


def with_error(value: float, error: float, digits: int, form: str = "f") -> str:
    """A value and its error, "2.1 +- 0.3", with more digits where the error would read as none."""
    near, _ = interval_ends(0.0, error, digits)
    digits = len(near.partition(".")[2])
    return f"{value:{form[:-1]}.{digits}{form[-1]}} +- {error:.{digits}f}"
