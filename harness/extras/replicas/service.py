"""What the core asks for by the name "replicas"."""

from __future__ import annotations

from harness.extras.replicas.doors import check_program
from harness.extras.replicas.launch import launch_replicas
from harness.extras.replicas.predicted import DrawsOnReplicas
from harness.extras.replicas.simulated import RecordedReplicas, check_simulated_router
from harness.kinds import BackendKind
from harness.model.spec import ServerSpec
from harness.runner.backends.base import Replicas


def check_router(server: ServerSpec, kind: BackendKind) -> None:
    """Refuse a router that this host cannot start, or that a virtual kind does not model: ServerError, SpecError."""
    if kind.is_virtual:
        check_simulated_router(server)
    else:
        check_program(server.door)


REPLICAS = Replicas(launch=launch_replicas, simulated=RecordedReplicas, drawn=DrawsOnReplicas, check=check_router)
