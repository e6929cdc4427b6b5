"""Each recipe of CONTRIBUTING.md is enough: what is added through its files alone runs, is analysed and is reported.

A recipe that needs another place fails here, because nothing but its own files is given. Source: CONTRIBUTING.md.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from release_wheels import empty_table, stack
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
    def with_table(experiment: catalogue.ExperimentRuns) -> catalogue.AnalysisOutput:
        rows = tuple((name, len(runs)) for name, runs in experiment.runs.items())
        tables, intervals, notes = general(experiment)
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


SPOKEN = """
import sys
from harness.emulator.dialect import dialect_of
from harness.kv_rules import rule_set
from harness.twin.stacks import stack_named
for version in sys.argv[1:]:
    rules = rule_set("auto", version)
    print(stack_named(version).vllm, rules.name, dialect_of(rules).vllm)
"""


@pytest.mark.same_everywhere
def test_a_release_is_its_facts_its_lock_its_number_and_its_dialect(tmp_path: Path) -> None:
    """In a copy of the house, so that the release is known to every module from its first import on."""
    house = tmp_path / "harness"
    shutil.copytree(ROOT / "harness", house, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "patches", tmp_path / "patches")
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONSAFEPATH": "1", "COLUMNS": "1000"}

    def says(*words: str, exit_code: int = 0) -> str:
        done = subprocess.run(
            [sys.executable, *words], env=env, cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == exit_code, done.stdout + done.stderr
        return done.stdout

    def edit(path: Path, old: str, new: str) -> None:
        text = path.read_text()
        assert text.count(old) == 1
        path.write_text(text.replace(old, new))

    known, new = "0.12.1a8", "0.12.2"
    shutil.copy(empty_table(tmp_path), house / "live" / "releases" / "facts.json")
    says("-m", "harness", "stack", "record", str(stack(tmp_path, known, vllm="0.31.0")))
    wheel = str(stack(tmp_path, new, vllm="0.33.0"))
    assert "rules: yes (vendor-0.12.1" in says("-m", "harness", "stack", "check", wheel, exit_code=3)
    # Its facts, its lock, its number in the rules that it follows, its dialect: the files of the recipe.
    says("-m", "harness", "stack", "record", wheel)
    locks = house / "twin"
    shutil.copy(locks / f"requirements-stack-{known}.lock", locks / f"requirements-stack-{new}.lock")
    edit(locks / f"requirements-stack-{new}.lock", "\nvllm==0.31.0", "\nvllm==0.33.0")
    edit(house / "kv_rules.py", 'releases=("0.12.1",)', f'releases=("0.12.1", "{new}")')
    edit(
        house / "emulator" / "dialect.py",
        "CONFIG_OF_0_31),\n}",
        f'CONFIG_OF_0_31),\n"{new}": replace(_OF_0_12_0, vllm="0.33.0")}}',
    )
    assert says("-c", SPOKEN, new, "0.12.0") == "0.33.0 vendor-0.12.1 0.33.0\n0.30.0 vendor-0.12.0 0.30.0\n"
    assert "as in 0.12.2" in says("-m", "harness", "stack", "check", wheel, exit_code=3)


LIMITS = {"A backend": 3, "A rule set": 5, "A release": 5, "A table of an analysis": 3, "An experiment": 2}


@pytest.mark.parametrize("recipe", LIMITS)
def test_a_recipe_names_few_files_and_all_their_places_are_there(recipe: str) -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    part = re.search(rf"^## {recipe}\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    assert part is not None
    files = re.findall(r"^\d\. `([^`]+)`", part[1], re.MULTILINE)
    assert 0 < len(files) <= LIMITS[recipe]
    assert [file for file in files if not (ROOT / file).parent.is_dir()] == []
