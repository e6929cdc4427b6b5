"""Conditions of several folders beside each other, from the command line."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from harness.runner import run_experiment
from harness.table import four_digits
from tests.support.command_line import harness
from tests.support.experiments import small_experiment

pytestmark = pytest.mark.same_everywhere


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("compare")
    for name in ("monday", "tuesday"):
        run_experiment(small_experiment(backend="sim"), runs_root=root / name)
    return root


def test_folders_experiments_and_conditions_are_compared_by_pairs(folders: Path) -> None:
    named = [str(folders / "monday" / "small" / "base"), str(folders / "tuesday" / "small")]
    rows = json.loads(harness("compare", *named, "--format", "json").stdout)
    assert {(Path(row["condition"]).name, Path(row["baseline"]).name) for row in rows} == {("more", "base")}
    monday = ("--baseline", str(folders / "monday" / "small"))
    days = json.loads(harness("compare", str(folders / "tuesday"), *monday, "--format", "json").stdout)
    assert {(row["condition"][-4:], row["baseline"][-4:]) for row in days} == {("base", "base"), ("more", "more")}
    text = harness("compare", *named, environment={"COLUMNS": "80"}).stdout
    assert "paired by plan" in " ".join(text.split())
    assert "ttft_p50_ms" in text
    assert "simulated, one draw of each plan" in " ".join(text.split())
    assert "Predicted: simulated in virtual time" in text
    assert f" {four_digits(rows[0]['mean'])} " in text


@pytest.mark.parametrize(
    ("form", "sign"), [("csv", "condition,baseline"), ("markdown", "| condition |"), ("latex", "toprule")]
)
def test_the_table_is_written_in_the_form_asked_for(folders: Path, form: str, sign: str) -> None:
    assert sign in harness("compare", str(folders / "monday"), "--format", form).stdout
    shown = harness("table", "small", "--runs", str(folders / "monday"), "--format", "csv").stdout
    assert [row["condition"] for row in csv.DictReader(shown.splitlines())] == ["base", "more"]


@pytest.mark.parametrize("asked", [(), ("--serving",)])
@pytest.mark.parametrize("form", ["text", "markdown", "latex", "csv", "json"])
def test_a_table_of_simulated_runs_says_so_in_every_form(folders: Path, form: str, asked: tuple[str, ...]) -> None:
    shown = harness("table", "small", "--runs", str(folders / "monday"), "--format", form, *asked).stdout
    if form == "csv":
        assert {row["backend"] for row in csv.DictReader(shown.splitlines())} == {"sim"}
    elif form == "json":
        assert {row["backend"] for row in json.loads(shown)} == {"sim"}
    else:
        ruled = {"text": "\n\u2500", "markdown": "\n|---", "latex": r"\begin{tabular}"}[form]
        # Each of them may be taken out and stand alone.
        assert " ".join(shown.split()).count("Predicted: simulated in virtual time") == shown.count(ruled) > 0


def test_one_condition_or_none_is_refused(folders: Path) -> None:
    alone = harness("compare", str(folders / "monday" / "small" / "base"))
    assert (alone.returncode, "--baseline PLACE" in alone.stderr) == (2, True)
    none = harness("compare", str(folders / "nowhere"))
    assert (none.returncode, "no valid sealed runs there" in none.stderr) == (2, True)
