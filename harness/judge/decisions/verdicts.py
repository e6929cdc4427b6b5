"""Verdicts on an experiment: its rules applied to the numbers of its sealed valid runs.

Runs that are exploratory, and conditions that a rule calls so, are computed and NOT SUBJECT. Nothing is read but
records, rules and predictions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, cast

from harness.analysis.compare.answer import ChannelWords, ExperimentRuns
from harness.analysis.compare.channels import BASIS_NAMES
from harness.analysis.compare.drawn import DrawnCosts
from harness.analysis.compare.stopping import ComparedBlocks, SequentialStatus, compared_blocks, status_until_decided
from harness.analysis.figures import totals
from harness.clock import NS_PER_S
from harness.judge.decisions import decide
from harness.judge.decisions.decide import Costs, Decision, Outcome, as_asked, withheld
from harness.judge.planning.rare_plans import few_plans_in_words, plans_asked
from harness.model.spec import Factor
from harness.model.spec.rules import CostRule, DecisionRule, EquivalenceRule, SuperiorityRule
from harness.plugins import part_at

EXPLORATORY = "the runs are exploratory"


class Case(NamedTuple):
    """What a rule is applied to. condition: that it may leave out or call exploratory; missing: what is, in words."""

    subject: str
    num_replicates: int
    decide: Callable[[], Decision]
    condition: str = ""
    missing: str = ""


def decide_experiment(
    rules: Sequence[DecisionRule], experiment: ExperimentRuns, *, is_confirmatory: bool
) -> list[Decision]:
    """Every rule on everything it applies to, in the order of the rules and the conditions."""
    decisions: list[Decision] = []
    for rule in rules:
        of_cases = [(case, experiment.factors.get(case.condition, {})) for case in cases_of(rule, experiment)]
        judged = [
            replace(_decided(rule, case, factors), num_blocks=case.num_replicates)
            for case, factors in of_cases
            if not case.condition or rule.applies_to(case.condition, factors)
        ]
        absent = dict.fromkeys(rule.missing_from(experiment.factors), "no condition of this experiment is that")
        if not judged:
            is_any = bool(experiment.valid_runs)
            absent = {
                "-": "no condition of this experiment is subject to it" if is_any else "none of its runs is valid"
            }
        decisions += [*judged, *(withheld(rule.name, subject, reason) for subject, reason in absent.items())]
    if is_confirmatory:
        return decisions
    return [
        decision.not_subject(EXPLORATORY) if decision.outcome in (Outcome.PASS, Outcome.FAIL) else decision
        for decision in decisions
    ]


def cases_of(rule: DecisionRule, experiment: ExperimentRuns) -> Iterator[Case]:
    """What a rule of any kind is applied to."""
    yield from part_at(rule.cases_at)(rule, experiment)


def _decided(rule: DecisionRule, case: Case, factors: Mapping[str, Factor]) -> Decision:
    if case.num_replicates < rule.min_replicates:
        reason = f"{case.num_replicates} valid replicates, the rule needs {rule.min_replicates}"
        return withheld(rule.name, case.subject, reason, num_replicates=case.num_replicates)
    if case.missing:
        return withheld(rule.name, case.subject, case.missing)
    if case.condition and rule.is_exploratory(case.condition, factors):
        return case.decide().not_subject("exploratory condition")
    return case.decide()


NO_PREDICTION = "nothing was predicted for these runs"


def costs_of(experiment: ExperimentRuns, condition: str, baseline: str) -> Costs | str:
    """Sums over the replicates that both conditions have; or, in words, what is missing."""
    pairs = experiment.pairs(condition, baseline)
    if not pairs:
        return "no replicate is valid, and has channel A, in both conditions"
    predicted = experiment.predicted(pairs)
    if predicted is None:
        return NO_PREDICTION
    if experiment.prices[condition].model is not None:
        return "its sides were priced by different cost models: what was predicted is not of the costs of A"
    own, base = totals(pairs)
    predicted_ns = (sum(run.device_ns for run in side) for side in predicted)
    sums_ns = (own.a_ns, own.b_ns, base.a_ns, base.b_ns, *predicted_ns)
    changed, unchanged = map(DrawnCosts.of, predicted)
    return Costs(*((ns or 0) / NS_PER_S for ns in sums_ns), predicted_interval=changed.interval_to(unchanged))


def cost_cases(rule: CostRule, experiment: ExperimentRuns) -> Iterator[Case]:
    for condition, baseline in experiment.compared():
        costs = costs_of(experiment, condition, baseline)
        missing = costs if isinstance(costs, str) else ""
        yield Case(
            condition,
            len(experiment.pairs(condition, baseline)),
            partial(_on_cost, rule, experiment, condition, baseline, cast("Costs", costs)),
            condition,
            missing,
        )


def _on_cost(rule: CostRule, experiment: ExperimentRuns, condition: str, baseline: str, costs: Costs) -> Decision:
    """The decision by the published tolerance, unless the answer of the same runs is withheld."""
    return as_asked(decide.decide_cost(rule, condition, costs), experiment.asked(condition, baseline))


def margin_cases(rule: EquivalenceRule | SuperiorityRule, experiment: ExperimentRuns) -> Iterator[Case]:
    status = status_until_decided(experiment.all_runs)
    every = compared_blocks(experiment.all_runs[0].spec, experiment.all_runs, rule.channel)
    decided = [one for one in every if _is_decided(rule, experiment, one.condition)]
    for ratios in (replace(one, family=max(1, len(decided))) for one in every):
        subject = f"{ratios.condition} vs {ratios.baseline}"
        decision = partial(_on_margin, rule, experiment, ratios, status)
        yield Case(subject, len(ratios.values), decision, ratios.condition)


def _is_decided(rule: DecisionRule, experiment: ExperimentRuns, condition: str) -> bool:
    """Whether the rule decides a condition, so that it shares the rule's alpha."""
    factors = experiment.factors.get(condition, {})
    return rule.applies_to(condition, factors) and not rule.is_exploratory(condition, factors)


def _on_margin(
    rule: EquivalenceRule | SuperiorityRule,
    experiment: ExperimentRuns,
    ratios: ComparedBlocks,
    status: SequentialStatus | None,
) -> Decision:
    """The decision on device time, unless B contradicts it, or what the decision says of the margin.

    Of a PASS it says whether so few plans pass too often, as far as a simulation tells.
    """
    decision, most = decide.decide_margin(rule, ratios, status), 1 + rule.margin
    claim = (1 / most, most) if isinstance(rule, EquivalenceRule) else (0.0, rule.limit)
    # What the model cannot know, as neighbours, is asked of B alone: A, which is blind to it, may only deny a claim.
    is_claim = decision.outcome is Outcome.PASS or decision.label in ("CHEAPER", "MORE EXPENSIVE")
    if is_claim or rule.channel != "b":
        decision = as_asked(decision, experiment.asked(ratios.condition, ratios.baseline, ratios.channel))
    compared = experiment.compare(ratios.condition, ratios.baseline, ratios.channel)
    if decision.outcome is Outcome.PASS and compared is not None and compared.is_denied(*claim):
        denied = (
            f"{BASIS_NAMES[compared.rests_on]} gives a cost ratio of {compared.main.ratio:.4f} and {BASIS_NAMES['b']} "
            f"{compared.ratio_b:.4f}, wholly beyond the margin"
        )
        return as_asked(decision, ChannelWords(denied))
    if decision.outcome is not Outcome.PASS or rule.channel == "b":
        return decision
    asked = plans_asked(experiment.all_runs[0].spec, ratios.condition).get(ratios.condition, 0)
    words = few_plans_in_words(asked, len(ratios.values))
    return replace(decision, reason="; ".join(filter(None, (decision.reason, words))))
