"""``harness run`` and ``harness report``: perform an experiment, and show what its sealed runs say.

No server is started or stopped here.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from harness.cli.addresses import (
    BackendOption,
    MaybeExperimentArgument,
    ReplicatesOption,
    ResumeOption,
    RunsOption,
    SealedArgument,
    TableFormOption,
    asked_again,
    changes_of,
    experiment_with,
    sealed_runs,
)
from harness.cli.terminal import escape_markup, format_duration, say, show, terminal
from harness.errors import ExitCode, HarnessError, SpecError
from harness.kinds import kind_named
from harness.outputs import check_output
from harness.shipped import shipped_names
from harness.table import Table, TableForm, table_of, written

if TYPE_CHECKING:
    from rich.console import Console

    from harness.analysis import ExperimentSummary
    from harness.prereg import RunAuthorization
    from harness.records import SealedRun
    from harness.report.view import Results
    from harness.runner import ExperimentOutcome
    from harness.spec import ExperimentSpec


def run(
    experiment: MaybeExperimentArgument = None,
    runs: RunsOption = Path("runs"),
    confirmatory: Annotated[
        Path | None, typer.Option("--confirmatory", help="Frozen file to run by (see `harness prereg freeze`).")
    ] = None,
    report_path: Annotated[
        Path | None, typer.Option("--report", help="Where the HTML report goes. Default: `RUNS/EXPERIMENT.html`")
    ] = None,
    resume: ResumeOption = False,
    retry_invalid: Annotated[
        bool, typer.Option("--retry-invalid", help="With --resume: repeat INVALID runs too; the old ones are kept.")
    ] = False,
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
        typer.Option("--until", help="`decided`: block by block, until the rule in [stop] has its answer."),
    ] = None,
    keep_going: Annotated[
        bool, typer.Option("--keep-going", help="Go on although every request of the first run failed alike.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, show the runs, start nothing.")] = False,
    form: Annotated[
        TableForm, typer.Option("--format", help="How the result is written; all else then goes to standard error.")
    ] = TableForm.text,
) -> None:
    """Run an experiment and write its report.

    Each condition and replicate runs on a freshly started server.

    Example: `harness run demo --backend sim --runs runs/first`
    """
    from harness.report.write import check_report_page

    if retry_invalid and not resume:
        raise SpecError(
            "goes with --resume", where="--retry-invalid", hint="Say: harness run ... --resume --retry-invalid"
        )
    extra = _asked(backend, replicates, devices, changes or [])
    spec, source, authorization = _what_to_run(experiment, confirmatory, extra, runs)
    if until:
        spec = _until_decided(spec, source, replicates)
    page = check_report_page(report_path or runs / f"{spec.name}.html")
    if dry_run:
        _show_order(terminal(), spec, runs, resume=resume, retry_invalid=retry_invalid, authorization=authorization)
        return
    perform(
        spec,
        source,
        runs,
        page=page,
        authorization=authorization,
        resume=resume,
        retry_invalid=retry_invalid,
        until=until is not None,
        keep_going=keep_going,
        again=""
        if authorization
        else f"harness run {source}{asked_again(changes or [], backend, replicates, devices)}",
        form=form,
    )


def perform(
    spec: ExperimentSpec,
    source: Path,
    runs: Path,
    *,
    page: Path | None = None,
    authorization: RunAuthorization | None = None,
    resume: bool = False,
    retry_invalid: bool = False,
    until: bool = False,
    keep_going: bool = False,
    again: str = "",
    form: TableForm = TableForm.text,
) -> None:
    """Run what ``spec`` plans, showing progress, write its report and leave with the outcome's exit code.

    until: end when the experiment's stopping rule has decided.
    again: the command that continues it; default: ``harness run --confirmatory`` of the frozen file.
    """
    from harness.cli.progress import watched
    from harness.report.write import check_report_page
    from harness.runner import run_experiment

    console = terminal(is_error=form is not TableForm.text)
    page = check_report_page(page or runs / f"{spec.name}.html")
    ensure_machine_code(spec)
    with watched(console, runs) as (progress, stop):
        outcome = run_experiment(
            spec,
            runs_root=runs,
            resume=resume,
            on_progress=progress,
            stop=stop,
            spec_source=str(source),
            authorization=authorization,
            retry_invalid=retry_invalid,
            until_decided=until,
            keep_going=keep_going,
        )
    again = again or f"harness run --confirmatory {source}"
    again += " --until decided" if until else ""
    if outcome.runs:
        _conclude(console, outcome.runs, page, spec.title or spec.name)
        if form is not TableForm.text:
            print(_conditions_written(outcome.runs, form), end="")
    raise typer.Exit(int(_exit_code(console, outcome, again, runs)))


def _until_decided(spec: ExperimentSpec, source: Path, replicates: int | None) -> ExperimentSpec:
    """The experiment with the blocks that its stopping rule allows; SpecError where that cannot decide."""
    from harness.runner.monitor import declared_rule

    if replicates is not None:
        raise SpecError(
            "the stopping rule says how many blocks there may be",
            where="--replicates",
            hint="Set it: --set stop.budget=N",
        )
    spec = spec.until_decided(str(source))
    declared_rule(spec, (), str(source))
    return spec


def _asked(backend: str | None, replicates: int | None, devices: str | None, changes: Sequence[str]) -> list[str]:
    """What the options change in the file, each as ``--set`` would."""
    if replicates is not None and replicates < 1:
        raise SpecError(f"must be at least 1, got {replicates}", where="--replicates")
    if devices is not None and not re.fullmatch(r"\d+(,\d+)*", devices):
        hint = "Write the numbers of devices, e.g. --devices 0,1,2,3"
        raise SpecError(f"{devices!r} is no list of numbers", where="--devices", hint=hint)
    return [*changes_of(changes, backend, replicates), *([f"fleet.devices=[{devices}]"] if devices is not None else [])]


def _what_to_run(
    experiment: Path | None, confirmatory: Path | None, changes: list[str], runs: Path
) -> tuple[ExperimentSpec, Path, RunAuthorization | None]:
    """The experiment, the file it comes from, and the authorization of a confirmatory run."""
    if confirmatory is None:
        if experiment is None:
            raise SpecError(
                "no experiment was named",
                where="harness run",
                hint="Name a file or a shipped experiment: harness run demo",
            )
        spec, path, _ = experiment_with(experiment, changes, runs)
        if path == Path(f"{experiment}.toml") and str(experiment) in shipped_names("experiments"):
            print(f"{experiment}: {path} of this folder, not the shipped experiment", file=sys.stderr)
        return spec, path, None
    from harness.prereg import authorize

    if experiment is not None or changes:
        raise SpecError(
            "a confirmatory run is exactly what was frozen: no experiment file and no change beside it",
            where=str(confirmatory),
            hint="Leave them out, or freeze again with --set",
        )
    frozen, authorization = authorize(confirmatory, runs_root=runs)
    return frozen.experiment, confirmatory, authorization


def report(
    experiment: SealedArgument,
    runs: RunsOption = Path("runs"),
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Default: `RUNS/EXPERIMENT.html`")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file whatever it holds.")] = False,
) -> None:
    """Write the HTML report of an experiment again.

    It is made from the sealed runs.
    A file that is no report of the harness is replaced only with `--force`.

    Example: `harness report demo --runs runs/today -o demo.html`
    """
    from harness.report.write import check_report_page

    sealed = sealed_runs(runs, experiment)
    page = output or sealed[0].path.parents[2] / f"{sealed[0].experiment}.html"
    if force:
        check_output(page).unlink(missing_ok=True)
    _conclude(terminal(), sealed, check_report_page(page), None)


def table(
    experiment: SealedArgument,
    runs: RunsOption = Path("runs"),
    serving: Annotated[
        bool, typer.Option("--serving", help="Every latency: by turn and prefix, with intervals and certified bounds.")
    ] = False,
    predicted: Annotated[
        bool, typer.Option("--predicted", help="Predicted cost ratios and reuse beside the observed, with intervals.")
    ] = False,
    form: TableFormOption = TableForm.text,
) -> None:
    """Print what each condition cost, and what its users felt.

    Example: `harness table demo --runs runs/today --serving`
    """
    from harness.analysis import summarise
    from harness.report import on_terminal, serving_tables, summary_tables

    sealed = sealed_runs(runs, experiment)
    if predicted:
        print(_predicted_written(sealed, form), end="")
        return
    if form is not TableForm.text:
        print(_conditions_written(sealed, form, serving=serving), end="")
        return
    out, summary = terminal(), summarise(sealed)
    if not serving:
        _print_answer(out, summary, sealed)
        out.print()
    for shown in serving_tables(summary) if serving else summary_tables(summary):
        out.print(on_terminal(shown, out.width))
        out.print()


def _conditions_written(sealed: Sequence[SealedRun], form: TableForm, *, serving: bool = False) -> str:
    """A row per condition, or the serving figures: every column for programs, the terminal's tables for documents."""
    from harness.analysis import summarise
    from harness.report import serving_tables, summary_tables
    from harness.report.terminal import for_documents

    summary = summarise(sealed)
    if form in (TableForm.csv, TableForm.json):
        rows = (summary.serving_to_arrow() if serving else summary.to_arrow()).to_pylist()
        return written([table_of(summary.experiment, "", rows)], form)
    shown = serving_tables(summary) if serving else summary_tables(summary)
    return written(list(map(for_documents, shown)), form)


def _predicted_written(sealed: Sequence[SealedRun], form: TableForm) -> str:
    """What was predicted for the very plans of these runs, by the frozen draws where there are such."""
    from harness.analysis.catalogue.costs import prediction_table
    from harness.analysis.decisions.verdicts import ExperimentRuns
    from harness.prereg import check_sealed_runs, predictions_for
    from harness.records import origin_of

    kind, valid = sealed[0].manifest.backend, [run for run in sealed if run.is_valid]
    predictions = (
        prediction_table(ExperimentRuns(valid, predictions_for(valid, check_sealed_runs(sealed)))) if valid else None
    )
    if predictions is None or not predictions.rows:
        raise SpecError("no condition has valid runs beside its baseline's", where=sealed[0].experiment)
    note = origin_of(sealed)
    if form is not TableForm.text:
        rows = tuple((*row, kind) for row in predictions.rows)
        table = Table(predictions.name, f"{predictions.caption}.", (*predictions.columns, "backend"), rows, note)
        return written([table], form)
    lines = [note] if note else []
    for row in predictions.records():
        lines.append(f"{row['condition']}")
        for name in ("predicted", "observed"):
            low, high = row[f"{name}_low"], row[f"{name}_high"]
            interval = "" if low is None else f"  [{low:.4f}, {high:.4f}]"
            observed = row["observed_ratio_B"] if row["observed_ratio_A"] is None else row["observed_ratio_A"]
            ratio = row["predicted_ratio"] if name == "predicted" else observed
            source = row["prediction" if name == "predicted" else "observation"]
            lines.append(f"  {name:<9}  cost ratio {ratio:.4f}{interval}  reused {row[f'{name}_reuse']}  ({source})")
    return "\n".join(lines) + "\n"


def _conclude(console: Console, sealed: Sequence[SealedRun], path: Path, title: str | None) -> None:
    from harness.analysis import summarise
    from harness.analysis.cost.drift import drift
    from harness.report import on_terminal, summary_tables, write_report

    summary = summarise(sealed)
    console.print()
    _print_answer(console, summary, sealed)
    for shown in summary_tables(summary):
        console.print()
        console.print(on_terminal(shown, console.width))
    if (moved := drift(sealed)) is not None and moved.is_found:
        console.print(str(moved), style="yellow", markup=False, highlight=False)
    page = write_report(sealed, path, title=title, results=_results(sealed), summary=summary)
    say(console, f"report: {page}")


def _print_answer(console: Console, summary: ExperimentSummary, sealed: Sequence[SealedRun]) -> None:
    """The question and the answer, before any table."""
    from harness.report.terminal import answer_lines

    for line in answer_lines(summary, sealed[0].manifest.question):
        console.print(line, highlight=False)


def _results(sealed: Sequence[SealedRun]) -> Results:
    """What the experiment's own analysis and rules give; why one of them gives nothing stands in the report."""
    from harness.analysis.catalogue import analyse
    from harness.analysis.catalogue.costs import prediction_table
    from harness.analysis.decisions.verdicts import ExperimentRuns
    from harness.prereg import check_sealed_runs, judge, predictions_for
    from harness.report.view import Results

    experiment = sealed[0].manifest.requested_experiment
    valid = [run for run in sealed if run.is_valid]
    is_measured = not kind_named(sealed[0].manifest.backend).is_virtual
    analysis, predicted, decisions, notes = None, None, (), list[str]()
    if valid and (experiment.get("analysis") or is_measured):
        try:
            frozen = check_sealed_runs(sealed)
            predictions = predictions_for(valid, frozen)
            if experiment.get("analysis"):
                analysis = analyse(sealed, predictions)
            if is_measured and (table := prediction_table(ExperimentRuns(valid, predictions))).rows:
                predicted = table
        except HarnessError as error:
            name = repr(experiment["analysis"]) if experiment.get("analysis") else "of predictions"
            notes.append(f"The analysis {name} gave nothing: {error.what}.")
    if experiment.get("rules") and valid:
        try:
            decisions = tuple(judge(sealed).decisions)
        except HarnessError as error:
            notes.append(f"The rules decided nothing: {error.what}.")
    return Results(analysis, decisions, tuple(notes), predicted)


def _exit_code(console: Console, outcome: ExperimentOutcome, experiment: str, runs: Path) -> ExitCode:
    from harness.runner.experiment import will_fail_again

    for invalid in outcome.invalid_runs:
        reasons = escape_markup("; ".join(invalid.invalid_reasons))
        say(console, f"[red]INVALID[/] {invalid.label}: {reasons}")
    if outcome.ended_by:
        cause = escape_markup(outcome.ended_by)
        say(
            console,
            f"every request of the first run failed alike, so the experiment ends here: {cause}. "
            "Mend the cause first; --keep-going performs the other runs all the same",
        )
        return ExitCode.RUN_INVALID
    repeatable = [run for run in outcome.invalid_runs if not will_fail_again(run)]
    if repeatable and outcome.is_complete:
        say(console, f"repeat them, the old ones kept: {experiment} --runs {runs} --resume --retry-invalid")
    if not outcome.is_complete:
        say(
            console,
            f"{len(outcome.runs)} of {outcome.num_planned} runs are sealed ({outcome.missing_words}); continue with: "
            f"{experiment} --runs {runs} --resume",
        )
        return ExitCode.INTERRUPTED
    return ExitCode.RUN_INVALID if outcome.invalid_runs else ExitCode.PASS


def ensure_machine_code(spec: ExperimentSpec | None = None) -> None:
    """Compile what runs of ``spec`` need, or simulations alone without one, where this machine has no code of it."""
    from harness.runner.machine_code import make, missing, parts_of

    needed = ["simulator"] if spec is None else parts_of(kind_named(spec.backend))
    if lacking := missing(needed):
        make(lacking)


def _show_order(
    console: Console,
    spec: ExperimentSpec,
    runs: Path,
    *,
    resume: bool,
    retry_invalid: bool,
    authorization: RunAuthorization | None,
) -> None:
    """The runs in their order; what is refused or left out now is refused or left out by the run itself."""
    from harness.runner.experiment import check_hosts, what_to_do
    from harness.runner.monitor import predicted_replay_s

    planned, todo, _ = what_to_do(spec, runs, resume=resume, retry_invalid=retry_invalid, authorization=authorization)
    check_hosts(todo)
    rows = [
        (
            run.label,
            run.plan.hash[:12],
            run.plan.num_requests,
            f"{{{','.join(map(str, run.server.decode_buckets))}}}",
            format_duration(predicted_replay_s(run)),
        )
        for run in todo
    ]
    table = Table("", "", ("run", "plan", "requests", "buckets", "replay"), tuple(rows))
    show(console, table)
    if spec.fleet is not None:
        shares = ", ".join(f"{place}: {num}" for place, num in Counter(run.place for run in todo).items())
        console.print(f"runs side by side: {shares}")
    if num_sealed := len(planned) - len(todo):
        console.print(f"{num_sealed} more are sealed already")
