"""``harness server calibrate``: every table of its experiment can be set, and no old answer passes for a new one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from harness.analysis.validity import invariants
from harness.analysis.validity.evidence import Evidence
from harness.cli.tree import app
from harness.measure.records.findings import finding
from harness.measure.records.manifest import Finding
from harness.measure.records.store import RunStore

pytestmark = pytest.mark.same_everywhere


def calibrate(root: Path, *words: str) -> Result:
    asked = ("server", "calibrate", "mine", "--quick", "--runs", str(root / "runs"), "--output", str(root / "costs"))
    return CliRunner().invoke(app, [*asked, *words], env={"COLUMNS": "1000"})


def test_a_key_of_any_table_is_set_and_a_bare_one_is_of_the_server(tmp_path: Path) -> None:
    done = calibrate(
        tmp_path,
        *("--backend", "sim", "--set", "max_num_seqs=2", "--set", "workload.token_id_range=[300, 2000]"),
        *("--set", "limits.request_timeout_s=600", "--set", "client.scrape_interval_s=2"),
    )
    assert done.exit_code == 0, done.output
    (run,) = RunStore(tmp_path / "runs").sealed("calibrate-mine")
    assert run.server.max_num_seqs == 2
    assert run.workload.token_id_range == (300, 2000)
    assert run.limits.request_timeout_s == 600
    assert run.client.scrape_interval_s == 2


def test_what_the_sweeps_set_is_refused(tmp_path: Path) -> None:
    done = calibrate(tmp_path, "--backend", "sim", "--set", "workload.waits=tracelab-v0.0.2")
    assert "workload.waits: is set by the sweeps" in " ".join(str(done.exception or done.output).split())
    assert not (tmp_path / "runs").exists()


def test_a_calibration_that_is_there_already_says_that_nothing_was_measured(tmp_path: Path) -> None:
    words = ("--backend", "sim", "--set", "max_num_seqs=2")
    first, second = calibrate(tmp_path, *words), calibrate(tmp_path, *words, "--resume")
    assert "nothing was measured now" not in first.output
    assert "nothing was measured now: 1 runs were sealed before" in second.output


def test_an_invalid_calibration_is_measured_again_when_asked(tmp_path: Path) -> None:
    def late(_run: Evidence) -> Iterator[Finding]:
        yield finding("rearrival-late", "as on a busy machine")

    words = ("--backend", "sim", "--set", "max_num_seqs=1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(invariants, "CHECKS", (late,))
        failed = calibrate(tmp_path, *words)
    assert "no valid sealed run to fit; all/0: rearrival-late" in str(failed.exception)
    repeated = calibrate(tmp_path, *words, "--resume")
    assert "nothing was measured now" in repeated.output
    assert "--resume --retry-invalid measures the INVALID ones again" in repeated.output
    calibrate(tmp_path, *words, "--resume", "--retry-invalid", "--set", "limits.server_stall_ms=100000")
    (run,) = RunStore(tmp_path / "runs").sealed("calibrate-mine")
    assert len(run.manifest.earlier_tries) == 1
    assert calibrate(tmp_path, *words, "--retry-invalid").exit_code != 0
