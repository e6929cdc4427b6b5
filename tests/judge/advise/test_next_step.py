"""Sealed runs suggest one change: the one that a quick simulation of their plans predicts to pay, and the command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.judge.advise.next_step import NextStep, candidates, next_step
from harness.measure.records.run import SealedRun
from harness.model.sim import simulate
from harness.model.spec import ServerShape, parse_experiment
from harness.runner import run_experiment
from tests.support.command_line import harness

MANY = {"num_sessions": 8, "wait_cap_s": 20.0}
LONE = {"num_sessions": 1}


def sealed(folder: Path, workload: dict[str, Any], **server: Any) -> tuple[SealedRun, ...]:
    """Sealed baseline runs, made in virtual time."""
    table = {
        "name": "base",
        "backend": "sim",
        "replicates": 2,
        "base_seed": 771,
        "workload": workload,
        "server": server,
        "condition": [{"name": "base"}],
    }
    return run_experiment(parse_experiment(table, where="test"), runs_root=folder / "runs").runs


def suggested(folder: Path, workload: dict[str, Any], **server: Any) -> NextStep:
    found = next_step(sealed(folder, workload, **server), folder / "runs", "base.toml")
    assert found is not None
    return found


def test_lost_slots_suggest_more_slots_and_the_simulator_agrees(tmp_path: Path) -> None:
    runs = sealed(tmp_path, MANY)
    found = next_step(runs, tmp_path / "runs")
    assert found is not None
    assert found.change is not None
    assert found.change.is_slots
    assert found.diagnosis is not None
    assert found.diagnosis.is_reuse_first
    more = runs[0].server.model_copy(update={"kv_slots": found.change.shape.kv_slots})
    nominal = [sum(simulate(run.plan, server).device_ns for run in runs) for server in (more, runs[0].server)]
    assert found.change.ratio.ratio == pytest.approx(nominal[0] / nominal[1], abs=0.03)
    assert found.command == f"harness predict advise base --runs {tmp_path / 'runs'}"


def test_padded_steps_suggest_the_size_that_fits_them(tmp_path: Path) -> None:
    workload = {"num_sessions": 5, "requests_per_session": 1, "wait_cap_s": 1.0}
    found = suggested(tmp_path, workload, max_num_seqs=8, decode_buckets=[8], kv_slots=20)
    assert found.change is not None
    assert not found.change.is_slots
    assert "predicted to save" in found.line
    assert "given" in found.line
    assert "f(5) was not measured, but interpolated" in found.line or 5 not in found.change.shape.decode_buckets


def test_where_nothing_pays_the_next_command_says_how_many_runs_show_more(tmp_path: Path) -> None:
    found = suggested(tmp_path, LONE, max_num_seqs=1, decode_buckets=[1], kv_slots=9)
    assert found.change is None
    assert found.line.endswith(f"harness power base.toml --runs {tmp_path / 'runs'}")


def test_a_configuration_that_was_tested_is_not_suggested_again(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text(
        'name = "x"\nbackend = "sim"\nreplicates = 3\nbase_seed = 771\n[workload]\nnum_sessions = 8\n'
        'wait_cap_s = 20.0\n[[condition]]\nname = "base"\n[[condition]]\nname = "more"\nserver.kv_slots = 12\n'
    )
    done = harness("run", "x.toml", "--runs", "runs", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    last = " ".join(done.stdout.split()).rpartition("next: ")[2]
    assert "predicted to save" in last
    assert "12 KV slots" not in last
    assert last.endswith("harness predict advise x")
    assert harness(*last.rpartition("Test it on new plans: harness ")[2].split(), cwd=tmp_path).returncode == 0


def test_nothing_is_suggested_that_saves_less_than_what_was_tested(tmp_path: Path) -> None:
    done = harness("run", "demo", "--backend", "sim", "--runs", "runs", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    last = " ".join(done.stdout.split()).rpartition("next: ")[2]
    assert last.startswith("no change of slots or sizes is predicted to save more than what was tested.")
    assert "harness power" in last


def test_candidates_are_more_slots_and_every_size_that_the_plans_can_fill(tmp_path: Path) -> None:
    plans = [run.plan for run in sealed(tmp_path, {"num_sessions": 6})]
    found = list(candidates(ServerShape(8, (1, 2, 4, 8), 8, 8192), plans))
    assert [shape.kv_slots for shape in found[:3]] == [10, 12, 16]
    assert [shape.decode_buckets for shape in found[3:]] == [(1, 2, 3, 4, 8), (1, 2, 4, 5, 8), (1, 2, 4, 6, 8)]


def test_the_report_shows_the_losses_and_the_same_suggestion_right_after_the_answer(tmp_path: Path) -> None:
    done = harness("run", "demo", "--backend", "sim", "--runs", "runs", cwd=tmp_path)
    page = (tmp_path / "runs" / "demo.html").read_text(encoding="utf-8")
    section = page.partition('<h2 id="next">')[2].partition('<h2 id="serving">')[0]
    for kind in ("Lost reuse", "Padding", "Prefill blocking"):
        assert f'<th scope="row">{kind}</th>' in section
    suggestion = " ".join(done.stdout.split()).rpartition("next: ")[2].rpartition(": harness ")
    assert suggestion[0][1:] in " ".join(section.split())
    assert f"<code>harness {suggestion[2]}</code>" in section
    assert "it was not measured" in section
