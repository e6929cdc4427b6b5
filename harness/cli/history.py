"""``harness history``: a figure over dates and releases, with its intervals and the points where its level changed.

Reads sealed runs and saved baselines.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.cli.addresses import RunsOption, TableFormOption
from harness.cli.terminal import print_tables
from harness.table import TableForm, with_four_digits

if TYPE_CHECKING:
    from collections.abc import Iterator

    from harness.analysis.decisions.history import Placed


def history(
    places: Annotated[
        list[str],
        typer.Argument(
            metavar="RUNS...",
            help="Folders of runs, experiments or conditions in them, or saved baselines: one point each.",
        ),
    ],
    figures: Annotated[
        list[str] | None,
        typer.Option("--figure", help="cost, ttft_p50, ttft_p99, tpot, reuse or padding. Repeatable. Default: cost."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Plots as a page (.html) or a picture (.svg).")
    ] = None,
    runs: RunsOption = Path("runs"),
    form: TableFormOption = TableForm.text,
) -> None:
    """Follow a figure over dates and releases, and name its changes.

    Points are ordered by date. Where all points have runs of the same plans, these alone count. Change points need six
    points or more, and the extra `history` (docs/history.md).

    Example: `harness history runs/may runs/june runs/july --figure tpot -o history.html`
    """
    from harness.analysis.decisions.history import histories
    from harness.report.history_page import history_lines, history_table, write_history

    results = histories([point for place in places for point in _placed(place, runs)], figures or ["cost"])
    table = history_table(results)
    if form not in (TableForm.csv, TableForm.json):
        table = with_four_digits(table, ("value", "low", "high"))
    print_tables([table], form, remarks=history_lines(results))
    if output is not None:
        write_history(output, results)


def _placed(address: str, runs: Path) -> Iterator[Placed]:
    """The conditions at an address, each with its valid runs."""
    from harness.analysis.decisions.gate import gate_run
    from harness.analysis.decisions.history import Placed
    from harness.cli.compare import sides_at
    from harness.export.baseline import is_baseline, load_baseline

    if not is_baseline(Path(address)):
        yield from (Placed(address, tuple(map(gate_run, side.runs))) for side in sides_at(address, runs))
        return
    loaded = load_baseline(Path(address))
    for condition in dict.fromkeys(run.condition for run in loaded):
        yield Placed(address, tuple(run for run in loaded if run.condition == condition))
