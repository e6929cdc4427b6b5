"""``harness doctor`` and ``emulator``: what this machine can run, and a server to try things on.

Starts nothing that outlives the command. Next: ``harness.live.doctor``, ``harness.emulator``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import typer

from harness.cli.run import RunsOption


def register(app: typer.Typer) -> None:
    app.command(name="doctor")(doctor)
    app.command(
        name="emulator",
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
        add_help_option=False,
    )(emulator)


def doctor(runs: RunsOption = Path("runs")) -> None:
    """Say what this machine can run, what is missing, and how to get it.

    Example: `harness doctor`
    """
    from rich.console import Console
    from rich.table import Table

    from harness.errors import ExitCode
    from harness.live.doctor import run_checks

    checks = run_checks(runs)
    table = Table("", "check", "found", "needed", "what to do", header_style="bold", box=None, pad_edge=False)
    marks = {True: "[green]ok[/]", False: "[red]missing[/]", None: "[yellow]optional[/]"}
    for check in checks:
        table.add_row(marks[check.ok], check.name, check.found, check.need, "" if check.ok else check.how)
    Console().print(table)
    raise typer.Exit(int(ExitCode.HARNESS_FAULT if any(check.ok is False for check in checks) else ExitCode.PASS))


def emulator(context: typer.Context) -> None:
    """Start the emulated server in this terminal (all its flags: `harness emulator --help`).

    Example: `harness emulator --port 8000 --decode-buckets 1,2,4,8`
    """
    os.execv(sys.executable, [sys.executable, "-m", "harness.emulator", *context.args])
