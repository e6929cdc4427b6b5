"""A server that somebody else started, as a backend; and the life of whatever server a run uses.

An attached server is never started, restarted, stopped or configured; every run on it says so. Next: the runner takes a
ServerLife from ``start_server`` and treats both kinds alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol
from urllib.parse import urlsplit

import httpx

from harness.clock import NS_PER_MS, NS_PER_S, Clock, MonotonicClock
from harness.errors import ServerError, SpecError
from harness.live.launch import Backend, LaunchOptions, LaunchPlan
from harness.live.server.process import ExitReport, ServerProcess, url_host
from harness.records import Finding, Observation
from harness.spec import ServerSpec

ANSWER_TIMEOUT_S = 10.0
POLL_NS = 200 * NS_PER_MS
HTTP_OK = 200
ATTACHED = Finding(
    code="server-attached",
    severity="warning",
    evidence="the server was started by somebody else and not restarted for this run",
    hint="What it held or did before is part of this run; compare only with runs that say the same",
)


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
        self._url = f"http://{url_host(launch.host)}:{launch.port}"
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
        return _get(f"{self._url}/health") is None

    def wait_healthy(self, host: str, port: int, *, deadline_s: float, path: str = "/health") -> int:
        """Wall ns until it answered; it should at once, but it may be starting."""
        del host, port
        started_ns = self._clock.now_ns()
        while (waited_ns := self._clock.now_ns() - started_ns) < int(deadline_s * NS_PER_S):
            response = _get(f"{self._url}{path}")
            if response is not None and response.status_code == HTTP_OK:
                return waited_ns
            self._clock.sleep_until_ns(self._clock.now_ns() + POLL_NS)
        raise ServerError(
            f"does not answer GET {path} with 200 within {deadline_s:g} s", where=self._url, hint="Check server.url"
        )

    def stop(self, grace_s: float = 10.0) -> ExitReport:
        del grace_s
        return ExitReport(pid=0, returncode=None, was_asked=False, killed=(), stop_ns=0, log_bytes=0, is_port_free=None)

    def kill(self) -> ExitReport:
        return self.stop()


@dataclass(frozen=True, slots=True)
class AttachedBackend(Backend):
    """Somebody else's OpenAI-compatible server at ``server.url``; the model is the first one it lists."""

    name: str = "attached"
    label: str = "attached server (started by somebody else, not restarted between runs)"
    allows_time_scale: bool = False

    def _plan(self, server: ServerSpec, options: LaunchOptions) -> LaunchPlan:
        del options  # nothing is launched
        host, number = _address(server.url)
        url = f"http://{url_host(host)}:{number}"
        return LaunchPlan(
            backend=self.name,
            argv=(),
            host=host,
            port=number,
            model=_first_model(url),
            requested={"server": server.model_dump(mode="json"), "url": url, "version": _version(url)},
            observation=Observation(steps="none", has_kv_log=False),
            is_ours=False,
            findings=(ATTACHED,),
        )


def _address(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        port = None
    if parts.scheme != "http" or not parts.hostname or not port or parts.path not in ("", "/"):
        raise SpecError(
            f"is {url!r}, not http://HOST:PORT", where="server.url", hint='Write for example "http://127.0.0.1:8000"'
        )
    return parts.hostname, port


def _first_model(url: str) -> str:
    response = _get(f"{url}/v1/models")
    if response is None:
        raise ServerError("no server answers there", where=url, hint="Start it, or change server.url")
    try:
        return str(response.json()["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        raise ServerError(
            f"GET /v1/models gives status {response.status_code} and no model",
            where=url,
            hint="Is it an OpenAI-compatible server?",
        ) from None


def _version(url: str) -> str:
    response = _get(f"{url}/version")
    try:
        answer: Any = {} if response is None else response.json()
        return str(answer.get("version", ""))
    except (ValueError, AttributeError):
        return ""


def _get(url: str) -> httpx.Response | None:
    """The answer, or None when there is none; no proxy of the environment stands between."""
    try:
        with httpx.Client(timeout=ANSWER_TIMEOUT_S, trust_env=False, verify=False) as http:
            return http.get(url)
    except httpx.HTTPError:
        return None
