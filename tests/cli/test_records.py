"""Sealed runs from the command line: where they are looked for, and rows in every form."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from harness.analysis.summary import summarise
from harness.measure.records.store import RunStore
from harness.model.spec import load_toml
from harness.runner import run_experiment
from tests.support.checkout import ROOT
from tests.support.command_line import harness, harness_apart
from tests.support.experiments import small_experiment

pytestmark = pytest.mark.same_everywhere


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data") / "demo"
    run_experiment(small_experiment(backend="sim"), runs_root=root)
    return root


@pytest.mark.parametrize("command", [("runs",), ("verify",), ("query", "from runs")])
def test_a_folder_without_runs_is_refused_and_told_where_they_lie(runs: Path, command: tuple[str, ...]) -> None:
    result = harness(*command, "--runs", str(runs.parent))
    assert result.returncode == 2
    assert str(runs) in result.stderr


def test_runs_of_a_patch_check_beside_others_are_named_as_other_runs(runs: Path, tmp_path: Path) -> None:
    root = shutil.copytree(runs, tmp_path / "runs")
    shutil.copytree(runs, root / "check")
    (root / "small" / "base" / "00").mkdir()
    listed = harness("runs", "--runs", str(root), environment={"COLUMNS": "400"}).stdout.splitlines()
    assert listed[-2:] == [
        f"check  other runs: harness runs --runs {root}/check",
        "small/base/00  not named as a run is, not counted",
    ]


def test_rows_are_drawn_with_their_types_and_the_middle_of_many_is_left_out(runs: Path) -> None:
    shown = harness("query", "from chunks", "--runs", str(runs)).stdout
    assert "int64" in shown
    assert "20 shown" in shown
    assert len(shown.splitlines()) < 40


def test_what_a_server_said_is_not_obeyed_by_a_terminal(runs: Path) -> None:
    shown = harness("query", "select chr(27) || '[31mred' as said", "--runs", str(runs)).stdout
    assert "\x1b" not in shown
    assert "[31mred" in shown


def test_a_value_that_takes_for_ever_is_stopped_at_its_time_too(runs: Path) -> None:
    endless = "select levenshtein(repeat('a', 2000000), repeat('b', 2000000))"
    stopped = harness_apart("query", endless, "--runs", str(runs), "--timeout", "0.5")
    assert (stopped.returncode, stopped.stdout) == (2, "")
    assert "the query took longer than 0.5 s and was stopped" in stopped.stderr


def test_rows_come_as_csv_json_and_parquet(runs: Path, tmp_path: Path) -> None:
    sql = "select condition, count(*) as n from valid_requests group by all order by all"
    expected = [{"condition": "base", "n": 6}, {"condition": "more", "n": 6}]
    assert json.loads(harness("query", sql, "--runs", str(runs), "--format", "json").stdout) == expected
    assert harness("query", sql, "--runs", str(runs), "--format", "csv").stdout.splitlines()[1] == '"base",6'
    file = tmp_path / "rows.parquet"
    assert harness("query", sql, "--runs", str(runs), "--format", "parquet", "-o", str(file)).returncode == 0
    assert pq.read_table(file).to_pylist() == expected


@pytest.mark.parametrize(
    ("form", "cell"),
    [
        ("csv", "[1, 2]"),
        ("json", "'nan'::double"),
        ("jsonl", "'ab'::blob"),
        ("json", "'290000-01-01'::timestamp"),
        ("parquet", "interval '1 year'"),
    ],
)
def test_a_cell_that_a_form_cannot_hold_is_one_line(runs: Path, form: str, cell: str) -> None:
    refused = harness("query", f"select {cell} as cell", "--runs", str(runs), "--format", form)
    assert refused.returncode == 2
    assert f"cannot be written as {form}" in refused.stderr
    assert refused.stderr.count("\n") == 1


def test_a_table_shows_costs_and_what_users_felt(runs: Path) -> None:
    text = harness("table", "small", "--runs", str(runs)).stdout
    assert "cost/base" in text
    assert "TTFT" in text
    assert "typical run" not in text
    assert "fewer than 10 lie beyond it; all of them: harness table --serving" in " ".join(text.split())
    every = harness("table", "small", "--runs", str(runs), "--serving").stdout
    assert "turn 1" in every
    assert "few runs" in every
    assert "half of all runs like these" in " ".join(every.split())


def test_the_mean_of_draws_stands_beside_the_draw_that_was_run(runs: Path) -> None:
    text = harness("table", "small", "--runs", str(runs), "--predicted").stdout
    predicted, observed = (line for line in text.splitlines() if "cost ratio" in line)
    assert predicted.endswith("(mean of draws)")
    assert observed.endswith("(simulated, one draw of each plan)")


def test_every_column_of_the_records_is_explained() -> None:
    text = harness("explain", "tables").stdout
    for word in ("response_head_ns", "clock ns", "valid_"):
        assert word in text


@pytest.mark.parametrize(
    ("topic", "folder"), [("rule", "rules"), ("costs", "costs"), ("space", "spaces"), ("compile", "artifacts")]
)
def test_every_key_of_a_shipped_file_is_explained(topic: str, folder: str) -> None:
    explained = set(re.findall(r"^(\w+) = ", harness("explain", topic).stdout, re.MULTILINE))
    written = {key for path in (ROOT / "plans" / folder).glob("*.toml") for key in keys_of(load_toml(path))}
    assert written
    assert written <= explained


def keys_of(table: dict[str, Any]) -> Iterator[str]:
    """The keys of a table and of those in it, without what a user names, and what has a topic of its own."""
    for key, value in table.items():
        yield key
        if key not in ("baseline", "named", "workload", "window", "conditions", "exploratory", "calibration", "f_ms"):
            for part in value if isinstance(value, list) else [value]:
                yield from keys_of(part) if isinstance(part, dict) else ()


def test_a_list_of_runs_and_the_result_of_a_run_come_in_every_form(runs: Path, tmp_path: Path) -> None:
    listed = json.loads(harness("runs", "--runs", str(runs), "--format", "json").stdout)
    assert [(row["condition"], row["is_valid"]) for row in listed] == [("base", True), ("more", True)]
    assert harness("runs", "--runs", str(runs), "--format", "csv").stdout.startswith("experiment,condition,replicate,")
    harness("init", "tiny", cwd=tmp_path)
    done = harness("run", "tiny.toml", "--backend", "sim", "--replicates", "1", "--format", "json", cwd=tmp_path)
    assert [row["condition"] for row in json.loads(done.stdout)] == ["base", "twelve-slots"]
    assert "report: " in done.stderr


def test_a_summary_shows_itself_in_a_notebook(runs: Path) -> None:
    store = RunStore(runs)
    summary = summarise(store.sealed())
    first, of_more = repr(summary).splitlines()
    assert first.startswith("ExperimentSummary 'small': 2 conditions, 2 runs. Predicted: simulated in virtual time")
    assert re.fullmatch(r"  more: \d\.\d{4} of base, too few runs for an interval", of_more)
    assert repr(store) == f"RunStore({str(runs)!r}): 2 sealed runs"
    shown = summary._repr_html_()
    assert shown.startswith("<table><caption>")
    assert "Predicted: simulated in virtual time" in shown
    assert "<td>more</td>" in shown


def test_a_run_its_plan_and_an_outcome_say_what_they_are_in_one_line(runs: Path, tmp_path: Path) -> None:
    run = next(iter(RunStore(runs).sealed()))
    assert repr(run) == f"SealedRun small/{run.label}: valid, sim, in {run.path}"
    assert re.fullmatch(
        r"Plan [0-9a-f]{12} \(drawn, seed 7, replicate 0, as-drawn\): 3 sessions, 6 requests", repr(run.plan)
    )
    outcome = run_experiment(small_experiment(backend="sim"), runs_root=tmp_path)
    assert repr(outcome) == "ExperimentOutcome 'small': 2 of 2 runs are sealed, 0 INVALID, 2 made now"


@pytest.mark.same_everywhere
@pytest.mark.parametrize("command", [("runs",), ("query", "select 1 as one from valid_requests limit 1")])
def test_a_list_of_runs_and_their_rows_load_no_specs_no_machine_code_and_no_pictures(
    runs: Path, command: tuple[str, ...]
) -> None:
    # A process of its own: what DuckDB's bindings say beside the rows, they say as it ends.
    alone = [sys.executable, "-X", "importtime", "-m", "harness", *command, "--runs", str(runs), "--format", "csv"]
    shown = subprocess.run(alone, capture_output=True, text=True, check=True)
    assert command == ("runs",) or shown.stdout.split() == ['"one"', "1"]
    assert {line.partition(":")[0] for line in shown.stderr.splitlines()} == {"import time"}
    loaded = {line.rpartition("|")[2].strip() for line in shown.stderr.splitlines()}
    assert "harness.measure.records.store" in loaded
    # What Python 3.10's duckdb imports of pyarrow is its own affair.
    assert not loaded & {"harness.model.spec", "harness.model.engine", "numba", "matplotlib", "scipy"}


def test_sql_without_its_package_names_the_command_that_installs_it(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "duckdb", None)
    monkeypatch.delitem(sys.modules, "harness.measure.records.sql", raising=False)
    result = harness("query", "from runs", "--runs", str(runs))
    assert result.returncode == 2
    assert "query: the package duckdb is not installed" in result.stderr
    assert "pip install 'rbln-harness[sql]'" in result.stderr
