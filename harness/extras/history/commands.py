"""``harness history``: a figure over dates and releases. Reads sealed runs and saved baselines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from harness.api import sides_at
from harness.cli.addresses import RunsOption, SessionTargetOption, TableFormOption
from harness.cli.terminal import print_tables
from harness.table import Table, TableForm, with_four_digits


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
    from harness.analysis.stats import grouped
    from harness.extras.history.points import PlacedRuns, histories, history_table, write_history
    from harness.judge.decisions.gate import gate_run
    from harness.present.export.baseline import is_baseline, load_baseline

    targets, placed = None if session_target is None else {"session_s": session_target}, list[PlacedRuns]()
    for place in places:
        if is_baseline(Path(place)):
            sides = grouped(load_baseline(Path(place)), lambda run: run.condition).values()
        else:
            sides = [list(map(gate_run, side.runs)) for side in sides_at(place, runs, targets)]
        placed += [PlacedRuns(place, side) for side in sides]
    made = histories(placed, figures or ["cost"])
    tables = [history_table(made)]
    if form not in (TableForm.csv, TableForm.json):
        tables = [with_four_digits(tables[0], ("value", "low", "high"))]
    if form is TableForm.text:
        # A table for each series fits a narrow terminal.
        (table,) = tables
        tables = [replace(table, columns=(), rows=())]
        for series, rows in grouped(table.rows, lambda row: ", ".join(map(str, row[:3]))).items():
            shown = tuple((str(row[3])[:16].replace("T", " "), *row[4:]) for row in rows)
            tables.append(Table(series, "", table.columns[3:], shown))
    print_tables(tables, form, remarks=[f"note: {note}" for history in made for note in history.notes])
    if output is not None:
        write_history(output, made)
