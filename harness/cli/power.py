"""``harness power`` and ``harness predict noise``: how many blocks an experiment needs, and how far its runs scatter.

Both read sealed runs or simulate; neither runs anything.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.cli.addresses import ExperimentArgument, RunsOption, SetOption, experiment_with, output_option
from harness.cli.terminal import format_duration, print_folded, print_text, terminal_width
from harness.errors import SpecError
from harness.table import Table, to_text, with_error

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from harness.judge.planning.needed import Components, Goal, Needed
    from harness.model.spec import ExperimentSpec
    from harness.model.spec.rules import SuperiorityRule

DASH = "> 1000"
# Blocks on each device for which the number of devices is printed.
EACH = (1, 2, 4, 8)


def power(
    experiment: ExperimentArgument,
    runs: RunsOption = Path("runs"),
    margin: Annotated[
        float | None,
        typer.Option(help="What counts as equal. Default: of the experiment's [stop], else 0.02.", min=1e-4, max=0.999),
    ] = None,
    precision: Annotated[float, typer.Option(help="Half width of a plain interval.", min=1e-4, max=0.999)] = 0.01,
    alpha: Annotated[
        float, typer.Option(help="Of all comparisons together, in equal parts; a rule has its own.", min=1e-6, max=0.5)
    ] = 0.05,
    wanted: Annotated[float, typer.Option("--power", help="Probability of the verdict.", min=0.01, max=0.999)] = 0.9,
    rule: Annotated[
        str | None,
        typer.Option(help="Superiority rule that will decide. Default: the experiment's own, if it names one."),
    ] = None,
    comparison: Annotated[
        list[str] | None, typer.Option(help="Only this condition against its baseline. Repeatable.")
    ] = None,
    simulate: Annotated[bool, typer.Option("--simulate", help="From the simulator, sealed runs or not.")] = False,
    blocks: Annotated[int, typer.Option(help="Plan draws that are simulated.", min=3, max=1000)] = 60,
    start_s: Annotated[float, typer.Option(help="Wall seconds to start and stop one server.", min=0)] = 3.0,
    output: Annotated[Path | None, output_option("HTML page with the power curves.")] = None,
    changes: SetOption = None,
) -> None:
    """How many replicates, and hours, an answer needs.

    For a precision, a margin or a superiority rule; from sealed runs or from the simulator.

    Example: `harness power demo --rule superiority --comparison bucket6-nowaits`
    """
    from harness.cli.run import ensure_machine_code
    from harness.judge.planning.needed import Goal, measured_components, needed_together, simulated_components
    from harness.judge.planning.power import MOST_BLOCKS
    from harness.judge.planning.rare_plans import few_plans_in_words, plans_asked
    from harness.measure.records.run import origin_of
    from harness.measure.records.store import RunStore
    from harness.present.report.power import write_power_page

    spec, path, runs = experiment_with(experiment, changes, runs)
    goal = Goal(spec.margin if margin is None else margin, alpha, wanted, precision, _superiority(spec, rule))
    ensure_machine_code(spec, is_simulated=True)
    simulated, replays_s = simulated_components(spec, blocks)
    block_s = replays_s + start_s * len(spec.condition)
    sealed = [] if simulate else [run for run in RunStore(runs).sealed(spec.name) if run.is_valid]
    components = measured_components(spec, sealed) if sealed else simulated
    needs = needed_together(components, goal)
    chosen = {parts.condition for parts in _chosen(components, comparison or [], str(path))}
    if goal.rule is not None:
        chosen = {name for name in chosen if goal.rule.applies_to(name, spec.factors[name])}
    needs = [need for need in needs if need.components.condition in chosen]
    asked = plans_asked(spec)
    rare = {
        need.components.condition: few_plans_in_words(asked[need.components.condition], need.proposed or MOST_BLOCKS)
        for need in needs
        if need.components.condition in asked
    }
    needs = [need.at_least(asked.get(need.components.condition, 0)) for need in needs]
    if not needs:
        raise SpecError("no comparison is left to plan for", where=str(path), hint="Check the rule's conditions")
    origin = f"simulated: {blocks} plan draws, each restarted with the client's jitter"
    if sealed:
        notes = list(filter(None, [origin_of(sealed)]))
        counted = f"{max(parts.num_blocks for parts in components)} sealed blocks under {runs}"
        origin = "\n".join((f"{'of' if notes else 'measured in'} {counted}", *notes))
    block = format_duration(block_s)
    one_device = "one device; " if all(parts.num_devices == 1 for parts in components) else ""
    given, observed = _given(spec), [parts for parts in components if sealed and parts.condition in chosen]
    # One of several comparisons has an equal part.
    one_of_several = replace(goal, alpha=goal.alpha / len(components))
    lines = [
        *_answers(needs, goal, given),
        f"{spec.name}: log cost ratio of one block, {origin}",
        *_spreads(needs),
        *(_of_blocks(observed, goal) if sealed else _own_plans(spec, needs)),
        *(f"{name}: {text}" for name, text in given.items() if name in chosen),
        *(f"{name}: {text}" for name, text in rare.items() if text),
        f"assumed: {one_device}{start_s:g} s to start and stop a server; one block takes {block} (replay simulated)",
        "",
        *_needs(needs, goal, block_s),
        "",
        *_devices(needs, one_of_several),
        "repeat no plan draw: a new one costs no more, and holds the restart's spread as well",
        *_paste(needs, goal, rule if rule and rule not in spec.rules else ""),
    ]
    print_folded("\n".join(lines))
    if output is not None:
        page = write_power_page(output, f"Power of {spec.name}", needs, goal, "\n".join(lines))
        print_folded(f"page: {page}")


def noise(
    experiment: Annotated[str, typer.Argument(help="Name of the experiment, as the sealed runs have it.")],
    runs: RunsOption = Path("runs"),
) -> None:
    """How far sealed runs scatter about their cost model.

    Prints the `[prediction]` lines that give predictions the same scatter.

    Best from null repeats: several blocks of the same conditions. What these runs cannot tell is left out, and stays
    assumed.

    Example: `harness predict noise demo --runs runs/today`
    """
    from harness.analysis.calibration.scatter import cost_bias
    from harness.analysis.calibration.scatter import scatter as measured
    from harness.measure.records.store import sealed_runs
    from harness.model.spec import PerturbationSpec

    sealed = [run for run in sealed_runs(runs, experiment) if run.is_valid]
    if not sealed:
        raise SpecError("no valid runs", where=experiment, hint="See `harness runs` for the reasons")
    kind = sealed[0].manifest.kind
    if kind.is_virtual:
        raise SpecError(
            "its runs are simulated and scatter by what they were told",
            where=experiment,
            hint="Run it on a server: --backend emulator, twin or rbln",
        )
    settings, bias = measured(sealed), cost_bias(sealed)
    print_folded(f"{experiment}: {len(sealed)} valid runs on the {kind.label}")
    if not kind.has_device:
        print_folded("No accelerator was measured: this is the scatter of the machine that stood in for one.")
    if bias is not None:
        print_folded(f"undisturbed decode steps last {100 * bias:+.2f} % against the cost model, on the mean of runs")
    print_folded("paste into the experiment, or a search space's table of the same keys:\n[prediction]")
    for key, setting in settings.items():
        print_text(f"{key} = {setting.value:.3g}  # from {setting.num_units:,} {setting.unit}")
    drawn = [key for key in PerturbationSpec.model_fields if key.endswith(("_ms", "_sd"))]
    if left := [key for key in drawn if key not in settings]:
        print_folded(f"# these runs cannot tell {', '.join(left)}")


def _chosen(components: Sequence[Components], names: Sequence[str], where: str) -> list[Components]:
    known = [parts.condition for parts in components]
    if unknown := [name for name in names if name not in known]:
        raise SpecError(
            f"compares no condition {unknown[0]!r} with a baseline", where=where, hint=f"There are {', '.join(known)}"
        )
    return [parts for parts in components if not names or parts.condition in names]


def _superiority(spec: ExperimentSpec, name: str | None) -> SuperiorityRule | None:
    """The superiority rule that is named, else the experiment's first; SpecError when the named one is another kind."""
    from harness.model.spec.rules import SuperiorityRule, load_rule

    for rule in map(load_rule, spec.rules if name is None else [name]):
        if isinstance(rule, SuperiorityRule):
            return rule
    if name is not None:
        hint = "Name a rule of kind superiority; for equivalence, say --margin and --alpha"
        raise SpecError(f"rule {name!r} is no superiority rule", where="--rule", hint=hint)
    return None


def _given(spec: ExperimentSpec) -> dict[str, str]:
    """Which sizes of each comparison have no measured cost, in words, by condition."""
    from harness.judge.planning.deciding import unmeasured_of_runs
    from harness.model.experiment import resolve

    runs = resolve(spec.model_copy(update={"replicates": 1})).by_condition
    pairs = {one.name: (runs[one.name][0], runs[spec.baseline_of(one)][0]) for one in spec.condition}
    given = {name: "; ".join(unmeasured_of_runs(*pair)) for name, pair in pairs.items()}
    return {name: text for name, text in given.items() if text}


def _own_plans(spec: ExperimentSpec, needs: Sequence[Needed]) -> Iterator[str]:
    """What ``harness simulate`` predicts on the experiment's own plans, where the ratio above is over other plans."""
    from harness.judge.prereg.predict import drawn_ratios, predict_until_sure
    from harness.model.experiment import resolve

    planned = resolve(spec)
    predictions = predict_until_sure(planned, spec.margin)
    own = dict(drawn_ratios(spec, predictions))
    plans = f"{spec.replicates} own plan{'s' * (spec.replicates > 1)}"
    for need in needs:
        parts = need.components
        if (ratio := own.get(parts.condition)) is not None:
            change = with_error(100 * (ratio.ratio - 1), 100 * ratio.error, 1, "+f")
            over_all = with_error(100 * math.expm1(parts.mean), 100 * parts.error, 1, "+f")
            yield (
                f"{parts.condition}: {change} % on this experiment's {plans} (`harness simulate`); "
                f"{over_all} % is over {parts.num_blocks} plans"
            )


def _of_blocks(observed: Sequence[Components], goal: Goal) -> Iterator[str]:
    """How far the true spread may lie above one that was measured, and that the plan counts with it."""
    from harness.judge.planning.power import spread_limit

    for parts in observed:
        limit = spread_limit(parts.sd, parts.num_blocks)
        yield (
            f"{parts.condition}: its sd is of {parts.num_blocks} blocks, and may be as high as {limit:.4f} (90 % "
            f"limit); power {goal.power:g} is over all that these blocks leave possible"
        )


def _answers(needs: Sequence[Needed], goal: Goal, given: Mapping[str, str]) -> Iterator[str]:
    """A sentence for each comparison under the goal's rule: how many replicates show it cheaper."""
    if goal.rule is None:
        return
    by = f" by at least {100 * goal.rule.margin:g} %" if goal.rule.margin else ""
    for need in needs:
        parts, effect = need.components, need.planned_effect
        change = _change(effect)
        if parts.is_observed:
            change += f" (the margin that is wanted; the {parts.num_blocks} blocks so far: {_change(parts.mean)})"
        note = f"; {given[parts.condition]}" if parts.condition in given else ""
        if need.proposed is None:
            yield (
                f"{parts.condition}: no number of replicates up to 1,000 shows it cheaper{by}, if it costs "
                f"{change}{note}"
            )
        else:
            yield (
                f"{parts.condition}: {need.proposed} replicates show it cheaper{by} with probability {goal.power:g}, "
                f"if it costs {change}{note}"
            )
    yield ""


def _change(log_ratio: float) -> str:
    return f"{_percent(log_ratio)[1:]} {'less' if log_ratio < 0 else 'more'}"


def _percent(log_ratio: float) -> str:
    return f"{100 * math.expm1(log_ratio):+.1f} %"


def _spreads(needs: Sequence[Needed]) -> Iterator[str]:
    width = max(len(need.components.condition) for need in needs)
    yield "how far the ratio of one block lies from the mean: sd of its logarithm, and the parts of plan and restart"
    yield f"{'':<{width}}    ratio      sd    plan  restart"
    for need in needs:
        parts = need.components
        levels = "  ".join("     -" if part is None else f"{part:.4f}" for part in (parts.plan, parts.restart))
        yield f"{parts.condition:<{width}}  {_percent(parts.mean):>9}  {parts.sd:.4f}  {levels}"


def _needs(needs: Sequence[Needed], goal: Goal, block_s: float) -> Iterator[str]:
    size = needs[0].num_together
    together = f" over {size} comparisons" if size > 1 else ""
    yield f"blocks for power {goal.power:g} at alpha {goal.alpha:g}{together}, hours in brackets"
    margin = f"{100 * goal.margin:.1f} %"
    heads = [f"+-{100 * goal.precision:.1f} %", f"equal {margin}", f"differ {margin}", "as predicted"]
    heads += [f"cheaper {100 * goal.rule.margin:.1f} %"] if goal.rule else []
    rows: list[tuple[str, ...]] = []
    for need in needs:
        cells = [need.precision, need.equivalence, need.difference, need.as_predicted]
        cells += [need.superiority] if goal.rule else []
        in_hours = [DASH if count is None else f"{count} ({count * block_s / 3600:.2f} h)" for count in cells]
        looked = ", ".join(_blocks(count) for count in (need.looked_50, need.looked_90))
        rows.append((need.components.condition, *in_hours, looked))
    table = Table("", "", ("", *heads, "stopped when known: half, 9 of 10"), tuple(rows))
    yield from to_text(table, terminal_width()).splitlines()[1:]
    yield f"+-: for an interval of that half width; equal: to show that the costs differ by less than {margin};"
    yield f"differ: to show a difference of {margin}; as predicted: to show the ratio above; the last: by which block"
    yield "half, or nine of ten, of such experiments end that stop when the answer is known"


def _devices(needs: Sequence[Needed], goal: Goal) -> Iterator[str]:
    """What the devices of sealed runs add, and how many of them the margin needs."""
    from harness.judge.planning.needed import devices_for_equivalence

    for need in needs:
        parts = need.components
        if parts.device is not None:
            devices = [_blocks(devices_for_equivalence(parts, goal, each)) for each in EACH]
            yield (
                f"{parts.condition}: sd {parts.device:.4f} between its {parts.num_devices} devices, {parts.within:.4f} "
                f"within; devices that show equal {100 * goal.margin:.1f} % with {', '.join(map(str, EACH))} blocks "
                f"each: {', '.join(devices)}"
            )


def _paste(needs: Sequence[Needed], goal: Goal, rule: str) -> Iterator[str]:
    """Lines for the experiment. rule: that it does not name yet, so that a freeze with these lines decides."""
    most = max(needs, key=lambda need: need.proposed or 10_000)
    if most.proposed is None:
        name = most.components.condition
        ways = "name others with --comparison" if goal.rule else "leave it out with --comparison, or widen --margin"
        yield f"{name} needs more than 1,000 blocks: {ways}"
        return
    margin, alpha = (goal.margin, goal.alpha) if goal.rule is None else (goal.rule.margin, goal.rule.alpha)
    reached = goal.power if math.isnan(most.proposed_power) else most.proposed_power
    what = f"power {reached:.2g} at margin {margin:g}, alpha {alpha:g}, sd {most.components.sd:.4f}"
    yield "paste above the first table of the experiment, in place of its own replicates:"
    yield f"# {what} ({most.components.condition})"
    yield f"replicates = {most.proposed}"
    if rule:
        yield f"rules = {json.dumps([rule])}"
    if all(need.looked_90 for need in needs):
        half = max(need.looked_50 or 0 for need in needs)
        budget = max(need.looked_90 or 0 for need in needs)
        yield f"or, to stop when the answer is known (half of such experiments end by block {half}):"
        yield "[stop]"
        yield f"margin = {goal.margin:g}"
        yield f"alpha = {goal.alpha:g}"
        yield f"budget = {max(5, budget)}"


def _blocks(count: int | None) -> str:
    return DASH if count is None else str(count)
