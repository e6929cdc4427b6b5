"""Whoever is killed, and whenever: nothing of the server stays behind."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import psutil
import pytest

from harness.clock import NS_PER_MS
from harness.errors import ServerError
from harness.measure.server.process import free_port, port_is_free
from tests.support.places import processes_naming
from tests.support.processes import (
    HOST,
    WITHIN_S,
    check_until_it_fails,
    child_named_in,
    clock,
    comes_true,
    ends,
    is_alive,
    start_tiny_server,
    tiny_server_argv,
)

pytestmark = pytest.mark.live

# A harness that starts a server, says its pid, and then replays until it is killed.
HARNESS = """
import sys
from pathlib import Path
from harness.clock import MonotonicClock
from harness.measure.server.process import ServerLog, ServerProcess
folder, fork, port, *argv = sys.argv[1:]
folder = Path(folder)
server = ServerProcess.start(
    argv, log=ServerLog(folder / "server.log", folder / "stamps", MonotonicClock()), orphan_grace_s=0.2
)
print(server.pid, flush=True)
if fork == "fork":
    # A child that lives on with a copy of every descriptor: the end of the socket pair stays open.
    import os, signal
    if os.fork() == 0:
        signal.pause()
server.wait_healthy("127.0.0.1", int(port), deadline_s=120)
print("healthy", flush=True)
sys.stdin.read()
"""


def wait_ms(milliseconds: float) -> None:
    clock.sleep_until_ns(clock.now_ns() + int(milliseconds * NS_PER_MS))


def start_harness(folder: Path, port: int, *, fork: str = "no-fork") -> subprocess.Popen[str]:
    argv = tiny_server_argv(port, "--ignore-term", "--child", "own-session")
    return subprocess.Popen(
        [sys.executable, "-c", HARNESS, str(folder), fork, str(port), *argv],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def clean_up(harness: subprocess.Popen[str]) -> None:
    # The group outlives its leader when the harness forked; otherwise it is gone by now.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(harness.pid, signal.SIGKILL)
    harness.wait()
    for stream in (harness.stdin, harness.stdout):
        stream.close()


@pytest.mark.parametrize("fork", ["no-fork", "fork"])
def test_a_killed_harness_leaves_no_server_and_no_engine_process(tmp_path: Path, fork: str) -> None:
    port = free_port()
    harness = start_harness(tmp_path, port, fork=fork)
    try:
        server = int(harness.stdout.readline())
        assert harness.stdout.readline() == "healthy\n"
        engine = child_named_in(tmp_path / "server.log")
        os.kill(harness.pid, signal.SIGKILL)
        assert ends(server)
        assert ends(engine)
        assert comes_true(lambda: port_is_free(HOST, port))
    finally:
        clean_up(harness)


@pytest.mark.parametrize("seed", range(4))
def test_a_harness_killed_at_any_moment_of_the_start_leaves_nothing(tmp_path: Path, seed: int) -> None:
    harness = start_harness(tmp_path, free_port())
    try:
        wait_ms(random.Random(seed).uniform(0, 600))
        os.kill(harness.pid, signal.SIGKILL)
        harness.wait()
        # Every process that was started on the way carries the run's folder or the server's script in its arguments.
        assert comes_true(lambda: not processes_naming(tmp_path)), processes_naming(tmp_path)
        log = tmp_path / "server.log"
        lines = log.read_text().splitlines() if log.exists() else []
        children = [int(line.split()[1]) for line in lines if line.startswith("child ")]
        assert all(ends(child) for child in children)
    finally:
        clean_up(harness)


def test_the_supervisor_killed_too_takes_the_server_with_it(tmp_path: Path) -> None:
    port = free_port()
    server = start_tiny_server(tmp_path, port, "--child", "same-group")
    server.wait_healthy(HOST, port, deadline_s=WITHIN_S)
    engine = child_named_in(tmp_path / "server.log")
    psutil.Process(server.pid).parent().kill()
    with pytest.raises(ServerError, match="ended by itself with unknown exit status"):
        check_until_it_fails(server)
    assert not is_alive(server.pid)
    assert not is_alive(engine)


@pytest.mark.parametrize("seed", range(3))
def test_a_server_killed_during_requests_is_reported_and_gone(tmp_path: Path, seed: int) -> None:
    port = free_port()
    server = start_tiny_server(tmp_path, port, "--child", "own-session")
    server.wait_healthy(HOST, port, deadline_s=WITHIN_S)
    engine = child_named_in(tmp_path / "server.log")
    answers: list[str] = []
    client = threading.Thread(target=ask_until_it_fails, args=(port, answers))
    client.start()
    wait_ms(random.Random(seed).uniform(0, 300))
    os.kill(server.pid, signal.SIGKILL)
    client.join(WITHIN_S)
    assert not client.is_alive()
    report = server.stop()
    assert not report.was_asked or report.returncode == -signal.SIGKILL
    assert report.ending == "signal SIGKILL"
    assert report.is_port_free
    assert not is_alive(engine)
    assert answers[-1] not in ("", "ok")


def ask_until_it_fails(port: int, answers: list[str]) -> None:
    while True:
        try:
            answers.append(httpx.get(f"http://{HOST}:{port}/", trust_env=False, timeout=WITHIN_S).text)
        except httpx.HTTPError as error:
            answers.append(type(error).__name__)
            return
