"""Sealed runs say what their baseline lost, and the command that searches what would save it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.cli.addresses import experiment_with
from harness.measure.records.run import SealedRun
from harness.model.spec import parse_experiment
from harness.runner import run_experiment
from harness.tune.diagnose import diagnose, hint
from tests.support.command_line import harness
from tests.support.experiments import UNHURRIED, one_condition
from tests.support.plain_server import PlainServer, plain_server

MANY = {"num_sessions": 8, "wait_cap_s": 20.0}


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


def test_lost_reuse_and_padding_are_named_with_the_command(tmp_path: Path) -> None:
    runs = sealed(tmp_path, MANY)
    found = hint(runs)
    assert [kind for kind, _ in found.losses] == ["Lost reuse", "Padding", "Prefill blocking"]
    assert found.line.startswith("next: base loses lost reuse ")
    assert found.line.endswith(": harness tune base")
    frozen = hint(runs, "plans/frozen/base.json")
    command, _, folder = frozen.command.rpartition(" ")
    assert command == "harness tune"
    assert experiment_with(Path(folder), [], tmp_path)[0].name == "base", (
        "a freeze is no file that tune reads, its runs' folder is"
    )


def test_a_run_ends_with_the_losses_that_its_report_has(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text(
        'name = "x"\nbackend = "sim"\nreplicates = 2\nbase_seed = 771\n[workload]\nnum_sessions = 8\n'
        'wait_cap_s = 20.0\n[[condition]]\nname = "base"\n[[condition]]\nname = "more"\nserver.kv_slots = 16\n'
    )
    done = harness("run", "x.toml", "--runs", "runs", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    last = " ".join(done.stdout.split()).rpartition("next: ")[2]
    assert last.startswith("base loses lost reuse ")
    assert last.endswith("harness tune x.toml")
    page = (tmp_path / "runs" / "x.html").read_text(encoding="utf-8")
    section = page.partition('<h2 id="next">')[2].partition('<h2 id="serving">')[0]
    for kind in ("Lost reuse", "Padding", "Prefill blocking"):
        assert f'<th scope="row">{kind}</th>' in section
    assert "<code>harness tune x.toml</code>" in section


def test_a_server_whose_costs_nobody_named_gets_no_advice_and_no_figures_of_them(tmp_path: Path) -> None:
    runs = sealed(tmp_path, MANY)
    for run in runs:
        object.__setattr__(run.manifest, "backend", "attached")
    diagnosis = diagnose(runs)
    assert "no costs of this server are known" in diagnosis.unknown
    assert diagnosis.device_ns is None
    assert diagnosis.losses == ()
    found = hint(runs)
    assert found.line == f"no advice: {diagnosis.unknown}"
    assert not any("device time" in line for line in diagnosis.lines())


def test_sessions_that_arrive_faster_than_they_are_served_are_called_overloaded_with_the_factor(tmp_path: Path) -> None:
    workload = {"num_sessions": 12, "start_offset_s": 0.5, "wait_cap_s": 1.0}
    run = sealed(tmp_path, workload, kv_slots=32)[0]
    found = diagnose([run])
    assert found.overload is not None
    assert next(line for line in found.lines() if "overloaded" in line).startswith("overloaded: the sessions ask for")


def test_a_loss_that_no_run_shows_has_a_bound_and_no_interval_of_no_width(tmp_path: Path) -> None:
    found = diagnose(sealed(tmp_path, {"num_sessions": 3}, kv_slots=32))
    lost = next(loss for loss in found.losses if loss.kind == "lost reuse")
    assert (lost.percent, lost.low) == ("0.0 %", None)
    assert found.num_rearrivals == 6
    # .607 ** 6 = .05
    assert lost.words.endswith("a true share of up to 39.3 % of them shows none of 6 too")


@pytest.mark.live
def test_a_vllm_of_others_whose_steps_nothing_showed_is_told_the_key_that_names_them(tmp_path: Path) -> None:
    with plain_server(PlainServer(has_metrics=True, health=200, gives_token_ids=True)) as there:
        server = {"url": there.url, "rules": "vllm-paged", "cost_model": "emulated-gpu", "declared": True}
        keys = {"workload": {"num_sessions": 2, "requests_per_session": 1}, "condition": [{"name": "base"}]}
        spec = one_condition("attached", "attached", server=server, limits=UNHURRIED, **keys)
        runs = run_experiment(spec, runs_root=tmp_path).require_valid().runs
    assert diagnose(runs).unknown.startswith("[server] names no step_log; step_log = FILE")
