"""``harness stack``: exit codes, JSON, and a release that is recorded holds afterwards."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from harness.cli.tree import app
from tests.support.command_line import harness
from tests.support.release_wheels import SOURCE, empty_table, stack

runner = CliRunner()


def test_a_changed_release_ends_with_3_and_what_may_be_used(tmp_path: Path) -> None:
    table = str(empty_table(tmp_path))
    old = stack(tmp_path, "0.12.0")
    new = stack(tmp_path, "0.12.1", SOURCE.replace("waiting[0]", "waiting[-1]"))
    assert runner.invoke(app, ["stack", "record", str(old), "--table", table]).exit_code == 0
    done = runner.invoke(app, ["stack", "check", str(new), "--table", table])
    assert done.exit_code == 3
    assert "changed: order (rules)" in done.stdout
    assert "    + request = waiting[-1]" in done.stdout
    assert "rules: unknown" in done.stdout


def test_json_holds_the_same_and_a_recorded_release_has_no_change(tmp_path: Path) -> None:
    table = str(empty_table(tmp_path))
    release = str(stack(tmp_path, "0.12.0"))
    runner.invoke(app, ["stack", "record", release, "--table", table])
    done = runner.invoke(app, ["stack", "check", release, "--table", table, "--format", "json"])
    said = json.loads(done.stdout)
    assert (said["release"], said["compared_with"], said["vllm"]["source"]) == ("0.12.0", "0.12.0", "read")
    assert {fact["state"] for fact in said["facts"]} == {"holds"}
    assert {use["what"]: use["verdict"] for use in said["uses"]}["rules"] == "yes"


def test_recording_twice_changes_nothing(tmp_path: Path) -> None:
    table = empty_table(tmp_path)
    release = str(stack(tmp_path, "0.12.0"))
    runner.invoke(app, ["stack", "record", release, "--table", str(table)])
    first = table.read_bytes()
    runner.invoke(app, ["stack", "record", release, "--table", str(table)])
    assert table.read_bytes() == first


def test_two_releases_are_simulated_side_by_side_and_an_unknown_one_is_refused(tmp_path: Path) -> None:
    words = ("demo", "--backend", "sim", "--runs", str(tmp_path), "--set", "replicates=1", "--format", "json")
    called = harness("stack", "compare", "0.11.2", "0.12.0", *words)
    decisions, figures, names = json.loads(called.stdout)
    assert {row["run"] for row in decisions} >= {"base-waits/0", "bucket6-nowaits/0"}
    assert {row["figure"] for row in figures} >= {"cost", "reuse"}
    assert {row["only_in"] for row in names} <= {"0.11.2", "0.12.0"}
    unknown = harness("stack", "compare", "0.11.2", "7.0.0", *words)
    assert (unknown.returncode, "7.0.0: no rules of this release are known" in unknown.stderr) == (2, True)


def test_two_releases_of_vllm_itself_are_simulated_by_the_rules_of_each(tmp_path: Path) -> None:
    words = ("gpu-capture-sizes", "--backend", "sim", "--runs", str(tmp_path), "--format", "json")
    words += ("--set", "replicates=1", "--set", "workload.num_sessions=1")
    called = harness("stack", "compare", "0.30.0", "0.33.0", *words, "--set", "server.long_prefill_tokens=64")
    _decisions, figures, _names = json.loads(called.stdout)
    assert {folder.name for folder in tmp_path.iterdir()} == {"0.30.0", "0.33.0"}
    # In 0.30 the threshold cuts the prompt of an agent that is alone, too.
    slowest = [row for row in figures if row["figure"] == "ttft_p99"]
    assert slowest
    assert all(row["old"] > row["new"] for row in slowest)


def test_an_environment_without_vllm_is_refused_before_anything_runs(tmp_path: Path) -> None:
    words = ("gpu-capture-sizes", "--backend", "vllm", "--runs", str(tmp_path / "runs"))
    missing = harness("stack", "compare", str(tmp_path / "old"), str(tmp_path / "new"), *words)
    assert (missing.returncode != 0, f"no vllm command in {tmp_path}/old" in missing.stderr) == (True, True)
    assert not (tmp_path / "runs").exists()
    again = harness("stack", "compare", "0.30.0", "0.30.0", "gpu-capture-sizes", "--backend", "sim")
    assert (again.returncode, "0.30.0: both are the same release" in again.stderr) == (2, True)
