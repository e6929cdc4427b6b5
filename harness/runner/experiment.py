"""An experiment's runs, in rotated order, resumed by set difference: planned keys minus sealed keys.

The order of conditions rotates from replicate to replicate, and every condition of a replicate gets the identical
drawn plan. No progress file exists: what is sealed is done. Next: ``harness.runner.run`` performs one run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from harness.analysis.method.runfacts import COST_MODEL_FILE
from harness.clock import NS_PER_S
from harness.engine import load_cost_model
from harness.engine.cost import find_cost_file
from harness.errors import RecordsError, RunInvalidError, SpecError
from harness.live.backends.registry import check_host, check_server
from harness.plan import Plan, build_plan, check_fits
from harness.prereg import Ticket
from harness.prereg.repository import file_sha256
from harness.records import RunStore, SealedRun
from harness.runner.progress import ExperimentStarted, ProgressSink, RunSealed, StopFlag, silent
from harness.runner.run import RunRequest, perform_run
from harness.runner.simulated import perform_simulated_run
from harness.sim import simulate
from harness.spec import ConditionSpec, ExperimentSpec, ServerSpec, WorkloadSpec

# Wall seconds to start and stop one emulator process, before any run of this experiment has been timed.
FIRST_GUESS_LIFECYCLE_S = 3.0


@dataclass(frozen=True, slots=True)
class RunKey:
    """One planned run. Condition names are unique in an experiment, so the name alone decides equality."""

    condition: ConditionSpec = field(compare=False)
    name: str
    replicate: int

    @property
    def label(self) -> str:
        return f"{self.name}/{self.replicate}"


@dataclass(frozen=True, slots=True)
class ExperimentOutcome:
    """What an invocation did. ``runs``: every sealed run of the experiment, earlier ones included."""

    spec: ExperimentSpec
    runs: tuple[SealedRun, ...]
    num_planned: int
    num_performed: int
    was_interrupted: bool

    @property
    def invalid_runs(self) -> tuple[SealedRun, ...]:
        return tuple(run for run in self.runs if not run.is_valid)

    @property
    def is_complete(self) -> bool:
        return len(self.runs) >= self.num_planned

    def require_valid(self) -> ExperimentOutcome:
        """This outcome, unless a run is missing or broke an invariant: then RunInvalidError, which names the first."""
        if not self.is_complete:
            raise RunInvalidError(
                f"{len(self.runs)} of {self.num_planned} runs are sealed",
                where=self.spec.name,
                hint="Continue them: run_experiment(..., resume=True)",
            )
        if self.invalid_runs:
            first = self.invalid_runs[0]
            raise RunInvalidError(
                f"{len(self.invalid_runs)} of {len(self.runs)} runs are invalid, first {first.condition}/"
                f"{first.replicate}: {'; '.join(first.invalid_reasons)}",
                where=self.spec.name,
                hint="They are left out of every comparison; `harness runs` lists them",
            )
        return self


def planned_order(spec: ExperimentSpec) -> list[RunKey]:
    """Every run of the experiment, replicate by replicate, the conditions rotated by one each time (paper 2-4)."""
    order: list[RunKey] = []
    for replicate in range(spec.replicates):
        shift = replicate % len(spec.condition)
        rotated = spec.condition[shift:] + spec.condition[:shift]
        order.extend(RunKey(condition, condition.name, replicate) for condition in rotated)
    return order


class _Forecast:
    """Wall seconds still to go: simulated model time of each run, plus the lifecycle cost seen so far."""

    def __init__(self, replay_s: dict[RunKey, float]) -> None:
        self._replay_s = replay_s
        self._lifecycle_s = [FIRST_GUESS_LIFECYCLE_S]
        self._pending = dict(replay_s)

    def of(self, key: RunKey) -> float:
        return self._replay_s[key] + sum(self._lifecycle_s) / len(self._lifecycle_s)

    def left_s(self) -> float:
        return sum(self.of(key) for key in self._pending)

    def finished(self, key: RunKey, wall_s: float) -> None:
        self._pending.pop(key)
        if FIRST_GUESS_LIFECYCLE_S in self._lifecycle_s:
            self._lifecycle_s.remove(FIRST_GUESS_LIFECYCLE_S)
        self._lifecycle_s.append(max(0.0, wall_s - self._replay_s[key]))


def build_plans(spec: ExperimentSpec) -> dict[RunKey, Plan]:
    """The plan of every run as drawn, checked against its server; raises SpecError before anything starts.

    Conditions with the same workload get the identical plan (the same object) in each replicate.
    """
    drawn: dict[tuple[WorkloadSpec, int], Plan] = {}
    plans: dict[RunKey, Plan] = {}
    for key in planned_order(spec):
        workload, server = spec.workload_of(key.condition), spec.server_of(key.condition)
        block = spec.input_of(key.replicate)
        if (workload, block) not in drawn:
            drawn[workload, block] = build_plan(workload, spec.base_seed, block)
        plans[key] = drawn[workload, block]
        load_cost_model(server.cost_model)
        check_fits(plans[key], server)
        check_server(spec.backend, server)
    return plans


def check_hosts(spec: ExperimentSpec, keys: Sequence[RunKey]) -> None:
    """Refuse, before anything starts, what a condition of ``keys`` needs and this host does not have now."""
    for server in {key.name: spec.server_of(key.condition) for key in keys}.values():
        check_host(spec.backend, server)


def predicted_replay_s(spec: ExperimentSpec, condition: ConditionSpec, plan: Plan) -> float:
    """Simulated wall seconds of one replay."""
    result = simulate(plan.with_treatment(condition.treatment), spec.server_of(condition))
    return 0.0 if spec.backend == "sim" else result.end_ns / NS_PER_S / spec.time_scale


def run_experiment(
    spec: ExperimentSpec,
    *,
    runs_root: Path | str,
    resume: bool = False,
    on_progress: ProgressSink = silent,
    stop: StopFlag | None = None,
    spec_source: str = "",
    ticket: Ticket | None = None,
) -> ExperimentOutcome:
    """Perform every planned run that is not sealed yet, and return all sealed runs of the experiment.

    resume: allow runs sealed earlier; without it they are an error, so that nothing is mixed by accident.
    Raises SpecError before anything starts; ServerError when a server cannot be run; RecordsError when records cannot
    be written.
    An invalid run is kept, named invalid, and the experiment goes on.
    ticket: of a preregistration; makes every run confirmatory. Without one they are exploratory, for ever.
    """
    stop = stop or StopFlag()
    runs_root = Path(runs_root)
    store = RunStore(runs_root)
    plans = build_plans(spec)
    keys = planned_order(spec)
    todo = _missing(store, spec, keys, plans, resume=resume, ticket=ticket)
    check_hosts(spec, todo)
    forecast = _Forecast({key: predicted_replay_s(spec, key.condition, plans[key]) for key in todo})
    on_progress(ExperimentStarted(spec.name, len(keys), len(keys) - len(todo), forecast.left_s()))
    performed = 0
    for position, key in enumerate(keys):
        if key not in todo:
            continue
        if stop.after_run:
            break
        request = RunRequest(
            spec=spec,
            condition=key.condition,
            replicate=key.replicate,
            label=key.label,
            drawn_plan=plans[key],
            position=position,
            num_planned=len(keys),
            predicted_wall_s=forecast.of(key),
            spec_source=spec_source,
            ticket=ticket,
        )
        perform = perform_simulated_run if spec.backend == "sim" else perform_run
        sealed, wall_s = perform(request, runs_root=runs_root, on_progress=on_progress, stop=stop)
        if sealed is None:  # aborted by the person; nothing of it is kept as whole
            break
        performed += 1
        forecast.finished(key, wall_s)
        on_progress(RunSealed(key.label, sealed.is_valid, tuple(sealed.invalid_reasons), wall_s, forecast.left_s()))
    return ExperimentOutcome(spec, tuple(store.sealed(spec.name)), len(keys), performed, stop.after_run)


def _missing(
    store: RunStore,
    spec: ExperimentSpec,
    keys: list[RunKey],
    plans: dict[RunKey, Plan],
    *,
    resume: bool,
    ticket: Ticket | None,
) -> list[RunKey]:
    """Planned keys minus sealed keys; refuses sealed runs that were made from another plan or configuration."""
    sealed = {(run.condition, run.replicate): run for run in store.sealed(spec.name)}
    if sealed and not resume:
        raise SpecError(
            f"{len(sealed)} sealed runs of experiment {spec.name!r} are there already",
            where=str(store.root / spec.name),
            hint="Use --resume to continue them, --runs to write elsewhere, or rename the experiment",
        )
    todo: list[RunKey] = []
    for key in keys:
        run = sealed.get((key.name, key.replicate))
        if run is None:
            todo.append(key)
        else:
            _require_same_inputs(run, spec, key, plans[key], ticket)
    return todo


def _require_same_inputs(run: SealedRun, spec: ExperimentSpec, key: RunKey, drawn: Plan, ticket: Ticket | None) -> None:
    """A sealed run counts only when it was made from the plan and the server that the spec asks for now."""
    expected: dict[str, object] = {
        "plan": drawn.with_treatment(key.condition.treatment).hash,
        "server": spec.server_of(key.condition).model_dump(mode="json"),
        "time_scale": 1.0 if spec.backend == "sim" else spec.time_scale,
        "backend": spec.backend,
        "client": spec.client.model_dump(mode="json"),
        "preregistration": None if ticket is None else ticket.record.sha256,
    }
    found: dict[str, object] = {
        "plan": run.manifest.plan_hash,
        # Keys that came later count with their defaults.
        "server": ServerSpec.model_validate(run.manifest.requested_server).model_dump(mode="json"),
        "time_scale": run.manifest.time_scale,
        "backend": run.manifest.backend,
        "client": run.manifest.requested_client,
        "preregistration": None if run.manifest.preregistration is None else run.manifest.preregistration.sha256,
    }
    if (copy := run.manifest.files.get(COST_MODEL_FILE)) is not None:
        expected["cost model"] = file_sha256(find_cost_file(spec.server_of(key.condition).cost_model))
        found["cost model"] = copy.sha256
    changed = sorted(name for name in expected if expected[name] != found[name])
    if changed:
        raise RecordsError(
            f"was sealed with another {' and '.join(changed)} than the experiment file now asks for",
            where=str(run.path),
            hint="Give the changed experiment a new name, or write to another --runs folder",
        )
