"""``harness stack steps``, and the doctor's line about it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from harness.cli.addresses import TableFormsOption
from harness.cli.terminal import printable_drawing, terminal_width
from harness.errors import ServerError
from harness.table import TableForm, written


def steps(
    file: Annotated[Path, typer.Argument(help="File of steps, or debug log; the stack is recognised by its content.")],
    form: TableFormsOption = TableForm.text,
) -> None:
    """Show the decode steps (n, b) in a file of another stack: padding p, h(n), and what the file does not show.

    Reads vLLM's step log, the steps of its engine core with what became of each request, the batch statistics of
    tpu-inference, the profiler file of Gaudi, and a debug log of vllm-rbln's native path.

    Example: `harness stack steps all_batches_stats_2026_11_23.jsonl --format json`
    """

    from harness.extras.other_stacks.steps import load_steps, request_records, request_table, step_tables

    steps_read = load_steps(file)
    tables = step_tables(steps_read)
    if form is TableForm.json:
        (whole,), shapes = (table.records() for table in tables)
        whole = {"source": steps_read.source, **whole, "first_damaged": steps_read.first_damaged}
        requests = request_records(steps_read)
        print(json.dumps({**whole, "notes": steps_read.notes, "shapes": shapes, "requests": requests}, indent=1))
    else:
        tables = (*tables, *filter(None, [request_table(steps_read)]))
        print(printable_drawing(written(tables, form, terminal_width())), end="")


def doctor_lines() -> list[str]:
    """How each stack shows its steps, and which of them is beside the vLLM on PATH."""
    from harness.extras.other_stacks.steps import ways_to_steps
    from harness.stacks.vllm.launch import find_vllm

    try:
        beside = ways_to_steps(find_vllm().versions)
    except ServerError:
        beside = []
    found = f"; beside the vLLM here: {'; '.join(beside)}" if beside else ""
    return [f"Steps of other stacks: harness stack steps FILE ({'; '.join(ways_to_steps())}){found}"]
