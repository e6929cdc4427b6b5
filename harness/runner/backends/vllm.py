"""vLLM itself as a backend: ``vllm serve`` in an environment of the user's, on any platform, restarted for every run.

What its steps were is read from its step log; what a stack without KV slots does not have is absent.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import ClassVar

from harness.kinds import KINDS
from harness.measure.server.doctor import Check
from harness.measure.server.life import LOOPBACK, LaunchPlan
from harness.measure.server.process import require_port
from harness.model.spec import ServerSpec
from harness.plugins import BackendKind
from harness.redact import filled_env
from harness.runner.backends.base import SLOW_START, FirstExperiment, ServerBackend, refuse_keys
from harness.runner.run import LaunchOptions
from harness.stacks.vllm.launch import (
    FIXED_KEYS,
    SHOWN_KEYS,
    check_graphs,
    check_serving,
    find_vllm,
    readiness,
    serve_plan,
)


@dataclass(frozen=True, slots=True)
class VllmBackend(ServerBackend):
    """A vLLM server that the harness starts; ``server.model`` names the model."""

    kind: BackendKind = KINDS["vllm"]
    shown_keys: ClassVar[frozenset[str]] = SHOWN_KEYS

    def check_server(self, server: ServerSpec) -> None:
        refuse_keys(server, FIXED_KEYS, "vLLM itself does not have it")
        check_serving(server)

    def check_host(self, server: ServerSpec) -> None:
        require_port(LOOPBACK, server.port)
        check_graphs(server, find_vllm(server.environment).versions)
        filled_env(server.env, os.environ)

    @property
    def first_experiment(self) -> FirstExperiment:
        return FirstExperiment(
            about="vllm serve of an environment of yours, on any platform",
            server=(
                ('model = "Qwen/Qwen3-4B"', "as vllm serve takes it"),
                ('environment = ""', "virtual environment of vLLM; empty: the vllm on PATH"),
                *SLOW_START,
            ),
            has_costs=False,
            needs="" if self.readiness().ok else "harness doctor",
        )

    def readiness(self) -> Check:
        return self.readiness_of("")

    def readiness_of(self, environment: str) -> Check:
        return readiness(self.kind.name, environment)

    def launch(self, server: ServerSpec, options: LaunchOptions) -> LaunchPlan:
        port = require_port(LOOPBACK, options.port)
        return serve_plan(server, backend=self.kind.name, port=port, run_folder=options.run_folder)


BACKEND = VllmBackend()
