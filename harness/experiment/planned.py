"""From an ExperimentSpec to its runs, resolved once: server, plan, treatment and cost model of each.

A PlannedRun is already validated, and its files are read. Nothing is started, simulated or written.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from harness.engine import CostModel, load_cost_model
from harness.engine.cost import find_cost_file
from harness.errors import SpecError
from harness.experiment.orders import Period, order_of_block, period_of
from harness.experiment.plans import build_plan
from harness.kinds import kind_named
from harness.plan import Plan, check_fits
from harness.records import RunKey, SealedRun
from harness.spec import ConditionSpec, ExperimentSpec, FleetSpec, Place, ServerSpec, Treatment, WorkloadSpec


@dataclass(frozen=True, slots=True, eq=False)
class PlannedRun:
    """Everything that determines a run: a condition in a replicate.

    position: place in the experiment's order, from 0. server: the condition's changes applied. plan: what is sent, the
    treatment applied; its ``drawn_hash`` is equal for all conditions of a replicate that share a workload.
    cost_file: of ``cost_model``. period: of a fleet whose devices start their runs together.
    """

    spec: ExperimentSpec
    condition: ConditionSpec
    replicate: int
    position: int
    server: ServerSpec
    plan: Plan
    cost_file: Path
    cost_model: CostModel = field(repr=False)
    period: Period | None = None

    @property
    def key(self) -> RunKey:
        return RunKey(self.spec.name, self.condition.name, self.replicate)

    @property
    def label(self) -> str:
        return f"{self.condition.name}/{self.replicate}"

    @property
    def place(self) -> Place | None:
        """The device that performs it; None outside a fleet."""
        return None if self.spec.fleet is None else self.spec.fleet.place_of(self.replicate)

    @property
    def neighbours(self) -> tuple[int, ...]:
        """Devices of the same host that are to be busy at the same time."""
        place, fleet = self.place, self.spec.fleet
        if place is None or fleet is None:
            return ()
        busy = fleet.devices if self.period is None else self.period.devices
        return tuple(device for device in busy if device != place.device)

    @property
    def order_index(self) -> int:
        """Position within the replicate's order."""
        return self.position % len(self.spec.condition)


@dataclass(frozen=True, slots=True, eq=False)
class PlannedRuns:
    """All runs of an experiment in the order of their execution."""

    spec: ExperimentSpec
    runs: tuple[PlannedRun, ...]

    def __iter__(self) -> Iterator[PlannedRun]:
        return iter(self.runs)

    def __len__(self) -> int:
        return len(self.runs)

    @property
    def by_condition(self) -> dict[str, tuple[PlannedRun, ...]]:
        """The runs of each condition, sorted by replicate; conditions in the order of the experiment."""
        return {
            condition.name: tuple(run for run in self.runs if run.condition is condition)
            for condition in self.spec.condition
        }


@dataclass(frozen=True, slots=True)
class _ResolvedCondition:
    """What the replicates of a condition share."""

    server: ServerSpec
    workload: WorkloadSpec
    cost_file: Path
    cost_model: CostModel = field(repr=False)


def resolve(spec: ExperimentSpec) -> PlannedRuns:
    """Every run of an experiment: replicate by replicate, the conditions of each in the experiment's order.

    Source: docs/method.md, "A run and its invariants"; docs/planning-method.md, "Orders and drift".

    Conditions with the same workload and treatment share one plan object in each replicate. Raises SpecError for an
    unknown cost model or wait distribution, and for a request that no KV slot of its server holds.
    """
    resolved = {condition.name: _resolve_condition(spec, condition) for condition in spec.condition}
    plans = _Plans(spec.base_seed)
    runs: list[PlannedRun] = []
    for replicate in range(spec.replicates):
        for order_index, place in enumerate(order_of_block(spec.order, len(spec.condition), spec.turn_of(replicate))):
            condition = spec.condition[place]
            shared = resolved[condition.name]
            plan = plans.plan(shared.workload, spec.input_of(replicate), condition.treatment)
            check_fits(plan, shared.server)
            _check_stream(plan, spec)
            period = period_of(spec, replicate, order_index)
            files = (shared.cost_file, shared.cost_model)
            runs.append(PlannedRun(spec, condition, replicate, len(runs), shared.server, plan, *files, period))
    return PlannedRuns(spec, tuple(runs))


def _check_stream(plan: Plan, spec: ExperimentSpec) -> None:
    requests = (request for session in plan.sessions for request in session.requests)
    if not spec.client.stream and any(request.abort_after_tokens for request in requests):
        raise SpecError(
            "the plan aborts requests after some tokens, and without streaming no token arrives before the end",
            where="client.stream",
            hint="Set client.stream = true",
        )


def _resolve_condition(spec: ExperimentSpec, condition: ConditionSpec) -> _ResolvedCondition:
    server = spec.server_of(condition)
    cost_file = find_cost_file(server.cost_model)
    return _ResolvedCondition(server, spec.workload_of(condition), cost_file, load_cost_model(cost_file))


class _Plans:
    """The plans of an experiment, each drawn and treated once."""

    def __init__(self, base_seed: int) -> None:
        self._base_seed = base_seed
        self._made: dict[tuple[WorkloadSpec, int, Treatment], Plan] = {}

    def plan(self, workload: WorkloadSpec, block: int, treatment: Treatment) -> Plan:
        key = (workload, block, treatment)
        if key not in self._made:
            self._made[key] = (
                build_plan(workload, self._base_seed, block)
                if treatment == "as-drawn"
                else self.plan(workload, block, "as-drawn").with_treatment(treatment)
            )
        return self._made[key]


def _of_fleet(fleet: FleetSpec, condition: ConditionSpec) -> tuple[object, ...]:
    """The parts of a fleet's specification that affect its runs."""
    return fleet.places, fleet.emulated, fleet.lockstep, condition.neighbours


def changed_inputs(run: SealedRun, spec: ExperimentSpec, condition: ConditionSpec) -> list[str]:
    """Names of the inputs that a sealed run has otherwise than ``spec`` asks for now, without its plan."""
    expected: dict[str, object] = {
        "server": spec.server_of(condition).model_dump(mode="json"),
        "time_scale": 1.0 if kind_named(spec.backend).is_virtual else spec.time_scale,
        "backend": spec.backend,
        "client": spec.client.model_dump(mode="json"),
        "order": spec.order,
        "fleet": None if spec.fleet is None else _of_fleet(spec.fleet, condition),
    }
    sealed: dict[str, object] = {
        # As requested, also with rules = "auto"; keys added since then have their defaults.
        "server": ServerSpec.model_validate(run.manifest.requested_server).model_dump(mode="json"),
        "time_scale": run.manifest.time_scale,
        "backend": run.manifest.backend,
        "client": run.client.model_dump(mode="json"),
        "order": run.spec.order,
        "fleet": None if run.fleet_spec is None else _of_fleet(run.fleet_spec, run.condition_spec),
    }
    return sorted(name for name in expected if expected[name] != sealed[name])
