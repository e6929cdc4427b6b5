"""``harness server patch check`` as a person runs it: the same plan with and without observing, and one verdict.

Skipped where the twin is not installed.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from harness.measure.records.store import RunStore
from tests.support.command_line import harness
from tests.support.experiments import UNHURRIED_TOML

pytestmark = [pytest.mark.live, pytest.mark.timeout(600), pytest.mark.usefixtures("twin")]

EXPERIMENT = """
name = "survival"
backend = "twin"
base_seed = 20261122
[workload]
source = "sequential"
num_background = 6
[server]
start_timeout_s = 300.0
stop_grace_s = 30.0
[[condition]]
name = "m6"
"""


def patch_check(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = ("server", "patch", "check", "survival.toml", "--runs", "runs", *words)
    return harness(*command, cwd=folder, environment={"COLUMNS": "200"})


def test_observing_changes_no_token_and_no_step_and_says_what_it_costs(tmp_path: Path) -> None:
    (tmp_path / "survival.toml").write_text(EXPERIMENT + UNHURRIED_TOML)

    first = patch_check(tmp_path)

    assert first.returncode == 0, first.stderr + first.stdout
    assert "tokens: 8 of 8 answers identical" in first.stdout
    # Sequential sessions meet no timing: one request at a time, 7 decode steps each.
    assert "decode tokens: 56 plain, 56 observed; the same batches in the same order" in first.stdout
    assert re.search(r"observer: \d+ \[\d+, \d+\] us a step \(median\)", first.stdout)
    # A busy host reads tokens together, which then have no times of their own.
    (period,) = re.findall(r"token period: .*", first.stdout)
    assert re.search(r"change [+-]\S+ % \[.*\] \(95 % bootstrap interval, [1-8] answers|not known", period)
    assert "the same: observing changed neither an answer nor the decode work" in first.stdout
    plain, observed = sorted(RunStore(tmp_path / "runs").sealed(), key=lambda run: run.condition != "plain")
    assert plain.manifest.observation.patch["mode"] == "none"
    assert {"sha256_before", "sha256_patch", "sha256_after"} <= observed.manifest.observation.patch.keys()

    # Once sealed, nothing is run again without being asked to, and --resume only compares.
    again = patch_check(tmp_path)
    assert again.returncode == 2
    assert "sealed runs of experiment 'survival-check' exist already. Use --resume" in again.stderr
    compared = patch_check(tmp_path, "--resume")
    assert compared.returncode == 0
    assert compared.stdout.splitlines()[-8:] == first.stdout.splitlines()[-8:]
