"""The simulator as a backend: a run in virtual time, with the same records as a measured one.

Starts no process and waits for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from harness.engine import EngineConfig
from harness.engine.config import ENGINE_KEYS
from harness.errors import SpecError
from harness.experiment import PlannedRun
from harness.kinds import KINDS, BackendKind
from harness.records import SealedRun
from harness.runner.backends.base import Backend
from harness.runner.run import Invocation
from harness.runner.simulated import perform_simulated_run
from harness.server.doctor import Check
from harness.spec import ServerSpec


def check_simulated_server(server: ServerSpec) -> None:
    """Refuse what the rules in force have no word for; "auto" has become the name of a release by now."""
    try:
        EngineConfig.from_server(server)
    except SpecError as error:
        raise SpecError(
            error.what, where="server", hint=error.hint or "Set server.rules, or leave the key out"
        ) from error


@dataclass(frozen=True, slots=True)
class SimulatedBackend(Backend):
    """The emulator's engine loop on a clock that jumps."""

    kind: BackendKind = KINDS["sim"]
    shown_keys: ClassVar[frozenset[str]] = ENGINE_KEYS

    def check_server(self, server: ServerSpec) -> None:
        check_simulated_server(server)

    def readiness(self) -> Check:
        return Check(
            name="backend sim", ok=True, found="virtual time, no process, no device", need="nothing", how="Use it"
        )

    def perform(self, run: PlannedRun, invocation: Invocation) -> SealedRun | None:
        return perform_simulated_run(run, invocation)


BACKEND = SimulatedBackend()
