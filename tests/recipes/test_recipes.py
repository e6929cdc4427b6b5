"""Each recipe of CONTRIBUTING.md is enough: what is added through its files alone runs, is analysed and is reported.

A recipe that needs another place fails here, because nothing but its own files is given. Source: CONTRIBUTING.md.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

import harness.runner.backends
from harness.analysis.method.tabular import ResultTable
from harness.cli import app
from harness.kinds import KINDS, BackendKind
from harness.shipped import shipped_folder
from harness.study import catalogue
from tests.support.checkout import ROOT

EXPERIMENT = """
name = "tried"
title = "Tried by its recipe"
question = "Does it run?"
backend = "sim"
base_seed = 5
replicates = 1
analysis = "general"

[workload]
num_sessions = 2

[[condition]]
name = "base"

[[condition]]
name = "slots"
server.kv_slots = 12
"""
BACKEND = """
from dataclasses import dataclass

from harness.kinds import KINDS, BackendKind
from harness.live.doctor import Check
from harness.runner.backends.base import Backend
from harness.runner.simulated import perform_simulated_run


@dataclass(frozen=True, slots=True)
class TriedBackend(Backend):
    kind: BackendKind = KINDS["tried"]

    def readiness(self):
        return Check(name="backend tried", ok=True, found="a page of Python", need="nothing", how="Use it")

    def perform(self, run, invocation):
        return perform_simulated_run(run, invocation)


BACKEND = TriedBackend()
"""


def harness_says(*words: str, exit_code: int = 0) -> str:
    done = CliRunner().invoke(app, list(words), env={"COLUMNS": "1000"})
    assert done.exit_code == exit_code, done.output
    return done.output


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    path = tmp_path / "tried.toml"
    path.write_text(EXPERIMENT)
    return path


def test_a_backend_is_its_row_and_its_module(tmp_path: Path, experiment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = BackendKind(name="tried", label="tried by its recipe", scales_time=True, is_virtual=True)
    monkeypatch.setitem(KINDS, "tried", kind)
    (tmp_path / "backends").mkdir()
    (tmp_path / "backends" / "tried.py").write_text(BACKEND)
    places = [*harness.runner.backends.__path__, str(tmp_path / "backends")]
    monkeypatch.setattr(harness.runner.backends, "__path__", places)
    runs = str(tmp_path / "runs")
    assert "backend tried" in harness_says("doctor", "--runs", runs)
    assert "base/0" in harness_says("run", str(experiment), "--backend", "tried", "--runs", runs)
    assert "backend tried (no NPU)" in (tmp_path / "runs" / "tried.html").read_text()
    assert "tried" in harness_says("query", "select distinct backend from runs", "--runs", runs)


def test_an_analysis_table_is_its_function_and_its_place_in_an_analysis(
    tmp_path: Path, experiment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_table(evidence: catalogue.Evidence) -> catalogue.Found:
        rows = tuple((name, len(runs)) for name, runs in evidence.runs.items())
        tables, intervals, notes = general(evidence)
        return (*tables, ResultTable("counted", "Runs.", ("condition", "runs"), rows)), intervals, notes

    general = catalogue.ANALYSES["general"]
    monkeypatch.setitem(catalogue.ANALYSES, "general", with_table)
    harness_says("run", str(experiment), "--runs", str(tmp_path / "runs"))
    assert "counted" in harness_says("analyse", "tried", "--runs", str(tmp_path / "runs"))


def test_an_experiment_is_its_file_and_its_page(
    tmp_path: Path, experiment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = shipped_folder("experiments")
    assert shipped is not None
    shutil.copytree(shipped.parent, tmp_path / "plans")
    shutil.copy(experiment, tmp_path / "plans" / "experiments")
    monkeypatch.setattr("harness.shipped.SHIPPED_ROOTS", (tmp_path / "plans",))
    assert "Tried by its recipe" in harness_says("catalogue", "--only", "tried")
    assert "base/0" in harness_says("run", "tried", "--dry-run")
    harness_says("run", "tried", "--runs", str(tmp_path / "runs"))
    assert "slots" in harness_says("analyse", "tried", "--runs", str(tmp_path / "runs"))


LIMITS = {"A backend": 3, "A rule set": 5, "A release": 5, "A table of an analysis": 3, "An experiment": 2}


@pytest.mark.parametrize("recipe", LIMITS)
def test_a_recipe_names_few_files_and_all_their_places_are_there(recipe: str) -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    part = re.search(rf"^## {recipe}\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    assert part is not None
    files = re.findall(r"^\d\. `([^`]+)`", part[1], re.MULTILINE)
    assert 0 < len(files) <= LIMITS[recipe]
    assert [file for file in files if not (ROOT / file).parent.is_dir()] == []
