"""``harness doctor`` and ``emulator``: what this machine can run, and a server to try things on.

Starts nothing that outlives the command.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from harness.cli.addresses import RunsOption
from harness.cli.terminal import escape_markup, say, terminal
from harness.errors import ExitCode


def doctor(
    runs: RunsOption = Path("runs"),
    url: Annotated[str, typer.Option(help="Ask this server alone: what would a measurement of it lack?")] = "",
    api_key_env: Annotated[str, typer.Option(help="With --url: environment variable with the server's key.")] = "",
) -> None:
    """Say what this machine can run, what is missing, and how to get it.

    Example: `harness doctor --url http://127.0.0.1:8000`
    """
    if url:
        _ask_server(url, api_key_env)
        return
    from harness.runner.backends import readiness, what_you_can_do
    from harness.server.doctor import run_checks

    console = terminal()
    checks = [*run_checks(runs), *readiness()]
    marks = {True: "[green]ok[/]      ", False: "[red]missing[/] ", None: "[yellow]optional[/]"}
    width = max(len(check.name) for check in checks)
    for check in checks:
        say(console, f"{marks[check.ok]} {check.name:<{width}}  {check.found}")
        if not check.ok:
            say(console, f"{'':>9}{'needs':>{width}}  {check.need}", "dim")
            say(console, f"{'':>9}{'do':>{width}}  {check.how}")
    say(console, what_you_can_do(checks), "bold")
    raise typer.Exit(int(ExitCode.HARNESS_FAULT if any(check.ok is False for check in checks) else ExitCode.PASS))


def _ask_server(url: str, api_key_env: str) -> None:
    """Print what a server shows and lacks; leaves with exit code 1 where a measurement would be refused."""
    from harness.client.target import endpoint_of
    from harness.runner.backends.attached import AttachedBackend
    from harness.server.probe import Needs, probe
    from harness.spec import ClientSpec, ServerSpec

    server, console = ServerSpec(url=url, api_key_env=api_key_env), terminal()
    endpoint = endpoint_of(server)
    report = probe(endpoint, Needs(ClientSpec(name="aiohttp" if endpoint.is_https else "epoll")))
    shown = {"model": report.model, "version": report.version}
    shown |= AttachedBackend().in_force(server) if report.model else {}
    for name, value in shown.items() if report.model else ():
        say(console, f"[green]shown[/]    {name}: {escape_markup(str(value))}")
    for note in report.notes:
        say(console, f"[yellow]limit[/]    {escape_markup(note)}")
    for problem in report.problems:
        say(console, f"[red]missing[/]  {escape_markup(problem)}")
    raise typer.Exit(int(ExitCode.HARNESS_FAULT if report.problems else ExitCode.PASS))


def emulator(context: typer.Context) -> None:
    """Start the emulated server in this terminal.

    All its flags: `harness server emulator --help`.

    Example: `harness server emulator --port 8000 --decode-buckets 1,2,4,8`
    """
    os.execv(sys.executable, [sys.executable, "-m", "harness.emulator", *context.args])
