"""``harness fleet``: the state of each device of a fleet, and the worker for a device of another host.

It reads the files that the runs write anyway, and writes no record.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Annotated

import typer

from harness.cli.addresses import RunsOption
from harness.cli.terminal import show, terminal
from harness.errors import SpecError
from harness.table import Table


def status(
    experiment: Annotated[str, typer.Argument(help="Name of an experiment that a fleet runs, or ran.")],
    runs: RunsOption = Path("runs"),
) -> None:
    """Show what each device does now: blocks done and left, who is behind, INVALID runs, temperature.

    Example: `harness fleet status demo --runs runs/today`
    """
    from harness.runner.fleet.slot import device_states

    rows = [
        (
            state.place,
            state.making,
            state.now,
            *(state.blocks_done, state.blocks_left, state.blocks_behind, state.num_invalid),
            "" if state.warmest_c is None else f"{state.warmest_c:g} C",
        )
        for state in device_states(runs, experiment)
    ]
    table = Table(
        f"Fleet of {experiment} in {runs}",
        "behind: whole blocks fewer than the device that has most; warmest: during its latest run, by its driver",
        ("device", "makes", "now", "blocks", "left", "behind", "INVALID", "warmest"),
        tuple(rows),
    )
    console = terminal()
    show(console, table)


def worker(
    scheduler: Annotated[
        str, typer.Argument(help="Dask scheduler, e.g. `tcp://127.0.0.1:8786` or `tls://alpha:8786`.")
    ],
    device: Annotated[int, typer.Option(min=0, help="Device that this worker stands for.")],
    host: Annotated[str | None, typer.Option(help="Name of this host in the experiment. Default: its own.")] = None,
    port: Annotated[int, typer.Option(help="Port of the worker; 0: any. A tunnel needs a fixed one.")] = 0,
    open_port: Annotated[
        bool, typer.Option("--open-port", help="Allow neither loopback nor TLS: whoever reaches it runs code here.")
    ] = False,
) -> None:
    """Become the worker of one device of this host, until the scheduler or a person ends it.

    It listens where the scheduler is: on loopback for a loopback scheduler, else with TLS as Dask is configured.

    Example: `harness fleet worker tcp://127.0.0.1:8786 --host alpha --device 3 --port 9003`
    """
    from pydantic import ValidationError

    from harness.runner.fleet.hosts import serve
    from harness.spec import FleetSpec, Place

    place = Place(host or socket.gethostname(), device)
    try:
        fleet = FleetSpec(devices=(device,), hosts=(place.host,), scheduler=scheduler, open_port=open_port)
    except ValidationError as error:
        what = error.errors()[0]["msg"].removeprefix("Value error, ").replace("open_port = true", "--open-port")
        raise SpecError(what, where="harness fleet worker") from error
    serve(scheduler, place, port, is_on_loopback=fleet.is_on_loopback)
