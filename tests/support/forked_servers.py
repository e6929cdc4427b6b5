"""Servers of ours that a test's own process starts for a run, and their supervisors, forked from a process that has
loaded everything already: most of a start is imports.

The supervisor's own code starts, watches and ends them. Other servers, and those that another process starts, are
started as ever; ``tests/runner/backends/test_emulator.py`` and ``tests/measure/emulator/test_server.py`` start the
emulator's command.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from harness.children import own_command
from harness.measure.server import process
from tests.support.forked import ForkedProcess, start_forked

OURS = own_command("")[:-1]
_start = process.ServerProcess.start


def fork_servers() -> None:
    """From now on."""
    process.ServerProcess.start = _start_forked  # pyright: ignore[reportAttributeAccessIssue]


@contextmanager
def started_anew() -> Any:
    """In the block servers of ours are started by their command, as any server."""
    process.ServerProcess.start = _start
    try:
        yield
    finally:
        fork_servers()


def _start_forked(argv: Sequence[str], **options: Any) -> process.ServerProcess:
    if tuple(argv[: len(OURS)]) != OURS:
        return _start(argv, **options)
    given: Any = process
    given.subprocess = SimpleNamespace(**{**vars(subprocess), "Popen": _supervisor})
    try:
        return _start(argv, **options)
    finally:
        given.subprocess = subprocess


def _supervisor(_command: Sequence[str], *, pass_fds: tuple[int], **_streams: Any) -> ForkedProcess:
    """In place of ``Popen``. pass_fds: the supervisor's end of its connection."""
    nowhere, (control,) = Path(os.devnull), pass_fds
    with socket.socket(fileno=os.dup(control)) as theirs:
        return ForkedProcess(
            start_forked(_supervise, theirs, cwd=Path.cwd(), variables=dict(os.environ), out=nowhere, err=nowhere)
        )


def _supervise(control: socket.socket) -> None:
    from harness.measure.server import supervisor

    os.setsid()
    os.execvpe = _become
    supervisor.main(str(control.detach()), str(os.getppid()))


def _become(_file: str, argv: Sequence[str], variables: Mapping[str, str]) -> None:
    """As the system does for a program and Python for its ``main``, but with the modules of this process."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    for descriptor in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        try:
            if fcntl.fcntl(descriptor, fcntl.F_GETFD) & fcntl.FD_CLOEXEC:
                os.close(descriptor)
        except OSError:
            continue  # that of the listing itself
    os.environ.clear()
    os.environ.update(variables)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1) for number in (1, 2))
    function, *words = argv[len(OURS) :]
    module, _, name = function.partition(":")
    sys.argv = [function, *words]
    os._exit(getattr(import_module(module), name)(*words) or 0)
