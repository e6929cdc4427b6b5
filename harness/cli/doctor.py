"""``harness doctor``: what this machine can run, what a server lacks, and the wait for a server that is starting.

Nothing is started or changed here.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.cli.addresses import RunsOption
from harness.cli.sizes import notes_of_server
from harness.cli.terminal import escape_markup, format_duration, printable_lines, say, terminal
from harness.clock import MonotonicClock
from harness.errors import ExitCode, SpecError, in_one_line
from harness.kinds import ServingStack

if TYPE_CHECKING:
    from rich.console import Console

    from harness.model.spec import ServerSpec

DEFAULT_WAIT = "5min"
# How often a wait is told where no terminal shows it.
SAID_EVERY_S = 5.0
WaitOption = Annotated[
    str, typer.Option("--wait", metavar="TIME", help="Wait so long for a server that is starting; `0s`: not at all.")
]
StackOption = Annotated[
    ServingStack | None,
    typer.Option("--stack", help="With --for: what serves, vLLM itself or vllm-rbln, where the server shows neither."),
]


def doctor(
    runs: RunsOption = Path("runs"),
    environment: Annotated[
        str, typer.Option("--environment", "-e", help="Virtual environment of a serving stack. Default: on PATH.")
    ] = "",
    url: Annotated[str, typer.Option(help="Ask this server alone: what would a measurement of it lack?")] = "",
    api_key_env: Annotated[str, typer.Option(help="With --url: environment variable with the server's key.")] = "",
    metrics_url: Annotated[str, typer.Option(help="With --url: where its metrics are, if not at /metrics.")] = "",
    wait: WaitOption = DEFAULT_WAIT,
) -> None:
    """Say what this machine can run, what is missing, and how to get it.

    Example: `harness doctor --url http://127.0.0.1:8000`
    """
    if url:
        _ask_server(url, api_key_env, metrics_url, seconds_to_wait(wait))
        return
    if environment and not Path(environment).is_dir():
        hint = "Make it, and install the stack there: docs/guides/npu.md, section 2"
        raise SpecError("there is no such folder", where=f"--environment {environment}", hint=hint)
    from harness.measure.server.doctor import run_checks
    from harness.runner.backends import readiness, what_you_can_do

    console = terminal()
    checks = [*run_checks(runs), *readiness(environment)]
    marks = {True: "[green]ok[/]      ", False: "[red]missing[/] ", None: "[yellow]optional[/]"}
    width = max(len(check.name) for check in checks)
    for check in checks:
        say(console, f"{marks[check.ok]} {check.name:<{width}}  {check.found}", hang=width + 11)
        if not check.ok:
            say(console, f"{'':>9}{'needs':>{width}}  {check.need}", "dim", hang=width + 11)
            say(console, f"{'':>9}{'do':>{width}}  {check.how}", hang=width + 11)
    _show_plugins(console)
    for line in what_you_can_do(checks):
        say(console, line, "bold", markup=False)
    raise typer.Exit(int(ExitCode.HARNESS_FAULT if any(check.ok is False for check in checks) else ExitCode.PASS))


def _show_plugins(console: Console) -> None:
    """Print the plug-ins that are here, a line for each that does not load, and what they say of this machine."""
    from harness.plugins import part_at, plugged, plugins

    found = plugins()
    for plugin in found.usable:
        say(console, f"[green]plug-in[/]  {escape_markup(plugin.name)}: {escape_markup(plugin.summary)}", hang=9)
    for broken in found.unusable:
        why = f"{broken.name} ({broken.package}) does not load and is left out: {broken.why}"
        say(console, f"[yellow]plug-in[/]  {escape_markup(printable_lines(why))}", hang=9)
    for name, place in plugged("doctor").items():
        try:
            lines = part_at(place)()
        # Other people's code: the doctor goes on.
        except (Exception, SystemExit) as error:
            lines = [f"{name} of a plug-in failed ({place}): {in_one_line(error)}"]
        for line in lines:
            say(console, escape_markup(line), "dim")


def _ask_server(url: str, api_key_env: str, metrics_url: str, wait_s: float) -> None:
    """Print what a server shows and lacks; leaves with exit code 1 where a measurement would be refused."""
    from harness.measure.client.target import endpoint_of
    from harness.measure.server.probe import Needs, probe
    from harness.model.spec import ServerSpec
    from harness.runner.backends.attached import AttachedBackend, facts_of

    server, console = ServerSpec(url=url, api_key_env=api_key_env, metrics_url=metrics_url), terminal()
    await_server(server, wait_s)
    report = probe(endpoint_of(server), Needs(asks_again=True, metrics_url=metrics_url))
    shown = {"model": report.model, "version": report.version}
    if report.model:
        facts = facts_of(server)
        stack, by = AttachedBackend().stack_shown(server, facts)
        silent = "vLLM itself or vllm-rbln: nothing shows which; say --stack to init and tune"
        shown |= {"stack": f"{stack.value} ({by})" if stack else silent} if by else {}
        shown |= AttachedBackend().all_shown(server, facts=facts)
    for name, value in shown.items() if report.model else ():
        say(console, f"[green]shown[/]    {name}: {escape_markup(str(value))}", hang=9)
    for note in (*report.notes, *(notes_of_server(url) if report.model else ())):
        say(console, f"[yellow]limit[/]    {escape_markup(note)}", hang=9)
    for problem in report.problems:
        say(console, f"[red]missing[/]  {escape_markup(problem)}", hang=9)
    if report.problems:
        verdict = f"it cannot be measured yet: {len(report.problems)} missing"
    else:
        limits = f", with {len(report.notes)} limit{'s' * (len(report.notes) > 1)}" if report.notes else ""
        verdict = f"it can be measured{limits}: harness init NAME --for {url}"
    say(console, escape_markup(verdict), "bold")
    raise typer.Exit(int(ExitCode.HARNESS_FAULT if report.problems else ExitCode.PASS))


def seconds_to_wait(wait: str) -> float:
    """The seconds of ``--wait``; SpecError where it is no time."""
    from harness.model.spec.sections import seconds_of

    if (seconds := seconds_of(wait)) is None:
        raise SpecError(f"{wait!r} is no time", where="--wait", hint="Write 90s, 5min or 1h; 0s: not at all")
    return seconds


def await_server(server: ServerSpec, limit_s: float) -> None:
    """Wait while a server is starting, for ``limit_s`` at most: the time so far, every few seconds.

    Ctrl-C leaves with 130 and says what was waited for.
    """
    from harness.measure.client.target import endpoint_of
    from harness.measure.server.ready import wait_until_ready

    endpoint, seen, waited_s, said_s = endpoint_of(server), list[str](), 0.0, 0.0
    console = terminal(is_error=True)
    status = console.status("")

    def on_wait(why: str, so_far_s: float) -> None:
        nonlocal waited_s, said_s
        waited_s = so_far_s
        if why not in seen:
            seen.append(why)
            left = format_duration(limit_s - so_far_s)
            say(console, f"{endpoint.url} is not ready ({why}): waiting {left} at most for it to start", markup=False)
            said_s = so_far_s
        elif not console.is_terminal and so_far_s - said_s >= SAID_EVERY_S:
            said_s, so_far, most = so_far_s, format_duration(so_far_s), format_duration(limit_s)
            say(console, f"waited {so_far} of {most} ({why}); it ends when the server answers, or with Ctrl-C")
        status.update(f"waited {format_duration(so_far_s)}; Ctrl-C ends it")
        status.start()

    try:
        wait_until_ready(endpoint, limit_s, on_wait, MonotonicClock())
    except KeyboardInterrupt:
        status.stop()
        why = f" ({seen[-1]})" if seen else ""
        waited = f"waited {format_duration(waited_s)} for {endpoint.url}{why}"
        say(console, f"interrupted: {waited}. Nothing was written", markup=False)
        raise typer.Exit(int(ExitCode.INTERRUPTED)) from None
    finally:
        status.stop()
