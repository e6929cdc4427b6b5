"""What a sealed run was asked for, held to what an experiment asks for now. Plans are compared elsewhere, by hash."""

from __future__ import annotations

from harness.kinds import kind_named
from harness.measure.records.run import SealedRun
from harness.model.spec import ConditionSpec, ExperimentSpec, FleetSpec, ServerSpec


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
        "request": spec.workload_of(condition).request.model_dump(mode="json"),
        "order": spec.order,
        "fleet": None if spec.fleet is None else _of_fleet(spec.fleet, condition),
    }
    sealed: dict[str, object] = {
        # As requested, also with rules = "auto"; keys added since then have their defaults.
        "server": ServerSpec.model_validate(run.manifest.requested_server).model_dump(mode="json"),
        "time_scale": run.manifest.time_scale,
        "backend": run.manifest.backend,
        "client": run.client.model_dump(mode="json"),
        "request": run.workload.request.model_dump(mode="json"),
        "order": run.spec.order,
        "fleet": None if run.fleet_spec is None else _of_fleet(run.fleet_spec, run.condition_spec),
    }
    return sorted(name for name in expected if expected[name] != sealed[name])
