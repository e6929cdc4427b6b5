"""``harness stack steps``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from harness.cli.addresses import TableFormsOption
from harness.cli.terminal import print_text, terminal_width
from harness.errors import RecordsError
from harness.table import TableForm, written


def steps(
    file: Annotated[Path, typer.Argument(help="File of steps, or debug log; the stack is recognised by its content.")],
    form: TableFormsOption = TableForm.text,
) -> None:
    """Show the decode steps (n, b) in a file: padding p, h(n), and what the file does not show.

    Reads vLLM's step log, the steps of its engine core with what became of each request, and a debug log of
    vllm-rbln's native path.

    Example: `harness stack steps core_steps.jsonl --format json`
    """

    from harness.extras.other_stacks.steps import read_steps, request_figures, request_table, step_tables

    with RecordsError.on_os_error("cannot be read", where=file):
        steps_read = read_steps(file.read_bytes(), where=str(file))
    tables = step_tables(steps_read)
    if form is TableForm.json:
        (whole,), shapes = (table.records() for table in tables)
        whole = {"source": steps_read.source, **whole, "first_damaged": steps_read.first_damaged}
        requests = request_figures(steps_read).to_pylist()
        print_text(json.dumps({**whole, "notes": steps_read.notes, "shapes": shapes, "requests": requests}, indent=1))
    else:
        tables = (*tables, *filter(None, [request_table(steps_read)]))
        print_text(written(tables, form, terminal_width()), end="")
