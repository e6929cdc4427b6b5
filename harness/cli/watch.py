"""``harness watch`` and ``harness fleet``: runs of other processes, and workers for devices of other hosts.

Reads files that the runs write anyway, and writes no record.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.cli.addresses import RunsOption, store_at
from harness.cli.terminal import show, terminal
from harness.clock import NS_PER_S, MonotonicClock
from harness.table import Table, table_of, to_rich

if TYPE_CHECKING:
    from rich.console import RenderableType


def watch(
    runs: RunsOption = Path("runs"),
    interval_s: Annotated[float, typer.Option(min=0.2, max=86_400, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look once and end.")] = False,
) -> None:
    """Watch the runs that another terminal makes.

    Shows requests done, n and bucket, tokens/s, lateness, and what the run waits for.

    Ctrl-C ends the watching and not the runs.

    Example: `harness watch --runs runs/today`
    """
    from rich.live import Live

    console = terminal()
    if once or not console.is_terminal:
        console.print(view(runs, console.width))
        return
    clock = MonotonicClock()
    with Live(view(runs, console.width), console=console, screen=True, auto_refresh=False) as live:
        while True:
            clock.sleep_until_ns(clock.now_ns() + int(interval_s * NS_PER_S))
            live.update(view(runs, console.width), refresh=True)


def view(runs: Path, width: int) -> RenderableType:
    """A row per tune and per experiment below ``runs``: its stage; runs sealed and invalid, and the one being made.

    Raises SpecError without any.
    """
    from harness.analysis.logs.glance import glance
    from harness.measure.records import layout
    from harness.measure.records.store import RunStore
    from harness.runner.fleet.slot import living_mark
    from harness.tune.folder import TuneFolder

    tunes = TuneFolder.below(runs)
    stores = [RunStore(runs), *(RunStore(tune.path) for tune in tunes if tune.path != runs)]
    making = [folder for store in stores for folder in store.unsealed() if folder.name.endswith(layout.PARTIAL)]
    sealed = [run for store in stores for run in store.sealed()]
    if not making and not tunes:
        store_at(runs)
    rows: list[tuple[str | int, ...]] = [(tune.path.name, "", "", "", "", f"stage: {tune.stage}") for tune in tunes]
    for experiment in sorted({run.experiment for run in sealed} | {folder.parent.parent.name for folder in making}):
        mine = [run for run in sealed if run.experiment == experiment]
        num_invalid = sum(not run.is_valid for run in mine)
        folders = [folder for folder in making if folder.parent.parent.name == experiment]
        for folder in folders:
            seen, label = glance(folder), f"{folder.parent.name}/{folder.name.removesuffix(layout.PARTIAL)}"
            if (mark := living_mark(folder)) is not None:
                label = f"dev{mark['device']} {label}"
            done = "" if seen.num_finished is None else str(seen.num_finished)
            now = ": ".join(filter(None, (seen.stand_in, seen.in_words())))
            rows.append((experiment, len(mine), num_invalid, label, done, now))
        if not folders:
            rows.append((experiment, len(mine), num_invalid, "", "", "nothing"))
    caption = "n, bucket: of the latest decode step; done: requests, as the server counts them"
    columns = ("experiment", "sealed", "INVALID", "running", "done", "now")
    return to_rich(Table(f"Runs in {runs}", caption, columns, tuple(rows)), width)


def fleet_status(
    experiment: Annotated[str, typer.Argument(help="Name of an experiment that a fleet runs, or ran.")],
    runs: RunsOption = Path("runs"),
) -> None:
    """Show what each device does now: blocks done and left, who is behind, INVALID runs, temperature.

    Example: `harness fleet status demo --runs runs/today`
    """
    from harness.runner.fleet.slot import device_states

    rows = [
        {
            "device": state.place,
            "makes": state.making,
            "now": state.now,
            "blocks": state.blocks_done,
            "left": state.blocks_left,
            "behind": state.blocks_behind,
            "INVALID": state.num_invalid,
            "warmest": "" if state.warmest_c is None else f"{state.warmest_c:g} C",
        }
        for state in device_states(runs, experiment)
    ]
    caption = "behind: whole blocks fewer than the device that has most; warmest: during its latest run, by its driver"
    show(terminal(), table_of(f"Fleet of {experiment} in {runs}", caption, rows))
