"""The smallest change that captures the gain: slots or buckets first by what is lost, both only where it pays.

Slots are added until another step no longer helps; buckets are searched at the chosen slots. Every candidate is judged
on new draws of the baseline's workload.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from harness.advise.diagnose import Diagnosis, diagnose
from harness.advise.experiment import write_experiment
from harness.errors import SpecError
from harness.plan.seeds import derive_seed
from harness.records import SealedRun
from harness.sim.predict.intervals import Prediction, predict
from harness.sim.search.run import search
from harness.sim.search.space import DrawsSpec, SpaceSpec
from harness.spec import ExperimentSpec, ServerShape, WorkloadSpec

ENOUGH = 0.8
"""A smaller change is proposed when it keeps this share of the largest predicted saving."""
SEED_RANGE = 2**31


@dataclass(frozen=True)
class Step:
    """One change on the way, with its prediction against the baseline."""

    name: str
    prediction: Prediction

    @property
    def saving(self) -> float:
        return 1.0 - self.prediction.mean


@dataclass(frozen=True)
class Advice:
    """A diagnosis, the changes that were tried from small to large, the one proposed (None: leave it), and files.

    ladder: numbers of slots tried, with the ratio each gave to the one before; the last one no longer helped.
    """

    diagnosis: Diagnosis
    space: SpaceSpec
    steps: tuple[Step, ...]
    ladder: tuple[tuple[int, Prediction], ...]
    proposal: Step | None
    experiment: Path | None
    criteria: Path | None

    def lines(self) -> Iterator[str]:
        """The advice for people."""
        yield from self.diagnosis.lines()
        first = (
            "slots first: lost reuse costs more than padding"
            if self.diagnosis.is_reuse_first
            else ("buckets first: most reuse is kept, padding costs more")
        )
        yield f"order: {first}"
        for slots, found in self.ladder:
            verdict = "helps" if found.is_told_apart and found.high < 1 else "no longer helps: stop adding slots"
            yield f"  {slots} slots: {found.low:.4f} to {found.high:.4f} of the cost with the slots before; {verdict}"
        for step in self.steps:
            found = step.prediction
            told = "" if found.is_told_apart else ", not told apart from the baseline"
            level = f"{found.level:.0%}"
            yield (
                f"  {step.name:<18} {found.candidate.label:<28} predicted {found.mean:.4f} "
                f"({level} {found.low:.4f} to {found.high:.4f}{told})"
            )
        if self.proposal is None:
            yield "proposal: keep the baseline; no change is told apart from it"
            return
        candidate = self.proposal.prediction.candidate
        device = self.space.device
        yield f"proposal: {self.proposal.name}, {candidate.label}, predicted to save {self.proposal.saving:.1%}"
        yield (
            f"  costs {device.memory_gib(candidate):.2f} GiB per device, {device.compile_s(candidate):.0f} s to compile"
            f" and {device.artifact_gib(candidate):.1f} GiB of artifact"
        )
        yield f"validate it on new inputs: harness freeze {self.experiment}, commit, then harness run {self.experiment}"
        yield f"criteria: {self.criteria}"


def advise(runs: Sequence[SealedRun], output: Path, *, condition: str = "", space: SpaceSpec | None = None) -> Advice:
    """Diagnose, search, propose; write the experiment that would validate the proposal into ``output``.

    space: default, slots up to four times the baseline's and buckets up to two more than it has, under its own limit.
    """
    diagnosis = diagnose(runs, condition)
    experiment = next(run for run in runs if run.condition == diagnosis.condition).spec
    chosen = space or default_space(experiment, diagnosis)
    if space is not None and space.baseline.shape != diagnosis.server.shape:
        raise SpecError(
            f"the space's baseline is {space.baseline.shape.label}, the one measured {diagnosis.server.shape.label}",
            where=space.name,
            hint="Give the space the baseline that was measured",
        )
    ladder = slot_ladder(chosen)
    steps = _steps(chosen, ladder)
    proposal = smallest_enough(steps, is_reuse_first=diagnosis.is_reuse_first)
    if proposal is None:
        return Advice(diagnosis, chosen, steps, ladder, None, None, None)
    # A proposal that changes both is measured beside its part, so that the validation shows what the rest adds.
    part = next((step for step in steps if step is not proposal and step.name.startswith("slots")), None)
    others = (part,) if part is not None and proposal.name == "slots and buckets" else ()
    files = write_experiment(
        output,
        experiment,
        diagnosis.server,
        {step.name.replace(" ", "-"): step.prediction.candidate for step in (*others, proposal)},
        seed=derive_seed(experiment.base_seed, "advise/validation") % SEED_RANGE,
    )
    return Advice(diagnosis, chosen, steps, ladder, proposal, *files)


def default_space(experiment: ExperimentSpec, diagnosis: Diagnosis) -> SpaceSpec:
    """New draws of the measured workload; the baseline's limit; slots and buckets around what it has."""
    server = diagnosis.server
    condition = next(one for one in experiment.condition if one.name == diagnosis.condition)
    workload = experiment.workload_of(condition)
    users, per_user = users_of(workload)
    table: dict[str, Any] = workload.model_dump(exclude_defaults=True, exclude={"num_sessions", "concurrency"})
    slots = server.num_kv_slots
    return SpaceSpec(
        name=f"{experiment.name}-advice"[:64],
        rules=server.rules,
        cost_model=server.cost_model,
        max_num_seqs=(server.max_num_seqs,),
        kv_slots=tuple(range(slots, 4 * slots + 1, max(slots // 4, 1))),
        slot_tokens=(server.slot_tokens,),
        buckets={"always": (1, "max_num_seqs"), "most": min(len(server.decode_buckets) + 2, 8)},  # type: ignore[arg-type]
        baseline=server,
        prediction=DrawsSpec(
            start_ms=diagnosis.start_ms,
            lag_ms=diagnosis.lag_ms,
            seed=derive_seed(experiment.base_seed, "advise/uncertainty") % SEED_RANGE,
        ),
        inputs={  # type: ignore[arg-type]
            "users": (users,),
            "sessions_per_user": per_user,
            "search_seeds": [derive_seed(experiment.base_seed, f"advise/search/{k}") % SEED_RANGE for k in range(3)],
            "evaluation_seeds": [
                derive_seed(experiment.base_seed, f"advise/evaluation/{k}") % SEED_RANGE for k in range(3)
            ],
            "replicates": 4,
            "treatment": condition.treatment,
            "workload": table,
        },
    )


def users_of(workload: WorkloadSpec) -> tuple[int, int]:
    """(N, sessions of each user) of a workload; raises SpecError where sessions do not divide evenly over users."""
    if workload.source == "sequential":
        raise SpecError("a sequential experiment has no concurrent sessions", where="advise", hint="Use another")
    if workload.concurrency is None:
        return workload.num_sessions, 1
    if workload.num_sessions % workload.concurrency:
        raise SpecError(
            f"{workload.num_sessions} sessions do not divide over {workload.concurrency} users",
            where="workload.num_sessions",
            hint="Give a search space with --space",
        )
    return workload.concurrency, workload.num_sessions // workload.concurrency


def slot_ladder(space: SpaceSpec) -> tuple[tuple[int, Prediction], ...]:
    """More slots with the baseline's buckets, rung by rung, until one is not told apart from the one before."""
    base = space.baseline.shape
    sizes = {place for place in space.kv_slots if not isinstance(place, str) and place > base.kv_slots}
    rungs: list[tuple[int, Prediction]] = []
    before = base
    for slots in sorted(sizes):
        candidate = before._replace(kv_slots=slots)
        if space.constraints.violated(space.device, candidate):
            break
        found = predict(space, candidate, space.inputs.users, reference=before)
        rungs.append((slots, found))
        if not (found.is_told_apart and found.high < 1):
            break
        before = candidate
    return tuple(rungs)


def _steps(space: SpaceSpec, ladder: Sequence[tuple[int, Prediction]]) -> tuple[Step, ...]:
    """Slots alone, buckets alone, both; each the best of its kind."""
    base = space.baseline.shape
    helped = [slots for slots, found in ladder if found.is_told_apart and found.high < 1]
    steps: list[Step] = []
    if helped:
        steps.append(_step(space, "slots", base._replace(kv_slots=helped[-1])))
    buckets = best_buckets(space, base.kv_slots)
    if buckets != base.decode_buckets:
        steps.append(_step(space, "buckets", base._replace(decode_buckets=buckets)))
    if helped:
        buckets = best_buckets(space, helped[-1])
        if buckets != base.decode_buckets:
            steps.append(_step(space, "slots and buckets", base._replace(kv_slots=helped[-1], decode_buckets=buckets)))
    return tuple(steps)


def _step(space: SpaceSpec, name: str, candidate: ServerShape) -> Step:
    return Step(name, predict(space, candidate, space.inputs.users))


def best_buckets(space: SpaceSpec, slots: int) -> tuple[int, ...]:
    """The best bucket set at a number of slots, by the space's search inputs, under the baseline's limit."""
    narrowed = space.model_copy(update={"max_num_seqs": (space.baseline.max_num_seqs,), "kv_slots": (slots,)})
    with TemporaryDirectory() as folder:
        result = search(narrowed, Path(folder) / "search")
        return result.candidate(result.ranked[0]).decode_buckets


def smallest_enough(steps: Sequence[Step], *, is_reuse_first: bool) -> Step | None:
    """The smallest step, by priority, that is told apart from the baseline and keeps most of the best saving."""
    order = ("slots", "buckets") if is_reuse_first else ("buckets", "slots")
    by_size = sorted(steps, key=lambda step: order.index(step.name) if step.name in order else len(order))
    good = [step for step in by_size if step.prediction.is_told_apart and step.saving > 0]
    most = max((step.saving for step in good), default=0.0)
    return next((step for step in good if step.saving >= ENOUGH * most), None)
