"""``harness replicas``: what routing did to sealed runs. ``harness predict replicas``: policies compared in virtual
time, before a router is installed."""

from __future__ import annotations

from itertools import count, product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.api import experiment_with
from harness.cli.addresses import (
    ExperimentArgument,
    RunsOption,
    SealedArgument,
    SetOption,
    TableFormsOption,
    changes_of,
)
from harness.cli.terminal import print_tables, time_left
from harness.errors import SpecError, unknown_name
from harness.table import Table, TableForm, with_four_digits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from harness.extras.replicas.figures import ReplicaFigures
    from harness.model.experiment import PlannedRun

SHORT = (
    *("device_s", "ratio", "session_p90_s", "ttft_p50_ms", "busiest", "busy"),
    *("share", "in_flight_s", "n", "b", "padding"),
)


def measured(
    experiment: SealedArgument,
    runs: RunsOption = Path("runs"),
    advise: Annotated[
        bool, typer.Option("--advise", help="Predict for the baseline what would help: sessions at home, or memory.")
    ] = False,
    form: TableFormsOption = TableForm.text,
) -> None:
    """Show what routing did to runs of several replicas: cost of each condition, reuse kept and lost, work of each.

    Compares the replicates that every condition has; the first condition is the baseline.

    Example: `harness replicas does-affinity-pay`
    """
    from harness.analysis.stats import grouped
    from harness.extras.replicas.advice import sentence, what_helps
    from harness.extras.replicas.figures import compare_policies, figures_of_sealed, of_each_replica
    from harness.measure.records.run import origin_of
    from harness.measure.records.store import sealed_runs

    sealed = [run for run in sealed_runs(runs, experiment) if run.is_valid]
    by_condition = grouped(sealed, lambda run: run.condition)
    common = set.intersection(*({run.replicate for run in each} for each in by_condition.values())) if sealed else set()
    if not common:
        raise SpecError(
            "no replicate has a valid run of every condition", where=experiment, hint="`harness runs` lists them"
        )
    order = list(dict.fromkeys(condition.name for condition in sealed[0].spec.condition))
    played = {
        name: [figures_of_sealed(run) for run in by_condition[name] if run.replicate in common]
        for name in sorted(by_condition, key=order.index)
    }
    if advise:
        baseline = sealed[0].spec.baseline_name
        costs, reuse = what_helps([run for run in by_condition[baseline] if run.replicate in common])
        print_tables([_short(costs, form), reuse], form, remarks=[sentence(played[baseline])])
        return
    origin = origin_of(sealed)
    costs, reuse = compare_policies(played, origin, "condition")
    each = of_each_replica(played, origin, "condition")
    print_tables([_short(costs, form), reuse, _short(each, form)], form)


def replicas(
    experiment: ExperimentArgument,
    num_replicas: Annotated[
        int, typer.Option("--replicas", min=1, max=64, help="Servers behind the router, each as the experiment has it.")
    ] = 2,
    policies: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            help="round-robin, least-requests, session-affinity or prefix-aware. Repeatable; the first is the "
            "baseline. Default: all four.",
        ),
    ] = None,
    condition: Annotated[
        str, typer.Option("--condition", help="Condition whose server and workload count. Default: the first.")
    ] = "",
    plans: Annotated[int, typer.Option("--plans", min=1, max=1000, help="Plans that are drawn and replayed.")] = 12,
    changes: SetOption = None,
    form: TableFormsOption = TableForm.text,
) -> None:
    """Predict what a router's policy costs: returning sessions that find their KV, and those that do not.

    Simulates the same plans on several servers behind each policy.

    Example: `harness predict replicas demo --replicas 2`
    """
    from harness.extras.replicas.advice import ORIGIN
    from harness.extras.replicas.figures import compare_policies, figures_of
    from harness.extras.replicas.policies import POLICIES, policy_named
    from harness.extras.replicas.virtual import play_replicas

    names = list(dict.fromkeys(policies or POLICIES))
    for name in names:
        policy_named(name, num_replicas)
    runs, simulated = _planned(experiment, condition, plans, changes), count(1)
    played: dict[str, list[ReplicaFigures]] = {name: [] for name in names}
    with time_left("simulating") as tell:
        for name, run in product(names, runs):
            router = policy_named(name, num_replicas)
            played[name].append(figures_of(play_replicas(run.plan, run.server, run.cost_model, router)))
            tell(next(simulated) / (len(names) * len(runs)))
    costs, reuse = compare_policies(played, ORIGIN)
    print_tables([_short(costs, form), reuse], form)


def layouts(
    experiment: ExperimentArgument,
    counts: Annotated[
        list[int] | None,
        typer.Option("--replicas", min=1, max=64, help="Cut the server into so many. Repeatable. Default: 1, 2, 4."),
    ] = None,
    policies: Annotated[
        list[str] | None, typer.Option("--policy", help="As of `harness predict replicas`. Repeatable. Default: all.")
    ] = None,
    condition: Annotated[
        str, typer.Option("--condition", help="Condition whose server is the budget. Default: the first.")
    ] = "",
    plans: Annotated[int, typer.Option("--plans", min=2, max=1000, help="Plans that are drawn and replayed.")] = 6,
    changes: SetOption = None,
    form: TableFormsOption = TableForm.text,
) -> None:
    """Search replicas, policies and compiled sizes at a server's budget of positions and KV slots.

    The first layout is the baseline; the others follow by predicted device time.

    Example: `harness predict layouts one-big-or-two-small`
    """
    from harness.extras.replicas.advice import ORIGIN, Planned, layouts_of
    from harness.extras.replicas.figures import compare_policies
    from harness.extras.replicas.policies import POLICIES, policy_named

    names = list(dict.fromkeys(policies or POLICIES))
    for name in names:
        policy_named(name, 1)
    runs = _planned(experiment, condition, plans, changes)
    server = runs[0].server
    if server.is_paged or server.is_routed:
        raise SpecError(
            "a budget is a single server with KV slots",
            where=f"condition {runs[0].condition.name}",
            hint="Choose another --condition",
        )
    played: dict[str, list[ReplicaFigures]] = {}
    found = list(layouts_of(server, sorted(set(counts or (1, 2, 4))), names))
    with time_left("simulating") as tell:
        for place, layout in enumerate(found, start=1):
            played[layout.name] = layout.play([Planned(run.plan, run.cost_model) for run in runs])
            tell(place / len(found))
    if not found:
        raise SpecError(
            f"{server.max_num_seqs} positions and {server.num_kv_slots} KV slots make no such replicas of equal size",
            where="--replicas",
            hint="Name numbers that divide both",
        )
    first, *others = played
    order = [first, *sorted(others, key=lambda name: sum(each.total_device_s for each in played[name]))]
    costs, reuse = compare_policies({name: played[name] for name in order}, ORIGIN, "layout")
    print_tables([_short(costs, form), reuse], form)


def _planned(experiment: Path, condition: str, plans: int, changes: list[str] | None) -> Sequence[PlannedRun]:
    """As many plans of a condition, by default of the first, with its server and costs."""
    from harness.model.experiment import resolve

    spec = experiment_with(experiment, changes_of([*(changes or ()), f"replicates={plans}"], None))[0]
    by_condition = resolve(spec).by_condition
    chosen = condition or next(iter(by_condition))
    if chosen not in by_condition:
        raise unknown_name("condition", chosen, by_condition)
    return by_condition[chosen]


def _short(table: Table, form: TableForm) -> Table:
    """With four digits, where people read it."""
    columns = [name for name in SHORT if name in table.columns]
    return table if form in (TableForm.csv, TableForm.json) else with_four_digits(table, columns)
