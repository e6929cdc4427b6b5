"""Whatever stands still for longer than a second during a run makes it INVALID: the server, or the client."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from harness.analysis.validity.stalls import check_freezes
from harness.runner import run_experiment
from harness.runner.progress import ProgressEvent, RequestFinished
from tests.support.analysis_tables import manifest
from tests.support.experiments import UNHURRIED, small_experiment
from tests.support.processes import servers_of_ours
from tests.support.raw_server import CHUNKED_HEAD, Asked, RawServer, Reply, chunked, events
from tests.support.replays import SCHEMES, plan_of, run, session

pytestmark = pytest.mark.live


def test_an_emulator_that_was_stopped_for_a_second_makes_its_run_invalid_by_its_log_and_by_its_schedule(
    tmp_path: Path,
) -> None:
    has_frozen = threading.Event()

    def freeze_once(event: ProgressEvent) -> None:
        if has_frozen.is_set() or not isinstance(event, RequestFinished):
            return
        has_frozen.set()
        (server,) = servers_of_ours()
        server.send_signal(signal.SIGSTOP)
        threading.Event().wait(1)
        server.send_signal(signal.SIGCONT)

    # Others still run, for seconds, when it is heard that the first request has ended.
    lengths = {"distribution": "uniform", "low": 9, "high": 1000}
    workload = {"num_sessions": 3, "waits": "none", "generate_tokens": lengths}
    # A second (wall) is five of the modelled server.
    limits = {**UNHURRIED, "server_stall_ms": 500.0, "schedule_moved_share": 0.05}
    spec = small_experiment(condition=[{"name": "base"}], time_scale=5.0, workload=workload, limits=limits)
    (run,) = run_experiment(spec, runs_root=tmp_path, on_progress=freeze_once).runs
    for said in ("server-stalled", "schedule-moved: the emulator's host stalled: its schedule moved by "):
        assert [reason for reason in run.manifest.invalid_reasons if reason.startswith(said)]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_client_that_stood_still_makes_its_run_invalid(scheme: str) -> None:
    class StandsStillOnce:
        """Asked by the client's own loop."""

        has_stood = False

        def is_set(self) -> bool:
            if asked and not self.has_stood:
                self.has_stood = True
                threading.Event().wait(1.1)
            return False

    asked: list[Any] = []

    def answer(one: Asked) -> Reply:
        asked.append(one)
        threading.Event().wait(0.2)
        return Reply([CHUNKED_HEAD, *chunked(events(one))])

    server: Any
    with RawServer(answer) as server:
        result = run(plan_of(session(0), session(1)), server, scheme, stop=StandsStillOnce(), is_watched=True)
    assert result.audit["client_pause_max_ms"] >= 1100
    assert "client-stalled" in [finding.code for finding in check_freezes(manifest(client_audit=result.audit))]
