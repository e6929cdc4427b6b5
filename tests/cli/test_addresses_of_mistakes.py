"""A mistaken address or change is named itself, not the file or folder that it was taken for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import command_line


def harness(*words: str) -> tuple[int, str]:
    """The exit code and everything that is printed."""
    done = command_line.harness(*words)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sealed") / "runs"
    assert harness("run", "demo", "--backend", "sim", "--replicates", "1", "--runs", str(folder))[0] == 0
    return folder


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("table", "base.tml"), "base.tml: there is no such file or folder"),
        (("run", "base.tml"), "base.tml: there is no such experiment file"),
        (("report", "some/where"), "some/where: there is no such file or folder"),
        (("plan", "show", "demo"), "demo: is no plan file. Write those of an experiment: harness plan build demo"),
        (("run", "demo", "--set", "workload.num_sessions=two"), "--set workload.num_sessions: must be a whole number"),
    ],
)
def test_what_was_mistyped_is_what_the_error_names(words: tuple[str, ...], said: str) -> None:
    code, output = harness(*words)
    assert code == 2
    assert said in output


def test_a_file_that_is_named_as_the_folder_of_runs_is_called_a_file(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("")
    code, output = harness("runs", "--runs", str(tmp_path / "notes.txt"))
    assert code == 2
    assert "is a file, not a folder of runs" in output


def test_the_line_of_a_key_that_the_file_has_wrong_is_still_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('name = "mine"\nreplicates = "three"\n[[condition]]\nname = "base"\n')
    code, output = harness("run", str(path), "--set", "workload.num_sessions=two")
    assert code == 2
    assert "line 2: replicates: must be a whole number" in output
    assert "--set workload.num_sessions" in output


def test_runs_and_verify_take_the_name_of_an_experiment(runs: Path) -> None:
    assert harness("verify", "demo", "--runs", str(runs)) == (0, "4 sealed runs are as they were sealed\n")
    code, output = harness("runs", "demo", "--runs", str(runs))
    assert code == 0
    assert len(output.splitlines()) == 4
    assert harness("verify", "other", "--runs", str(runs))[0] == 2


def test_a_dry_run_says_how_long_all_runs_take() -> None:
    code, output = harness("run", "demo", "--dry-run")
    assert code == 0
    assert "in all, servers started and stopped; a first estimate" in output


def test_the_command_line_works_without_docstrings() -> None:
    command = [sys.executable, "-m", "harness", "--help"]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONOPTIMIZE": "2"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
