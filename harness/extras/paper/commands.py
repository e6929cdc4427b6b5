"""``harness paper``: the experiments of the method, their analyses, and the tables of the paper.

Nothing is computed here.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from harness.cli.addresses import PrintedOutput, ReplicatesOption, RunsOption, SealedArgument, sealed_runs
from harness.cli.prereg import FormatOption
from harness.cli.terminal import print_folded, print_or_write, print_text, printable_lines, say, terminal, time_left
from harness.clock import NS_PER_S, MonotonicClock
from harness.errors import ExitCode, RunInvalidError, SpecError
from harness.kinds import DEFAULT_BACKEND, kind_named
from harness.outputs import check_output
from harness.shipped import find_shipped, shipped_names
from harness.table import TableForm, written

if TYPE_CHECKING:
    from collections.abc import Sequence

    from harness.model.spec import ExperimentSpec


def catalogue(
    perform: Annotated[bool, typer.Option("--run", help="Perform them and write each one's analysis.")] = False,
    only: Annotated[list[str] | None, typer.Option("--only", help="Only this experiment. Repeatable.")] = None,
    backend: Annotated[str, typer.Option(help="Backend for --run.")] = "sim",
    runs: Annotated[Path, typer.Option("--runs", help="Folder for --run.")] = Path("runs/catalogue"),
    replicates: ReplicatesOption = None,
    changes: Annotated[list[str] | None, typer.Option("--set", help="Change one key of each. Repeatable.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Perform only what is not sealed there yet.")] = False,
) -> None:
    """List the experiments of the method, each with its question; or perform them all.

    Their pages: docs/reference/experiments. With --run every experiment's analysis is written beside its runs, as
    RUNS/BACKEND/NAME.md; then `harness decide NAME --runs RUNS/BACKEND` and `harness paper tables --runs RUNS/BACKEND`.
    Exit code 3 when a run is invalid.

    Example: `harness paper catalogue`
    """

    from harness.model.spec import experiment_table, parse_experiment
    from harness.model.spec.changes import override_table

    extra = [*(changes or []), *([f"replicates={replicates}"] if replicates is not None else [])]
    extra += [f'backend="{backend}"'] if perform else []
    paths = _catalogue_files(only or [])
    specs = [parse_experiment(override_table(experiment_table(path), extra), where=str(path)) for path in paths]
    if perform:
        _perform_all(specs, paths, runs / backend, resume=resume)
        return
    for spec in specs:
        num_runs = len(spec.condition) * spec.replicates
        print_folded(f"{spec.name}  ({len(spec.condition)} conditions x {spec.replicates} = {num_runs} runs)")
        print_folded(f"    {printable_lines(spec.title)}")
        print_folded(f"    {printable_lines(spec.question)}")


def _catalogue_files(only: list[str]) -> list[Path]:
    """Files of the experiments that name an analysis; SpecError when a name of ``only`` is none of them."""
    from harness.model.spec import load_toml

    paths = [find_shipped("experiments", name, what="experiment") for name in only or shipped_names("experiments")]
    if not paths:
        raise SpecError("no experiment ships with this installation", hint="Use a checkout: plans/experiments")
    tables = {path: load_toml(path) for path in paths}
    # Those that are about the real stack cannot run on any backend.
    of_stack = {path for path, table in tables.items() if kind_named(table.get("backend", DEFAULT_BACKEND)).has_stack}
    return paths if only else [path for path in paths if tables[path].get("analysis") and path not in of_stack]


def _perform_all(specs: Sequence[ExperimentSpec], paths: Sequence[Path], runs: Path, *, resume: bool) -> None:
    """Perform every experiment, with the time left; RunInvalidError when a run is invalid."""
    from harness.processes import parallel_map
    from harness.runner.experiment import what_to_do
    from harness.runner.progress import predicted_work

    # All are looked at before the first is performed.
    planned = [what_to_do(spec, runs, resume=resume, retry_invalid=False, authorization=None)[0] for spec in specs]
    work = [sum(map(predicted_work, of_spec)) for of_spec in planned]
    order, processes = list(range(len(specs))), 1
    # Servers of another kind than the simulator's would disturb each other.
    if all(kind_named(spec.backend).is_virtual for spec in specs):
        processes = None
        # One of little work tells whether sharing is worth it; then those of most, so that the last is a short one.
        order.sort(key=lambda place: -work[place])
        order.insert(0, order.pop())
    results: dict[int, tuple[str, int]] = {}
    num_printed = 0
    with time_left("catalogue") as show:
        performed = parallel_map(
            lambda place, _on_progress: _perform(specs[place], runs, str(paths[place]), resume=resume),
            order,
            workers=processes,
        )
        for place, result in performed:
            results[order[place]] = result
            show(sum(work[done] for done in results) / sum(work))
            while num_printed in results:
                print_text(results[num_printed][0])
                num_printed += 1
    if num_invalid := sum(invalid for _, invalid in results.values()):
        raise RunInvalidError(f"{num_invalid} runs are invalid", where=str(runs), hint="See `harness runs`")
    print_text(f"analyses: {runs}/NAME.md")
    print_text("next: harness search paper -o runs/search-paper --set rules=paper")
    print_text(f"then: harness paper tables --runs {runs} --search runs/search-paper")


def _perform(spec: ExperimentSpec, runs: Path, source: str, *, resume: bool) -> tuple[str, int]:
    """Perform one experiment and write its analysis beside its runs: what to say of it, and how many are invalid."""
    from harness.judge.catalogue import analyse as analyse_runs
    from harness.judge.prereg import predictions_for
    from harness.runner import run_experiment

    clock = MonotonicClock()
    began_ns = clock.now_ns()
    outcome = run_experiment(spec, runs_root=runs, spec_source=source, resume=resume)
    sealed = list(outcome.runs)
    # A busy machine may leave none that is valid: the other experiments go on.
    if any(run.is_valid for run in sealed):
        result = analyse_runs(sealed, predictions_for(sealed, None))
        (runs / f"{spec.name}.md").write_text(result.to_markdown(), encoding="utf-8")
    num_invalid = len(outcome.invalid_runs)
    seconds = (clock.now_ns() - began_ns) / NS_PER_S
    counted = f"{len(sealed):>3} runs, {num_invalid} invalid, {seconds:6.1f} s"
    lines = [f"{spec.name:<27} {counted}"]
    lines += [f"    {run.condition}/{run.replicate}: {'; '.join(run.invalid_reasons)}" for run in outcome.invalid_runs]
    return "\n".join(lines), num_invalid


def analyse(
    experiment: SealedArgument,
    runs: RunsOption = Path("runs"),
    name: Annotated[str, typer.Option("--as", help="Analysis to use instead of the experiment's own.")] = "",
    output: FormatOption = "text",
) -> None:
    """Compute what the experiment asks for: its tables, intervals and notes.

    Example: `harness paper analyse demo --as general --runs runs/today --format markdown`
    """
    from harness.judge.catalogue import analyse as analyse_runs
    from harness.judge.prereg import check_sealed_runs, predictions_for

    sealed = sealed_runs(runs, experiment)
    frozen = check_sealed_runs(sealed)
    result = analyse_runs(sealed, predictions_for(sealed, frozen), name)
    if output == "json":
        print_text(result.to_json(), end="")
    elif output == "markdown":
        print_text(result.to_markdown(), end="")
    else:
        print_text(result.to_text(terminal().width), end="")


def tables(
    runs: RunsOption = Path("runs"),
    numbers: Annotated[
        list[str] | None, typer.Option("--table", help="Only this one, e.g. `--table I --table S4`. Repeatable.")
    ] = None,
    form: Annotated[
        Literal["markdown", "md", "csv", "latex", "text", "json"],
        typer.Option("--format", metavar="FORM", help="markdown, csv, latex (booktabs), text or json."),
    ] = "markdown",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Default: print.")] = None,
    search: Annotated[
        Path | None, typer.Option("--search", help="Folder of `harness search paper`, for S10 and S11.")
    ] = None,
    artifacts: Annotated[
        Path | None, typer.Option("--artifacts", help="Folder of compiled artifacts, for Table XIV.")
    ] = None,
) -> None:
    """The paper's tables (I-XV, S1-S12) from your own runs.

    A table without runs names the command that makes them; then the exit code is 5.

    Example: `harness paper tables --runs runs/today --format latex -o tables.tex`
    """
    from harness.extras.paper.source import PaperRuns
    from harness.extras.paper.tables import paper_tables

    if output is not None:
        check_output(output)  # before minutes of work, not after
    made = paper_tables(PaperRuns(runs, search, artifacts), numbers or ())
    content = written(made, TableForm("markdown" if form == "md" else form), terminal().width)
    print_or_write(content, output, "tables:")
    if empty := [table.name.removeprefix("Table ") for table in made if not table.rows]:
        what = f"{len(empty)} of {len(made)} tables have no figures: {', '.join(empty)}; why stands under each"
        say(terminal(is_error=True), what, markup=False)
        raise typer.Exit(ExitCode.CANNOT_TELL)


def signs(
    sums: Annotated[int, typer.Option(min=8, help="Sums of three plans per N.")] = 400, output: PrintedOutput = None
) -> None:
    """Signs of Tables I and II over many simulated plans.

    Also under other readings of the method.

    Example: `harness paper signs -o docs/evidence/table-signs.md`
    """
    from harness.extras.paper.signs import page

    if output is not None:
        check_output(output)
    with time_left("drawing plans") as on_progress:
        text = page(sums, on_progress)
    print_or_write(text, output)


def rules(
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Markdown file to write.")] = None,
) -> None:
    """The paper's printed figures beside those of the vendor's rules.

    Says why they differ.

    Example: `harness paper rules -o docs/evidence/paper-rules.md`
    """
    from harness.extras.paper.printed import page

    if output is not None:
        check_output(output)
    with time_left("searching") as on_progress:
        text = page(on_progress)
    print_or_write(text, output)
