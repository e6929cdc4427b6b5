"""What ``import harness`` offers: comparisons print as tables, and become data frames in the line of the docs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import harness
from harness.errors import SpecError
from tests.support.checkout import ROOT
from tests.support.report_runs import seal_demo


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("api")
    seal_demo(folder / "runs/notebook")
    return folder


def test_a_comparison_prints_as_a_table_in_a_terminal_and_a_notebook(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(root)
    compared = harness.compare("runs/notebook/demo")
    lines = str(compared).splitlines()
    assert repr(compared) == str(compared)
    assert "no accelerator was measured" in " ".join(str(compared).split())
    assert any(re.match(r" +condition +baseline", line) for line in lines)
    assert "<table" in compared._repr_html_()
    assert "rows=" not in repr(compared)


def test_a_name_that_is_none_is_refused_with_those_that_are(root: Path) -> None:
    runs = harness.open_runs(root / "runs/notebook/demo")
    for ask, said in (
        (lambda: runs[0].table("request"), "there is no table 'request'. Did you mean 'requests'? Use one of "),
        (
            lambda: harness.summarise(runs).condition("base"),
            "there is no condition 'base'. Use one of base-nowaits, base-waits",
        ),
        (lambda: harness.compare(root / "runs/notebook/demo").column("rato"), "Did you mean 'ratio'? Use one of "),
    ):
        with pytest.raises(SpecError, match=re.escape(said)):
            ask()


@pytest.mark.parametrize("package", ["pandas", "polars"])
def test_the_line_of_the_docs_makes_a_data_frame(package: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = pytest.importorskip(package)
    page = (ROOT / "docs" / "reference" / "python.md").read_text(encoding="utf-8")
    (row,) = re.findall(rf"^\| {package} \|.*$", page, flags=re.MULTILINE)
    monkeypatch.chdir(root)
    summary = harness.summarise(harness.open_runs("runs/notebook/demo"))
    names = {package: module, "harness": harness, "summary": summary}
    of_conditions, of_measures = (eval(code, names) for code in re.findall(r"`([^`]+)`", row))
    assert len(of_conditions) == len(summary.conditions)
    assert "no difference shown" in list(of_measures["verdict"])
