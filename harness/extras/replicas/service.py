"""What the core asks for by the name "replicas"."""

from __future__ import annotations

from harness.errors import SpecError
from harness.extras.replicas.launch import launch_replicas
from harness.extras.replicas.predicted import DrawsOnReplicas, warm_up
from harness.extras.replicas.router_launch import check_program
from harness.extras.replicas.simulated import RecordedReplicas, check_simulated_router
from harness.model.spec import ServerSpec
from harness.plugins import BackendKind
from harness.runner.backends.base import Replicas


def check_router(server: ServerSpec, kind: BackendKind) -> None:
    """Refuse a router that this host cannot start, or that a virtual kind does not model: ServerError, SpecError."""
    words = " ".join(server.routing.command)
    # Sealed runs keep the command as it was filled in, so that only a run to come is held to this.
    if server.routing.kind == "command" and (
        "{port}" not in words or ("{urls}" not in words and "{hosts}" not in words)
    ):
        raise SpecError(
            "command needs {port}, where it listens, and {urls} or {hosts}, the replicas: both are free ports "
            "of each run",
            where="server.router.command",
        )
    if kind.is_virtual:
        check_simulated_router(server)
    else:
        check_program(server.routing)


REPLICAS = Replicas(
    launch=launch_replicas, simulated=RecordedReplicas, drawn=DrawsOnReplicas, check=check_router, warm_up=warm_up
)
