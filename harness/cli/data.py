"""``harness query``, ``runs``, ``derive``, ``verify``: look at sealed runs, with SQL or without.

Reads sealed runs only; never changes what was measured. Next: ``harness.records.RunStore``.
"""

from __future__ import annotations

import sys
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from harness.cli.run import RunsOption, sealed_runs


class OutputFormat(str, Enum):
    """How rows are printed."""

    table = "table"
    csv = "csv"
    jsonl = "jsonl"


def register(app: typer.Typer) -> None:
    app.command(name="query")(query)
    app.command(name="runs")(list_runs)
    app.command(name="verify")(verify)
    app.command(name="derive")(derive)


def query(
    sql: Annotated[str, typer.Argument(help="One SQL statement (DuckDB).")],
    runs: RunsOption = Path("runs"),
    output: Annotated[OutputFormat, typer.Option("--format", help="How rows are printed.")] = OutputFormat.table,
) -> None:
    """SQL over all sealed runs: tables runs, requests, chunks, steps, kv_events, metrics, scrapes.

    Example: `harness query "select condition, sum(cached_tokens) from requests group by all" --runs runs/today`
    """
    import pyarrow.csv as pa_csv

    from harness.records import RunStore

    rows = RunStore(runs).query(sql)
    if output is OutputFormat.csv:
        pa_csv.write_csv(rows, sys.stdout.buffer)
    elif output is OutputFormat.jsonl:
        import json

        for row in rows.to_pylist():
            print(json.dumps(row, default=str))
    else:
        from rich.console import Console
        from rich.table import Table

        from harness.cli.words import said

        shown = Table(*map(said, rows.column_names), header_style="bold")
        for row in rows.to_pylist():
            shown.add_row(*("" if value is None else said(value) for value in row.values()))
        Console().print(shown)


def list_runs(runs: RunsOption = Path("runs")) -> None:
    """List sealed runs, valid and invalid, and what lies unfinished beside them.

    Example: `harness runs --runs runs/today`
    """
    from rich.console import Console

    from harness.cli.words import said
    from harness.records import RunStore

    console = Console()
    store = RunStore(runs)
    for run in store.sealed():
        verdict = "valid" if run.is_valid else f"INVALID: {said('; '.join(run.invalid_reasons))}"
        console.print(f"{run.experiment}/{run.condition}/{run.replicate}  {verdict}", highlight=False, soft_wrap=True)
    for folder in store.foreign():
        name = said(str(folder.relative_to(runs)))
        console.print(f"{name}  foreign: the name of no run, not counted", style="dim", highlight=False)
    for folder in store.unsealed():
        console.print(f"{folder.relative_to(runs)}  never sealed, not counted", style="dim", highlight=False)


def verify(runs: RunsOption = Path("runs")) -> None:
    """Check every file of every sealed run against the hashes taken when it was sealed.

    Example: `harness verify --runs runs/today`
    """
    from harness.records import RunStore

    print(f"{RunStore(runs).verify()} sealed runs are as they were sealed")


def derive(
    experiment: Annotated[str, typer.Argument(help="Name of an experiment with sealed runs.")],
    runs: RunsOption = Path("runs"),
) -> None:
    """Rebuild every derived table from the raw logs and scrapes.

    Example: `harness derive demo --runs runs/today`
    """
    from harness.analysis import rebuild

    for run in sealed_runs(runs, experiment):
        rebuild(run)
        run.verify()
        print(f"{run.path}: derived tables rebuilt, equal to those sealed")
