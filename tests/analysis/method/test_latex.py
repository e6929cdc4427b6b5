"""A table in LaTeX reads as its cells do."""

from __future__ import annotations

import pytest

from harness.analysis.method.latex import latex_text, to_latex


@pytest.mark.parametrize(
    ("words", "written"),
    [
        ("batch_size", r"batch\_size"),
        ("{1,2}", r"\{1,2\}"),
        ("\u2264 95 %, \u00d74", r"$\le$ 95 \%, $\times$4"),
        ("-0.5", "$-$0.5"),
        ("0.99\u20131.01\u2020", r"0.99--1.01\dag{}"),
    ],
)
def test_every_sign_is_escaped(words: str, written: str) -> None:
    assert latex_text(words) == written


def test_a_table_without_rows_keeps_its_caption_and_notes() -> None:
    lines = to_latex("Nothing", ("a", "b"), [], ["Not run yet."]).splitlines()
    assert lines == [r"\begin{table*}[!t]", r"\caption{Nothing}", r"\par\footnotesize Not run yet.", r"\end{table*}"]
