"""Sealed runs suggest one change: the smallest that is as good as the best of a quick search, and the command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.api import experiment_with
from harness.measure.records.run import SealedRun
from harness.model.sim import simulate
from harness.model.spec import parse_experiment
from harness.runner import run_experiment
from harness.tune.diagnose import diagnose
from harness.tune.hint import Hint, hint
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


def suggested(folder: Path, workload: dict[str, Any], **server: Any) -> Hint:
    found = hint(sealed(folder, workload, **server))
    assert found is not None
    return found


def test_lost_slots_suggest_more_slots_and_the_simulator_agrees(tmp_path: Path) -> None:
    runs = sealed(tmp_path, MANY)
    found = hint(runs)
    assert found is not None
    assert found.proposal is not None
    assert found.proposal.setup.kv_slots == 16
    assert found.diagnosis.losses[0].kind == "lost reuse"
    more = found.proposal.setup.on(runs[0].server)
    nominal = [sum(simulate(run.plan, server).device_ns for run in runs) for server in (more, runs[0].server)]
    assert found.proposal.ratio.ratio == pytest.approx(nominal[0] / nominal[1], abs=0.05)
    assert "16 KV slots in place of 8: predicted to save" in found.line
    frozen = hint(runs, "plans/frozen/base.json")
    assert frozen is not None
    told, _, folder = frozen.command.rpartition(" ")
    assert told == "harness tune"
    assert experiment_with(Path(folder), [], tmp_path)[0].name == "base", (
        "a freeze is no file that tune reads, its runs' folder is"
    )


def test_padded_steps_suggest_the_size_that_fits_them(tmp_path: Path) -> None:
    workload = {"num_sessions": 5, "requests_per_session": 1, "wait_cap_s": 1.0}
    found = suggested(tmp_path, workload, max_num_seqs=8, decode_buckets=[8], kv_slots=20)
    assert found.proposal is not None
    assert found.proposal.setup.kv_slots == 20
    assert any(size <= 5 for size in found.proposal.setup.decode_buckets)
    assert found.diagnosis.losses[0].kind == "padding"
    assert "on new plans, compile {" in found.line


def test_where_nothing_pays_it_says_keep_it_and_how_little_the_best_change_saves(tmp_path: Path) -> None:
    found = suggested(tmp_path, LONE, max_num_seqs=1, decode_buckets=[1], kv_slots=9)
    assert found.proposal is None
    assert "keep it: the best change is predicted to save 0.0 %" in found.line


def test_a_configuration_that_was_tested_is_not_suggested_again(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text(
        'name = "x"\nbackend = "sim"\nreplicates = 2\nbase_seed = 771\n[workload]\nnum_sessions = 8\n'
        'wait_cap_s = 20.0\n[[condition]]\nname = "base"\n[[condition]]\nname = "more"\nserver.kv_slots = 16\n'
    )
    done = harness("run", "x.toml", "--runs", "runs", cwd=tmp_path, draws=True)
    assert done.returncode == 0, done.stderr
    last = " ".join(done.stdout.split()).rpartition("next: ")[2]
    assert last.startswith("no change of slots or sizes is predicted to save 1 % more than 16 KV slots in place of 8")
    page = (tmp_path / "runs" / "x.html").read_text(encoding="utf-8")
    section = page.partition('<h2 id="next">')[2].partition('<h2 id="serving">')[0]
    for kind in ("Lost reuse", "Padding", "Prefill blocking"):
        assert f'<th scope="row">{kind}</th>' in section
    assert last.partition(". How")[0][1:] in " ".join(section.split())
    assert "it was not measured" in section


def test_a_server_whose_costs_nobody_named_gets_no_advice_and_no_figures_of_them(tmp_path: Path) -> None:
    runs = sealed(tmp_path, MANY)
    for run in runs:
        object.__setattr__(run.manifest, "backend", "attached")
    diagnosis = diagnose(runs)
    assert "no costs of this server are known" in diagnosis.unknown
    assert diagnosis.device_ns is None
    assert diagnosis.losses == ()
    found = hint(runs)
    assert found is not None
    assert found.line == f"no advice: {diagnosis.unknown}"
    assert not any("device time" in line for line in diagnosis.lines())


def test_sessions_that_arrive_faster_than_they_are_served_are_called_overloaded_with_the_factor(tmp_path: Path) -> None:
    workload = {"num_sessions": 12, "start_offset_s": 0.5, "wait_cap_s": 1.0}
    run = sealed(tmp_path, workload, kv_slots=32)[0]
    found = diagnose([run])
    assert found.overload is not None
    assert next(line for line in found.lines() if "overloaded" in line).startswith("overloaded: the sessions ask for")
