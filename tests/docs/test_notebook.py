"""The notebook runs from top to bottom, and its stored outputs are what it prints."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import DOCS


def code_cells() -> list[dict[str, Any]]:
    cells = json.loads((DOCS / "notebook.ipynb").read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def shown_by(source: str, names: dict[str, Any]) -> Any:
    """Run a cell in ``names``; returns the value of its last line."""
    *lines, last = ast.parse(source).body
    exec(compile(ast.Module(lines, []), "cell", "exec"), names)
    assert isinstance(last, ast.Expr), "a cell of the notebook ends in a value"
    return eval(compile(ast.Expression(last.value), "cell", "eval"), names)


def test_the_notebook_gives_the_outputs_that_it_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import matplotlib as mpl

    monkeypatch.chdir(tmp_path)
    mpl.use("agg")
    names: dict[str, Any] = {}
    for cell in code_cells():
        value = shown_by("".join(cell["source"]), names)
        stored = "".join(cell["outputs"][0]["data"]["text/plain"])
        if isinstance(value, list):
            assert value == ast.literal_eval(stored), "run the notebook again in Jupyter, and keep its outputs"
        else:
            assert repr(value) == stored, "run the notebook again in Jupyter, and keep its outputs"
    assert (tmp_path / "slots.html").is_file()
    assert [axes.get_title() for axes in names["figure"].axes] == [
        "device time / that of slots-8 (95 %)",
        "returns whose prefix was cached",
    ]
