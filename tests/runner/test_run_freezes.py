"""Whatever stands still for longer than a second during a run makes it INVALID: the server, or either client."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from harness.analysis.validity.stalls import check_freezes
from harness.runner import run_experiment
from harness.runner.progress import ProgressEvent, RequestFinished
from tests.support.analysis_tables import manifest
from tests.support.experiments import small_experiment
from tests.support.raw_server import CHUNKED_HEAD, Asked, RawServer, Reply, chunked, events
from tests.support.replays import plan_of, run, session

pytestmark = pytest.mark.live


def test_a_server_that_was_stopped_for_two_seconds_makes_its_run_invalid(tmp_path: Path) -> None:
    has_frozen = threading.Event()

    def freeze_once(event: ProgressEvent) -> None:
        if has_frozen.is_set() or not isinstance(event, RequestFinished):
            return
        has_frozen.set()
        (server,) = [
            child
            for child in psutil.Process().children(recursive=True)
            if "harness.emulator" in " ".join(child.cmdline())
        ]
        server.send_signal(signal.SIGSTOP)
        threading.Event().wait(2)
        server.send_signal(signal.SIGCONT)

    outcome = run_experiment(small_experiment(), runs_root=tmp_path, on_progress=freeze_once)
    stalled = [
        run for run in outcome.runs if any("server-stalled" in reason for reason in run.manifest.invalid_reasons)
    ]
    assert len(stalled) == 1


@pytest.mark.parametrize("client", ["epoll", "aiohttp"])
def test_a_client_that_stood_still_makes_its_run_invalid(client: str) -> None:
    class StandsStillOnce:
        """Asked by the client's own loop."""

        has_stood = False

        def is_set(self) -> bool:
            if asked and not self.has_stood:
                self.has_stood = True
                threading.Event().wait(1.5)
            return False

    asked: list[Any] = []

    def answer(one: Asked) -> Reply:
        asked.append(one)
        threading.Event().wait(0.4)
        return Reply([CHUNKED_HEAD, *chunked(events(one))])

    server: Any
    with RawServer(answer) as server:
        result = run(plan_of(session(0), session(1)), server, client, stop=StandsStillOnce())
    assert result.audit["client_pause_max_ms"] >= 1500
    assert "client-stalled" in [finding.code for finding in check_freezes(manifest(client_audit=result.audit))]
