"""Servers of the twin forked from a process that has loaded its stack: a start costs a fifth of one that loads it.

One such process for each environment and each PYTHONPATH serves all processes of the tests, and ends with them. Forked
are servers whose engine is forked too (``VLLM_WORKER_MULTIPROC_METHOD``), and none without the variable ``TESTS``. An
environment that is edited after a server of it has started needs another name.
"""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from harness.clock import NS_PER_S, MonotonicClock
from harness.extras.twin.install import SERVED_MODULES

CHECKOUT = Path(__file__).resolve().parents[2]
LOADED_STACK = Path(__file__).with_name("loaded_stack.py")
TESTS = "TESTS_WITH_LOADED_STACKS"
"""Variable with the pid of the process that runs the tests, or of the one that shares them out."""
MODULES = (*SERVED_MODULES, "vllm.entrypoints.cli.serve", "vllm.v1.engine.core", "vllm.v1.engine.async_llm")
METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
PATIENCE_S = 300
_started: dict[str, subprocess.Popen[bytes]] = {}


def share_stacks() -> None:
    """From now on, in this process and those that it starts."""
    os.environ[METHOD] = "fork"
    runs_tests = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()
    os.environ.setdefault(TESTS, str(runs_tests))


def is_shared(argv: Sequence[str], env: Mapping[str, str]) -> bool:
    """Whether the command is a server of the real stack, to be forked."""
    if env.get(METHOD) != "fork" or TESTS not in env or Path(argv[0]).name != "vllm":
        return False
    return any(Path(argv[0]).parents[1].glob("lib/python3.*/site-packages/vllm_rbln"))


class StackProcess:
    """A supervisor that was forked, with the methods of ``subprocess.Popen`` that the harness uses."""

    def __init__(self, pid: int, status: int) -> None:
        self.pid = pid
        self._status = status
        self._returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status, at its end; subprocess.TimeoutExpired where that does not come in time. timeout: s."""
        if self._returncode is None:
            with socket.socket(fileno=self._status) as end:
                end.settimeout(timeout)
                try:
                    said = end.recv(16)
                except TimeoutError:
                    self._status = end.detach()
                    raise subprocess.TimeoutExpired(["forked supervisor"], timeout or 0) from None
                self._returncode = int(said or -signal.SIGKILL)
        return self._returncode

    def poll(self) -> int | None:
        """Its exit status; None while it runs."""
        with suppress(subprocess.TimeoutExpired):
            return self.wait(1e-6)
        return None

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def start_supervisor(
    argv: Sequence[str], env: Mapping[str, str], _command: Sequence[str], *, pass_fds: tuple[int], **_streams: Any
) -> StackProcess:
    """In place of ``Popen``: the supervisor of the server of ``argv``. pass_fds: its end of the connection to us."""
    ours, theirs = socket.socketpair()
    with theirs, _connected(argv, env) as stack:
        socket.send_fds(stack, [b"supervisor"], [*pass_fds, theirs.fileno()])
        pid = stack.recv(16)
    if not pid:
        ours.close()
        raise AssertionError(f"{argv[0]}: its stack does not load: {' '.join(_words(argv, env))}")
    return StackProcess(int(pid), ours.detach())


def _connected(argv: Sequence[str], env: Mapping[str, str]) -> socket.socket:
    """A connection to the process that has loaded the stack, which is started where there is none."""
    clock = MonotonicClock()
    until_ns = clock.now_ns() + PATIENCE_S * NS_PER_S
    name = _name(argv, env)
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(f"\0{name}")
        except ConnectionRefusedError:
            connection.close()
        else:
            connection.settimeout(PATIENCE_S)
            return connection
        if name not in _started or _started[name].poll() is not None:
            _started[name] = _start(argv, env)
        clock.sleep_until_ns(clock.now_ns() + NS_PER_S // 50)
        if clock.now_ns() > until_ns:
            raise AssertionError(f"{argv[0]}: its stack does not load: {' '.join(_words(argv, env))}")


def _start(argv: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    own = {name: value for name, value in env.items() if name != "VLLM_LOGGING_CONFIG_PATH"}
    nowhere: Any = subprocess.DEVNULL
    return subprocess.Popen(
        _words(argv, env), env=own, cwd="/", stdin=nowhere, stdout=nowhere, stderr=nowhere, start_new_session=True
    )


def _words(argv: Sequence[str], env: Mapping[str, str]) -> list[str]:
    python = str(Path(argv[0]).with_name("python"))
    return [python, str(LOADED_STACK), _name(argv, env), env[TESTS], str(CHECKOUT), *MODULES]


def _name(argv: Sequence[str], env: Mapping[str, str]) -> str:
    """One for each run of the tests, release and PYTHONPATH."""
    told_apart = "\n".join((env[TESTS], argv[0], env.get("PYTHONPATH", "")))
    return f"loaded-stack-{hashlib.sha256(told_apart.encode()).hexdigest()[:16]}"
