"""Judgement of sealed runs: confirmatory runs by their frozen rules; exploratory runs are computed and decide nothing.

Any doubt about freeze or ledger withholds every decision, and so does a run that may still be made or repeated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from harness.analysis.compare.answer import ExperimentRuns
from harness.analysis.compare.stopping import status_until_decided
from harness.errors import HarnessError, RecordsError, RuleFailedError, SpecError, UndecidedError
from harness.judge.decisions.decide import Decision, Outcome, decide_stopped
from harness.judge.decisions.verdicts import EXPLORATORY, cases_of, decide_experiment
from harness.judge.prereg.account import Account, account_of
from harness.judge.prereg.authorize import EDITED, check_sealed_runs, differs_from_commit, frozen_record
from harness.judge.prereg.frozen import Preregistration, changed_rule_code
from harness.judge.prereg.ledger import Entry
from harness.judge.prereg.predict import predictions_for
from harness.judge.prereg.proof import Proof, aborts_of, doubts_of, find_proof
from harness.judge.prereg.repository import Repository
from harness.measure.records.run import SealedRun, origin_of
from harness.model.spec.rules import DecisionRule, load_rule
from harness.shipped import shipped_names


@dataclass(frozen=True, slots=True)
class Judgement:
    """Every decision on the runs of one experiment. is_confirmatory: they were made under a preregistration.

    aborts: starts of frozen runs that sealed nothing, from the ledger. num_planned_blocks: of the experiment; each
    decision says how many it was applied to. account: of the frozen runs; None for exploratory ones. origin: of the
    figures. freeze: how exploratory runs get a decision that counts.
    """

    experiment: str
    decisions: tuple[Decision, ...]
    is_confirmatory: bool
    aborts: tuple[str, ...] = ()
    num_planned_blocks: int = 0
    num_invalid: int = 0
    account: Account | None = None
    origin: str = ""
    notes: tuple[str, ...] = ()
    freeze: str = ""

    @property
    def failed(self) -> tuple[Decision, ...]:
        return tuple(decision for decision in self.decisions if decision.outcome is Outcome.FAIL)

    def _repr_markdown_(self) -> str:
        """Each decision with its reason, for a notebook."""
        lines = [
            f"- **{decision.outcome.value}** {decision.rule}: {decision.subject}"
            f"{self.blocks_of(decision)}. {decision.reason}"
            for decision in self.decisions
        ]
        return "\n".join([*filter(None, [self.origin]), *lines])

    def blocks_of(self, decision: Decision) -> str:
        """ " (5 of 6 blocks)", to follow the subject of a decision; empty where its blocks were not counted."""
        if decision.num_blocks is None:
            return ""
        return f" ({decision.num_blocks} of {self.num_planned_blocks} blocks)"

    @property
    def account_lines(self) -> list[str]:
        """What became of the frozen runs: counts, each that is not valid with its reasons, aborted starts."""
        lines = [] if self.account is None else list(self.account.lines())
        return [*lines, *(f"started and not sealed: {abort}" for abort in self.aborts), *self.notes]

    def require_passed(self) -> Judgement:
        """This judgement.

        RuleFailedError when a rule is FAIL; UndecidedError when one is WITHHELD, or none is PASS: such runs decide
        nothing, as those that are NOT SUBJECT.
        """
        if self.failed:
            first = self.failed[0]
            raise RuleFailedError(
                f"{len(self.failed)} of {len(self.decisions)} decisions are FAIL, first {first.rule} on "
                f"{first.subject}",
                where=self.experiment,
            )
        outcomes = [decision.outcome for decision in self.decisions]
        if Outcome.WITHHELD in outcomes or Outcome.PASS not in outcomes:
            counts = ", ".join(f"{outcomes.count(one)} {one.value}" for one in dict.fromkeys(outcomes))
            raise UndecidedError(
                f"these runs do not decide everything that was asked ({counts or 'no decision'})",
                where=self.experiment,
                hint=self.freeze or "The reasons stand with the decisions",
            )
        return self


def decide(
    runs: Sequence[SealedRun], rules: Sequence[str] = (), *, repository: Path | None = None, proof: Proof | None = None
) -> Judgement:
    """Apply decision rules to the sealed valid runs of one experiment.

    rules: names or files. Default: the frozen rules, or those that an exploratory experiment names.
    repository: holds freeze and ledger; default: the repository around the runs. proof: both, from an archive.

    Every decision is WITHHELD until all frozen runs are sealed or the frozen stopping rule has decided, while an
    INVALID run may still be repeated, and where freeze and ledger do not prove what these runs are. Raises SpecError
    without runs or rules and for a rule that was not frozen; RecordsError for mixed, changed or damaged runs.
    """
    if not runs:
        raise SpecError("no sealed runs to judge", where="decide", hint="Run the experiment first")
    frozen = check_sealed_runs(runs)
    chosen = _chosen_rules(runs, frozen, rules)
    experiment = ExperimentRuns(runs, predictions_for(runs, frozen))
    decisions = decide_experiment(chosen, experiment, is_confirmatory=frozen is not None)
    status = status_until_decided(runs)
    if status is not None:
        looked = status.comparisons
        asked = {each.condition: experiment.asked(each.condition, each.baseline, each.channel) for each in looked}
        stopped = decide_stopped(status, asked)
        decisions += stopped if frozen is not None else [decision.not_subject(EXPLORATORY) for decision in stopped]
    made = Judgement(
        runs[0].experiment,
        tuple(decisions),
        frozen is not None,
        num_planned_blocks=runs[0].spec.replicates,
        num_invalid=sum(not run.is_valid for run in runs),
        origin=origin_of(runs),
    )
    if frozen is None:
        return replace(made, freeze=_freeze_first(runs[0]))
    record = frozen_record(runs[0])
    doubts: list[str] = []
    # What is published holds for ever.
    runs_root = runs[0].path.parents[2] if proof is None else None
    chain: Mapping[str, Entry] = {}
    try:
        proof = proof or find_proof(runs, repository)
        doubts.extend(doubts_of(proof, frozen, runs))
        with suppress(RecordsError):  # a chain that is broken is among the doubts
            chain = proof.entries
    except (SpecError, RecordsError) as error:
        if str(error.where).startswith(str(runs[0].path.parents[1])):
            raise  # a damaged run, not a missing proof
        doubts.append(f"nothing shows when these runs were frozen: {error.where} {error.what}")
    is_decided = status is not None and status.is_decided
    account = account_of(runs, frozen, chain.values(), is_decided=is_decided)
    changed = changed_rule_code(frozen)
    doubts = [*account.open_ends(), *([changed] if changed else []), *doubts]
    tree = None if proof is None else proof.repository
    return replace(
        made,
        decisions=tuple(_until_proven(decisions, doubts)),
        aborts=tuple(aborts_of(chain, runs_root)),
        notes=() if tree is None else tuple(_edited(tree, record.path)),
        num_planned_blocks=account.num_blocks,
        account=account,
    )


def _freeze_first(run: SealedRun) -> str:
    """The command that freezes the experiment of an exploratory run, with a seed that this run did not use."""
    source = str(run.manifest.requested.get("spec_source", ""))
    file = source if source.endswith(".toml") else f"{run.experiment}.toml"
    seed = run.spec.base_seed + 1
    return f"Freeze it with an unused seed, then run it: harness prereg freeze {file} --commit --seed {seed}"


def _edited(repository: Repository, name: str) -> Iterator[str]:
    """That the frozen file of the work tree is no longer the committed one, by which the runs are judged."""
    if differs_from_commit(repository.root / name):
        yield f"note: {name} {EDITED}. The committed file decides (git checkout HEAD -- {name})"


def _until_proven(decisions: Sequence[Decision], doubts: Sequence[str]) -> list[Decision]:
    if not doubts:
        return list(decisions)
    more = "" if len(doubts) < 2 else f" (and {len(doubts) - 1} more: {doubts[1]})"
    reason = f"{doubts[0]}{more}"
    return [
        replace(
            decision, outcome=Outcome.WITHHELD, reason=f"{reason}; so far {decision.outcome.value}: {decision.reason}"
        )
        if decision.outcome is not Outcome.NOT_SUBJECT
        else decision
        for decision in decisions
    ]


def _applicable(runs: Sequence[SealedRun]) -> Iterator[str]:
    """The shipped rules that have something to judge in these runs."""
    experiment = ExperimentRuns(runs, predictions_for(runs, None))
    for name in shipped_names("rules"):
        rule = load_rule(name)
        # A rule over factors that are ambiguous here does not apply.
        with suppress(HarnessError):
            if any(not case.missing for case in cases_of(rule, experiment)):
                yield name


def _chosen_rules(
    runs: Sequence[SealedRun], frozen: Preregistration | None, names: Sequence[str]
) -> list[DecisionRule]:
    """The frozen rules of confirmatory runs, else the named rules; a changed frozen rule is refused."""
    if frozen is None:
        chosen = names or runs[0].spec.rules
        if not chosen and status_until_decided(runs) is None:
            names = ", ".join(_applicable(runs)) or "none of those that ship applies, so write a file"
            hint = f"Name one with --rule: {names}"
            raise SpecError("the experiment names no rules", where=runs[0].experiment, hint=hint)
        return [load_rule(name) for name in chosen]
    frozen_rules = {entry.rule.name: entry.rule for entry in frozen.rules}
    named = {name: load_rule(name) for name in names}
    for name, rule in named.items():
        if frozen_rules.get(rule.name) != rule:
            what = "was changed after the freeze" if rule.name in frozen_rules else "was not frozen"
            raise SpecError(
                f"criterion {rule.name!r} {what}, so it cannot judge confirmatory runs",
                where=name,
                hint="Leave --rule out: the frozen criteria apply",
            )
    return list((named or frozen_rules).values())
