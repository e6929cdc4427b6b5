"""``harness simulate``: what to expect of each run of an experiment, before a server runs, and how sure that is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.cli.addresses import MaybeExperimentArgument, experiment_with
from harness.cli.terminal import format_duration, say, show, terminal, time_left
from harness.clock import NS_PER_S
from harness.errors import SpecError
from harness.plugins import service
from harness.table import WIDE, Table, interval_text, with_error

if TYPE_CHECKING:
    from harness.analysis.compare.drawn import Predictions
    from harness.model.experiment import PlannedRuns

LONG_S = 3.0
"""What lasts longer is announced."""
REQUESTS_PER_S = {True: 20_000, False: 200_000}
"""Requests that a second simulates, paged and slots; only to say beforehand what will last."""


def simulate(
    experiment: MaybeExperimentArgument = None,
    jsonl: Annotated[
        Path | None, typer.Option(help="One case per line instead of an experiment; `-` for standard input.")
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
        service("simulation cases", where="--jsonl")(jsonl)
        return
    if experiment is None:
        raise SpecError("nothing to simulate", hint="Give an experiment file, or --jsonl FILE")
    from harness.judge.prereg.predict import predict_experiment, predict_until_sure
    from harness.model.experiment import resolve
    from harness.model.sim.draws import perturbation_of
    from harness.runner.experiment import checked

    spec, _, _ = experiment_with(experiment)
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
                spec.margin,
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
    from harness.analysis.compare.drawn import DrawnCosts

    # Two draws are too few for an interval.
    interval = f"{100 * planned.spec.prediction.level:.0f} % interval" if num_draws > 2 else ""
    above = ["device s", *([interval] if interval and not is_narrow else [])]
    headings = ("condition", *above, "decode s", "prefill s", "W s", "ends s", "reused", "cached", "evicted")
    rows: list[tuple[str, ...]] = []
    for name, of_condition in predictions.items():
        runs = list(of_condition.values())
        device, scale = DrawnCosts.of(runs).interval, len(runs) * NS_PER_S
        sums = [sum(getattr(run, figure) for run in runs) for figure in MEAN_SECONDS]
        again = sum(run.num_rearrivals for run in runs)
        reused = f"{100 * sum(run.num_reused for run in runs) / again:.0f} %" if again else ""
        counts = (f"{sum(getattr(run, count) for run in runs) / len(runs):.0f}" for count in MEAN_COUNTS)
        drawn = [f"{sum(run.device_ns for run in runs) / scale:.3f}"]
        if interval:
            drawn += ["" if device is None else interval_text(device.low / scale, device.high / scale, 3, "\u2013")]
        cells = ["\n".join(drawn)] if is_narrow else drawn
        rows.append((name, *cells, *(f"{ns / scale:.3f}" for ns in sums), reused, *counts))
    caption = f"below device s: its {interval}" if interval and is_narrow else ""
    return Table("", caption, headings, tuple(rows))


MEAN_SECONDS = ("decode_ns", "prefill_ns", "waiting_session_ns", "end_ns")
MEAN_COUNTS = ("cached_tokens", "num_evictions")


def _answers(planned: PlannedRuns, predictions: Predictions) -> Iterator[str]:
    """A sentence for every condition: device time over its baseline's, all replicates summed; how sure, given what."""
    from harness.analysis.compare.answer import source_of_prediction
    from harness.analysis.compare.drawn import DrawnCosts, predicted_ratio
    from harness.judge.planning.deciding import unmeasured_of_runs
    from harness.judge.prereg.predict import planned_break_even
    from harness.model.sim.draws import if_assumed, perturbation_of

    spec, margin = planned.spec, planned.spec.margin
    given = if_assumed(any(perturbation_of(spec.prediction, run.cost_file).assumed for run in planned))
    for condition in spec.condition:
        baseline = spec.baseline_of(condition)
        if baseline == condition.name:
            continue
        own, base = (list(predictions[name].values()) for name in (condition.name, baseline))
        costs, base_costs = DrawnCosts.of(own), DrawnCosts.of(base)
        drawn, mean = costs.interval_to(base_costs), costs.ratio_to(base_costs)
        parts = [f"{predicted_ratio(own, base):.4f} ({source_of_prediction(own).value})"]
        if mean is not None:
            parts[0] = f"{with_error(mean.ratio, mean.error, 4)} (mean of {mean.num_draws} draws)"
        if drawn is not None:
            parts.append(f"{100 * drawn.level:.0f} % of outcomes {interval_text(drawn.low, drawn.high)}{given}")
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
