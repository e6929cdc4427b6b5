"""What a backend hands over: the exact command of one server, its environment, the files it wrote.

Nothing here knows a kind of server.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from harness.client.target import Endpoint
from harness.errors import ServerError
from harness.records import Finding, Observation
from harness.redact import redacted_arguments, redacted_env

LogFormat = Literal["default", "precise"]
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """How to start one server. ``requested`` is what was asked of it, for the manifest.

    env: additions to the harness's own environment, never the whole of it. files: what the backend wrote or the server
    will write into the run folder, by role ("config", "device_trace"). observation: what its log will show.
    reached_at: see ``endpoint``.
    is_ours: False for a server that somebody else started. effective: keys of a ServerSpec with the values in force, as
    far as the launch itself shows them; the run's log and metrics show others, and what nobody shows is not in force.
    device_command: how to ask for the devices' state, with its first answer in ``requested``. findings: what is known
    to be so of every run on it. read_offset: for a log that another host stamps, its wall clock minus our monotonic
    clock and the uncertainty of that, ns. scratch_variable: tells the server a folder for its own sockets.
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

    @property
    def endpoint(self) -> Endpoint:
        """Where the server is reached: as the plan says, else by plain HTTP at host and port."""
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
        }


def write_config(path: Path, config: Mapping[str, Any]) -> None:
    """A readable JSON file; a folder that cannot be written is a ServerError naming it."""
    try:
        path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ServerError(
            f"cannot be written ({error.strerror})", where=str(path), hint="Choose a folder with room and access"
        ) from error
