"""A device that is slow, hangs or takes the engine down with it: the live path notices, says so and leaves nothing.

Skipped where the twin is not installed.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from harness.analysis.logs.parse import ParseCounts, parse_log
from harness.errors import ServerError
from harness.extras.twin.backend import TwinBackend
from harness.extras.twin.environment import TwinEnvironment
from harness.measure.server.life import LaunchPlan
from harness.measure.server.process import ServerProcess
from harness.model.spec import ServerSpec
from harness.runner.run import LaunchOptions
from harness.stacks.rbln.rules.log_grammar import KvCopyFailedEvent
from tests.support.processes import comes_true, start_launched

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]

SERVER = ServerSpec(start_timeout_s=300.0, stop_grace_s=5.0)
PROMPT = list(range(1000, 1200))


def started(folder: Path, **fault: object) -> tuple[ServerProcess, LaunchPlan]:
    launch = TwinBackend(timing="none", faults=(fault,)).launch(SERVER, LaunchOptions(0, folder))
    return start_launched(launch, folder), launch


def ask(launch: LaunchPlan, *, timeout_s: float) -> httpx.Response:
    body = {"model": launch.model, "prompt": PROMPT, "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    return httpx.post(f"http://{launch.host}:{launch.port}/v1/completions", json=body, timeout=timeout_s)


def processes_of(folder: Path) -> set[int]:
    """Processes other than this one that have a file of this run's folder open, as its log is to all of the server."""
    found: set[int] = set()
    for opened in Path("/proc").glob("[0-9]*/fd/*"):
        # A process or its file may be gone by now.
        with suppress(OSError):
            if folder in opened.readlink().parents:
                found.add(int(opened.parts[2]))
    return found - {os.getpid()}


@pytest.fixture(autouse=True)
def _installed(twin: TwinEnvironment) -> None:
    del twin


def test_a_server_that_is_not_ready_in_time_is_one_error_and_gone(tmp_path: Path) -> None:
    process, launch = started(tmp_path, do="slow", call="start", seconds=600)

    with process, pytest.raises(ServerError, match=r"not healthy|not ready|did not"):
        process.wait_healthy(launch.host, launch.port, deadline_s=4)

    # A process that was killed is there until the kernel has ended it.
    assert comes_true(lambda: not processes_of(tmp_path))


def test_a_step_that_hangs_is_a_timeout_for_the_client_and_the_server_can_still_be_stopped(tmp_path: Path) -> None:
    process, launch = started(tmp_path, do="hang", call="decode", at=3)
    with process:
        process.wait_healthy(launch.host, launch.port, deadline_s=SERVER.start_timeout_s)
        assert processes_of(tmp_path)
        with pytest.raises(httpx.ReadTimeout):
            ask(launch, timeout_s=5)
        report = process.stop(grace_s=SERVER.stop_grace_s)

    assert report.was_asked
    # A process that was killed is there until the kernel has ended it.
    assert comes_true(lambda: not processes_of(tmp_path))


def test_a_copy_that_fails_is_a_full_prefill_that_no_counter_tells_of(tmp_path: Path) -> None:
    process, launch = started(tmp_path, do="error", call="copy", at=0)
    with process:
        process.wait_healthy(launch.host, launch.port, deadline_s=SERVER.start_timeout_s)
        first, failed, reused = (ask(launch, timeout_s=120).json() for _ in range(3))
        process.stop(grace_s=SERVER.stop_grace_s)

    # The answer is right, though the target slot holds a copy in part.
    assert failed["choices"][0]["text"] == reused["choices"][0]["text"] == first["choices"][0]["text"]
    cached = [one["usage"]["prompt_tokens_details"]["cached_tokens"] for one in (first, failed, reused)]
    assert cached == [0, 128, 128]
    trace = [json.loads(line) for line in (tmp_path / "device_trace.jsonl").read_text().splitlines()]
    prefills = [record for record in trace if record["kind"] == "prefill"]
    assert [record["first_position"] for record in prefills] == [0, 128, 0, 128, 128]
    counts = ParseCounts()
    events = list(parse_log([(tmp_path / "server.log").read_bytes()], counts))
    assert [len(event.request_ids) for event in events if isinstance(event, KvCopyFailedEvent)] == [1]
    assert counts.unread == 0, counts.unread_samples
