"""Which server a run measures, and the exact command that starts it.

A backend turns a ServerSpec into a LaunchPlan: argv, additions to the environment, files it wrote. It starts nothing
and waits for nothing, so that every kind of server is started, watched and stopped by the same code.
Next: ``harness.live.server`` starts a LaunchPlan; ``harness.live.runner`` records it in the manifest.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Protocol

from harness.errors import ServerError, SpecError
from harness.live.server import require_port
from harness.spec import ServerSpec

LogFormat = Literal["default", "precise"]
LOOPBACK = "127.0.0.1"
CONFIG_FILE = "server.config.json"
DEVICE_TRACE_FILE = "device_trace.jsonl"
EMULATED_MODEL = "emulated-qwen3-4b"


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """How to start one server. ``requested`` is what was asked of it, for the manifest.

    env: additions to the harness's own environment, never the whole of it. files: what the backend wrote or the server
    will write into the run folder, by role ("config", "device_trace").
    """

    backend: str
    argv: tuple[str, ...]
    host: str
    port: int
    model: str
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, Path] = field(default_factory=dict)
    requested: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """For the manifest; files by name, since the run folder moves when it is sealed."""
        return {
            "backend": self.backend,
            "argv": list(self.argv),
            "env": dict(self.env),
            "host": self.host,
            "port": self.port,
            "model": self.model,
            "files": {role: path.name for role, path in self.files.items()},
            "requested": dict(self.requested),
        }


class Backend(Protocol):
    """One kind of server that the harness can measure."""

    @property
    def name(self) -> str:
        """As experiments write it: ``backend = "emulator"``."""
        ...

    @property
    def label(self) -> str:
        """As a report says it, so that no reader takes one kind of server for another."""
        ...

    @property
    def allows_time_scale(self) -> bool:
        """Whether model time may differ from wall time. Real devices keep their own time."""
        ...

    def launch(
        self, server: ServerSpec, *, port: int, run_folder: Path, time_scale: float, log_format: LogFormat
    ) -> LaunchPlan:
        """The command for ``server``, with its files written into ``run_folder``.

        port: 0 for any free one. Raises ServerError for a busy port, SpecError for what this kind cannot do.
        """
        ...


@dataclass(frozen=True, slots=True)
class EmulatorBackend:
    """The embedded emulator: the scheduler's rules in real time, a cost model instead of a device."""

    name: str = "emulator"
    label: str = "embedded emulator (modelled step times, no device)"
    allows_time_scale: bool = True
    seed: int = 0

    def launch(
        self,
        server: ServerSpec,
        *,
        port: int,
        run_folder: Path,
        time_scale: float = 1.0,
        log_format: LogFormat = "default",
    ) -> LaunchPlan:
        check_time_scale(self, time_scale)
        chosen_port = require_port(LOOPBACK, port)
        # Absolute: the server's working folder is its own business.
        files = {
            "config": (run_folder / CONFIG_FILE).absolute(),
            "device_trace": (run_folder / DEVICE_TRACE_FILE).absolute(),
        }
        config = {
            "server": server.model_dump(mode="json"),
            "time_scale": time_scale,
            "host": LOOPBACK,
            "port": chosen_port,
            "model": EMULATED_MODEL,
            "log_format": log_format,
            "trace_path": str(files["device_trace"]),
            "seed": self.seed,
        }
        write_config(files["config"], config)
        return LaunchPlan(
            backend=self.name,
            argv=(sys.executable, "-m", "harness.emulator", "--config", str(files["config"])),
            # Lines must reach the log when they are written, not when a buffer is full.
            env={"PYTHONUNBUFFERED": "1"},
            host=LOOPBACK,
            port=chosen_port,
            model=EMULATED_MODEL,
            files=files,
            requested=config,
        )


BACKENDS: Mapping[str, Backend] = MappingProxyType({backend.name: backend for backend in (EmulatorBackend(),)})


def backend_named(name: str) -> Backend:
    """The backend an experiment names; an unknown name is a SpecError that lists those there are."""
    try:
        return BACKENDS[name]
    except KeyError:
        raise SpecError(f"unknown backend {name!r}", where="backend", hint=f"Use one of {sorted(BACKENDS)}") from None


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
