"""``harness plan``, ``waits``, ``simulate``: make and look at inputs, before any server is started.

Writes only the files that the commands name.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.cli.addresses import ExperimentArgument, MaybeExperimentArgument, experiment_with
from harness.cli.terminal import print_facts, show, terminal, time_left
from harness.cli.trace import check_trace_format
from harness.clock import NS_PER_S
from harness.errors import SpecError
from harness.table import Table

if TYPE_CHECKING:
    from rich.console import Console

    from harness.analysis.decisions.predictions import Predictions
    from harness.spec import ExperimentSpec


def plan_build(
    experiment: ExperimentArgument,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the plan files.")] = Path("plans/frozen"),
) -> None:
    """Write every plan an experiment will replay, each named by its hash.

    Example: `harness plan build demo -o plans/demo`
    """
    from harness.experiment import resolve
    from harness.plan import save_plan
    from harness.runner.experiment import checked
    from harness.spec import load_experiment

    written: set[str] = set()
    for run in checked(resolve(load_experiment(experiment))):
        if run.plan.hash not in written:
            written.add(run.plan.hash)
            print(f"{save_plan(run.plan, output)}  replicate {run.replicate}, {run.plan.treatment}")


def plan_show(path: Annotated[Path, typer.Argument(help="A plan file.")]) -> None:
    """Check a plan file against its hash and describe it.

    Example: `harness plan show plan.jsonl`
    """
    from harness.plan import describe, read_plan

    print_facts(describe(read_plan(path)))


def waits_show(
    name: Annotated[str, typer.Argument(help="A shipped distribution, or a file.")] = "tracelab-v0.0.2",
    cap_s: Annotated[float, typer.Option("--cap-s", help="Waits are cut at this many seconds.")] = 60.0,
) -> None:
    """Quantiles, mean and capped share of a tool-wait distribution.

    Example: `harness plan waits show tracelab-v0.0.2`
    """
    from harness.plan import load_waits

    waits = load_waits(name)
    mean_s, std_s = waits.moments_s(cap_s)
    print(f"{waits.name}: {len(waits.tools)} tools, {waits.total_calls} calls; capped at {cap_s:g} s")
    for u in (0.25, 0.5, 0.75, 0.9, 0.95):
        print(f"  p{u * 100:<4.0f} {min(waits.mixture_quantile_ms(u) / 1000, cap_s):10.4f} s")
    print(f"  mean {mean_s:10.4f} s   standard deviation {std_s:.4f} s")
    print(f"  below 1 s {waits.cdf(1000.0):.2%}   capped {waits.capped_share(cap_s):.2%}")


def waits_import(
    source: Annotated[Path, typer.Argument(help="TraceLab release (.duckdb, .jsonl, .jsonl.gz), or recorded agents.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The wait file to write (TOML).")],
    kind: Annotated[
        str, typer.Option("--format", help="tracelab: tool by tool; else as `harness trace import`, tools as one.")
    ] = "tracelab",
    name: Annotated[str, typer.Option(help="Name of the distribution; default: the file's stem.")] = "",
    tables: Annotated[
        list[str] | None, typer.Option("--table", help="Which table of a DuckDB file holds the tools. Repeatable.")
    ] = None,
) -> None:
    """Make a tool-wait distribution from a TraceLab release, or from any recording that `harness trace import` reads.

    Example: `harness plan waits import ~/.claude/projects --format claude -o plans/waits/mine.toml`
    """
    if kind != "tracelab":
        from harness.traces.waits import import_recorded_waits

        check_trace_format(kind)
        counted = import_recorded_waits([source], output, name=name or output.stem, kind=kind)
        print(f"{counted.source_format}: {counted.num_waits} waits for tools; {counted.num_zero} of nothing left out")
        print(f"wrote {output}")
        return
    from harness.traces.waits import import_tracelab

    summary = import_tracelab(source, output, name=name or output.stem, tables=tuple(tables or ()))
    for line in summary.lines():
        print(line)
    print(f"wrote {output}")


def simulate(
    experiment: MaybeExperimentArgument = None,
    jsonl: Annotated[
        Path | None, typer.Option("--jsonl", help="One case per line instead of an experiment; `-` for standard input.")
    ] = None,
    draws: Annotated[
        int | None, typer.Option(min=1, help="Simulations of each run; 1: one, nominal. Default: the experiment's.")
    ] = None,
) -> None:
    """Predict every run of an experiment without a server.

    Or simulate cases, one JSON line each.

    A server is chaotic: figures are means over perturbed draws, with the interval that should hold a measured one.

    Example: `harness simulate demo`
    """

    if jsonl is not None:
        from harness.sim import simulate_batches, simulate_jsonl

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


def _simulate_experiment(path: Path, draws: int | None) -> None:
    from harness.analysis.decisions.predictions import drawn_interval
    from harness.experiment import resolve
    from harness.prereg.predict import predict_experiment
    from harness.runner.experiment import checked
    from harness.sim.predict.draws import perturbation_of

    spec, _, _ = experiment_with(path)
    if draws is not None:
        spec = spec.model_copy(update={"prediction": spec.prediction.model_copy(update={"draws": draws})})
    planned = checked(resolve(spec))
    with time_left("predicting") as on_progress:
        predictions = predict_experiment(planned, on_progress=on_progress)
    console, wanted = terminal(), spec.prediction
    interval = [f"{wanted.level:.0%} interval"] * (wanted.draws > 1)
    headings = ("run", "device s", *interval, "decode s", "prefill s", "W s", "ends s", "reused", "cached", "evicted")
    rows: list[tuple[str, ...]] = []
    for run in planned:
        means = predictions[run.condition.name][run.replicate]
        device = drawn_interval([means], "device_ns")
        seconds = (means.decode_ns, means.prefill_ns, means.waiting_session_ns, means.end_ns)
        counts = (
            f"{means.num_reused}/{means.num_rearrivals}",
            str(means.cached_tokens),
            str(means.num_evictions),
        )
        drawn = () if device is None else (f"{device.low / NS_PER_S:.3f} - {device.high / NS_PER_S:.3f}",)
        device_s = f"{means.device_ns / NS_PER_S:.3f}"
        rows.append((run.label, device_s, *drawn, *(f"{ns / NS_PER_S:.3f}" for ns in seconds), *counts))
    how = f"means of {wanted.draws} draws" if wanted.draws > 1 else "one simulation of each, without perturbations"
    console.print(f"{spec.name}: predicted, in model seconds, {how}; W: session seconds others waited for prefills")
    console.print(f"rules: {', '.join(dict.fromkeys(run.server.rule_set().name for run in planned))}")
    if wanted.draws > 1:
        for line in dict.fromkeys(perturbation_of(wanted, run.cost_file).line() for run in planned):
            console.print(line)
    show(console, Table("", "", headings, tuple(rows)))
    _print_ratios(console, spec, predictions)


def _print_ratios(console: Console, spec: ExperimentSpec, predictions: Predictions) -> None:
    """Predicted device time of every condition over its baseline's, all replicates summed."""
    from harness.analysis.decisions.answer import source_of_prediction
    from harness.analysis.decisions.predictions import drawn_ratio, predicted_ratio

    for condition in spec.condition:
        baseline = spec.baseline_of(condition)
        if baseline == condition.name:
            continue
        own, base = (list(predictions[name].values()) for name in (condition.name, baseline))
        drawn, source = drawn_ratio(own, base), source_of_prediction(own).value
        ends = "" if drawn is None else f", {drawn.level:.0%} of outcomes {drawn.low:.4f} to {drawn.high:.4f}"
        console.print(f"{condition.name} / {baseline}: {predicted_ratio(own, base):.4f} ({source}){ends}")
