"""Which runs stand beside which: the replicates that conditions have in common.

Conditions that are shown together are summed over the replicates in which each of them has a valid run, so that no sum
holds inputs that another one lacks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

from harness.analysis.figures import RunFigures
from harness.analysis.stats import grouped
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


def counted_runs(runs: Sequence[RunFigures]) -> list[RunFigures]:
    """The valid runs of the replicates that all conditions among ``runs`` have in common."""
    common = common_replicates(runs)
    return [run for run in runs if run.is_valid and run.replicate in common]


def without_a(runs: Iterable[RunFigures]) -> str:
    """Why channel A of these runs is not known; empty where it is."""
    missing = [run for run in runs if run.a is None]
    reasons = {
        "no step log": any(not run.has_steps for run in missing),
        "unknown reuse": any(run.computed_prefill_tokens is None for run in missing),
    }
    named = [reason for reason, is_so in reasons.items() if is_so]
    return " and ".join(named) or ("no costs of this server" if missing else "")
