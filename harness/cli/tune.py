"""``harness tune``: from a server and its sessions to a configuration that is shown to pay.

Every stage is in ``harness.tune``; here are the options, the progress, and how it ends.
"""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from harness.cli.addresses import (
    BackendOption,
    MaybeExperimentArgument,
    RunsOption,
    SetOption,
    asked_again,
    changes_of,
    experiment_with,
)
from harness.cli.doctor import DEFAULT_WAIT, StackOption, WaitOption, await_server, seconds_to_wait
from harness.cli.init import AgentsOption, DraftInputs, to_be_tuned, write_experiment
from harness.cli.sizes import notes_of
from harness.cli.terminal import escape_markup, say, terminal, time_left
from harness.clock import NS_PER_S, MonotonicClock
from harness.errors import ExitCode, SpecError
from harness.measure.server.once import asked_once
from harness.outputs import write_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from harness.model.spec import ExperimentSpec
    from harness.runner import ExperimentOutcome


@asked_once()
def tune(
    experiment: MaybeExperimentArgument = None,
    runs: RunsOption = Path("runs"),
    backend: BackendOption = None,
    url: Annotated[
        str,
        typer.Option(
            "--for", metavar="URL", help="Write the experiment of this server first, with the settings it shows."
        ),
    ] = "",
    recording: Annotated[
        str,
        typer.Option("--from", metavar="FILE", help="Write the experiment first, with the agents of this recording."),
    ] = "",
    agents: AgentsOption = 0,
    api_key_env: Annotated[str, typer.Option(help="With --for: environment variable with the server's key.")] = "",
    stack: StackOption = None,
    wait: WaitOption = DEFAULT_WAIT,
    budget: Annotated[str, typer.Option(help="Wall time for all of it, e.g. `20min`. Default: [tune] budget.")] = "",
    memory: Annotated[str, typer.Option(help="Memory of one device, e.g. `14GiB`. Default: [tune] memory.")] = "",
    may_change: Annotated[list[str] | None, typer.Option(help="Key of [server] that may change. Repeatable.")] = None,
    candidate: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=URL",
            help="URL of its server (URL,FILE with its step log), or folder of its compiled model. Repeatable.",
        ),
    ] = None,
    only: Annotated[Literal["explore"] | None, typer.Option(help="`explore`: search without measuring.")] = None,
    changes: SetOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what each stage takes, and start nothing.")] = False,
) -> None:
    """Find a configuration that pays, and confirm it.

    Diagnoses what the experiment's server loses, searches configurations, and measures the proposal against today's
    server on new plans. The same command goes on after an interruption.

    Without an experiment, --for, --from or --backend write one first: `tune-URL.toml`, `tune-FILE.toml`,
    `tune-BACKEND.toml`.

    Example: `harness tune demo --backend sim --dry-run`
    """
    from harness.cli.run import ensure_machine_code
    from harness.tune.folder import PAGE, TUNED, folder_name
    from harness.tune.path import Tune, TuneStoppedError

    console = terminal()
    wanted = DraftInputs(
        backend or "", (url,) if url else (), recording, api_key_env, seconds_to_wait(wait), agents=agents, stack=stack
    )
    wishes = [f"tune.budget={json.dumps(budget)}"] * bool(budget) + [f"tune.memory={json.dumps(memory)}"] * bool(memory)
    wishes += [f"tune.may_change={json.dumps(may_change)}"] if may_change else []
    options = asked_again([*(changes or ()), *wishes], None, None)
    options += f" --runs {shlex.quote(str(runs))}" * (runs != Path("runs"))
    experiment, backend = _experiment(experiment, wanted, options)
    spec, source, _ = experiment_with(experiment, [*changes_of(changes, backend), *wishes], runs)
    ensure_machine_code(spec)

    def tell(line: str) -> None:
        say(console, line, markup=False)

    for note in notes_of(spec):
        tell(note)
    with time_left("searching") as on_search:
        made = Tune(spec, runs, _performer(source), tell, on_search, candidates=_places(candidate or []))
        if dry_run or only is None:
            made.forecast()
        if dry_run:
            return
        try:
            found = made.run(only_explore=only == "explore").answer
        except (TuneStoppedError, KeyboardInterrupt):
            say(console, "interrupted; what is sealed is kept, and the same command goes on")
            raise typer.Exit(int(ExitCode.INTERRUPTED)) from None
    console.print()
    say(console, escape_markup(found.sentence), "bold")
    if found.rests:
        say(console, escape_markup(found.rests))
    if found.why and found.state != "keep":
        say(console, escape_markup(f"not confirmed: {found.why}" if found.state == "predicted" else found.why))
    folder = runs / folder_name(spec.name)
    say(console, escape_markup(f"configuration: {folder / TUNED}"))
    say(console, escape_markup(f"page: {folder / PAGE}"))
    raise typer.Exit(int(found.exit_code))


def _experiment(experiment: Path | None, wanted: DraftInputs, options: str) -> tuple[Path, str | None]:
    """The experiment that is named, or that is written now, and the backend that replaces the file's.

    options: of the same command on the file.
    """
    from harness.model.spec import ServerSpec

    backend, urls, source = wanted.backend, wanted.urls, wanted.source
    if wanted.api_key_env and not urls:
        raise SpecError("goes with --for", where="--api-key-env", hint="Name the server with --for, or leave it out")
    if wanted.agents and not source:
        raise SpecError("goes with --from", where="--agents", hint="Name a recording with --from, or leave it out")
    if experiment is not None and not (urls or source):
        return experiment, backend or None
    if experiment is None and not (urls or source or backend):
        hint = "Name an experiment file, or say --for URL, --from RECORDING or --backend sim"
        raise SpecError("nothing to tune is named", where="harness tune", hint=hint)
    path = Path(f"{_file_name(wanted)}.toml") if experiment is None else experiment.with_suffix(".toml")
    words = [backend, *(urls or ("",)), source, wanted.api_key_env, *([wanted.agents] if wanted.agents else [])]
    asked = f"# harness tune: {json.dumps(words)}\n"
    if not path.exists():
        if source and not (urls or backend):
            say(terminal(), "no server is named (--for URL): this is of an emulator with assumed costs, not of yours")
        _print_verdict(source)
        write_experiment(path.stem, wanted, to_be_tuned)
        write_text(path, asked + path.read_text(encoding="utf-8"))
        same = escape_markup(f"`harness tune {path}{options}`")
        say(terminal(), f"wrote {escape_markup(str(path))}: what runs today; {same} is the same")
    elif not path.read_text(encoding="utf-8").startswith(asked):
        hint = f"Go on with it: harness tune {path}{options}; or name another file: harness tune NAME --for ..."
        raise SpecError("is there already, and asks something else", where=str(path), hint=hint)
    elif urls:
        await_server(ServerSpec(url=urls[0], api_key_env=wanted.api_key_env), wanted.wait_s)
    return path, None


def _print_verdict(source: str) -> None:
    """Say first how far predictions of the recorded server hold, where a plug-in can tell."""
    from harness.plugins import plugged, service

    verdict = "verdict of a recording"
    if source and verdict in plugged("services"):
        for line in service(verdict, where="--from")(Path(source)):
            say(terminal(), escape_markup(line))


def _file_name(wanted: DraftInputs) -> str:
    """Of the experiment that is written: what is asked, in small letters, digits and dashes."""
    url = wanted.urls[0] if wanted.urls else ""
    what = Path(wanted.source).stem if wanted.source else url.partition("://")[2] or url or wanted.backend
    return "tune-" + "-".join(re.findall(r"[a-z0-9]+", what.lower()))[:40]


def _performer(source: Path) -> Any:
    """Performs the runs of a stage with progress on the terminal."""

    def perform(spec: ExperimentSpec, folder: Path, until_ns: int, **options: Any) -> ExperimentOutcome:
        from harness.cli.progress import watched
        from harness.runner import run_experiment
        from harness.runner.progress import ExperimentStarted

        clock = MonotonicClock()
        with watched(terminal(), folder) as (progress, stop):

            def told(event: Any) -> None:
                if isinstance(event, ExperimentStarted) and event.predicted_wall_s is not None:
                    # No run begins after the budget.
                    left_s = max(0.0, (until_ns - clock.now_ns()) / NS_PER_S)
                    event = replace(event, predicted_wall_s=min(event.predicted_wall_s, left_s))
                progress(event)
                stop.after_run = stop.after_run or clock.now_ns() >= until_ns

            return run_experiment(
                spec, runs_root=folder, resume=True, on_progress=told, stop=stop, spec_source=str(source), **options
            )

    return perform


def _places(candidates: Sequence[str]) -> dict[str, str]:
    """Addresses or folders by the name of their candidate; SpecError for what is no NAME=URL."""
    places: dict[str, str] = {}
    for text in candidates:
        name, separator, place = text.partition("=")
        # An empty place would be the working folder.
        is_place = bool(place) and (place.startswith(("http://", "https://")) or Path(place).is_dir())
        if not separator or name not in ("smallest", "best", "proposed") or not is_place:
            hint = "Write best=http://HOST:PORT, of a compiled model best=FOLDER; or smallest=, or of agents proposed="
            raise SpecError(f"{text!r} is no NAME=URL of a candidate", where="--candidate", hint=hint)
        if name in places:
            raise SpecError(f"{name!r} is given twice", where="--candidate", hint="Leave one of them out")
        places[name] = place
    return places
