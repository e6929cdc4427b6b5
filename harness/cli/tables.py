"""``harness paper tables``, ``signs``: the paper's tables from sealed runs, and two tables' signs over many plans.

Nothing is computed here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from harness.cli.addresses import RunsOption
from harness.cli.terminal import print_or_write, terminal, time_left
from harness.outputs import check_output
from harness.table import TableForm, written


def tables(
    runs: RunsOption = Path("runs"),
    numbers: Annotated[
        list[str] | None, typer.Option("--table", help="Only this one, e.g. `--table I --table S4`. Repeatable.")
    ] = None,
    form: Annotated[
        Literal["markdown", "md", "csv", "latex", "text", "json"],
        typer.Option("--format", help="Markdown, CSV, LaTeX (booktabs), text or JSON."),
    ] = "markdown",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Default: print.")] = None,
    search: Annotated[
        Path | None, typer.Option("--search", help="Folder of `harness search paper`, for S10 and S11.")
    ] = None,
    artifacts: Annotated[
        Path | None, typer.Option("--artifacts", help="Folder of compiled artifacts, for Table XIV.")
    ] = None,
) -> None:
    """The paper's tables (I-XV, S1-S12) from your own runs.

    A table without runs names the command that makes them.

    Example: `harness paper tables --runs runs/today --format latex -o tables.tex`
    """
    from harness.paper import Source, paper_tables

    if output is not None:
        check_output(output)  # before minutes of work, not after
    made = paper_tables(Source(runs, search, artifacts), numbers or ())
    content = written(made, TableForm("markdown" if form == "md" else form), terminal().width)
    print_or_write(content, output, "tables:")


def signs(
    sums: Annotated[int, typer.Option(min=8, help="Sums of three plans per N.")] = 400,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Markdown file. Default: print.")] = None,
) -> None:
    """Signs of Tables I and II over many simulated plans.

    Also under other readings of the method.

    Example: `harness paper signs -o docs/table-signs.md`
    """
    from harness.paper.signs import page

    if output is not None:
        check_output(output)
    with time_left("drawing plans") as tell:
        text = page(sums, tell)
    print_or_write(text, output)
