"""``harness records export`` as a person runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.runner import run_experiment
from tests.support.command_line import harness
from tests.support.experiments import small_experiment
from tests.support.report_runs import Shape, seal_run

pytestmark = pytest.mark.same_everywhere


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("records")
    run_experiment(small_experiment(backend="sim"), runs_root=root)
    seal_run(root, Shape(experiment="broken", invalid_reasons=("a request failed",)))
    return root


def export(runs: Path, *words: str) -> tuple[int, str]:
    done = harness("records", "export", *words, "--runs", str(runs))
    return done.returncode, done.stdout + done.stderr


def test_an_experiment_is_written_and_what_has_no_room_is_listed(runs: Path, tmp_path: Path) -> None:
    code, said = export(runs, "small", "--format", "aiperf", "-o", str(tmp_path / "out"))
    assert code == 0
    assert "no room in aiperf: finish reason" in said
    assert len(list((tmp_path / "out").glob("*/0/profile_export.jsonl"))) == 2


def test_one_run_is_written_alone(runs: Path, tmp_path: Path) -> None:
    assert export(runs, "small/more/0", "--format", "vllm-bench", "-o", str(tmp_path / "out"))[0] == 0
    (path,) = (tmp_path / "out").rglob("*.json")
    assert json.loads(path.read_text())["label"] == "small/more/0"


def test_a_folder_of_runs_names_them_too(runs: Path, tmp_path: Path) -> None:
    words = ("--format", "csv", "-o", str(tmp_path / "out"))
    assert harness("records", "export", str(runs / "small"), *words).returncode == 0
    assert harness("records", "export", str(runs / "small" / "more"), *words, "--force").returncode == 0
    assert "base" not in (tmp_path / "out" / "requests.csv").read_text()


def test_a_file_that_is_there_is_kept_unless_forced(runs: Path, tmp_path: Path) -> None:
    words = ("small", "--format", "csv", "-o", str(tmp_path))
    (tmp_path / "requests.csv").write_text("mine")
    code, said = export(runs, *words)
    assert code == 2
    assert "is there already" in said
    assert (tmp_path / "requests.csv").read_text() == "mine"
    assert not (tmp_path / "serving.csv").exists()
    assert export(runs, *words, "--force")[0] == 0
    assert "mine" not in (tmp_path / "requests.csv").read_text()


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (("small", "--format", "xml"), "unknown format 'xml'. Use csv, parquet, otel"),
        (("nothing", "--format", "csv"), "no sealed runs of experiment 'nothing'"),
        (("small/none", "--format", "csv"), "no valid sealed runs of that name. Valid there:"),
        (("small", "--format", "csv", "--otlp", "http://127.0.0.1:1"), "Use --format otel"),
        (("small", "--format", "otel", "--otlp", "there"), "no address of a collector"),
        (("small", "--format", "csv", "-o", "/dev/full/x"), "cannot be written"),
    ],
)
def test_what_cannot_be_exported_is_one_line(runs: Path, words: tuple[str, ...], answer: str) -> None:
    code, said = export(runs, *words)
    assert code in {1, 2}
    assert answer in said
    assert said.count("\n") == 1


def test_invalid_runs_are_left_out_and_named(runs: Path, tmp_path: Path) -> None:
    code, said = export(runs, "broken", "--format", "csv", "-o", str(tmp_path))
    assert code == 2
    assert "left out: base-waits/0 is INVALID (a request failed)" in said
    assert list(tmp_path.iterdir()) == []
