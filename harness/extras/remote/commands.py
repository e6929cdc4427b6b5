"""``harness fleet worker``."""

from __future__ import annotations

import socket
from typing import Annotated

import typer

from harness.errors import SpecError


def worker(
    scheduler: Annotated[
        str, typer.Argument(help="Dask scheduler, e.g. `tcp://127.0.0.1:8786` or `tls://alpha:8786`.")
    ],
    device: Annotated[int, typer.Option(min=0, help="Device that this worker stands for.")],
    host: Annotated[str | None, typer.Option(help="Name of this host in the experiment. Default: its own.")] = None,
    port: Annotated[
        int, typer.Option(min=0, max=65_535, help="Port of the worker; 0: any. A tunnel needs a fixed one.")
    ] = 0,
    open_port: Annotated[
        bool, typer.Option("--open-port", help="Allow neither loopback nor TLS: whoever reaches it runs code here.")
    ] = False,
) -> None:
    """Become the worker of one device of this host, until the scheduler or a person ends it.

    It listens where the scheduler is: on loopback for a loopback scheduler, else with TLS as Dask is configured.

    Example: `harness fleet worker tcp://127.0.0.1:8786 --host alpha --device 3 --port 9003`
    """
    from pydantic import ValidationError

    from harness.extras.remote.hosts import serve
    from harness.model.spec import DeviceSlot, FleetSpec

    place = DeviceSlot(host or socket.gethostname(), device)
    try:
        fleet = FleetSpec(devices=(device,), hosts=(place.host,), scheduler=scheduler, open_port=open_port)
    except ValidationError as error:
        what = error.errors()[0]["msg"].removeprefix("Value error, ").replace("open_port = true", "--open-port")
        raise SpecError(what, where="harness fleet worker") from error
    serve(scheduler, place, port, is_on_loopback=fleet.is_on_loopback)
