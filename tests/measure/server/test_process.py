"""A server's life through the public doors of harness.measure.server.process, on small servers of our own."""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from harness.clock import ScaledClock
from harness.errors import ServerError
from harness.measure.server.process import ServerLog, ServerProcess, free_port, port_is_free, port_owner, require_port
from harness.secrets import note_secrets
from tests.support.processes import (
    HOST,
    WITHIN_S,
    check_until_it_fails,
    child_named_in,
    clock,
    ends,
    is_alive,
    start_tiny_server,
)

pytestmark = pytest.mark.live


def test_a_healthy_server_answers_and_is_gone_after_stop(tmp_path: Path) -> None:
    port = free_port()
    server = start_tiny_server(tmp_path, port)
    server.wait_healthy(HOST, port, deadline_s=WITHIN_S)
    assert is_alive(server.pid)
    assert os.getpgid(server.pid) == server.pid
    report = server.stop(grace_s=WITHIN_S)
    assert not is_alive(server.pid)
    assert (report.returncode, report.ending) == (-signal.SIGTERM, "signal SIGTERM")
    assert report.was_asked
    assert report.killed == ()
    assert report.is_port_free
    assert server.stop() == report


def test_the_log_is_kept_as_bytes_with_a_stamp_for_every_read(tmp_path: Path) -> None:
    code = (
        r"import os, sys; os.write(1, b'out \xff\x00 torn'); os.write(2, b' line\nnext\n'); os.write(1, b'x' * 300000)"
    )
    model_clock = ScaledClock(4.0)
    before_ns = model_clock.now_ns()
    server = ServerProcess.start(
        [sys.executable, "-c", code],
        log=ServerLog(tmp_path / "server.log", tmp_path / "server.log.stamps", model_clock),
    )
    assert ends(server.pid)
    report = server.stop()
    log = (tmp_path / "server.log").read_bytes()
    assert log == b"out \xff\x00 torn line\nnext\n" + b"x" * 300_000
    assert report.log_bytes == len(log)
    stamps = np.fromfile(tmp_path / "server.log.stamps", dtype="<i8").reshape(-1, 2)
    offsets, received_ns = stamps[:, 0], stamps[:, 1]
    assert offsets[0] == 0
    assert (np.diff(offsets) > 0).all()
    assert offsets[-1] < len(log)
    assert before_ns <= received_ns[0]
    assert (np.diff(received_ns) >= 0).all()
    assert received_ns[-1] <= model_clock.now_ns()


def test_a_server_that_dies_while_starting_is_one_error_with_its_last_lines(tmp_path: Path) -> None:
    port = free_port()
    server = start_tiny_server(tmp_path, port, "--fail", "3")
    with pytest.raises(ServerError, match=r"exit code 3[\s\S]*loading the model\n  ValueError: no such artifact"):
        server.wait_healthy(HOST, port, deadline_s=WITHIN_S)
    assert not is_alive(server.pid)


def test_a_server_that_never_gets_healthy_is_ended_at_the_deadline(tmp_path: Path) -> None:
    port = free_port()
    server = start_tiny_server(tmp_path, port, "--ignore-term", "--child", "own-session")
    child = child_named_in(tmp_path / "server.log")
    server.wait_healthy(HOST, port, deadline_s=WITHIN_S)
    with pytest.raises(ServerError, match=r"not healthy after 0.3 s \(/unhealthy on port \d+: HTTP 503\)"):
        server.wait_healthy(HOST, port, deadline_s=0.3, path="/unhealthy")
    assert not is_alive(server.pid)
    assert not is_alive(child)
    assert port_is_free(HOST, port)


def test_a_person_who_gives_up_need_not_wait_for_a_server_that_still_starts(tmp_path: Path) -> None:
    port, asked = free_port(), list[bool]()

    def gives_up_at_the_third_look() -> bool:
        asked.append(True)
        return len(asked) == 3

    with start_tiny_server(tmp_path, port) as server:
        server.wait_healthy(HOST, port, deadline_s=600, path="/unhealthy", is_stopped=gives_up_at_the_third_look)
        assert len(asked) == 3
        assert is_alive(server.pid)
    assert not is_alive(server.pid)


def test_a_program_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match=r"no-such-server: cannot be started: .*No such file or directory"):
        ServerProcess.start(["no-such-server"], log=ServerLog(tmp_path / "log", tmp_path / "stamps", clock))


def test_a_log_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="missing/log: No such file"):
        ServerProcess.start(
            [sys.executable, "-c", "pass"], log=ServerLog(tmp_path / "missing" / "log", tmp_path / "stamps", clock)
        )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_ends_the_server_with_a_clear_error(tmp_path: Path) -> None:
    # With a key that logs are searched for: this log has no end.
    note_secrets(["a-key-that-no-log-repeats"])
    server = ServerProcess.start(
        [sys.executable, "-c", "import signal; print('hello', flush=True); signal.pause()"],
        log=ServerLog(Path("/dev/full"), tmp_path / "stamps", clock),
    )
    with pytest.raises(ServerError, match=r"its log cannot be written .*No space left"):
        check_until_it_fails(server)
    assert not is_alive(server.pid)


def test_a_server_that_ignores_sigterm_is_killed_with_all_its_group(tmp_path: Path) -> None:
    port = free_port()
    server = start_tiny_server(tmp_path, port, "--ignore-term", "--child", "same-group")
    server.wait_healthy(HOST, port, deadline_s=WITHIN_S)
    child = child_named_in(tmp_path / "server.log")
    report = server.stop(grace_s=0.2)
    assert set(report.killed) == {server.pid, child}
    assert report.ending == "signal SIGKILL"
    assert not is_alive(server.pid)
    assert not is_alive(child)
    assert report.is_port_free


def test_a_child_that_left_the_group_and_outlived_the_server_is_found(tmp_path: Path) -> None:
    port = free_port()
    server = start_tiny_server(tmp_path, port, "--child", "own-session")
    server.wait_healthy(HOST, port, deadline_s=WITHIN_S)
    child = child_named_in(tmp_path / "server.log")
    assert os.getpgid(child) != server.pid
    # Time for the server to end by itself: it ends at once where it is let.
    report = server.stop(grace_s=3)
    assert report.killed == (child,)
    assert report.ending == "signal SIGTERM"
    assert not is_alive(child)


def test_a_server_that_ends_between_two_requests_fails_the_next_check(tmp_path: Path) -> None:
    port = free_port()
    server = start_tiny_server(tmp_path, port)
    server.wait_healthy(HOST, port, deadline_s=WITHIN_S)
    server.check()
    os.kill(server.pid, signal.SIGKILL)
    assert ends(server.pid)
    with pytest.raises(ServerError, match="ended by itself with signal SIGKILL"):
        check_until_it_fails(server)
    assert server.has_exited
    assert not server.exit_report.was_asked


def test_an_error_inside_the_with_block_still_ends_the_server(tmp_path: Path) -> None:
    server = start_tiny_server(tmp_path, free_port(), "--ignore-term")
    with pytest.raises(KeyboardInterrupt), server:
        raise KeyboardInterrupt
    assert not is_alive(server.pid)


def said(folder: Path, *argv: str, **settings: Any) -> str:
    """The log of a program that ends by itself."""
    server = ServerProcess.start(argv, log=ServerLog(folder / "log", folder / "stamps", clock), **settings)
    assert ends(server.pid)
    server.stop()
    return (folder / "log").read_text()


def test_the_server_reads_nothing_and_inherits_no_descriptor(tmp_path: Path) -> None:
    code = "import os, sys; print(sorted(map(int, os.listdir('/proc/self/fd')))[:-1], sys.stdin.read() == '')"
    assert said(tmp_path, sys.executable, "-c", code) == "[0, 1, 2] True\n"


def test_additions_to_the_environment_reach_the_server(tmp_path: Path) -> None:
    code = "import os; print(os.environ['GREETING'], 'PATH' in os.environ)"
    assert said(tmp_path, sys.executable, "-c", code, env={"GREETING": "hallo"}) == "hallo True\n"


def test_a_log_hides_what_it_repeats_of_a_key_and_keeps_every_byte_in_its_place(tmp_path: Path) -> None:
    note_secrets(["sk-of-the-client"])
    assert said(tmp_path, "echo", "before", "sk-of-the-client", "after") == f"before {'*' * 16} after\n"


def test_a_busy_port_is_named_with_the_process_that_holds_it() -> None:
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        listener.listen(1)
        port = listener.getsockname()[1]
        assert not port_is_free(HOST, port)
        assert port_owner(port) == (os.getpid(), Path("/proc/self/comm").read_text().strip())
        with pytest.raises(ServerError, match=rf"port {port} is in use by pid {os.getpid()}"):
            require_port(HOST, port)
    assert port_is_free(HOST, port)
    assert require_port(HOST, port) == port
    assert port_owner(port) is None


def test_a_port_with_closed_connections_can_be_used_again_at_once(tmp_path: Path) -> None:
    port = free_port()
    for _ in range(2):
        server = start_tiny_server(tmp_path, port)
        server.wait_healthy(HOST, port, deadline_s=WITHIN_S)
        assert httpx.get(f"http://{HOST}:{port}/", trust_env=False, timeout=WITHIN_S).text == "ok"
        assert server.stop().is_port_free
