"""``harness report`` and ``table``: what the sealed runs of one experiment say.

Nothing is computed here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from harness.cli.addresses import (
    RunsOption,
    SealedArgument,
    SessionTargetOption,
    TableFormOption,
    held_to,
    output_option,
    sealed_runs,
)
from harness.cli.terminal import print_folded, print_text, say, terminal
from harness.errors import HarnessError, SpecError
from harness.kinds import kind_named
from harness.outputs import check_output
from harness.table import Table, TableForm, interval_text, table_of, written

if TYPE_CHECKING:
    from rich.console import Console

    from harness.analysis.summary import ExperimentSummary
    from harness.measure.records.run import SealedRun
    from harness.present.report.view import Results
    from harness.tune.diagnose import Hint

TimeInStepsOption = Annotated[
    bool,
    typer.Option(
        "--time-in-steps", help="Answers rest on the time in steps (S), where every run measured it, in place of A."
    ),
]
CostsOption = Annotated[
    str, typer.Option("--costs", help="Cost model, name or file: prices A of every run, in place of its own costs.")
]
Figures = Literal["conditions", "serving", "reuse by wait"]
"""What ``harness table`` shows."""


def report(
    experiment: SealedArgument,
    runs: RunsOption = Path("runs"),
    session_target: SessionTargetOption = None,
    time_in_steps: TimeInStepsOption = False,
    costs: CostsOption = "",
    output: Annotated[Path | None, output_option("Default: `RUNS/EXPERIMENT.html`; of an archive: here")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file whatever it holds.")] = False,
) -> None:
    """Write the HTML report of an experiment again.

    It is made from the sealed runs.
    A file that is no report of the harness is replaced only with `--force`.

    Example: `harness report demo --runs runs/today -o demo.html`
    """
    from harness.measure.records.archive import archive_of
    from harness.present.report.page import check_report_page

    sealed = sealed_runs(runs, experiment)
    # A file beside the runs of an archive would make it another archive.
    beside = Path() if archive_of(sealed[0]) else sealed[0].path.parents[2]
    page = output or beside / f"{sealed[0].experiment}.html"
    if force:
        check_output(page).unlink(missing_ok=True)
    summary = _summarised(held_to(sealed, session_target), time_in_steps=time_in_steps, costs=costs)
    conclude(terminal(), sealed, check_report_page(page), None, summary=summary)


def table(
    experiment: SealedArgument,
    runs: RunsOption = Path("runs"),
    serving: Annotated[
        bool, typer.Option("--serving", help="Every latency: by turn and prefix, with intervals and bounds.")
    ] = False,
    reuse_by_wait: Annotated[
        bool, typer.Option("--reuse-by-wait", help="Share of returns still cached, by the wait, with intervals.")
    ] = False,
    predicted: Annotated[
        bool, typer.Option("--predicted", help="Predicted cost ratios and reuse beside the observed, with intervals.")
    ] = False,
    session_target: SessionTargetOption = None,
    time_in_steps: TimeInStepsOption = False,
    costs: CostsOption = "",
    form: TableFormOption = TableForm.text,
) -> None:
    """Print what each condition cost, and what its users felt.

    Example: `harness table demo --runs runs/today --serving`
    """
    from harness.measure.records.archive import archive_of, standing_of
    from harness.present.report import on_terminal

    if serving + reuse_by_wait + predicted > 1:
        hint = "Ask for each in a command of its own"
        raise SpecError("--serving, --reuse-by-wait and --predicted are a table each", where="table", hint=hint)
    figures: Figures = "serving" if serving else "reuse by wait" if reuse_by_wait else "conditions"
    sealed = sealed_runs(runs, experiment)
    if predicted:
        text = _predicted_written(sealed, form)
        print_folded(text.removesuffix("\n")) if form is TableForm.text else print_text(text, end="")
        return
    summary = _summarised(held_to(sealed, session_target), time_in_steps=time_in_steps, costs=costs)
    if form is not TableForm.text:
        print_text(figures_written(summary, form, figures), end="")
        return
    out = terminal()
    if standing := standing_of(archive_of(sealed[0]) or runs):
        print_folded(standing)
    if figures == "conditions":
        _print_answer(out, summary, sealed)
        out.print()
    for shown in _tables(summary, figures):
        out.print(on_terminal(shown, out.width))
        out.print()


def _summarised(sealed: Sequence[SealedRun], *, time_in_steps: bool, costs: str) -> ExperimentSummary:
    """The figures; SpecError where answers are to rest on a time in steps that a run did not measure.

    costs: a cost model that prices A of every run; "": each run's own.
    """
    from harness.analysis.summary import summarise
    from harness.model.engine import load_cost_model

    cost_model = load_cost_model(costs) if costs else None
    if not time_in_steps:
        return summarise(sealed, cost_model)
    summary = summarise(sealed, cost_model, basis="s")
    if missing := [run.label for run in summary.runs if run.is_valid and run.parts is None]:
        raise SpecError(
            f"no engine core stamped the steps of {missing[0]}",
            where="--time-in-steps",
            hint="Leave it out: only a vLLM with one engine and its observer has it (docs/guides/vllm-steps.md)",
        )
    return summary


def figures_written(summary: ExperimentSummary, form: TableForm, figures: Figures = "conditions") -> str:
    """A row per condition: every column for programs, the terminal's tables for documents."""
    from harness.present.report.terminal import for_documents

    if form in (TableForm.csv, TableForm.json):
        to_arrow = {"serving": summary.serving_to_arrow, "reuse by wait": summary.reuse_by_wait_to_arrow}
        rows = to_arrow.get(figures, summary.to_arrow)().to_pylist()
        return written([table_of(summary.experiment, "", rows)], form)
    return written(list(map(for_documents, _tables(summary, figures))), form)


def _tables(summary: ExperimentSummary, figures: Figures) -> list[Table]:
    from harness.present.report import serving_tables, summary_tables
    from harness.present.report.terminal import reuse_by_wait_table

    if figures == "conditions":
        return summary_tables(summary)
    return serving_tables(summary) if figures == "serving" else [reuse_by_wait_table(summary)]


def _predicted_written(sealed: Sequence[SealedRun], form: TableForm) -> str:
    """What was predicted for the very plans of these runs, by the frozen draws where there are such."""
    from harness.analysis.compare.answer import ExperimentRuns
    from harness.judge.catalogue import prediction_table
    from harness.judge.prereg import check_sealed_runs, predictions_for
    from harness.measure.records.run import origin_of

    kind, valid = sealed[0].manifest.kind.name, [run for run in sealed if run.is_valid]
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
            interval = ""
            if isinstance(low, float) and isinstance(high, float):
                interval = f"  [{interval_text(low, high, between=', ')}]"
            observed = row["observed_ratio_B"] if row["observed_ratio_A"] is None else row["observed_ratio_A"]
            ratio = row["predicted_ratio"] if name == "predicted" else observed
            source = row["prediction" if name == "predicted" else "observation"]
            lines.append(f"  {name:<9}  cost ratio {ratio:.4f}{interval}  reused {row[f'{name}_reuse']}  ({source})")
    return "\n".join(lines) + "\n"


def conclude(
    console: Console,
    sealed: Sequence[SealedRun],
    path: Path,
    title: str | None,
    summary: ExperimentSummary | None = None,
    source: Path | str = "",
) -> Hint | None:
    """Print answer and tables, and write the report; what the runs suggest next.

    summary: of these runs, where it is not as the experiment says.
    source: the file of the experiment, for the next command.
    """
    from harness.analysis.speeds import drift
    from harness.analysis.summary import summarise
    from harness.present.report import on_terminal, summary_tables, write_report

    summary = summary or summarise(sealed)
    console.print()
    _print_answer(console, summary, sealed)
    for shown in summary_tables(summary):
        console.print()
        console.print(on_terminal(shown, console.width))
    if (moved := drift(sealed)) is not None and moved.is_found:
        say(console, str(moved), "yellow", markup=False)
    results = _results(sealed, source)
    page = write_report(sealed, path, title=title, results=results, summary=summary)
    say(console, f"report: {page}")
    return results.hint


def _print_answer(console: Console, summary: ExperimentSummary, sealed: Sequence[SealedRun]) -> None:
    """The question and the answer, before any table."""
    from harness.present.report.terminal import answer_lines

    for line in answer_lines(summary, sealed[0].manifest.question):
        say(console, line)


def _results(sealed: Sequence[SealedRun], source: Path | str) -> Results:
    """What the experiment's own analysis and rules give; why one of them gives nothing stands in the report."""
    from harness.analysis.compare.answer import ExperimentRuns
    from harness.judge.catalogue import analyse, prediction_table
    from harness.judge.prereg import check_sealed_runs, decide, predictions_for
    from harness.present.report.view import Results
    from harness.tune.diagnose import hint

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
            decisions = tuple(decide(sealed).decisions)
        except HarnessError as error:
            notes.append(f"The rules decided nothing: {error.what}.")
    return Results(analysis, decisions, tuple(notes), predicted, hint(sealed, source))
