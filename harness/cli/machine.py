"""``harness doctor`` and ``emulator``: what this machine can run, and a server to try things on.

Starts nothing that outlives the command.
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
    from harness.cli.words import terminal
    from harness.errors import ExitCode
    from harness.runner.backends import readiness
    from harness.server.doctor import run_checks

    console = terminal()
    checks = [*run_checks(runs), *readiness()]
    marks = {True: "[green]ok[/]      ", False: "[red]missing[/] ", None: "[yellow]optional[/]"}
    width = max(len(check.name) for check in checks)
    for check in checks:
        console.print(f"{marks[check.ok]} {check.name:<{width}}  {check.found}", highlight=False, soft_wrap=True)
        if not check.ok:
            console.print(f"{'':>9}{'needs':>{width}}  {check.need}", style="dim", highlight=False, soft_wrap=True)
            console.print(f"{'':>9}{'do':>{width}}  {check.how}", highlight=False, soft_wrap=True)
    raise typer.Exit(int(ExitCode.HARNESS_FAULT if any(check.ok is False for check in checks) else ExitCode.PASS))


def emulator(context: typer.Context) -> None:
    """Start the emulated server in this terminal (all its flags: `harness emulator --help`).

    Example: `harness emulator --port 8000 --decode-buckets 1,2,4,8`
    """
    os.execv(sys.executable, [sys.executable, "-m", "harness.emulator", *context.args])
