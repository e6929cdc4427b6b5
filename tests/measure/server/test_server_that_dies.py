"""A server that dies during a run: the run is sealed as INVALID with the reason, and nothing of it is left."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from harness.present.report import write_report
from harness.runner import run_experiment
from harness.runner.progress import ProgressEvent, RequestFinished
from tests.support.experiments import one_condition
from tests.support.forked_children import started_anew
from tests.support.places import processes_naming

pytestmark = pytest.mark.live


def test_an_emulator_that_is_killed_between_two_requests(tmp_path: Path) -> None:
    spec = one_condition("dying", time_scale=4.0, workload={"source": "sequential", "num_background": 4})
    killed: list[int] = []

    def kill_at_the_second_answer(event: ProgressEvent) -> None:
        if isinstance(event, RequestFinished) and event.num_finished == 2 and not killed:
            killed.extend(pid for pid in processes_naming(tmp_path) if _is_emulator(pid))
            for pid in killed:
                os.kill(pid, signal.SIGKILL)

    with started_anew():
        (run,) = run_experiment(spec, runs_root=tmp_path, on_progress=kill_at_the_second_answer).runs

    assert len(killed) == 1
    assert not run.is_valid
    assert run.invalid_reasons[0].startswith("server-died: ")
    assert run.manifest.server.exit_status == -signal.SIGKILL
    statuses = run.table("requests")["status"].to_pylist()
    assert len(statuses) == 6
    # Events come up to a heartbeat late, so that one or two more may have been answered before the kill.
    num_answered = statuses.count("ok")
    assert 2 <= num_answered < 6
    assert statuses[:num_answered] == ["ok"] * num_answered
    assert processes_naming(tmp_path) == []
    assert list(tmp_path.rglob("*.partial")) == []
    assert "server-died" in write_report([run], tmp_path / "report.html").read_text(encoding="utf-8")


def _is_emulator(pid: int) -> bool:
    return b"harness.measure.emulator" in Path(f"/proc/{pid}/cmdline").read_bytes()
