"""What a backend hands over: the exact command of one server, its environment, the files it wrote.

Nothing here knows a kind of server. Next: ``backends`` make LaunchPlans.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from harness.errors import ServerError, SpecError
from harness.records import Finding, Observation
from harness.redact import redacted_arguments, redacted_env
from harness.spec import ServerSpec

LogFormat = Literal["default", "precise"]
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """How to start one server. ``requested`` is what was asked of it, for the manifest.

    env: additions to the harness's own environment, never the whole of it. files: what the backend wrote or the server
    will write into the run folder, by role ("config", "device_trace"). observation: what its log will show.
    is_ours: False for a server that somebody else started. tells_settings: its log and metrics say what is in force.
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
    tells_settings: bool = False
    device_command: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    scratch_variable: str = ""
    read_offset: Callable[[], tuple[int, int]] | None = None

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


class LaunchOptions(NamedTuple):
    """What a run says about one launch. port: 0 for any free one. run_folder: where the backend writes its files."""

    port: int
    run_folder: Path
    time_scale: float
    log_format: LogFormat


class Backend(ABC):
    """One kind of server that the harness can measure."""

    __slots__ = ()

    name: str
    """As experiments write it: ``backend = "emulator"``."""
    label: str
    """As a report says it, so that no reader takes one kind of server for another."""
    allows_time_scale: bool
    """Whether model time may differ from wall time. Real devices keep their own time."""

    def launch(
        self,
        server: ServerSpec,
        *,
        port: int,
        run_folder: Path,
        time_scale: float = 1.0,
        log_format: LogFormat = "default",
    ) -> LaunchPlan:
        """The command for ``server``, with its files written into ``run_folder``.

        port: 0 for any free one. Raises ServerError for a busy port, SpecError for what this kind cannot do.
        """
        check_time_scale(self, time_scale)
        return self._plan(server, LaunchOptions(port, run_folder, time_scale, log_format))

    @abstractmethod
    def _plan(self, server: ServerSpec, options: LaunchOptions) -> LaunchPlan:
        """See ``launch``."""


def check_time_scale(backend: Backend, time_scale: float) -> None:
    """Only a modelled device can run in scaled time."""
    if time_scale != 1.0 and not backend.allows_time_scale:
        raise SpecError(
            f"{backend.name} runs in real time and cannot be scaled by {time_scale:g}",
            where="time_scale",
            hint="Remove time_scale",
        )


def write_config(path: Path, config: Mapping[str, Any]) -> None:
    """A readable JSON file; a folder that cannot be written is a ServerError naming it."""
    try:
        path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ServerError(
            f"cannot be written ({error.strerror})", where=str(path), hint="Choose a folder with room and access"
        ) from error
