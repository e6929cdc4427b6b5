"""Judgement of sealed runs: confirmatory runs by their frozen rules, exploratory runs by rules that decide nothing.

A rule that differs from its frozen version is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from harness.analysis.method.decide import Decision, Outcome
from harness.analysis.method.margins import decide_stopped
from harness.analysis.method.stopping import SequentialStatus, declared_status, sequential_status
from harness.analysis.method.verdicts import EXPLORATORY, ExperimentRuns, decide_experiment
from harness.errors import RecordsError, RuleFailedError, SpecError
from harness.prereg.frozen import Preregistration
from harness.prereg.predict import predictions_for
from harness.prereg.proof import Proof, aborts_of, doubts_of, find_proof
from harness.prereg.ticket import check_sealed_runs
from harness.records import SealedRun
from harness.spec.rules import DecisionRule, load_rule


@dataclass(frozen=True, slots=True)
class Judgement:
    """Every decision on the runs of one experiment. is_confirmatory: they were made under a preregistration.

    aborts: starts of frozen runs that sealed nothing, from the ledger.
    """

    experiment: str
    decisions: tuple[Decision, ...]
    is_confirmatory: bool
    aborts: tuple[str, ...] = ()

    @property
    def failed(self) -> tuple[Decision, ...]:
        return tuple(decision for decision in self.decisions if decision.outcome is Outcome.FAIL)

    def _repr_markdown_(self) -> str:
        """Each decision with its reason, for a notebook."""
        return "\n".join(f"- **{one.outcome.value}** {one.rule}: {one.subject}. {one.reason}" for one in self.decisions)

    def require_passed(self) -> Judgement:
        """This judgement; RuleFailedError when a rule is FAIL. WITHHELD and NOT SUBJECT are no failures."""
        if self.failed:
            first = self.failed[0]
            raise RuleFailedError(
                f"{len(self.failed)} of {len(self.decisions)} decisions are FAIL, first {first.rule} on "
                f"{first.subject}",
                where=self.experiment,
            )
        return self


def judge(
    runs: Sequence[SealedRun],
    rules: Sequence[str] = (),
    *,
    repository: Path | None = None,
    proof: Proof | None = None,
) -> Judgement:
    """Apply decision rules to the sealed valid runs of one experiment.

    rules: names or files. Default: the frozen rules, or those that an exploratory experiment names.
    repository: holds freeze and ledger; default: the repository around the runs. proof: both, from an archive.

    Every decision is WITHHELD until all frozen runs are sealed or the frozen stopping rule has decided, and where
    freeze and ledger do not prove what these runs are. Raises SpecError without runs or rules and for a rule that was
    not frozen; RecordsError for mixed, changed or damaged runs.
    """
    if not runs:
        raise SpecError("no sealed runs to judge", where="decide", hint="Run the experiment first")
    frozen = check_sealed_runs(runs)
    chosen = _chosen_rules(runs, frozen, rules)
    experiment = ExperimentRuns(runs, predictions_for(runs, frozen))
    decisions = decide_experiment(chosen, experiment, is_confirmatory=frozen is not None)
    found = _stopped(runs, frozen)
    if found is not None:
        stopped = decide_stopped(found)
        decisions += stopped if frozen is not None else [decision.not_subject(EXPLORATORY) for decision in stopped]
    aborts: list[str] = []
    if frozen is not None:
        is_decided = found is not None and found.is_decided
        doubts = [] if is_decided else _not_whole(len(runs), len(frozen.plans))
        try:
            record = runs[0].manifest.preregistration
            assert record is not None, "what was frozen is recorded"
            proof = proof or find_proof(runs, record, repository)
            doubts += doubts_of(proof, frozen, runs)
            aborts = aborts_of(proof)
        except (SpecError, RecordsError) as error:
            if str(error.where).startswith(str(runs[0].path.parents[1])):
                raise  # a damaged run, not a missing proof
            doubts.append(f"nothing shows when these runs were frozen: {error.where} {error.what}")
        decisions = _until_proven(decisions, doubts)
    return Judgement(runs[0].experiment, tuple(decisions), frozen is not None, tuple(aborts))


def _stopped(runs: Sequence[SealedRun], frozen: Preregistration | None) -> SequentialStatus | None:
    """Where the runs stand under the stopping rule that was frozen, or that an exploratory experiment declared."""
    if frozen is None:
        return declared_status(runs)
    spec = frozen.experiment
    return None if spec.stop is None else sequential_status(spec, runs, spec.stop)


def _not_whole(num_sealed: int, num_planned: int) -> list[str]:
    """The doubt that runs are missing: a free choice of when to stop would favour a good moment."""
    return [] if num_sealed >= num_planned else [f"{num_sealed} of {num_planned} frozen runs are sealed"]


def _until_proven(decisions: Sequence[Decision], doubts: Sequence[str]) -> list[Decision]:
    if not doubts:
        return list(decisions)
    reason = f"{doubts[0]} (and {len(doubts) - 1} more doubts: {doubts[1]})" if len(doubts) > 1 else doubts[0]
    return [
        replace(
            decision,
            outcome=Outcome.WITHHELD,
            reason=f"{reason}; so far {decision.outcome.value}: {decision.reason}",
        )
        if decision.outcome is not Outcome.NOT_SUBJECT
        else decision
        for decision in decisions
    ]


def _chosen_rules(
    runs: Sequence[SealedRun], frozen: Preregistration | None, names: Sequence[str]
) -> list[DecisionRule]:
    """The frozen rules of confirmatory runs, else the named rules; a changed frozen rule is refused."""
    if frozen is None:
        asked = names or runs[0].spec.rules
        if not asked and declared_status(runs) is None:
            raise SpecError("the experiment names no rules", where=runs[0].experiment, hint="Name one with --rule")
        return [load_rule(name) for name in asked]
    return [_frozen_rule(frozen, name) for name in names] if names else [entry.rule for entry in frozen.rules]


def _frozen_rule(frozen: Preregistration, name: str) -> DecisionRule:
    rule = load_rule(name)
    entry = frozen.rule_named(rule.name)
    if entry is None or entry.rule != rule:
        what = "was not frozen" if entry is None else "was changed after the freeze"
        raise SpecError(
            f"criterion {rule.name!r} {what}, so it cannot judge confirmatory runs",
            where=name,
            hint="Leave --rule out: the frozen criteria apply",
        )
    return entry.rule
