"""An attached server is what its own records show: an emulator is called one, and no other server takes its place."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyarrow import csv
from typer.testing import CliRunner

from harness.cli.tree import app
from harness.records import RunStore, SealedRun
from harness.runner import run_experiment
from harness.spec import ExperimentSpec
from tests.support.emulator_process import Emulator, end, start_ready

pytestmark = pytest.mark.live


def attached(url: str, **keys: Any) -> ExperimentSpec:
    """Two conditions of two short sessions each on the server at ``url``."""
    table: dict[str, Any] = {
        "name": "attached",
        "backend": "attached",
        "replicates": 1,
        "base_seed": 1,
        "workload": {
            "num_sessions": 2,
            "waits": "none",
            "generate_tokens": {"distribution": "fixed", "value": 4},
        },
        "limits": {"rearrival_lag_p99_ms": 5000.0, "start_spread_ms": 5000.0, "schedule_moved_share": 1.0},
        "server": {"url": url},
        "condition": [{"name": "base"}, {"name": "no-waits", "treatment": "no-waits"}],
    }
    for name, value in keys.items():
        table[name] = {**table.get(name, {}), **value} if isinstance(value, dict) else value
    return ExperimentSpec.model_validate(table)


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulator]:
    started = start_ready(tmp_path_factory.mktemp("server"), time_scale=1.0)
    yield started
    end(started)


@pytest.fixture(scope="module")
def on_the_emulator(emulator: Emulator, tmp_path_factory: pytest.TempPathFactory) -> list[SealedRun]:
    root = tmp_path_factory.mktemp("runs")
    run_experiment(attached(emulator.address), runs_root=root).require_valid()
    return list(RunStore(root).sealed("attached"))


def harness(*words: str) -> str:
    done = CliRunner().invoke(app, [*words], env={"COLUMNS": "1000"})
    assert done.exit_code == 0, done.output
    return " ".join(done.output.split())


def test_an_attached_emulator_is_called_one_and_nothing_is_called_measured(
    on_the_emulator: list[SealedRun], tmp_path: Path
) -> None:
    note = "Emulated with modelled step times; no accelerator was measured."
    assert {run.manifest.backend for run in on_the_emulator} == {"attached"}
    assert {run.manifest.kind.has_device for run in on_the_emulator} == {False}
    runs, out = ("--runs", str(on_the_emulator[0].path.parents[2])), tmp_path / "out"
    for words in (("table", "attached"), ("table", "attached", "--serving"), ("compare", "attached")):
        page = harness(*words, *runs)
        assert note in page
        assert "measured" not in page.replace(note, "")
    harness("records", "export", "attached", *runs, "--format", "csv", "-o", str(out))
    tables = [csv.read_csv(path) for path in out.rglob("*.csv")]
    assert tables
    for table in tables:
        assert set(table["origin"].to_pylist()) == {note}
