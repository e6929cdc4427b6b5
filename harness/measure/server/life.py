"""How a run starts and holds its server: a launch plan from the backend, then a process or an attached server.

A server that somebody else started is only observed. Nothing here knows a kind of server.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from harness.clock import NS_PER_MS, NS_PER_S, Clock, MonotonicClock
from harness.errors import ServerError
from harness.measure.client.target import Endpoint
from harness.measure.records.findings import finding
from harness.measure.records.manifest import Finding, Observation
from harness.measure.server.ask import HTTP_OK, METRICS, NO_ANSWER, Reply, ask, ask_metrics
from harness.measure.server.process import ExitReport, HealthWait, ServerHandle, ServerLog, ServerProcess
from harness.redact import redacted_arguments, redacted_env
from harness.secrets import without_secrets
from harness.stacks.vllm.step_log import header_before

LogFormat = Literal["default", "precise"]
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """How to start one server. requested: the settings asked of it, for the manifest.

    env: additions to the environment of the harness. files: what the backend wrote or the server will write into the
    run folder, by role ("config", "device_trace"). observation: what the server's log will show. is_ours: False for a
    server that somebody else started. reached_at: see ``endpoint``. effective: keys of a ServerSpec with the values in
    force, as far as the launch shows them; log and metrics show the others. device_command: reports the devices' state;
    its first answer is in ``requested``. findings: they hold for every run on this server. scratch_variable: gives the
    server a folder for its sockets. read_offset: for a log that another host stamps, that host's wall clock minus our
    monotonic clock and the uncertainty, ns. appended: files that a server of somebody else appends to, and where the
    header in force of each and what is appended during the run are kept. warms_up: the server answers requests before
    the measured part. replicas: the servers behind the router that this launches. start: starts it all, where one
    process is not all.
    """

    backend: str
    argv: tuple[str, ...]
    host: str
    port: int
    model: str
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, Path] = field(default_factory=dict)
    requested: Mapping[str, Any] = field(default_factory=dict)
    observation: Observation = field(default_factory=Observation)
    is_ours: bool = True
    reached_at: Endpoint | None = None
    effective: Mapping[str, Any] = field(default_factory=dict)
    device_command: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    scratch_variable: str = ""
    read_offset: Callable[[], tuple[int, int]] | None = None
    appended: tuple[tuple[Path, Path], ...] = ()
    warms_up: bool = False
    replicas: tuple[LaunchPlan, ...] = ()
    start: Callable[[ServerLog], ServerHandle] | None = None

    @property
    def servers(self) -> tuple[LaunchPlan, ...]:
        """Every server that answers: the replicas behind the router, or this one."""
        return self.replicas or (self,)

    @property
    def endpoint(self) -> Endpoint:
        """Where the server is reached: ``reached_at``, else plain HTTP at host and port."""
        return self.reached_at or Endpoint(self.host, self.port)

    def to_json(self) -> dict[str, Any]:
        """For the manifest: no secret; files by name, since the run folder moves when it is sealed."""
        return {
            "backend": self.backend,
            "argv": list(redacted_arguments(self.argv)),
            "env": redacted_env(self.env),
            "host": self.host,
            "port": self.port,
            "model": self.model,
            "files": {role: path.name for role, path in self.files.items()},
            "requested": dict(self.requested),
            "is_ours": self.is_ours,
            **({"replicas": [replica.to_json() for replica in self.replicas]} if self.replicas else {}),
        }


def write_config(path: Path, config: Mapping[str, Any]) -> None:
    """A readable JSON file; a folder that cannot be written is a ServerError naming it."""
    with ServerError.on_os_error("cannot be written", where=path, hint="Choose a folder with room and access"):
        path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


ANSWER_TIMEOUT_S = 10.0
MODELS, HEALTH, VERSION = "/v1/models", "/health", "/version"
POLL_NS = 200 * NS_PER_MS
SERVER_FAULT, NOT_IMPLEMENTED = 500, 501


class AttachedServer(ServerHandle):
    """A server that somebody else started: only observed. ``stop`` and ``kill`` leave it running."""

    def __init__(self, launch: LaunchPlan) -> None:
        self._endpoint = launch.endpoint
        self._clock = MonotonicClock()
        self._appended = launch.appended
        self._identity: dict[str, str] = {}
        self._offsets = [source.stat().st_size for source, _kept in launch.appended]

    def __exit__(self, *_error: object) -> None:
        """Nothing is left to do."""

    @property
    def has_exited(self) -> bool:
        return get_at(self._endpoint, MODELS).status == NO_ANSWER

    def _waited(self, wanted: HealthWait) -> int:
        """Until it did not say that it is unhealthy either. It may still be starting."""
        deadline_s, started_ns, sick = wanted.deadline_s, self._clock.now_ns(), ""
        while (waited_ns := self._clock.now_ns() - started_ns) < int(deadline_s * NS_PER_S):
            left_s = deadline_s - waited_ns / NS_PER_S
            if get_at(self._endpoint, MODELS, left_s).status == HTTP_OK and not (sick := unhealthy(self._endpoint)):
                self._identity = self._asked_identity()
                return waited_ns
            if wanted.is_stopped():
                return waited_ns
            self._clock.sleep_until_ns(self._clock.now_ns() + POLL_NS)
        raise ServerError(
            f"{sick or f'does not answer GET {MODELS} with 200'} within {deadline_s:g} s",
            where=self._endpoint.url,
            hint="Check server.url, and the server's log",
        )

    def changes(self) -> tuple[Finding, ...]:
        """Findings where the server is not what it was when it was healthy, or says that it is unhealthy."""
        findings: list[Finding] = []
        if self.has_exited:
            return ()
        if sick := unhealthy(self._endpoint):
            findings.append(finding("server-unhealthy", f"after the replay {sick}"))
        now = self._asked_identity()
        for what, before in self._identity.items():
            if now[what] != before:
                evidence = f"the {what} changed during the run, from {before or 'none'} to {now[what] or 'none'}"
                findings.append(finding("server-replaced", evidence))
        return tuple(findings)

    def _asked_identity(self) -> dict[str, str]:
        """Version and models, as the server states them; a server that does not answer states nothing."""
        models, version = get_at(self._endpoint, MODELS), get_at(self._endpoint, VERSION)
        return {"list of models": names_of_models(models), "version": stated_version(version)}

    def stop(self, grace_s: float = 10.0) -> ExitReport:
        del grace_s
        self._keep_appended()
        return ExitReport(pid=0, returncode=None, was_asked=False, killed=(), stop_ns=0, log_bytes=0, is_port_free=None)

    def _keep_appended(self) -> None:
        """Copy of each file the header in force, and what was appended since the run began."""
        for (source, kept), offset in zip(self._appended, self._offsets, strict=True):
            with ServerError.on_os_error("cannot be copied", where=source), source.open("rb") as file:
                header, line = header_before(file, offset)
                kept.write_bytes(without_secrets(header + line + file.read()))


def start_server(launch: LaunchPlan, *, log_path: Path, stamps_path: Path, clock: Clock) -> ServerHandle:
    """A new process for ``launch``, or a handle on the server that runs already."""
    if launch.start is not None:
        return launch.start(ServerLog(log_path, stamps_path, clock))
    if not launch.is_ours:
        # A run always has these files; without access to the log they stay empty.
        log_path.touch()
        stamps_path.touch()
        return AttachedServer(launch)
    return ServerProcess.start(
        launch.argv,
        env=launch.env,
        log=ServerLog(log_path, stamps_path, clock),
        scratch_variable=launch.scratch_variable,
    )


def unhealthy(endpoint: Endpoint) -> str:
    """ "GET /health gives status 503"; empty where the server does not say so. Not every server has /health."""
    status = get_at(endpoint, HEALTH).status
    return f"GET {HEALTH} gives status {status}" if status >= SERVER_FAULT and status != NOT_IMPLEMENTED else ""


def names_of_models(reply: Reply) -> str:
    """The ids in a list of models, in its order; empty where there are none."""
    try:
        return ", ".join(str(model["id"]) for model in reply.json()["data"])
    except (LookupError, TypeError):
        return ""


def model_entry(reply: Reply, name: str = "") -> dict[str, Any]:
    """What a list of models says of the model ``name``, or of its first one; LookupError where it has none.

    An adapter (LoRA) names its base model as its parent: it is not the first one, and is as long as its base.
    """
    models: Any = reply.json()
    try:
        by_id: dict[str, dict[str, Any]] = {model["id"]: model for model in models["data"]}
        bases = [model for model in by_id.values() if model.get("parent") not in by_id]
        found = by_id[name] if name else [*bases, *by_id.values()][0]
        base = by_id.get(found.get("parent") or "", {})
        return found | (
            {} if found.get("max_model_len") else {"max_model_len": base.get("max_model_len")} if base else {}
        )
    except (IndexError, TypeError, AttributeError):
        raise LookupError(name) from None


def stated_version(reply: Reply) -> str:
    """The version in an answer to GET /version; empty where it has none."""
    answer: Any = reply.json()
    return str(answer.get("version", "")) if isinstance(answer, dict) else ""


def metrics_address(endpoint: Endpoint, metrics_url: str = "") -> tuple[str, Mapping[str, str]]:
    """(URL, headers) of a server's metrics; another server's get no key of this one."""
    url = metrics_url or endpoint.url + METRICS
    is_same = urlsplit(url)[:2] == urlsplit(endpoint.url)[:2]
    return url, endpoint.headers if is_same else {}


def get_metrics(endpoint: Endpoint, metrics_url: str = "") -> Reply:
    """The server's answer to GET of its metrics, or of ``metrics_url``."""
    url, headers = metrics_address(endpoint, metrics_url)
    return ask_metrics(url, deadline_s=ANSWER_TIMEOUT_S, headers=headers)[0]


def get_at(endpoint: Endpoint, path: str, most_s: float = math.inf) -> Reply:
    """The server's answer to GET ``path``, within ``most_s`` where that is shorter than the usual limit."""
    return ask(endpoint, path, deadline_s=min(ANSWER_TIMEOUT_S, most_s))
