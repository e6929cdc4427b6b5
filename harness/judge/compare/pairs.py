"""Which runs stand beside which: the replicates that conditions have in common.

Conditions that are shown together are summed over the replicates in which each of them has a valid run, so that no sum
holds inputs that another one lacks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from harness.analysis.figures import RunFigures
from harness.analysis.stats import grouped


def common_replicates(runs: Iterable[RunFigures]) -> tuple[int, ...]:
    """Replicates with a valid run of every condition that has any, ascending."""
    by_condition = grouped((run for run in runs if run.is_valid), lambda run: run.condition)
    replicates = [{run.replicate for run in group} for group in by_condition.values()]
    return tuple(sorted(set[int].intersection(*replicates))) if replicates else ()


def counted_runs(runs: Sequence[RunFigures]) -> list[RunFigures]:
    """The valid runs of the replicates that all conditions among ``runs`` have in common."""
    common = common_replicates(runs)
    return [run for run in runs if run.is_valid and run.replicate in common]
