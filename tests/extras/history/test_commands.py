"""`harness history` over folders of runs and saved baselines, in every form."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from harness.present.export.baseline import save_baseline
from harness.runner import run_experiment
from tests.support.command_line import harness
from tests.support.experiments import small_experiment


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two folders of runs and a baseline of the same plans."""
    root = tmp_path_factory.mktemp("history")
    for name in ("may", "june"):
        outcome = run_experiment(small_experiment(backend="sim", replicates=3), runs_root=root / name)
    save_baseline(root / "july", outcome.runs)
    return [str(root / name) for name in ("may", "june", "july")]


def test_each_place_is_a_point_of_each_condition(places: list[str]) -> None:
    rows = json.loads(harness("history", *places, "--figure", "cost", "--figure", "tpot", "--format", "json").stdout)
    assert len(rows) == 3 * 2 * 2
    assert {row["place"] for row in rows} == set(places)
    assert all(row["low"] < row["value"] < row["high"] for row in rows)
    table = harness("history", *places, "--format", "csv").stdout
    assert [row["condition"] for row in csv.DictReader(table.splitlines())] == 3 * ["base"] + 3 * ["more"]
    shown = harness("history", *places).stdout
    assert "Predicted: simulated in virtual time" in shown


def test_the_page_has_a_plot_and_the_table(places: list[str], tmp_path: Path) -> None:
    path = tmp_path / "history.html"
    assert harness("history", *places, "-o", str(path)).returncode == 0
    text = path.read_text()
    assert "<svg" in text
    assert "no accelerator was measured" in text
    refused = harness("history", *places, "-o", str(tmp_path / "history.pdf"))
    assert (refused.returncode, "neither .html nor .csv" in refused.stderr) == (2, True)


def test_the_file_for_otava_has_a_row_for_each_place_and_a_column_for_each_figure(
    places: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "history.csv"
    assert harness("history", *places, "-o", str(path)).returncode == 0
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert [row["place"] for row in rows] == places
    assert list(rows[0])[:3] == ["time", "release", "place"]
    columns = [name for name in rows[0] if name.endswith(".cost")]
    assert len(columns) == 2
    assert all(float(row[column]) > 0 for row in rows for column in columns)


def test_a_folder_named_twice_is_refused(places: list[str]) -> None:
    experiment = next(path for path in Path(places[0]).iterdir() if path.is_dir())
    for again in (places[0], str(experiment), experiment.name):
        told = harness("history", places[0], again, "--runs", places[0])
        assert told.returncode == 2, again
        assert "holds the same runs as" in told.stderr
