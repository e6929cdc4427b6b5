"""Processes forked from one that has loaded everything already: a start costs a tenth of a new interpreter's.

Tests about how a process starts and dies start a real interpreter.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_from = SimpleNamespace(processes=multiprocessing.get_context("forkserver"))
_from.processes.set_forkserver_preload(["tests.support.loaded"])


def start_forked(work: Callable[..., object], *arguments: Any, **of_process: Any) -> BaseProcess:
    """A process that calls ``work``; of_process: as ``in_place_of`` takes it."""
    process = _from.processes.Process(target=_work, args=(work, arguments, of_process))
    process.start()
    return process


def fork_from_here() -> None:
    """From now on fork from this very process, which was forked itself."""
    _from.processes = multiprocessing.get_context("fork")


def _work(work: Callable[..., object], arguments: tuple[Any, ...], of_process: Mapping[str, Any]) -> None:
    in_place_of(**of_process)
    work(*arguments)


def in_place_of(*, cwd: Path, variables: Mapping[str, str], out: Path, err: Path) -> None:
    """Make this process, which was just forked, what a new one of that folder, environment and outputs would be."""
    for descriptor, path in ((1, out), (2, err)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, descriptor)
        os.close(file)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(variables)
    tempfile.tempdir = None
    gc.freeze()


class ForkedProcess:
    """A forked process with the methods of ``subprocess.Popen`` that tests use."""

    def __init__(self, process: BaseProcess) -> None:
        self._process = process
        assert process.pid is not None
        self.pid = process.pid

    def poll(self) -> int | None:
        """Its exit status; None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status, at its end; subprocess.TimeoutExpired where that does not come in time. timeout: s."""
        self._process.join(timeout)
        if (status := self._process.exitcode) is None:
            raise subprocess.TimeoutExpired(["forked process"], timeout or 0)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()
