"""``harness simulate``, ``search`` and ``predict``: expected results, and a configuration chosen before compiling.

Prints how sure each prediction is; writes only ledgers and the files that the options name.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harness.api import experiment_with, override_table
from harness.cli.addresses import MaybeExperimentArgument
from harness.cli.terminal import format_duration, say, show, terminal, time_left
from harness.clock import NS_PER_S
from harness.errors import ExitCode, SpecError
from harness.shipped import find_shipped, shipped_names
from harness.table import WIDE, Table

if TYPE_CHECKING:
    from rich.console import Console

    from harness.analysis.compare.predictions import Predictions
    from harness.model.experiment import PlannedRuns
    from harness.model.sim.search.result import SearchResult
    from harness.model.sim.search.run import Progress
    from harness.model.sim.search.space import SpaceSpec
    from harness.model.spec import ExperimentSpec

SpaceArgument = Annotated[str, typer.Argument(help="A shipped search space, or a TOML file.")]
SetOption = Annotated[list[str] | None, typer.Option("--set", help="Change one key of the space. Repeatable.")]
ClusterOption = Annotated[
    str | None,
    typer.Option(help="`local`, or a Dask scheduler such as `tcp://host:8786`. Default: all cores of this machine."),
]


def simulate(
    experiment: MaybeExperimentArgument = None,
    jsonl: Annotated[
        Path | None, typer.Option("--jsonl", help="One case per line instead of an experiment; `-` for standard input.")
    ] = None,
    draws: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=100_000,
            help="Simulations of each run; 1: one, nominal. Default: as many as make the error of each ratio small.",
        ),
    ] = None,
) -> None:
    """Predict every run of an experiment without a server.

    Or simulate cases, one JSON line each.

    A server is chaotic: figures are means over perturbed draws, with the interval that should hold a measured one.

    Example: `harness simulate demo`
    """

    if jsonl is not None:
        from harness.model.sim import simulate_batches, simulate_jsonl

        if str(jsonl) == "-":
            _print_results(simulate_jsonl(sys.stdin), str(jsonl))
            return
        with SpecError.on_os_error("cannot be read", where=jsonl, hint="Check the path"):
            lines = jsonl.open(encoding="utf-8")
        with lines:
            _print_results(simulate_batches(lines), str(jsonl))
        return
    if experiment is None:
        raise SpecError("nothing to simulate", hint="Give an experiment file, or --jsonl FILE")
    _simulate_experiment(experiment, draws)


def _print_results(results: Iterable[str], source: str) -> None:
    """Print every result; SpecError in the end where no line of ``source`` was a case."""
    num_lines = num_errors = 0
    for line in results:
        print(line, flush=source == "-")
        num_lines += 1
        num_errors += '"error": ' in line
    if num_lines and num_errors == num_lines:
        what = f"none of its {num_lines} lines is a case"
        raise SpecError(what, where=source, hint="Write one JSON object in each line")


LONG_S = 3.0
"""What lasts longer is announced."""
REQUESTS_PER_S = {True: 20_000, False: 200_000}
"""Requests that a second simulates, paged and slots; only to say beforehand what will last."""


def _simulate_experiment(path: Path, draws: int | None) -> None:
    from harness.judge.prereg.predict import predict_experiment, predict_until_sure
    from harness.model.experiment import resolve
    from harness.model.sim.predict.draws import perturbation_of
    from harness.runner.experiment import checked

    spec, _, _ = experiment_with(path)
    if draws is not None:
        spec = spec.model_copy(update={"prediction": spec.prediction.model_copy(update={"draws": draws})})
    planned = checked(resolve(spec))
    first_s = sum(run.plan.num_requests / REQUESTS_PER_S[run.server.is_paged] for run in planned)
    _announce(
        f"simulating {len(list(planned))} runs, {spec.prediction.draws} draws of each", first_s * spec.prediction.draws
    )
    with time_left("predicting") as on_progress:
        if draws is None:
            predictions = predict_until_sure(
                planned,
                _margin(spec),
                on_progress=on_progress,
                on_more=lambda more, seconds: _announce(f"{more} draws of each, for a small error", seconds),
            )
        else:
            predictions = predict_experiment(planned, on_progress=on_progress)
    console, wanted = terminal(), spec.prediction
    made = next(iter(next(iter(predictions.values())).values())).draws
    num_draws = 1 if made is None else len(made.device_ns)
    how = f"means of {num_draws} draws" if num_draws > 1 else "one simulation of each, without perturbations"
    num_plans = spec.replicates
    of_plans = f"the mean of its {num_plans} plans" if num_plans > 1 else "its plan"
    what = "W: time that other sessions waited while a prompt was computed, summed over them"
    say(console, f"{spec.name}: predicted for {of_plans}, in model seconds, {how}; {what}")
    say(console, f"rules: {', '.join(dict.fromkeys(run.server.rule_set().name for run in planned))}")
    if num_draws > 1:
        for line in dict.fromkeys(perturbation_of(wanted, run.cost_file).line() for run in planned):
            say(console, line)
    show(console, _predicted_conditions(planned, predictions, num_draws, is_narrow=console.width < WIDE))
    for line in _answers(planned, predictions):
        say(console, line)
    say(console, "+-: what the draws leave open (95 %), of these plans alone. Over new plans: harness power")


def _announce(what: str, seconds: float) -> None:
    """Say on standard error what takes long, before it does."""
    if seconds > LONG_S:
        say(terminal(is_error=True), f"{what}: about {format_duration(seconds)}")


def _predicted_conditions(planned: PlannedRuns, predictions: Predictions, num_draws: int, *, is_narrow: bool) -> Table:
    """A row for each condition, means over its plans; where there is little room, the interval stands below."""
    from harness.analysis.compare.predictions import drawn_interval

    # Two draws are too few for an interval.
    interval = f"{100 * planned.spec.prediction.level:.0f} % interval" if num_draws > 2 else ""
    above = ["device s", *([interval] if interval and not is_narrow else [])]
    headings = ("condition", *above, "decode s", "prefill s", "W s", "ends s", "reused", "cached", "evicted")
    rows: list[tuple[str, ...]] = []
    for name, of_condition in predictions.items():
        runs = list(of_condition.values())
        device, scale = drawn_interval(runs, "device_ns"), len(runs) * NS_PER_S
        sums = [sum(getattr(run, figure) for run in runs) for figure in MEAN_SECONDS]
        again = sum(run.num_rearrivals for run in runs)
        reused = f"{100 * sum(run.num_reused for run in runs) / again:.0f} %" if again else ""
        counts = (f"{sum(getattr(run, count) for run in runs) / len(runs):.0f}" for count in MEAN_COUNTS)
        drawn = [f"{sum(run.device_ns for run in runs) / scale:.3f}"]
        if interval:
            drawn += ["" if device is None else f"{device.low / scale:.3f}\u2013{device.high / scale:.3f}"]
        cells = ["\n".join(drawn)] if is_narrow else drawn
        rows.append((name, *cells, *(f"{ns / scale:.3f}" for ns in sums), reused, *counts))
    caption = f"below device s: its {interval}" if interval and is_narrow else ""
    return Table("", caption, headings, tuple(rows))


MEAN_SECONDS = ("decode_ns", "prefill_ns", "waiting_session_ns", "end_ns")
MEAN_COUNTS = ("cached_tokens", "num_evictions")


def _margin(spec: ExperimentSpec) -> float:
    """The margin of the experiment's stopping rule, else the default of ``harness power``."""
    return 0.02 if spec.stop is None else spec.stop.margin


def _answers(planned: PlannedRuns, predictions: Predictions) -> Iterator[str]:
    """A sentence for every condition: device time over its baseline's, all replicates summed; how sure, given what."""
    from harness.analysis.compare.answer import source_of_prediction
    from harness.analysis.compare.predictions import drawn_ratio, mean_ratio, predicted_ratio
    from harness.model.sim.predict.deciding import planned_break_even, unmeasured_of_runs
    from harness.model.sim.predict.draws import if_assumed, perturbation_of

    spec, margin = planned.spec, _margin(planned.spec)
    given = if_assumed(any(perturbation_of(spec.prediction, run.cost_file).assumed for run in planned))
    for condition in spec.condition:
        baseline = spec.baseline_of(condition)
        if baseline == condition.name:
            continue
        own, base = (list(predictions[name].values()) for name in (condition.name, baseline))
        drawn, mean, source = drawn_ratio(own, base), mean_ratio(own, base), source_of_prediction(own).value
        parts = [f"{predicted_ratio(own, base):.4f} ({source})"]
        if mean is not None:
            parts[0] = f"{mean.ratio:.4f} +- {mean.error:.4f} (mean of {mean.num_draws} draws)"
        if drawn is not None:
            parts.append(f"{100 * drawn.level:.0f} % of outcomes {drawn.low:.4f} to {drawn.high:.4f}{given}")
        runs = [planned.by_condition[name] for name in (condition.name, baseline)]
        parts += unmeasured_of_runs(runs[0][0], runs[1][0])
        ends: list[str] = []
        if mean is not None and not mean.is_sure(margin):
            ends.append(
                f"not sure: an error of {mean.wanted_error(margin):.4f}, a tenth of the effect or of the margin, "
                f"needs --draws {mean.draws_needed(margin)}"
            )
        if mean is None or mean.shows_effect:
            found = planned_break_even(runs[0], runs[1], 1 if mean is None else mean.num_draws)
            ends += [] if found is None else [str(found)]
        else:
            ends.append("no difference shown by the draws")
        yield "; ".join([f"{condition.name} / {baseline}: {', '.join(parts)}", *ends])


def search(
    space: SpaceArgument = "paper",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Folder of the ledger.")] = None,
    budget_s: Annotated[
        float | None, typer.Option("--budget-s", min=0.001, help="Seconds to search; halving when all does not fit.")
    ] = None,
    cluster: ClusterOption = None,
    workers: Annotated[int | None, typer.Option(min=1, max=1024, help="Processes of a local cluster.")] = None,
    top: Annotated[int, typer.Option(min=1, max=1_000_000, help="How many candidates to show.")] = 10,
    intervals: Annotated[bool, typer.Option(help="Compare the best with intervals.")] = True,
    changes: SetOption = None,
) -> None:
    """Simulate every configuration of a search space, best first.

    After Ctrl-C the same command continues the ledger.

    Example: `harness search paper -o runs/search-paper --set rules=paper`
    """
    from harness.model.sim.search.run import compute_here
    from harness.model.sim.search.run import search as run_search

    console = terminal()
    spec = read_space(space, changes)
    folder = output or Path("runs") / f"search-{spec.name}"
    with _runner(cluster, workers, compute_here) as run_chunks, _progress(console, spec) as on_progress:
        try:
            result = run_search(spec, folder, budget_s=budget_s, run_chunks=run_chunks, on_progress=on_progress)
        except KeyboardInterrupt:
            kept = len(list(folder.glob("rung-*.parquet")))
            say(console, f"stopped; {kept} chunks are kept in {folder}; the same command goes on from there")
            raise typer.Exit(int(ExitCode.INTERRUPTED)) from None
    _show(console, result, top, with_intervals=intervals)
    say(console, f"ledger: {folder / 'ledger.parquet'}")


def ratios(
    space: SpaceArgument = "paper",
    ablations: Annotated[
        list[str] | None,
        typer.Option("--ablation", help="Also with one rule changed: computed, not measured. Repeatable."),
    ] = None,
    changes: SetOption = None,
) -> None:
    """Predicted cost ratios of named configurations, with intervals.

    Example: `harness predict ratios paper --ablation lru-slots --ablation no-waits`
    """
    from harness.model.sim.predict.deciding import deciding_sizes, sizes_in_words
    from harness.model.sim.predict.intervals import Predictor
    from harness.model.sim.simulate import LABEL, UNCHANGED, ablation

    console = terminal()
    spec = read_space(space, changes)
    predictor = Predictor(spec)
    rows: list[tuple[str, ...]] = []
    for changed in (UNCHANGED, *(ablation(name) for name in ablations or ())):
        for name, server in spec.named.items():
            for users in spec.inputs.users:
                prediction = predictor.predict(server.shape, users, changed)
                note = f"{changed.name}: {LABEL}" if changed.name else ""
                note = note or ("" if prediction.shows_difference else "=")
                mean = f"{prediction.mean:.4f} +- {prediction.error:.4f}"
                ratios = (f"{prediction.ratio_of_sums:.4f}", f"{prediction.median_of_pairs:.4f}", mean)
                interval = f"{prediction.low:.4f}\u2013{prediction.high:.4f}"
                turns = ""
                if prediction.shows_difference and not changed.name:
                    turns = predictor.break_even(server.shape, users).short
                rows.append((name, str(users), prediction.rules, *ratios, interval, turns, note))
    headings = ("configuration", "N", "rules", "sums", "median", "mean")
    table = Table(
        f"{spec.name}: cost ratio to {spec.baseline.shape.label}",
        "sums, median: nominal; mean: of draws, +- what they leave open (95 %); turns at: the error of the deciding "
        "costs that makes the ratio 1; =: no difference from the baseline shown",
        (*headings, f"{100 * spec.prediction.level:.0f} % interval", "turns at", ""),
        tuple(rows),
    )
    show(console, table)
    for name, server in spec.named.items():
        sizes = deciding_sizes(server.shape.decode_buckets, spec.baseline.shape.decode_buckets)
        parts = [f"turns at {sizes_in_words(sizes) if sizes else 'the prefill costs'}"]
        parts += filter(None, [predictor.unmeasured(server.shape, spec.baseline.shape)])
        say(console, f"{name}: {'; '.join(parts)}")


def read_space(name_or_path: str, changes: list[str] | None) -> SpaceSpec:
    """A search space by its name or file, with ``--set`` changes applied; SpecError for an experiment."""
    from harness.model.sim.search.space import parse_space
    from harness.model.spec import load_toml

    if name_or_path in shipped_names("experiments") and name_or_path not in shipped_names("spaces"):
        raise _not_a_space(name_or_path)
    path = find_shipped("spaces", name_or_path, what="search space")
    table = load_toml(path)
    if "condition" in table:
        raise _not_a_space(name_or_path)
    given = "".join(f" --set {change}" for change in changes or ())
    return parse_space(override_table(table, changes or []), where=f"{path}{given and ' with'}{given}")


def _not_a_space(experiment: str) -> SpecError:
    spaces = ", ".join(shipped_names("spaces"))
    return SpecError(
        "is an experiment, and a search space is wanted",
        where=experiment,
        hint=f"`harness simulate {experiment}` predicts its conditions; spaces: {spaces}, or a file like these",
    )


@contextmanager
def _runner(cluster: str | None, workers: int | None, here: Any) -> Generator[Any]:
    if cluster is None:
        yield here
        return
    from harness.model.sim.search.run import cluster_runner

    with cluster_runner(cluster, workers) as run_chunks:
        yield run_chunks


@contextmanager
def _progress(console: Console, spec: SpaceSpec) -> Generator[Any]:
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
    from rich.progress import Progress as Bars

    bars = Bars(
        TextColumn("{task.description}"),
        BarColumn(bar_width=28),
        MofNCompleteColumn(),
        TextColumn("{task.fields[left]}"),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    task = bars.add_task(spec.name, total=spec.count(), left="")

    def on_progress(progress: Progress) -> None:
        left = "" if progress.left_s is None else f"{format_duration(progress.left_s)} left"
        name = spec.name if progress.rungs == 1 else f"{spec.name}, pass {progress.rung + 1} of {progress.rungs}"
        bars.update(task, description=name, completed=progress.done, total=progress.total, left=left)

    with bars:
        yield on_progress


def _show(console: Console, result: SearchResult, top: int, *, with_intervals: bool) -> None:
    from harness.model.sim.search.result import search_tables

    with time_left("intervals") as tell:
        parts = list(search_tables(result, top, with_intervals=with_intervals, on_progress=tell))
    for part in parts:
        if isinstance(part, str):
            say(console, part, markup=False)
        else:
            show(console, part)
        console.print()
