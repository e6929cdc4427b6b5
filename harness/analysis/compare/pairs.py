"""Which runs stand beside which, and by whose costs their modelled device time (A) is priced.

Conditions that are shown together are summed over the replicates in which each of them has a valid run, so that no sum
holds inputs that another one lacks. Runs that other cost files priced are priced again, by the costs of their baseline,
so that a ratio holds the servers and not their cost files. A simulation cannot be: its times are those of its costs.
Definitions: docs/reference/method.md, "Channel A and channel B".
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from harness.analysis.figures import RunFigures, figures_at, run_figures
from harness.analysis.stats import grouped
from harness.measure.records import layout
from harness.measure.records.run import SealedRun
from harness.model.engine import CostModel
from harness.model.spec import ExperimentSpec

Run = TypeVar("Run")


def common_replicates(runs: Iterable[RunFigures]) -> tuple[int, ...]:
    """Replicates with a valid run of every condition that has any, ascending."""
    by_condition = grouped((run for run in runs if run.is_valid), lambda run: run.condition)
    replicates = [{run.replicate for run in group} for group in by_condition.values()]
    return tuple(sorted(set[int].intersection(*replicates))) if replicates else ()


def in_order(own: Iterable[Run], base: Iterable[Run], plan_of: Callable[[Run], Hashable]) -> list[tuple[Run, Run]]:
    """Runs of equal plans; those of a plan that was repeated are paired in order."""
    others = {plan: iter(runs) for plan, runs in grouped(base, plan_of).items()}
    pairs = ((run, next(others.get(plan_of(run), iter(())), None)) for run in own)
    return [(run, other) for run, other in pairs if other is not None]


def num_comparisons(spec: ExperimentSpec) -> int:
    """Conditions that have another one as baseline: they are judged together; 1 where none has."""
    return max(1, sum(spec.baseline_of(condition) != condition.name for condition in spec.condition))


def num_plans(runs: Iterable[RunFigures]) -> int:
    """Different inputs among runs. A plan that is not known counts as another one."""
    plans = [run.plan for run in runs]
    return len(set(plans) - {""}) + plans.count("")


def are_repeats(runs: Sequence[RunFigures]) -> bool:
    """Whether several runs sent the same sessions, as of a recording that is replayed whole."""
    return len(runs) > 1 and bool(runs[0].sessions) and len({run.sessions for run in runs}) == 1


def counted_runs(runs: Sequence[RunFigures]) -> list[RunFigures]:
    """The valid runs of the replicates that all conditions among ``runs`` have in common."""
    common = common_replicates(runs)
    return [run for run in runs if run.is_valid and run.replicate in common]


def without_a(runs: Iterable[RunFigures]) -> str:
    """Why channel A of these runs is not known; empty where it is."""
    missing = [run for run in runs if run.a is None]
    reasons = {
        "no price of drafts in its costs": any(run.drafts and run.has_steps for run in missing),
        "no sizes of steps": any(not run.has_steps for run in missing),
        "unknown reuse": any(run.computed_prefill_tokens is None for run in missing),
    }
    named = [reason for reason, is_so in reasons.items() if is_so]
    return " and ".join(named) or ("no costs of this server" if missing else "")


class Prices(NamedTuple):
    """By which costs runs are compared. model: of all of them; None: each run's own.

    note: what a reader must know of them; short: the same for a sentence. Both are empty where one model priced all.
    """

    model: CostModel | None = None
    note: str = ""
    short: str = ""

    def figures(self, run: SealedRun) -> RunFigures:
        """Its figures at these prices, computed once."""
        return run_figures(run) if self.model is None else run.once(_At(repr(self.model), self.model))


@dataclass(frozen=True, slots=True)
class _At:
    """Prices a run; equal for equal costs."""

    costs: str
    model: CostModel = field(compare=False)

    def __call__(self, run: SealedRun) -> RunFigures:
        return figures_at(run, self.model)


def cost_models(runs: Iterable[SealedRun]) -> dict[str, str]:
    """The cost models by which runs were priced: names by the hash of their files."""
    found: dict[str, str] = {}
    for run in runs:
        entry = run.manifest.files.get(layout.COST_MODEL)
        if entry is not None and entry.sha256 not in found:
            found[entry.sha256] = run.cost_model.name
    return found


def prices_of(sides: Mapping[str, Sequence[SealedRun]], base: Sequence[SealedRun]) -> Prices:
    """Of runs that are compared, by the names of their sides. base: those of the baseline, among them."""
    runs = [run for side in sides.values() for run in side]
    if len(cost_models(runs)) < 2 or not base:
        return Prices()
    models = ", ".join(f"{name} ({', '.join(cost_models(side).values())})" for name, side in sides.items())
    if all(run.manifest.kind.is_virtual for run in runs):
        note = f"Simulated by different cost models, so that ratios hold these too: {models}."
        return Prices(None, note, "simulated by different cost models")
    first = min(base, key=lambda run: (not run.is_valid, run.replicate))
    model = first.cost_model
    note = f"Priced by different cost models; A of all is by the baseline's here ({model.name}): {models}."
    return Prices(model, note, f"A of both by the costs of {model.name}")


def prices_by_condition(runs: Sequence[SealedRun]) -> dict[str, Prices]:
    """Of the conditions of one experiment: those that have one baseline are priced alike."""
    by_condition = grouped(runs, lambda run: run.condition)
    baselines = {name: _last_baseline(name, by_condition) for name in by_condition}
    prices: dict[str, Prices] = {}
    for baseline, names in grouped(by_condition, lambda name: baselines[name]).items():
        of_group = prices_of({name: by_condition[name] for name in names}, by_condition[baseline])
        prices |= dict.fromkeys(names, of_group)
    return prices


def _last_baseline(condition: str, runs: Mapping[str, Sequence[SealedRun]]) -> str:
    """The baseline of a condition, or of its baseline and so on, that has sealed runs."""
    seen = [condition]
    while (named := runs[seen[-1]][0].manifest.baseline) in runs and named not in seen:
        seen.append(named)
    return seen[-1]
