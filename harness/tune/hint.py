"""What sealed runs suggest, for the last line of ``run`` and for the report: by a quick search, on new plans.

Nothing is run here.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from harness.analysis.logs.engine_steps import step_log_of
from harness.clock import NS_PER_S
from harness.errors import HarnessError
from harness.measure.records.run import SealedRun
from harness.model.experiment import PlannedRun
from harness.model.plan.build import derive_seed
from harness.model.sim.draws import perturbation_of
from harness.model.spec import ExperimentSpec, ServerSpec, Treatment, WorkloadSpec
from harness.tune.diagnose import Diagnosis, diagnose
from harness.tune.explore import QUICK, Effort, Explored, explore
from harness.tune.plans import MARGIN, SEED_RANGE, Question
from harness.tune.predict import Option
from harness.tune.setups import Setup, checked_levers


@dataclass(frozen=True)
class Hint:
    """What sealed runs suggest.

    baseline: the condition it is about. explored: None where nothing can be predicted for its server; diagnosis says
    why. tested: what the other conditions of the experiment are predicted to save, at most. command: goes on from here.
    """

    baseline: str
    diagnosis: Diagnosis
    explored: Explored | None
    tested: Option | None
    command: str

    @property
    def proposal(self) -> Option | None:
        """The change that is suggested; None where none pays, or none pays more than what was tested."""
        if self.explored is None or (proposal := self.explored.smallest) is None:
            return None
        if self.tested is not None and proposal.saving < self.tested.saving + MARGIN:
            return None
        return proposal

    @property
    def suggestion(self) -> str:
        """What to try, before the command; "" where nothing can be said."""
        if (eager := self.diagnosis.eager) is not None and eager.sizes:
            return (
                f"{eager.count:,} of {eager.num_steps:,} decode steps ran without a graph; "
                f"server.decode_buckets = {list(eager.sizes)} captures them. Confirm it by measuring"
            )
        over = "" if self.diagnosis.overload is None else f"overloaded by a factor of {self.diagnosis.overload:.1f}; "
        if self.explored is None:
            return ""
        if (proposal := self.proposal) is not None:
            best = self.explored.best
            beside = ""
            if best is not None and best.setup != proposal.setup:
                beside = f"; {best.words} saves {best.percent}"
            return f"{over}on new plans, {proposal.sentence}{beside}. Confirm it by measuring"
        if self.tested is not None and self.tested.saving >= MARGIN:
            return (
                f"{over}no change of {self._levers} is predicted to save {100 * MARGIN:g} % more than "
                f"{self.tested.words}. How sure that is"
            )
        most = 100 * self.explored.most_saved
        return f"{over}keep it: the best change is predicted to save {most:.1f} %. What was searched"

    @property
    def _levers(self) -> str:
        return "slots or sizes" if self.explored is not None and self.explored.baseline.kv_slots else "its settings"

    @property
    def line(self) -> str:
        """One line with one command; "" where there is nothing to suggest."""
        if not self.suggestion:
            return f"no advice: {self.diagnosis.unknown}"
        return f"next: {self.suggestion}: {self.command}"

    @property
    def losses(self) -> list[tuple[str, str]]:
        """(kind, words) of what the baseline lost, as far as its records show it."""
        found = self.diagnosis
        if (eager := found.eager) is not None:
            share = f"{eager.count:,}, {100 * eager.count / eager.num_steps:.1f} % of the decode steps"
            return [("Steps without a graph", share)]
        rows = [(loss.kind.capitalize(), f"{loss.percent} of device time; {loss.words}") for loss in found.losses]
        if found.waiting_session_ns is not None:
            waited = found.waiting_session_ns / NS_PER_S
            rows.append(("Prefill blocking", f"{waited:.2f} session seconds behind the prompts of other sessions"))
        return rows


def hint(sealed: Sequence[SealedRun], source: str | Path = "", effort: Effort = QUICK) -> Hint | None:
    """What the sealed runs of an experiment suggest; None where their baseline has no valid run, or cannot be searched.

    source: the file of the experiment; default: its name.
    """
    try:
        first = sealed[0].spec
        diagnosis, source = diagnose(sealed), source or first.name
        if str(source).endswith(".json"):
            # A freeze is no file of an experiment; the folder of its runs is read as one.
            source = sealed[0].path.parents[1]
        valid = [run for run in sealed if run.condition == first.baseline_name and run.is_valid]
        if any(log.num_drafts for run in valid if (log := step_log_of(run)) is not None):
            # Under speculative decoding a captured size counts tokens: requests at once say nothing of sizes.
            return None
        nothing = Hint(first.baseline_name, diagnosis, None, None, shlex.join(["harness", "tune", str(source)]))
        if diagnosis.unknown or (diagnosis.eager is not None and diagnosis.eager.sizes):
            return nothing
        others, question = _tested(sealed, first), question_of(valid)
        found = None if question.server.is_routed else explore(question, effort, also=others)
    except HarnessError:
        # Sealed by another version, no valid run, or more sessions than a quick search takes.
        return None
    if found is None:
        return None
    tested = [option for option in found.options if option.setup in others]
    return replace(nothing, explored=found, tested=max(tested, key=lambda each: each.saving, default=None))


def _tested(sealed: Sequence[SealedRun], spec: ExperimentSpec) -> list[Setup]:
    """The configurations of the other conditions with the baseline's sessions."""
    own = next(one for one in spec.condition if one.name == spec.baseline_name)
    alike = {
        one.name
        for one in spec.condition
        if one.treatment == own.treatment and spec.workload_of(one) == spec.workload_of(own) and one != own
    }
    return list(dict.fromkeys(Setup.of(run.simulated_server) for run in sealed if run.condition in alike))


def question_of(valid: Sequence[SealedRun]) -> Question:
    """The question of sealed runs of one condition: new plans of their workload, at their costs."""
    first = valid[0]
    return _question(first, first.simulated_server, first.workload, first.condition_spec.treatment, ())


def question_of_run(run: PlannedRun, levers: Sequence[str]) -> Question:
    """The question of a run that is planned, on new plans of its workload."""
    return _question(run, run.server, run.spec.workload_of(run.condition), run.condition.treatment, levers)


def _question(
    run: SealedRun | PlannedRun,
    server: ServerSpec,
    workload: WorkloadSpec,
    treatment: Treatment,
    levers: Sequence[str],
) -> Question:
    perturbation = perturbation_of(run.spec.prediction, run.cost_file)
    seed, levers = derive_seed(run.spec.base_seed, "tune") % SEED_RANGE, checked_levers(levers, server)
    return Question(server, run.cost_model, workload, treatment, perturbation, levers, seed=seed)
