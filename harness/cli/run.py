"""``harness run`` and ``harness sweep``: perform an experiment, as it is or at several values of one key.

No server is started or stopped here.
"""

from __future__ import annotations

import json
import shlex
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from harness.cli.addresses import (
    FORMS,
    BackendOption,
    ExperimentArgument,
    MaybeExperimentArgument,
    ReplicatesOption,
    ResumeOption,
    RetryInvalidOption,
    RunsOption,
    SetOption,
    asked_again,
    changes_of,
    experiment_with,
    from_here,
)
from harness.cli.terminal import about, escape_markup, format_duration, print_folded, print_text, say, show, terminal
from harness.errors import ExitCode, SpecError
from harness.kinds import kind_named
from harness.shipped import shipped_names
from harness.table import Table, TableForm

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from harness.judge.prereg import RunAuthorization
    from harness.model.experiment import PlannedRun
    from harness.model.spec import ExperimentSpec
    from harness.runner import ExperimentOutcome


def run(
    experiment: MaybeExperimentArgument = None,
    runs: RunsOption = Path("runs"),
    confirmatory: Annotated[
        Path | None, typer.Option(help="Frozen file to run by (see `harness prereg freeze`).")
    ] = None,
    report_path: Annotated[
        Path | None, typer.Option("--report", help="Where the HTML report goes. Default: `RUNS/EXPERIMENT.html`")
    ] = None,
    resume: ResumeOption = False,
    retry_invalid: RetryInvalidOption = False,
    backend: BackendOption = None,
    replicates: ReplicatesOption = None,
    devices: Annotated[
        str | None, typer.Option(help="Share the replicates among these devices, e.g. `--devices 0,1,2,3`.")
    ] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="Change one key, e.g. `--set server.kv_slots=16`. Repeatable.")
    ] = None,
    until: Annotated[
        Literal["decided"] | None,
        typer.Option(help="`decided`: block by block, until the rule in [stop] has its answer."),
    ] = None,
    keep_going: Annotated[
        bool, typer.Option("--keep-going", help="Go on where a server answers nothing, or has other settings.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, show the runs, start nothing.")] = False,
    form: Annotated[
        TableForm,
        typer.Option(
            "--format",
            metavar="FORM",
            help=f"How the result is written: {FORMS}; all else then goes to standard error.",
        ),
    ] = TableForm.text,
) -> None:
    """Run an experiment and write its report.

    Each condition and replicate runs on a freshly started server.

    Example: `harness run demo --backend sim --runs runs/first`
    """
    from harness.present.report.page import check_report_page

    if retry_invalid and not resume:
        raise SpecError(
            "goes with --resume", where="--retry-invalid", hint="Say: harness run ... --resume --retry-invalid"
        )
    made = changes_of(changes, backend, replicates, devices)
    spec, source, authorization = _what_to_run(experiment, confirmatory, made, runs)
    again = f"harness run {source}{asked_again(changes, backend, replicates, devices)}"
    if authorization is not None:
        again = f"harness run --confirmatory {source}"
    if until is not None:
        spec = _until_decided(spec, source, replicates)
        again += " --until decided"
    page = report_path or runs / f"{spec.name}.html"
    if dry_run:
        check_report_page(page)
        _show_order(spec, runs, resume=resume, retry_invalid=retry_invalid, authorization=authorization)
        return
    perform(
        spec,
        source,
        runs,
        again,
        page=page,
        form=form,
        authorization=authorization,
        resume=resume,
        retry_invalid=retry_invalid,
        until_decided=until is not None,
        keep_going=keep_going,
    )


def perform(
    spec: ExperimentSpec,
    source: Path,
    runs: Path,
    again: str,
    *,
    page: Path | None = None,
    form: TableForm = TableForm.text,
    **options: Any,
) -> None:
    """Run what ``spec`` plans, showing progress, write its report and leave with the outcome's exit code.

    again: the command that continues it. options: of ``run_experiment``.
    """
    from harness.analysis.summary import summarise
    from harness.cli.progress import watched
    from harness.cli.results import conclude, figures_written
    from harness.present.report.page import check_report_page
    from harness.runner import run_experiment

    console = terminal(is_error=form is not TableForm.text)
    page = check_report_page(page or runs / f"{spec.name}.html")
    ensure_machine_code(spec)
    with watched(console, runs) as (progress, stop):
        outcome = run_experiment(
            spec, runs_root=runs, on_progress=progress, stop=stop, spec_source=str(source), **options
        )
    suggested = None
    if outcome.runs:
        suggested = conclude(console, outcome.runs, page, spec.title or spec.name, source=source)
        if form is not TableForm.text:
            print_text(figures_written(summarise(outcome.runs), form), end="")
    code = _exit_code(console, outcome, f"{again} --runs {runs}")
    if code is ExitCode.PASS and options.get("authorization") is not None:
        say(console, f"decide it: harness decide {spec.name} --runs {runs}", markup=False)
    elif code is ExitCode.PASS and suggested is not None:
        say(console, escape_markup(suggested.line))
    raise typer.Exit(int(code))


def _until_decided(spec: ExperimentSpec, source: Path, replicates: int | None) -> ExperimentSpec:
    """The experiment with the blocks that its stopping rule allows; SpecError where that cannot decide."""
    from harness.judge.planning.rare_plans import few_plans_in_words, plans_asked
    from harness.runner.progress import declared_rule

    if replicates is not None:
        what, hint = "the stopping rule says how many blocks there may be", "Set it: --set stop.budget=N"
        raise SpecError(what, where="--replicates", hint=hint)
    spec = spec.until_decided(str(source))
    stop = declared_rule(spec, (), str(source))
    ensure_machine_code(spec, is_simulated=True)
    for name, asked in plans_asked(spec).items():
        if words := few_plans_in_words(asked, stop.budget):
            print_folded(f"{name}: {words}", is_error=True)
    return spec


def _what_to_run(
    experiment: Path | None, confirmatory: Path | None, changes: list[str], runs: Path
) -> tuple[ExperimentSpec, Path, RunAuthorization | None]:
    """The experiment, the file it comes from, and the authorization of a confirmatory run."""
    if confirmatory is None:
        if experiment is None:
            hint = "Name a file or a shipped experiment: harness run demo"
            raise SpecError("no experiment was named", where="harness run", hint=hint)
        spec, path, _ = experiment_with(experiment, changes, runs)
        if path == Path(f"{experiment}.toml") and str(experiment) in shipped_names("experiments"):
            print_text(f"{experiment}: {path} of this folder, not the shipped experiment", is_error=True)
        _refuse_frozen(spec.name, spec.base_seed, path)
        return spec, path, None
    from harness.judge.prereg import authorize

    if experiment is not None or changes:
        raise SpecError(
            "a confirmatory run is exactly what was frozen: no experiment file and no change beside it",
            where=str(confirmatory),
            hint="Leave them out; to change it, freeze a copy of its file with another name = and base_seed",
        )
    frozen, authorization = authorize(confirmatory, runs_root=runs)
    return frozen.experiment, confirmatory, authorization


def _refuse_frozen(name: str, base_seed: int, path: Path) -> None:
    """SpecError for an experiment whose freeze lies beside it: exploratory runs would use up the frozen seed."""
    from harness.measure.records.manifest import table_at

    for folder in path.absolute().parents:
        frozen = folder / "plans" / "frozen" / f"{name}.json"
        table: object = None
        with suppress(OSError, ValueError, RecursionError):
            table = json.loads(frozen.read_bytes())
        if table_at(table, "experiment").get("base_seed") == base_seed:
            first = f"harness run {path} --replicates 1 --set base_seed={base_seed + 1} --runs runs/first"
            raise SpecError(
                f"is frozen, and runs without its freeze would use up base seed {base_seed}",
                where=str(path),
                hint=f"Measure it: harness run --confirmatory {from_here(frozen)}. A first look: {first}",
            )
        if (folder / ".git").exists():
            return


def _exit_code(console: Console, outcome: ExperimentOutcome, again: str) -> ExitCode:
    """What an outcome leaves to do, printed. again: the command that continues the experiment."""
    from harness.runner.experiment import LASTING, will_fail_again

    for invalid in outcome.invalid_runs:
        say(console, f"[red]INVALID[/] {invalid.label}: {escape_markup('; '.join(invalid.invalid_reasons))}")
    if outcome.ended_by and not outcome.is_complete:
        alike = "" if outcome.ended_by.startswith(LASTING) else "every request of the first run failed alike, so "
        say(
            console,
            f"{alike}the experiment ends here: {escape_markup(outcome.ended_by)}. "
            "Mend the cause first; --keep-going performs the other runs all the same",
        )
        return ExitCode.RUN_INVALID
    if not outcome.is_complete:
        num_sealed = f"{len(outcome.runs)} of {outcome.num_planned} runs are sealed"
        say(console, f"{num_sealed} ({outcome.missing_words}); continue with: {again} --resume")
        return ExitCode.INTERRUPTED
    if any(not will_fail_again(run) for run in outcome.invalid_runs):
        say(console, f"repeat them, the old ones kept: {again} --resume --retry-invalid")
    return ExitCode.RUN_INVALID if outcome.invalid_runs else ExitCode.PASS


def _show_order(spec: ExperimentSpec, runs: Path, **options: Any) -> None:
    """The runs in their order; what is refused or left out now is refused or left out by the run itself.

    options: of ``run_experiment``.
    """
    from harness.runner.backends import backend_named
    from harness.runner.experiment import check_hosts, what_to_do
    from harness.runner.progress import alike_words, predicted_replay_s

    console = terminal()
    planned, todo, _ = what_to_do(spec, runs, **options)
    check_hosts(todo)
    rows = [
        (
            run.label,
            run.plan.hash[:12],
            run.plan.num_requests,
            f"{{{','.join(map(str, run.server.decode_buckets))}}}" if run.server.decode_buckets else "the server's",
            format_duration(predicted_replay_s(run)),
        )
        for run in todo
    ]
    show(console, Table("", "", ("run", "plan", "requests", "buckets", "replay"), tuple(rows)))
    if todo and (words := backend_named(spec.backend).checked_on(todo[0].server)):
        say(console, f"checked {words}. No server was started", markup=False)
    if total := predicted_total(todo):
        say(console, total)
    if words := alike_words(planned):
        say(console, f"Note: {escape_markup(words)}.")
    if spec.fleet is not None:
        shares = ", ".join(f"{place}: {num}" for place, num in Counter(run.place for run in todo).items())
        say(console, f"runs side by side: {shares}")
    if num_sealed := len(planned) - len(todo):
        say(console, f"{num_sealed} more are sealed already")


def predicted_total(todo: Sequence[PlannedRun]) -> str:
    """How long these runs take together, servers started and stopped; "" where no wall time passes."""
    from harness.runner.progress import assumed_pace, predicted_replay_s

    kinds = [kind_named(run.spec.backend) for run in todo]
    if not todo or any(kind.is_virtual for kind in kinds):
        return ""
    replays_s = sum(predicted_replay_s(run) for run in todo)
    total_s = (replays_s + sum(kind.lifecycle_s for kind in kinds)) / max(1, len({run.place for run in todo}))
    life = ", servers started and stopped" if any(kind.is_restarted for kind in kinds) else ""
    return f"{about(total_s)} in all{assumed_pace(kinds[0]) or f'{life}; a first estimate'}"


def ensure_machine_code(spec: ExperimentSpec, *, is_simulated: bool = False) -> None:
    """Compile what runs of ``spec`` need, or its simulations alone, where this machine has no code of it."""
    from harness.runner.machine_code import make, missing, parts_of

    if lacking := missing(parts_of(spec, is_simulated=is_simulated)):
        make(lacking)


def sweep(
    experiment: ExperimentArgument,
    over: Annotated[
        str, typer.Option(help="KEY=VALUE,VALUE,... of [server] or [workload], e.g. `server.kv_slots=8,10,12`.")
    ],
    runs: RunsOption = Path("runs"),
    resume: ResumeOption = False,
    backend: BackendOption = None,
    replicates: Annotated[int | None, typer.Option(min=1, help="Use this number of replicates.")] = None,
    changes: SetOption = None,
) -> None:
    """Run an experiment at several values of one key.

    The report draws rates and latencies along it.
    The first value is the baseline of the others. Results lie under NAME-sweep-KEY.

    Example: `harness sweep demo --over workload.num_sessions=2,4,8 --backend sim --runs runs/sweep`
    """

    from harness.measure.records.store import experiment_at
    from harness.model.spec import parse_experiment
    from harness.model.spec.changes import override_table, swept_table

    path, recorded, _ = experiment_at(experiment, runs)
    table = swept_table(override_table(recorded, changes_of(changes, backend, replicates)), over)
    spec = parse_experiment(table, where=f"{path} --over {over}")
    _refuse_frozen(str(recorded.get("name")), spec.base_seed, path)
    again = f"harness sweep {experiment} --over {shlex.quote(over)}{asked_again(changes, backend, replicates)}"
    perform(spec, path, runs, again, resume=resume)
