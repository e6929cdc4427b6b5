"""What tests know about time and processes: a clock that jumps, is a process alive, which child did a server name."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from harness.clock import NS_PER_MS, NS_PER_S, Clock, MonotonicClock
from harness.measure.server.life import LaunchPlan
from harness.measure.server.process import ServerLog, ServerProcess

TINY_SERVER = Path(__file__).with_name("tiny_server.py")
HOST = "127.0.0.1"
NO_PORT = 1
"""Nobody listens there. A port that was free may be another suite's by the time that it is asked."""
WITHIN_S = 120.0
"""What will happen has happened by then, however busy the machine is. A test never waits so long but to fail."""
clock = MonotonicClock()


def tiny_server_argv(port: int, *options: str) -> list[str]:
    return [sys.executable, "-u", str(TINY_SERVER), "--port", str(port), *options]


def start_tiny_server(folder: Path, port: int, *options: str) -> ServerProcess:
    return ServerProcess.start(
        tiny_server_argv(port, *options), log=ServerLog(folder / "server.log", folder / "server.log.stamps", clock)
    )


def start_launched(launch: LaunchPlan, folder: Path, clock: Clock | None = None) -> ServerProcess:
    """What a backend planned, started; its log and the log's stamps go into ``folder``."""
    return ServerProcess.start(
        launch.argv,
        env=launch.env,
        log=ServerLog(folder / "server.log", folder / "server.log.stamps", clock or MonotonicClock()),
    )


@contextmanager
def serving(
    launch: LaunchPlan, folder: Path, clock: Clock | None = None, *, ready_within_s: float = 300.0
) -> Generator[ServerProcess, None, None]:
    """As ``start_launched``, and healthy."""
    with start_launched(launch, folder, clock) as process:
        process.wait_healthy(launch.host, launch.port, deadline_s=ready_within_s)
        yield process


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def comes_true(fact: Callable[[], object], seconds: float = WITHIN_S) -> bool:
    """Whether ``fact`` becomes true in time. Another time than ``WITHIN_S`` is for what shall not become true."""
    deadline_ns = clock.now_ns() + int(seconds * NS_PER_S)
    while not fact():
        if clock.now_ns() > deadline_ns:
            return False
        clock.sleep_until_ns(clock.now_ns() + 20 * NS_PER_MS)
    return True


def ends(pid: int) -> bool:
    return comes_true(lambda: not is_alive(pid))


def commands_of_children() -> list[tuple[psutil.Process, str]]:
    """This process's children and theirs, each with its command line; without those that ended meanwhile."""
    living: list[tuple[psutil.Process, str]] = []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            living.append((child, " ".join(child.cmdline())))
    return living


def servers_of_ours() -> list[psutil.Process]:
    """What supervisors of this process started: each leads a group of its own, in the session of its supervisor."""
    living = [child for child, _ in commands_of_children()]
    return [child for child in living if os.getpgid(child.pid) == child.pid != os.getsid(child.pid)]


def check_until_it_fails(server: ServerProcess) -> None:
    """Raises what ``server.check`` raises once it does."""
    comes_true(server.check)


def child_named_in(log: Path) -> int:
    """The pid in the log line ``child <pid>``."""

    def named() -> list[str]:
        lines = log.read_text().splitlines(keepends=True) if log.exists() else []
        return [line for line in lines if line.startswith("child ") and line.endswith("\n")]

    assert comes_true(named), f"no child in {log}"
    return int(named()[0].split()[1])


class VirtualClock:
    """A clock that jumps."""

    scale = 1.0

    def __init__(self, start_ns: int = 0) -> None:
        self._now_ns = start_ns

    def now_ns(self) -> int:
        return self._now_ns

    def sleep_until_ns(self, deadline_ns: int) -> None:
        self._now_ns = max(self._now_ns, deadline_ns)

    async def wait_until_ns(self, deadline_ns: int) -> None:
        self._now_ns = max(self._now_ns, deadline_ns)
        await asyncio.sleep(0)  # noqa: TID251  # no time passes: other tasks get their turn
