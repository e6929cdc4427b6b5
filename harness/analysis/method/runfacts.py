"""What a sealed run says about its own design: the experiment, the condition, the sessions' groups, N, its cost model.

Read from the run alone, so that an analysis never needs the experiment's file. Nothing is computed from tables.
Next: the analyses of single experiments group runs by these facts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from pydantic import ValidationError

from harness.engine import CostModel, load_cost_model
from harness.errors import RecordsError
from harness.records import SealedRun
from harness.spec import ConditionSpec, ExperimentSpec, ServerSpec, WorkloadSpec

Key = TypeVar("Key")
# A copy of the cost-model file, as it was when the run was made: the run's channel A never changes with a checkout.
COST_MODEL_FILE = "cost_model.toml"


def experiment_of(run: SealedRun) -> ExperimentSpec:
    """The experiment a run was made for; RecordsError when the manifest holds none that this version reads."""
    try:
        return ExperimentSpec.model_validate(run.manifest.requested.get("experiment", {}))
    except ValidationError as error:
        raise RecordsError(
            f"its manifest holds no experiment that this version reads ({error.error_count()} problems)",
            where=str(run.path),
            hint="Read it with the harness version that sealed it",
        ) from error


def condition_of(run: SealedRun) -> ConditionSpec:
    """The condition of a run, as it was written."""
    for condition in experiment_of(run).condition:
        if condition.name == run.condition:
            return condition
    raise RecordsError(f"its experiment has no condition {run.condition!r}", where=str(run.path), hint="Restore it")


def workload_of(run: SealedRun) -> WorkloadSpec:
    """What the run replayed."""
    return experiment_of(run).workload_of(condition_of(run))


def server_of(run: SealedRun) -> ServerSpec:
    """The server configuration that was asked for, rules that it left open being those of the version that served."""
    asked = ServerSpec.model_validate(run.manifest.requested_server)
    return asked.model_copy(update={"rules": asked.rule_set(run.manifest.serving_version).name})


def cost_model_of(run: SealedRun) -> CostModel:
    """What prices the run's channel A: the copy that lies in it; runs older than such copies, the file of that name."""
    path = run.file(COST_MODEL_FILE)
    return load_cost_model(path if path.is_file() else str(run.manifest.server_spec.get("cost_model", "paper")))


def group_sessions(run: SealedRun) -> dict[str, range]:
    """Session indices of every named group, in order; one group "all" when the workload has none."""
    found: dict[str, range] = {}
    first = 0
    for group, _laws in workload_of(run).groups_or_self():
        found[group.name] = range(first, first + group.num_sessions)
        first += group.num_sessions
    return found


def valid(runs: Iterable[SealedRun]) -> list[SealedRun]:
    """Only what counts."""
    return [run for run in runs if run.is_valid]


def by_condition(runs: Iterable[SealedRun]) -> dict[str, list[SealedRun]]:
    """Valid runs by condition, conditions in the order of the experiment, runs by replicate."""
    counted = valid(runs)
    order = (
        {condition.name: place for place, condition in enumerate(experiment_of(counted[0]).condition)}
        if counted
        else {}
    )
    grouped: dict[str, list[SealedRun]] = {}
    for run in sorted(counted, key=lambda run: (order.get(run.condition, len(order)), run.replicate)):
        grouped.setdefault(run.condition, []).append(run)
    return grouped


def paired(runs: Sequence[SealedRun], baseline: Sequence[SealedRun]) -> list[tuple[SealedRun, SealedRun]]:
    """Runs of both conditions by equal replicate."""
    others: Mapping[int, SealedRun] = {run.replicate: run for run in baseline}
    return [(run, others[run.replicate]) for run in runs if run.replicate in others]
