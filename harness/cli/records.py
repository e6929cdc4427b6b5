"""``harness runs``, ``query``, ``verify`` and ``harness records``: sealed runs in SQL, checked, rebuilt and exported.

Nothing that was measured is changed.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from harness.cli.addresses import (
    FORMS,
    MaybeSealedArgument,
    RunsOption,
    SealedArgument,
    SessionTargetOption,
    complete_sealed,
    held_to,
    output_option,
    sealed_runs,
    store_at,
    valid_runs,
)
from harness.cli.terminal import (
    escape_markup,
    print_bytes,
    print_folded,
    print_text,
    print_with_comment,
    say,
    terminal,
    terminal_width,
)
from harness.errors import SpecError, in_one_line
from harness.outputs import check_output, write_text
from harness.table import Table, TableForm, table_of, written

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    import pyarrow as pa

    from harness.measure.records.run import SealedRun

# Time for DuckDB to heed an interrupt.
INTERRUPT_GRACE_S = 2.0
RowForm = Literal["table", "csv", "json", "jsonl", "parquet"]


def query(
    sql: Annotated[str, typer.Argument(help="One SQL statement (DuckDB).")],
    runs: RunsOption = Path("runs"),
    form: Annotated[
        RowForm,
        typer.Option("--format", metavar="FORM", help="How rows are printed: table, csv, json, jsonl or parquet."),
    ] = "table",
    output: Annotated[Path | None, output_option("A file for the rows. Default: print.")] = None,
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=0.001, max=86_400, help="Seconds the query may take.")
    ] = 60.0,
) -> None:
    """Ask sealed runs in SQL.

    Tables: runs, requests, chunks, steps, kv_events, metrics, scrapes, latencies.
    `valid_runs`, `valid_requests`, ... leave invalid runs out. `harness explain tables` has every column and unit.

    Example: `harness query "select condition, sum(cached_tokens) from valid_requests group by all" --runs runs/today`
    """
    store = store_at(runs)
    if form == "table":
        with _ended_after(timeout_s):
            text = store.drawn(sql, terminal_width(), timeout_s)
        print_text(text) if output is None else write_text(output, f"{text}\n")
        return
    if output is None and form == "parquet" and sys.stdout.isatty():
        raise SpecError("Parquet is not for a terminal", where="--format", hint="Name a file with -o")
    with _ended_after(timeout_s):
        rows = store.query(sql, timeout_s)
    data = _encoded(rows, form)
    if output is None:
        print_bytes(data)
    else:
        check_output(output).write_bytes(data)


@contextmanager
def _ended_after(timeout_s: float) -> Generator[None]:
    """End the process where a query goes on: DuckDB heeds no interrupt within a value, which may be of gigabytes."""
    from harness.measure.records.sql import too_slow

    def end() -> None:
        error = too_slow(timeout_s)
        print_text(f"harness: {error}", is_error=True)
        os._exit(int(error.exit_code))

    timer = threading.Timer(timeout_s + INTERRUPT_GRACE_S, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def open_archive(
    archive: Annotated[Path, typer.Argument(help="An archive of `harness prereg publish`.")],
    output: Annotated[Path | None, output_option("New folder. Default: the archive's name without .zip")] = None,
) -> None:
    """Unpack a published archive, so that every command reads its runs.

    Each file is held to its checksum first. Commands that take a folder of runs also take the archive itself, and so
    does `open_runs` in Python. Nothing is judged here: `harness prereg check` does that.

    Example: `harness open configuration.zip -o configuration-published`
    """
    from harness.measure.records.archive import open_into, runs_folder
    from harness.measure.records.store import sealed_runs as runs_at

    folder = open_into(archive, output or archive.with_suffix(""))
    sealed = runs_at(Path("runs"), folder)
    num_invalid = sum(not run.is_valid for run in sealed)
    print_folded(f"{folder}: {len(sealed)} runs of {sealed[0].experiment}, {num_invalid} of them INVALID")
    print_folded(f"  harness prereg check {folder}")
    print_folded(f"  harness table {folder}")
    print_folded(f'  harness query "select condition, replicate, is_valid from runs" --runs {runs_folder(folder)}')
    print_with_comment(f'  harness.open_runs("{folder}")', "Python")


def _encoded(rows: pa.Table, form: RowForm) -> bytes:
    """The rows as a file of that form; SpecError where a cell does not fit into one."""
    import pyarrow as pa

    from harness.measure.records.disk import csv_bytes, parquet_bytes

    to_json = partial(json.dumps, default=_json_text, allow_nan=False)
    try:
        if form == "json":
            return to_json(rows.to_pylist(), indent=1).encode() + b"\n"
        if form == "jsonl":
            return "".join(f"{to_json(row)}\n" for row in rows.to_pylist()).encode()
        return csv_bytes(rows) if form == "csv" else parquet_bytes(rows)
    except (pa.ArrowException, ValueError, OverflowError) as error:
        raise SpecError(
            f"a cell of the answer cannot be written as {form}: {in_one_line(error)}",
            where="--format",
            hint="Cast its column to text, select COLUMN::varchar, or choose another format",
        ) from error


def _json_text(cell: object) -> str:
    """Dates, decimals and identifiers as text; bytes have no text of their own."""
    if isinstance(cell, bytes):
        raise ValueError("JSON has no bytes")
    return str(cell)


def list_runs(
    name: MaybeSealedArgument = None,
    runs: RunsOption = Path("runs"),
    form: Annotated[
        TableForm, typer.Option("--format", metavar="FORM", help=f"How the list is written: {FORMS}.")
    ] = TableForm.text,
) -> None:
    """List sealed runs, valid and INVALID, and unfinished ones.

    Example: `harness runs --runs runs/today`
    """
    store = store_at(runs)
    listed = store.sealed() if name is None else sealed_runs(runs, name)
    if form is not TableForm.text:
        print_text(written([_runs_listed(listed, runs)], form), end="")
        return

    console = terminal()
    for run in listed:
        verdict = "valid" if run.is_valid else f"INVALID: {escape_markup('; '.join(run.invalid_reasons))}"
        tries = "".join(f"; repeats {earlier.folder}, INVALID" for earlier in run.manifest.earlier_tries)
        say(console, f"{run.experiment}/{run.condition}/{run.replicate}  {verdict}{tries}")
    if name is not None:
        return
    from harness.measure.records import layout

    others = store.foreign()
    # Such as runs/check of a patch check: what lies there at this depth are its conditions.
    nested = {folder.parents[1] for folder in others if any(folder.glob(f"*/{layout.MANIFEST}"))}
    for folder in sorted(nested):
        say(console, f"{folder.relative_to(runs)}  other runs: harness runs --runs {folder}", "dim", markup=False)
    for folder in others:
        if folder.parents[1] not in nested:
            say(console, f"{folder.relative_to(runs)}  not named as a run is, not counted", "dim", markup=False)
    for folder in store.unsealed():
        say(console, f"{folder.relative_to(runs)}  never sealed, not counted", "dim")


def _runs_listed(listed: Sequence[SealedRun], runs: Path) -> Table:
    rows = [
        {
            **run.key._asdict(),
            "is_valid": run.is_valid,
            "invalid_reasons": "; ".join(run.invalid_reasons),
            "num_earlier_tries": len(run.manifest.earlier_tries),
            "backend": run.manifest.kind.name,
            "folder": str(run.path),
        }
        for run in listed
    ]
    return table_of("runs", f"Sealed runs in {runs}.", rows)


def verify(name: MaybeSealedArgument = None, runs: RunsOption = Path("runs")) -> None:
    """Check every file of sealed runs, of all or of one experiment.

    Example: `harness verify --runs runs/today`
    """
    from harness.measure.records.archive import archive_of, standing_of

    if name is None:
        num_runs = store_at(runs).verify()
    else:
        named = sealed_runs(runs, name)
        for run in named:
            run.verify()
        num_runs, runs = len(named), archive_of(named[0]) or runs
    print_folded(f"{num_runs} sealed runs are as they were sealed")
    if standing := standing_of(runs):
        print_folded(standing)


def derive(experiment: SealedArgument, runs: RunsOption = Path("runs")) -> None:
    """Rebuild every derived table from the raw logs and scrapes.

    Example: `harness records derive demo --runs runs/today`
    """
    from harness.analysis.logs.derive import rebuild

    for run in sealed_runs(runs, experiment):
        rebuild(run)
        run.verify()
        if run.is_by_simulator:
            print_folded(f"{run.path}: the simulator wrote the tables itself; left as they were sealed")
        else:
            print_folded(f"{run.path}: derived tables rebuilt, equal to those sealed")


def export(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="Sealed runs: of an experiment (its name, file or folder), a condition, or one run.",
            autocompletion=complete_sealed,
        ),
    ],
    form: Annotated[
        str,
        typer.Option(
            "--format", help="vllm-bench, aiperf, guidellm, inference-perf, otel, prometheus, csv or parquet."
        ),
    ],
    output: Annotated[Path | None, output_option("Folder to write. Default: EXPERIMENT-FORMAT.")] = None,
    otlp: Annotated[str, typer.Option(metavar="URL", help="With otel: also send the spans to this collector.")] = "",
    session_target: SessionTargetOption = None,
    runs: RunsOption = Path("runs"),
    force: Annotated[bool, typer.Option("--force", help="Replace files that are there.")] = False,
) -> None:
    """Write sealed runs in the shapes of other tools: serving figures and requests, no text of a prompt.

    Valid runs only. What was simulated or emulated is marked in each file (docs/guides/export.md).

    Example: `harness records export demo/base-waits --format aiperf -o aiperf-demo --runs runs/today`
    """
    from harness.present.export import measured, named_format, write_runs

    chosen = named_format(form)
    if otlp and chosen.send is None:
        raise SpecError(f"spans are sent as otel, not as {form}", where="--otlp", hint="Use --format otel")
    send = chosen.send(otlp) if otlp and chosen.send else None
    selected = held_to(valid_runs(name, runs), session_target)
    experiment = selected[0].experiment
    for path in write_runs(selected, chosen, output or Path(f"{experiment}-{chosen.name}"), may_replace=force):
        print_folded(f"wrote {path}")
    for left in chosen.no_room:
        print_folded(f"no room in {chosen.name}: {left}")
    if send:
        num_spans = sum(send(measured(run)) for run in selected)
        print_folded(f"sent {num_spans} spans of {len(selected)} runs to {otlp}")
