"""Answers rest on the time in steps only where every run measured it."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from harness.cli.tree import app
from harness.runner import run_experiment
from tests.support.experiments import small_experiment


def test_runs_whose_steps_nobody_stamped_are_refused_by_name(tmp_path: Path) -> None:
    run_experiment(small_experiment(backend="sim"), runs_root=tmp_path)
    for command in ("table", "report"):
        done = CliRunner().invoke(app, [command, "small", "--runs", str(tmp_path), "--time-in-steps"])
        assert done.exit_code != 0
        assert "no engine core stamped the steps of" in str(done.exception)
