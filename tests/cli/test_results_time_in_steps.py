"""What answers rest on can be chosen: the time in steps where every run measured it, A at other costs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from harness.cli.tree import app
from harness.runner import run_experiment
from tests.support.experiments import small_experiment

pytestmark = pytest.mark.same_everywhere


def test_runs_whose_steps_nobody_stamped_are_refused_by_name(tmp_path: Path) -> None:
    run_experiment(small_experiment(backend="sim"), runs_root=tmp_path)
    for command in ("table", "report"):
        done = CliRunner().invoke(app, [command, "small", "--runs", str(tmp_path), "--time-in-steps"])
        assert done.exit_code != 0
        assert "no engine core stamped the steps of" in str(done.exception)


def test_sealed_runs_are_priced_again_by_the_costs_that_a_reader_names_and_it_is_said(tmp_path: Path) -> None:
    run_experiment(small_experiment(backend="sim"), runs_root=tmp_path)
    dearer = tmp_path / "dearer.toml"
    dearer.write_text(
        'name = "dearer"\nsource = "a test"\n[decode.f_ms]\n1 = 500.0\n[prefill]\nper_call_ms = 1.0\n', encoding="utf-8"
    )
    asked = ["table", "small", "--runs", str(tmp_path), "--costs", str(dearer)]
    as_made, priced = (
        json.loads(CliRunner().invoke(app, [*command, "--format", "json"]).stdout) for command in (asked[:-2], asked)
    )
    assert all(new["a_ns"] > 5 * old["a_ns"] for new, old in zip(priced, as_made, strict=True))
    assert all(new["b_ns"] == old["b_ns"] for new, old in zip(priced, as_made, strict=True))
    assert "by the costs of dearer" in " ".join(CliRunner().invoke(app, asked).stdout.split())
