"""Sessions that ask for more than their server can do are called overloaded, with the factor, before anything else."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path

import pytest

from harness.analysis.sessions import overload
from harness.analysis.summary import summarise
from harness.measure.records.store import RunStore
from harness.model.spec import parse_experiment
from harness.runner import run_experiment
from tests.support.command_line import harness

WORKLOAD = {"num_sessions": 12, "start_offset_s": 0.5, "wait_cap_s": 1.0}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a server that cannot keep up, and of the same where sessions come slowly."""
    root = tmp_path_factory.mktemp("overload") / "runs"
    table = {
        "name": "busy",
        "backend": "sim",
        "replicates": 2,
        "base_seed": 771,
        "workload": WORKLOAD,
        "server": {"kv_slots": 32},
        "condition": [{"name": "fast"}, {"name": "slow", "baseline": "slow", "workload": {"start_offset_s": 60.0}}],
    }
    run_experiment(parse_experiment(table, where="test"), runs_root=root)
    return root


def test_the_factor_is_device_time_over_the_time_until_the_last_arrival(runs: Path) -> None:
    run = next(run for run in RunStore(runs).sealed("busy") if run.condition == "fast")
    factor = overload(run.plan, 30_000_000_000)
    assert factor == pytest.approx(30 / 5.5, rel=0.2)
    assert overload(run.plan, 30_000_000_000, num_servers=2) == pytest.approx(factor / 2)
    assert overload(run.plan, 1_000_000_000) is None


def test_every_view_says_it_first(runs: Path) -> None:
    summary = summarise(list(RunStore(runs).sealed("busy")))
    assert list(summary.overloads) == ["fast"]
    said = (
        f"Overloaded: until the last request arrives, the sessions ask for {summary.overloads['fast']:.1f} times what"
    )
    assert " ".join(harness("table", "busy", "--runs", str(runs)).stdout.split()).startswith(f"{said} fast can do")
    rows = csv.DictReader(io.StringIO(harness("table", "busy", "--runs", str(runs), "--format", "csv").stdout))
    assert [bool(row["overload"]) for row in rows] == [True, False]
    page = runs.parent / "page.html"
    assert harness("report", "busy", "--runs", str(runs), "-o", str(page)).returncode == 0
    assert said in re.sub(r"\s+", " ", re.sub(r"<[^>]+>", "", page.read_text()))
    assert any(line.startswith("overloaded: the sessions ask") for line in _diagnosis(runs))


def _diagnosis(runs: Path) -> list[str]:
    from harness.tune.diagnose import diagnose

    return list(diagnose([run for run in RunStore(runs).sealed("busy") if run.condition == "fast"]).lines())
