"""``harness history``: a figure over dates and releases. Reads sealed runs and saved baselines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.api import sides_at
from harness.cli.addresses import RunsOption, SessionTargetOption, TableFormOption
from harness.cli.terminal import print_tables
from harness.table import Cell, Table, TableForm, table_of, with_four_digits

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from harness.extras.history.points import PlacedRuns


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
        typer.Option(
            "--figure",
            help="cost, ttft_p50, ttft_p99, tpot, itl_p50, e2e_p50, session_p50, session_p90, session_p99, "
            "session_goodput, tokens, reuse or padding. Repeatable. Default: cost.",
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="A page (.html), or a file for Apache Otava (.csv).")
    ] = None,
    session_target: SessionTargetOption = None,
    runs: RunsOption = Path("runs"),
    form: TableFormOption = TableForm.text,
) -> None:
    """Follow a figure over dates and releases.

    Points are ordered by date. Where all points have runs of the same plans, these alone count. Change points are found
    by Apache Otava from `-o history.csv` (docs/guides/gate.md).

    Example: `harness history runs/may runs/june runs/july --figure tpot -o history.html`
    """
    from harness.extras.history.page import history_notes, history_table, write_history
    from harness.extras.history.points import histories, refuse_same_runs

    targets = None if session_target is None else {"session_s": session_target}
    points = [point for place in places for point in _placed(place, runs, targets)]
    refuse_same_runs(points)
    results = histories(points, figures or ["cost"])
    table = history_table(results)
    if form not in (TableForm.csv, TableForm.json):
        table = with_four_digits(table, ("value", "low", "high"))
    print_tables(_by_series(table) if form is TableForm.text else [table], form, remarks=history_notes(results))
    if output is not None:
        write_history(output, results)


def _by_series(table: Table) -> list[Table]:
    """A table for each series, which fits a narrow terminal: a row for each date, to the minute."""
    names, shown = table.columns[:3], table.columns[3:]
    series: dict[str, list[dict[str, Cell]]] = {}
    for row in table.records():
        minute = str(row["date"])[:16].replace("T", " ")
        name = ", ".join(str(row[name]) for name in names)
        series.setdefault(name, []).append({name: row[name] for name in shown} | {"date": minute})
    tables = [table_of(name, "", rows) for name, rows in series.items()]
    return [replace(table, columns=(), rows=()), *tables]


def _placed(address: str, runs: Path, targets: Mapping[str, float] | None) -> Iterator[PlacedRuns]:
    """The conditions at an address, each with its valid runs."""
    from harness.extras.history.points import PlacedRuns
    from harness.judge.decisions.gate import gate_run
    from harness.present.export.baseline import is_baseline, load_baseline

    if not is_baseline(Path(address)):
        yield from (PlacedRuns(address, tuple(map(gate_run, side.runs))) for side in sides_at(address, runs, targets))
        return
    loaded = load_baseline(Path(address))
    for condition in dict.fromkeys(run.condition for run in loaded):
        yield PlacedRuns(address, tuple(run for run in loaded if run.condition == condition))
