"""``harness plan waits import``: a wait distribution from recordings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from harness.cli.inputs import check_trace_format
from harness.cli.terminal import print_folded


def waits_import(
    source: Annotated[Path, typer.Argument(help="TraceLab release (.duckdb, .jsonl, .jsonl.gz), or recorded agents.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The wait file to write (TOML).")],
    kind: Annotated[
        str, typer.Option("--format", help="tracelab: tool by tool; else as `harness trace import`, tools as one.")
    ] = "tracelab",
    name: Annotated[str, typer.Option(help="Name of the distribution; default: the file's stem.")] = "",
    tables: Annotated[
        list[str] | None, typer.Option("--table", help="Which table of a DuckDB file holds the tools. Repeatable.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace another file of this name.")] = False,
) -> None:
    """Make a tool-wait distribution from a TraceLab release, or from any recording that `harness trace import` reads.

    Example: `harness plan waits import ~/.claude/projects --format claude -o plans/waits/mine.toml`
    """
    from harness.extras.formats.waits import import_recorded_waits, import_tracelab

    name = name or output.stem
    if kind == "tracelab":
        lines = import_tracelab(source, output, name=name, tables=tuple(tables or ()), may_replace=force).lines()
    else:
        check_trace_format(kind)
        counted = import_recorded_waits([source], output, name=name, kind=kind, may_replace=force)
        what = f"{counted['waits']} waits for tools; {counted['left_out_zero']} of nothing left out"
        lines = [f"{counted['format']}: {what}"]
    for line in (*lines, f"wrote {output}"):
        print_folded(line)
