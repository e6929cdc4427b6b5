"""Which server a run measures, and the exact command that starts it.

A backend turns a ServerSpec into a LaunchPlan: argv, additions to the environment, files it wrote. It starts nothing
and waits for nothing, so that every kind of server is started, watched and stopped by the same code.
Next: ``harness.live.server.process`` starts a LaunchPlan; ``harness.runner`` records it in the manifest.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from harness.errors import SpecError
from harness.live.artifacts import check_artifact, read_artifact
from harness.live.backends.attached import AttachedBackend
from harness.live.backends.rbln import RblnBackend, check_installed, find_stack
from harness.live.backends.twin import TwinBackend
from harness.live.compile import require_fresh
from harness.live.launch import (
    LOOPBACK,
    Backend,
    LaunchOptions,
    LaunchPlan,
    check_time_scale,
    write_config,
)
from harness.live.server.process import require_port
from harness.records import layout
from harness.redact import filled_env
from harness.spec import ServerSpec
from harness.twin.environment import find_twin

EMULATED_MODEL = "emulated-qwen3-4b"

__all__ = [
    "BACKENDS",
    "Backend",
    "EmulatorBackend",
    "LaunchPlan",
    "TwinBackend",
    "backend_named",
    "check_host",
    "check_server",
    "check_time_scale",
]


@dataclass(frozen=True, slots=True)
class EmulatorBackend(Backend):
    """The embedded emulator: the scheduler's rules in real time, a cost model instead of a device."""

    name: str = "emulator"
    label: str = "embedded emulator (modelled step times, no device)"
    allows_time_scale: bool = True
    seed: int = 0

    def _plan(self, server: ServerSpec, options: LaunchOptions) -> LaunchPlan:
        chosen_port = require_port(LOOPBACK, options.port)
        # Absolute: the server's working folder is its own business.
        files = {
            "config": (options.run_folder / layout.SERVER_CONFIG).absolute(),
            "device_trace": (options.run_folder / layout.DEVICE_TRACE).absolute(),
        }
        config = {
            "server": server.model_dump(mode="json"),
            "time_scale": options.time_scale,
            "host": LOOPBACK,
            "port": chosen_port,
            "model": EMULATED_MODEL,
            "log_format": options.log_format,
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


BACKENDS: Mapping[str, Backend] = MappingProxyType(
    {backend.name: backend for backend in (EmulatorBackend(), TwinBackend(), RblnBackend(), AttachedBackend())}
)


def check_server(backend: str, server: ServerSpec) -> None:
    """Refuse, before an experiment starts, a condition whose compiled model is not there or is not what it asks for.

    What can change until the run starts (devices, ports, patches) is checked when it does.
    """
    if server.artifact and not server.ssh and backend in {"rbln", "twin"}:
        check_artifact(read_artifact(Path(server.artifact)), server, server.artifact)


def check_host(backend: str, server: ServerSpec) -> None:
    """Refuse, before the first server of an experiment starts, what this host can already tell.

    A busy port, a stack that is not there, an installed package that is not as the condition declares, a stale
    artifact. Another host is looked at when its server starts. Raises as `Backend.launch` does.
    """
    if server.ssh or backend not in {"emulator", "rbln", "twin"}:
        return
    require_port(LOOPBACK, server.port)
    if backend == "rbln":
        stack = find_stack(server.environment)
        check_installed(server, stack.site_packages)
        if not server.artifact:
            raise SpecError("is missing", where="server.artifact", hint="Name the folder of the compiled model")
        require_fresh(Path(server.artifact), stack.versions)
        filled_env(server.env, os.environ)
    if backend == "twin":
        check_installed(server, find_twin().site_packages)


def backend_named(name: str) -> Backend:
    """The backend an experiment names; an unknown name is a SpecError that lists those there are."""
    try:
        return BACKENDS[name]
    except KeyError:
        raise SpecError(f"unknown backend {name!r}", where="backend", hint=f"Use one of {sorted(BACKENDS)}") from None
