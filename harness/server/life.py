"""The life of whatever server a run uses: a process of ours, or a server that somebody else started.

What somebody else started is looked at and left alone.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Protocol

from harness.client.target import Endpoint
from harness.clock import NS_PER_MS, NS_PER_S, Clock, MonotonicClock
from harness.errors import ServerError
from harness.server.ask import HTTP_OK, NO_ANSWER, Reply, ask, ask_endpoint
from harness.server.launch import LaunchPlan
from harness.server.process import ExitReport, ServerProcess

ANSWER_TIMEOUT_S = 10.0
MODELS = "/v1/models"
POLL_NS = 200 * NS_PER_MS


class ServerLife(Protocol):
    """What a run needs of a server, from its first healthy answer to its end. As a context it leaves nothing behind."""

    pid: int

    def __enter__(self) -> ServerLife: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    @property
    def has_exited(self) -> bool: ...

    def wait_healthy(self, host: str, port: int, *, deadline_s: float, path: str = "/health") -> int: ...

    def stop(self, grace_s: float = 10.0) -> ExitReport: ...

    def kill(self) -> ExitReport: ...


def start_server(launch: LaunchPlan, *, log_path: Path, stamps_path: Path, clock: Clock) -> ServerLife:
    """A fresh server for ``launch``, or a hold on the one that is there already."""
    if not launch.is_ours:
        # The files of a run are always there; this one stays empty, for the log is somebody else's.
        log_path.touch()
        stamps_path.touch()
        return AttachedServer(launch)
    return ServerProcess.start(
        launch.argv,
        env=launch.env,
        log_path=log_path,
        stamps_path=stamps_path,
        clock=clock,
        scratch_variable=launch.scratch_variable,
    )


class AttachedServer:
    """A server that is only looked at. ``stop`` and ``kill`` let go of it."""

    pid = 0

    def __init__(self, launch: LaunchPlan) -> None:
        self._endpoint = launch.endpoint
        self._clock = MonotonicClock()

    def __enter__(self) -> AttachedServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del kind, error, trace

    @property
    def has_exited(self) -> bool:
        """Whether it has stopped answering."""
        return get_at(self._endpoint, MODELS).status == NO_ANSWER

    def wait_healthy(self, host: str, port: int, *, deadline_s: float, path: str = "/health") -> int:
        """Wall ns until it answered; it should at once, but it may be starting."""
        del host, port, path  # not every server that speaks as vLLM does has /health
        started_ns = self._clock.now_ns()
        while (waited_ns := self._clock.now_ns() - started_ns) < int(deadline_s * NS_PER_S):
            if get_at(self._endpoint, MODELS).status == HTTP_OK:
                return waited_ns
            self._clock.sleep_until_ns(self._clock.now_ns() + POLL_NS)
        raise ServerError(
            f"does not answer GET {MODELS} with 200 within {deadline_s:g} s",
            where=self._endpoint.url,
            hint="Check server.url",
        )

    def stop(self, grace_s: float = 10.0) -> ExitReport:
        del grace_s
        return ExitReport(pid=0, returncode=None, was_asked=False, killed=(), stop_ns=0, log_bytes=0, is_port_free=None)

    def kill(self) -> ExitReport:
        return self.stop()


def get_at(endpoint: Endpoint, path: str) -> Reply:
    """As ``get``, from wherever a server is reached."""
    return ask_endpoint(endpoint, path, deadline_s=ANSWER_TIMEOUT_S)


def get(host: str, port: int, path: str) -> Reply:
    """What the server says to GET ``path``, within the time that a server which is there needs."""
    return ask(host, port, path, deadline_s=ANSWER_TIMEOUT_S)
