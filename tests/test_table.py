"""One table in every form: the same cells, and in the forms for people where they are from."""

from __future__ import annotations

import csv
import io
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from harness.table import (
    Table,
    TableForm,
    folded,
    interval_ends,
    interval_text,
    latex_text,
    table_of,
    to_rich,
    with_error,
    with_four_digits,
    written,
)
from tests.support.command_line import lines_beyond

TABLE = Table(
    "Table IV",
    "Delay by length, 50%",
    ("Length", "A -> B"),
    (("2,000", "-0.072"), ("{1,2}", "a|b")),
    "Predicted.",
    ("Note.",),
    "tab:IV",
)


def test_markdown_keeps_a_bar_inside_a_cell() -> None:
    assert written([TABLE], TableForm.markdown).splitlines() == [
        *("**Table IV.** Delay by length, 50%", "", "| Length | A -> B |", "|---|---|", "| 2,000 | -0.072 |"),
        *("| {1,2} | a\\|b |", "", "Predicted.  ", "Note."),
    ]


def test_csv_of_one_table_is_its_cells_alone() -> None:
    lines = written([TABLE], TableForm.csv).splitlines()
    assert list(csv.reader(lines)) == [list(TABLE.columns), *map(list, TABLE.rows)]


def test_csv_of_several_tables_has_their_titles_origins_and_notes_as_comments() -> None:
    lines = written([TABLE, TABLE], TableForm.csv).splitlines()
    assert lines[:3] == ["# Table IV. Delay by length, 50%", "# Predicted.", "# Note."]
    rows = list(csv.reader(io.StringIO("\n".join(line for line in lines if line and not line.startswith("#")))))
    assert rows == 2 * [list(TABLE.columns), *map(list, TABLE.rows)]


def test_people_read_four_decimals_and_programs_every_digit() -> None:
    table = table_of("t", "", [{"a": 1 / 3, "b": None, "c": True}, {"a": 1234.56}])
    assert table.text_rows() == [["0.3333", "-", "yes"], ["1234.6", "-", "-"]]
    assert json.loads(written([table], TableForm.json))[0] == {"a": 1 / 3, "b": None, "c": True}


def test_text_that_is_wider_than_the_terminal_goes_on_below_beside_the_first_column() -> None:
    table = table_of("t", "c", [{"condition": "base", "first_ms": 1, "second_ms": 2}])
    assert written([table], TableForm.text, 24).splitlines() == [
        "t: c",
        "  condition  first_ms",
        "       base         1",
        "",
        "  condition  second_ms",
        "       base          2",
    ]


def test_latex_is_a_booktabs_table_with_its_signs_escaped() -> None:
    latex = written([TABLE], TableForm.latex)
    assert r"\caption{Delay by length, 50\%}" in latex
    assert r"\label{tab:IV}" in latex
    assert r"2,000 & $-$0.072 \\" in latex
    assert r"\{1,2\} & a|b \\" in latex
    assert r"A $\rightarrow$ B" in latex
    assert r"\par\footnotesize Predicted." in latex
    assert latex.count(r"\begin{table*}") == latex.count(r"\end{table*}") == 1


@pytest.mark.parametrize(
    ("words", "latex"),
    [
        ("batch_size", r"batch\_size"),
        ("{1,2}", r"\{1,2\}"),
        ("\u2264 95 %, \u00d74", r"$\le$ 95 \%, $\times$4"),
        ("-0.5", "$-$0.5"),
        ("0.99\u20131.01\u2020", r"0.99--1.01\dag{}"),
    ],
)
def test_every_sign_is_escaped(words: str, latex: str) -> None:
    assert latex_text(words) == latex


def test_a_table_without_rows_keeps_its_caption_and_notes() -> None:
    lines = written([Table("Nothing", "", ("a", "b"), (), notes=("Not run yet.",))], TableForm.latex).splitlines()
    assert lines == [r"\begin{table*}[!t]", r"\caption{Nothing}", r"\par\footnotesize Not run yet.", r"\end{table*}"]


def test_the_ends_of_an_interval_never_read_as_one_number() -> None:
    assert interval_ends(1.04, 1.06, 1) == ("1.0", "1.1")
    assert interval_ends(1.041, 1.044, 2) == ("1.041", "1.044")
    assert interval_ends(2.34561, 2.34567, 4, "g") == ("2.3456", "2.3457")
    assert interval_ends(3.0, 3.0, 1) == ("3.0", "3.0")
    assert interval_ends(0.97441, 0.97444, 4) == ("0.97441", "0.97444")
    assert interval_text(-0.0012, 0.0034, 2, ", ", "+f") == "-0.001, +0.003"


def test_an_error_never_reads_as_none() -> None:
    assert with_error(2.14, 0.31, 1) == "2.1 +- 0.3"
    assert with_error(2.14, 0.031, 1) == "2.14 +- 0.03"
    assert with_error(2.14, 0.0, 1, "+f") == "+2.1 +- 0.0"


@pytest.mark.parametrize("form", [TableForm.text, TableForm.markdown, TableForm.latex])
def test_ends_in_a_table_never_read_as_one_number(form: TableForm) -> None:
    row = {"ratio": 0.974425, "low": 0.97441, "high": 0.97444, "mean_low": 2831.12, "mean_high": 2831.14}
    table = table_of("Ratios", "", [row, row | {"low": 0.96, "high": 0.98}])
    shown = written([table], form, 200)
    assert "0.97441" in shown
    assert "0.97444" in shown
    assert "2,831.12" in shown
    assert "0.9600" in shown
    assert with_four_digits(table, ("mean_low", "mean_high")).rows[0][3:] == ("2,831.12", "2,831.14")


NARROWEST_WORDS = 12
WORDS = st.text("abcd,.(){}\u2013", min_size=1, max_size=24)
LINES = st.lists(WORDS, min_size=1, max_size=30).map(" ".join)


@given(LINES, st.integers(20, 100), st.integers(0, 40))
def test_a_folded_line_has_the_same_words_and_no_longer_lines(line: str, width: int, hang: int) -> None:
    lines = folded(line, width, hang)
    assert " ".join(lines).split() == line.split()
    assert lines_beyond("\n".join(lines), width) == []


@given(LINES, st.lists(WORDS, min_size=1, max_size=20), st.integers(40, 100))
def test_a_folded_command_is_one_command_to_a_shell(before: str, options: list[str], width: int) -> None:
    command = f"harness run {' '.join(options)}"
    lines = "\n".join(folded(f"{before}: {command}", width))
    joined = re.sub(r" \\\n +", " ", lines)
    assert joined.endswith(command)
    assert lines_beyond(lines, width) == []


NUMBERS = st.integers(0, 10**6).map(str) | st.just("0.9567\u201310.2405")
CELLS = st.lists(st.lists(WORDS, min_size=1, max_size=12).map(" ".join) | NUMBERS, min_size=4, max_size=4)


@given(st.lists(CELLS, min_size=1, max_size=4), st.integers(64, 200))
def test_a_table_cuts_no_word_and_folds_none_into_a_narrow_column(cells: list[list[str]], width: int) -> None:
    table = Table("", "", ("name", "one", "two", "three"), tuple(map(tuple, cells)))
    console = Console(width=width, color_system=None)
    with console.capture() as captured:
        console.print(to_rich(table, width))
    shown = captured.get()
    assert max(map(len, shown.splitlines())) <= width
    assert set(" ".join(cell for row in cells for cell in row).split()) <= set(shown.split())
    short = [cell for row in cells for cell in row if len(cell) <= NARROWEST_WORDS]
    assert [cell for cell in short if cell not in shown] == []
