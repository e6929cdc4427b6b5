"""Children of ours that a test's own process starts for a run, forked from one that has loaded everything already.

Most of a start is imports. Forked are supervisors and the servers of ours that they start, processes of a client and
those that serve it, and workers of a fleet with all that these start; so too where a command started them that was
forked itself (``command_line``). Servers of the twin are forked by ``stack_servers``. Other programs, and what another
process starts, start as ever; so do the emulator's
command in ``tests/runner/backends/test_emulator.py`` and ``tests/measure/emulator/test_server.py``, and all children in
a block of ``started_anew``.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import harness.processes
from harness.children import own_command
from harness.measure.server import process
from harness.runner.fleet import driver
from tests.support import forked
from tests.support.forked import ForkedProcess, start_forked
from tests.support.stack_servers import is_shared, start_supervisor

OURS = own_command("")[:-1]
SUPERVISOR, WORKER = "harness.measure.server.supervisor:main", "harness.runner.fleet.worker:main"
_start = process.ServerProcess.start
of_fleets: list[ForkedProcess] = []
"""Every worker of a fleet so far."""


def fork_children() -> None:
    """From now on."""
    process.ServerProcess.start = _server  # pyright: ignore[reportAttributeAccessIssue]
    _fork_from(harness.processes, driver)


def _fork_from(*modules: ModuleType, popen: Any = None) -> None:
    """What starts a program in these modules. popen: in place of one that forks."""
    for module in modules:
        given: Any = module
        given.subprocess = SimpleNamespace(**{**vars(subprocess), "Popen": popen or _forked})


@contextmanager
def started_anew() -> Any:
    """In the block children of ours are started by their commands, as any program."""
    process.ServerProcess.start = _start
    _fork_from(harness.processes, driver, popen=subprocess.Popen)
    try:
        yield
    finally:
        fork_children()


def _server(argv: Sequence[str], **options: Any) -> process.ServerProcess:
    """As ``ServerProcess.start``."""
    env = {**os.environ, **(options.get("env") or {})}
    if is_shared(argv, env):
        _fork_from(process, popen=partial(start_supervisor, argv, env))
    elif tuple(argv[: len(OURS)]) == OURS:
        _fork_from(process)
    else:
        return _start(argv, **options)
    try:
        return _start(argv, **options)
    finally:
        _fork_from(process, popen=subprocess.Popen)


def _forked(command: Sequence[str], *, pass_fds: tuple[int], **_streams: Any) -> ForkedProcess:
    """In place of ``Popen``, for a child of ours that gets one end of a connection. pass_fds: that end."""
    nowhere, (connection,) = Path(os.devnull), pass_fds
    with socket.socket(fileno=os.dup(connection)) as theirs:
        work = start_forked(
            _work, command[len(OURS)], theirs, cwd=Path.cwd(), variables=dict(os.environ), out=nowhere, err=nowhere
        )
    if command[len(OURS)] == WORKER:
        of_fleets.append(ForkedProcess(work))
    return ForkedProcess(work)


def _work(function: str, connection: socket.socket) -> None:
    os.setsid()
    number = connection.detach()
    _close_sockets(but=number)
    words = [str(number)]
    if function == WORKER:
        # What a process forks that was forked itself is a child of its own.
        forked.fork_from_here()
        fork_children()
    elif function == SUPERVISOR:
        os.execvpe = _become
        words.append(str(os.getppid()))
    _call(function, *words)


def _call(function: str, *words: str) -> int:
    module, _, name = function.partition(":")
    sys.argv = [function, *words]
    return getattr(import_module(module), name)(*words) or 0


def _become(file: str, argv: Sequence[str], variables: Mapping[str, str]) -> None:
    """As the system does for a program and Python before its ``main``, but with the modules of this process."""
    del file
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    for number in _descriptors():
        with suppress(OSError):  # that of the listing itself
            if fcntl.fcntl(number, fcntl.F_GETFD) & fcntl.FD_CLOEXEC:
                os.close(number)
    os.environ.clear()
    os.environ.update(variables)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1) for number in (1, 2))
    os._exit(_call(*argv[len(OURS) :]))


def _close_sockets(*, but: int) -> None:
    """A copy of an end would keep that connection open when its owner dies."""
    for number in _descriptors():
        with suppress(OSError):
            if number != but and stat.S_ISSOCK(os.fstat(number).st_mode):
                os.close(number)


def _descriptors() -> list[int]:
    return [int(path.name) for path in Path("/proc/self/fd").iterdir()]
