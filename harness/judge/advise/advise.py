"""Proposes the smallest change that captures most of the predicted gain, and writes the experiment that validates it.

Slots or buckets come first by what the baseline loses, both only where that pays. Every candidate is judged on new
draws of the baseline's workload. Nothing is run or frozen here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import tomli_w
from pydantic import BaseModel

from harness.errors import RecordsError, SpecError
from harness.judge.advise.diagnose import Diagnosis, diagnose
from harness.measure.records.run import SealedRun
from harness.model.plan.build import derive_seed
from harness.model.sim.predict.deciding import BreakEven
from harness.model.sim.predict.intervals import Prediction, Predictor
from harness.model.sim.search.run import search
from harness.model.sim.search.space import DrawsSpec, SpaceSpec
from harness.model.spec import ExperimentSpec, ServerShape, ServerSpec, WorkloadSpec

CLOSE = 0.01
"""Fewer slots are as good where they save this share of the cost less."""
ENOUGH = 0.8
"""A smaller change is proposed when it keeps this share of the largest predicted saving."""
SLOT_STEPS = (1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10, 12, 16)
"""Numbers of slots that are tried, as multiples of the baseline's."""
REPLICATES = 3
"""Fewest replicates of a validation."""
SEED_RANGE = 2**31


@dataclass(frozen=True)
class Step:
    """One change on the way, with its prediction against the baseline.

    break_even: how far the deciding costs may be off; None where no difference was shown. unmeasured: which of its
    sizes have no measured cost, in words.
    """

    name: str
    prediction: Prediction
    break_even: BreakEven | None = None
    unmeasured: str = ""

    @property
    def saving(self) -> float:
        return 1.0 - self.prediction.mean

    @property
    def sentence(self) -> str:
        """What it changes, what that is predicted to save, and given which costs."""
        ratio = self.prediction
        given = f"; {self.unmeasured}" if self.unmeasured else ""
        turns = f"; {self.break_even}" if self.break_even else ""
        return (
            f"{self.name}, {ratio.candidate.label}, predicted to save {100 * self.saving:.1f} +- "
            f"{100 * ratio.error:.1f} % "
            f"({100 * ratio.level:.0f} % of outcomes {100 * (1 - ratio.high):.1f} to {100 * (1 - ratio.low):.1f} %)"
            f"{given}{turns}"
        )


@dataclass(frozen=True)
class Advice:
    """A diagnosis, the changes tried from small to large, the proposed change (None: keep the baseline), and the files.

    ladder: numbers of slots tried, each with its predicted ratio to the baseline.
    """

    diagnosis: Diagnosis
    space: SpaceSpec
    steps: tuple[Step, ...]
    ladder: tuple[tuple[int, Prediction], ...]
    proposal: Step | None
    files: tuple[Path, Path] | None = None

    def lines(self) -> Iterator[str]:
        """The advice as lines of text."""
        yield from self.diagnosis.lines()
        first = (
            "slots first: lost reuse costs more than padding"
            if self.diagnosis.is_reuse_first
            else ("buckets first: most reuse is kept, padding costs more")
        )
        yield f"order: {first}"
        for slots, ratio in self.ladder:
            yield f"  {slots} slots: {ratio.mean:.4f} +- {ratio.error:.4f} of the cost of the baseline"
        for step in self.steps:
            ratio = step.prediction
            note = "" if ratio.shows_difference else f", so that {REPLICATES} runs need not show it"
            yield (
                f"  {step.name:<18} {ratio.candidate.label:<28} predicted {ratio.mean:.4f} +- {ratio.error:.4f} "
                f"({100 * ratio.level:.0f} % {ratio.low:.4f} to {ratio.high:.4f}{note})"
            )
        if self.proposal is None:
            yield "proposal: keep the baseline; no change is predicted to save anything"
            return
        candidate = self.proposal.prediction.candidate
        device = self.space.device
        yield f"proposal: {self.proposal.sentence}"
        yield (
            f"  costs {device.memory_gib(candidate):.2f} GiB per device, {device.compile_s(candidate):.0f} s to compile"
            f" and {device.artifact_gib(candidate):.1f} GiB of artifact"
        )
        if self.files is not None:
            yield from commands_of(*self.files)


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
    predictor = Predictor(chosen)
    ladder = slot_ladder(predictor)
    steps = _steps(predictor, ladder)
    proposal = smallest_enough(steps, is_reuse_first=diagnosis.is_reuse_first)
    if proposal is None:
        return Advice(diagnosis, chosen, steps, ladder, None)
    # A proposal that changes both is measured beside its first part, to show what the second part adds.
    part = next((step for step in steps if step is not proposal and step.name.startswith("slots")), None)
    others = (part,) if part is not None and proposal.name == "slots and buckets" else ()
    validation = Validation(
        experiment,
        diagnosis.server,
        {step.name.replace(" ", "-"): step.prediction.candidate for step in (*others, proposal)},
        derive_seed(experiment.base_seed, "advise/validation") % SEED_RANGE,
    )
    return Advice(diagnosis, chosen, steps, ladder, proposal, validation.write(output))


def _set_keys(part: BaseModel) -> dict[str, Any]:
    """The keys that differ from their defaults, each with its whole value: a length names its distribution."""
    is_set = part.model_dump(exclude_defaults=True, exclude_none=True)
    return part.model_dump(mode="json", include=set(is_set), exclude_none=True)


def default_space(experiment: ExperimentSpec, diagnosis: Diagnosis) -> SpaceSpec:
    """New draws of the measured workload, the baseline's max_num_seqs, and slots and buckets around the baseline's."""
    server = diagnosis.server
    condition = next(one for one in experiment.condition if one.name == diagnosis.condition)
    workload = experiment.workload_of(condition)
    users, per_user = users_of(workload)
    table = {key: value for key, value in _set_keys(workload).items() if key not in ("num_sessions", "concurrency")}
    slots = server.num_kv_slots
    return SpaceSpec(
        name=f"{experiment.name}-advice"[:64],
        rules=server.rules,
        cost_model=server.cost_model,
        max_num_seqs=(server.max_num_seqs,),
        kv_slots=tuple(dict.fromkeys(math.ceil(slots * step) for step in SLOT_STEPS)),
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


def slot_ladder(predictor: Predictor) -> tuple[tuple[int, Prediction], ...]:
    """More and more slots with the baseline's buckets, against the baseline, while more of them save more."""
    space = predictor.space
    base = space.baseline.shape
    sizes = {place for place in space.kv_slots if not isinstance(place, str) and place > base.kv_slots}
    rungs: list[tuple[int, Prediction]] = []
    least = 1.0
    for slots in sorted(sizes):
        candidate = base._replace(kv_slots=slots)
        if space.constraints.violated(space.device, candidate):
            break
        prediction = predictor.predict(candidate, space.inputs.users)
        rungs.append((slots, prediction))
        if prediction.mean + prediction.error >= least and slots > 2 * base.kv_slots:
            break
        least = min(least, prediction.mean)
    return tuple(rungs)


def _steps(predictor: Predictor, ladder: Sequence[tuple[int, Prediction]]) -> tuple[Step, ...]:
    """The best change of slots alone, of buckets alone, and of both."""
    space = predictor.space
    base = space.baseline.shape
    saves = {slots: 1 - each.mean for slots, each in ladder if each.mean + each.error < 1}
    most = max(saves.values(), default=0.0)
    helped = [slots for slots, saving in saves.items() if saving >= most - CLOSE][:1]
    steps: list[Step] = []
    if helped:
        steps.append(_step(predictor, "slots", base._replace(kv_slots=helped[-1])))
    buckets = best_buckets(space, base.kv_slots)
    if buckets != base.decode_buckets:
        steps.append(_step(predictor, "buckets", base._replace(decode_buckets=buckets)))
    if helped:
        buckets = best_buckets(space, helped[-1])
        if buckets != base.decode_buckets:
            steps.append(
                _step(predictor, "slots and buckets", base._replace(kv_slots=helped[-1], decode_buckets=buckets))
            )
    return tuple(steps)


def _step(predictor: Predictor, name: str, candidate: ServerShape) -> Step:
    users = predictor.space.inputs.users
    prediction = predictor.predict(candidate, users)
    turns = predictor.break_even(candidate, users) if prediction.shows_difference else None
    return Step(name, prediction, turns, predictor.unmeasured(candidate, predictor.space.baseline.shape))


def best_buckets(space: SpaceSpec, slots: int) -> tuple[int, ...]:
    """The best bucket set at a number of slots, by the space's search inputs, under the baseline's limit."""
    narrowed = space.model_copy(update={"max_num_seqs": (space.baseline.max_num_seqs,), "kv_slots": (slots,)})
    with TemporaryDirectory() as folder:
        result = search(narrowed, Path(folder) / "search")
        return result.candidate(result.ranked[0]).decode_buckets


def smallest_enough(steps: Sequence[Step], *, is_reuse_first: bool) -> Step | None:
    """The smallest step, by priority, that differs from the baseline and keeps most of the best saving."""
    order = ("slots", "buckets") if is_reuse_first else ("buckets", "slots")
    by_size = sorted(steps, key=lambda step: order.index(step.name) if step.name in order else len(order))
    good = [step for step in by_size if step.prediction.mean + step.prediction.error < 1]
    most = max((step.saving for step in good), default=0.0)
    return next((step for step in good if step.saving >= ENOUGH * most), None)


@dataclass(frozen=True)
class Validation:
    """The experiment that would validate a proposal, on new inputs. proposed: by the name of their condition."""

    measured: ExperimentSpec
    server: ServerSpec
    proposed: Mapping[str, ServerShape]
    seed: int

    @property
    def name(self) -> str:
        return f"{self.measured.name}-validation"[:64]

    def write(self, folder: Path) -> tuple[Path, Path]:
        """Write (experiment file, criteria file); raises RecordsError when the disk refuses."""
        experiment, criteria = folder / f"{self.name}.toml", folder / f"{self.name}-criteria.toml"
        if not str(folder).isprintable():
            raise RecordsError("has characters that no TOML file can hold", where=str(folder), hint="Choose another")
        with RecordsError.on_os_error("cannot be written", where=folder, hint="Choose another"):
            folder.mkdir(parents=True, exist_ok=True)
            criteria.write_text(self._criteria(), encoding="utf-8")
            experiment.write_text(self._experiment(criteria), encoding="utf-8")
        return experiment, criteria

    def _experiment(self, criteria: Path) -> str:
        measured, base = self.measured, self.server.shape
        parts = {
            "workload": measured.workload,
            "server": self.server,
            "client": measured.client,
            "limits": measured.limits,
        }
        written = {key: _set_keys(part) for key, part in parts.items()}
        table = {
            "name": self.name,
            "title": f"Validation of a change to {measured.name}",
            "question": "Does the proposed configuration save what the simulator promises?",
            "backend": measured.backend,
            "time_scale": measured.time_scale,
            "replicates": max(REPLICATES, measured.replicates),
            "base_seed": self.seed,
            "baseline": "baseline",
            "rules": [str(criteria)],
            **{key: keys for key, keys in written.items() if keys or key in ("workload", "server")},
            "condition": [
                {"name": "baseline"},
                *(
                    {"name": condition, **({"server": changes} if (changes := _changes(candidate, base)) else {})}
                    for condition, candidate in self.proposed.items()
                ),
            ],
        }
        proposed = "; ".join(candidate.label for candidate in self.proposed.values())
        return (
            f"# Written by `harness predict advise` from the sealed runs of {measured.name!r}: "
            "new inputs of the same workload.\n"
            f"# Baseline {base.label}; proposed: {proposed}.\n"
            f"{tomli_w.dumps(table)}"
        )

    def _criteria(self) -> str:
        table = {
            "name": f"{self.name}-criteria"[:64],
            "version": 1,
            "kind": "cost-validation",
            "source": "paper 4-3",
            "question": "Is the predicted cost ratio right, and on the right side of 1?",
            "conditions": list(self.proposed),
            "min_replicates": REPLICATES,
            "tolerance": "revised",
            "tau0": 0.02,
            "max_error": 0.03,
            "equivalence_band": [0.98, 1.02],
        }
        head = "# The paper's criteria of cost validation, for the proposed conditions; freeze before measuring.\n"
        return head + tomli_w.dumps(table)


def commands_of(experiment: Path, criteria: Path) -> Iterator[str]:
    """How to carry out a validation, as lines of text."""
    yield f"validate it on new inputs: harness prereg freeze {experiment}, commit, then harness run {experiment}"
    yield f"criteria: {criteria}"


def _changes(candidate: ServerShape, base: ServerShape) -> dict[str, Any]:
    """Keys of [server] in which a proposal differs from the baseline."""
    sides = [
        {
            "decode_buckets": one.decode_buckets,
            "max_num_seqs": one.max_num_seqs,
            "kv_slots": one.kv_slots,
            # TOML has no null: without a lowered admission limit, the limit itself is written where they differ.
            "max_active_seqs": one.max_active_seqs or one.max_num_seqs,
        }
        for one in (candidate, base)
    ]
    changes = {key: value for key, value in sides[0].items() if value != sides[1][key]}
    if candidate.max_active_seqs is None and base.max_active_seqs is None:
        changes.pop("max_active_seqs", None)
    return changes
