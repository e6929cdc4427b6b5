"""The embedded emulator as a backend: the scheduler's rules in real time, a cost model instead of a device.

Its whole configuration is one file in the run folder.
"""

from __future__ import annotations

import platform
import sys
from dataclasses import dataclass, replace

from harness.children import own_command
from harness.kinds import KINDS
from harness.measure.records import layout
from harness.measure.server.doctor import Check
from harness.measure.server.life import LOOPBACK, LaunchPlan, write_config
from harness.measure.server.process import require_port
from harness.model.spec import ServerSpec
from harness.plugins import BackendKind
from harness.runner.backends.base import (
    MODELLED,
    FirstExperiment,
    ModelledBackend,
    ServerBackend,
    observation_of,
)
from harness.runner.run import LaunchOptions

EMULATED_MODEL = "emulated-qwen3-4b"
EMULATOR = "harness.measure.emulator.__main__:main"


@dataclass(frozen=True, slots=True)
class EmulatorBackend(ModelledBackend, ServerBackend):
    """An OpenAI-compatible server that steps the simulator's engine in real time. seed: of its tokens."""

    kind: BackendKind = KINDS["emulator"]
    seed: int = 0

    def check_host(self, server: ServerSpec) -> None:
        ModelledBackend.check_host(self, server)
        require_port(LOOPBACK, server.port)

    @property
    def first_command(self) -> str:
        return "harness run demo"

    @property
    def first_experiment(self) -> FirstExperiment:
        about = 'a modelled server on this machine; "attached" measures one of yours: server.url'
        return replace(MODELLED, about=about, time_scale=4.0)

    def readiness(self) -> Check:
        return Check(
            name="backend emulator",
            ok=sys.platform == "linux",
            found=f"{platform.system()}, no device needed",
            need="Linux",
            how="Use Linux: process groups and /proc are needed to end a server for certain",
        )

    def launch(self, server: ServerSpec, options: LaunchOptions) -> LaunchPlan:
        chosen_port = require_port(LOOPBACK, options.port)
        # Absolute: the server may have another working folder.
        files = {
            "config": (options.run_folder / layout.SERVER_CONFIG).absolute(),
            "device_trace": (options.run_folder / layout.DEVICE_TRACE).absolute(),
        }
        if server.is_paged:
            files["step_log"] = (options.run_folder / layout.STEP_LOG).absolute()
        config = {
            "server": server.model_dump(mode="json"),
            "time_scale": options.time_scale,
            "host": LOOPBACK,
            "port": chosen_port,
            "model": EMULATED_MODEL,
            "log_format": options.log_format,
            "trace_path": str(files["device_trace"]),
            **({"step_log_path": str(files["step_log"])} if server.is_paged else {}),
            "seed": self.seed,
            **({} if options.device is None else {"step_factor": options.step_factor, "replica": options.device}),
        }
        write_config(files["config"], config)
        return LaunchPlan(
            backend=self.kind.name,
            argv=own_command(EMULATOR, "--config", files["config"]),
            # Unbuffered: lines must reach the log when they are written.
            env={"PYTHONUNBUFFERED": "1"},
            host=LOOPBACK,
            port=chosen_port,
            model=EMULATED_MODEL,
            files=files,
            requested=config,
            observation=observation_of(server),
        )


BACKEND = EmulatorBackend()
