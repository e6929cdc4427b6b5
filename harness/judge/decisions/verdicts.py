"""Verdicts on an experiment: its rules applied to the numbers of its sealed valid runs.

Runs that are exploratory, and conditions that a rule calls so, are computed and NOT SUBJECT. Nothing is read but
records, rules and predictions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, Literal, NamedTuple, cast

from harness.analysis.calibration.scatter import full_bucket_ms, reported_model_ms
from harness.analysis.compare.answer import ChannelWords
from harness.analysis.compare.channels import BASIS_NAMES
from harness.analysis.compare.experiment_runs import ExperimentRuns
from harness.analysis.compare.predictions import drawn_ratio
from harness.analysis.compare.stopping import (
    LogRatios,
    SequentialStatus,
    declared_status,
    log_ratios,
)
from harness.analysis.figures import RunFigures, totals
from harness.analysis.stats import pooled_pair_differences
from harness.clock import NS_PER_S
from harness.errors import SpecError
from harness.judge.decisions import decide
from harness.judge.decisions.decide import Block, Costs, Decision, Outcome, as_asked, withheld
from harness.judge.decisions.interference import decide_interference, injections
from harness.measure.records.run import SealedRun
from harness.model.spec import Factor, level_text
from harness.model.spec.rules import (
    CostRule,
    DecisionRule,
    DirectionRule,
    EquivalenceRule,
    InterferenceRule,
    NoTreatmentRule,
    OccupancyPredictionRule,
    RecompilationRule,
    SaturationRule,
    SuperiorityRule,
    TimesSource,
)

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
        judged = list(_apply(rule, experiment))
        absent = dict.fromkeys(rule.missing_from(experiment.factors), "no condition of this experiment is that")
        if not judged:
            absent = {"-": "no condition of this experiment is subject to it"}
        decisions += [*judged, *(withheld(rule.name, subject, reason) for subject, reason in absent.items())]
    if is_confirmatory:
        return decisions
    return [
        decision.not_subject(EXPLORATORY) if decision.outcome in (Outcome.PASS, Outcome.FAIL) else decision
        for decision in decisions
    ]


def _apply(rule: DecisionRule, experiment: ExperimentRuns) -> Iterator[Decision]:
    for case in CASES[type(rule)](rule, experiment):
        factors = experiment.factors.get(case.condition, {})
        if case.condition and not rule.applies_to(case.condition, factors):
            continue
        yield replace(_decided(rule, case, factors), num_blocks=case.num_replicates)


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
    return Costs(*((ns or 0) / NS_PER_S for ns in sums_ns), predicted_interval=drawn_ratio(*predicted))


def channels_s(runs: Sequence[RunFigures]) -> tuple[list[float], list[float]]:
    """Channels A and B of every run with a step log, seconds."""
    sums = [(run.a_ns / NS_PER_S, run.b_ns / NS_PER_S) for run in runs if run.a_ns is not None]
    return [a_s for a_s, _ in sums], [b_s for _, b_s in sums]


def _costs(rule: CostRule, experiment: ExperimentRuns) -> Iterator[Case]:
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


def waits_pairs(experiment: ExperimentRuns) -> Iterator[tuple[str, str]]:
    """(condition with waits, condition without) wherever one is the other's baseline."""
    for condition, baseline in experiment.compared():
        treatments = (experiment.treatments[condition], experiment.treatments.get(baseline))
        if treatments == ("as-drawn", "no-waits"):
            yield condition, baseline
        elif treatments == ("no-waits", "as-drawn"):
            yield baseline, condition


def blocks_of(experiment: ExperimentRuns, with_waits: str, without: str) -> list[Block]:
    """Padding of both conditions, block by block."""
    return [Block(own.padding, base.padding) for own, base in experiment.pairs(with_waits, without)]


def _directions(rule: DirectionRule, experiment: ExperimentRuns) -> Iterator[Case]:
    for with_waits, without in waits_pairs(experiment):
        blocks = blocks_of(experiment, with_waits, without)
        yield Case(with_waits, len(blocks), partial(decide.decide_direction, rule, with_waits, blocks), with_waits)


def _occupancy_predictions(rule: OccupancyPredictionRule, experiment: ExperimentRuns) -> Iterator[Case]:
    for with_waits, without in waits_pairs(experiment):
        blocks = blocks_of(experiment, with_waits, without)
        predicted = experiment.predicted(experiment.pairs(with_waits, without))
        promised = [Block(own.padding, base.padding) for own, base in zip(*(predicted or ([], [])), strict=True)]
        occupancies = (decide.pooled(promised).occupancy, decide.pooled(blocks).occupancy)
        decision = partial(decide.decide_occupancy_prediction, rule, with_waits, *occupancies)
        yield Case(with_waits, len(blocks), decision, with_waits, NO_PREDICTION if predicted is None else "")


class Contrast(NamedTuple):
    """One factor that varies while the factors of ``strata`` stay equal."""

    factor: str
    strata: tuple[str, ...]

    def conditions_at(self, experiment: ExperimentRuns, level: Factor) -> dict[str, str]:
        """The condition of every stratum at a value; SpecError where two conditions have the same value and stratum."""
        conditions: dict[str, str] = {}
        for condition, factors in experiment.factors.items():
            if self.factor not in factors or factors[self.factor] != level:
                continue
            stratum = " ".join(level_text(name, factors[name]) for name in self.strata if name in factors)
            if stratum in conditions:
                raise SpecError(
                    f"conditions {conditions[stratum]!r} and {condition!r} have the same {self.factor} and "
                    f"{self.strata}",
                    where="factors",
                    hint="Give them a factor in which they differ, and name it in the rule's strata",
                )
            conditions[stratum] = condition
        return conditions


def adjacent_ratios(
    experiment: ExperimentRuns, contrast: Contrast, smaller: Factor, larger: Factor
) -> dict[str, list[float]]:
    """A(larger) / A(smaller) per replicate, by stratum; none where no replicate is valid in both."""
    below, above = (contrast.conditions_at(experiment, level) for level in (smaller, larger))
    return {
        stratum: [
            own.a_ns / base.a_ns
            for own, base in experiment.pairs(condition, below[stratum])
            if own.a_ns is not None and base.a_ns is not None
        ]
        for stratum, condition in above.items()
        if stratum in below
    }


def _saturations(rule: SaturationRule, experiment: ExperimentRuns) -> Iterator[Case]:
    contrast = Contrast(rule.factor, rule.strata)
    for smaller, larger in pairwise(rule.levels):
        subject = f"{level_text(rule.factor, smaller)} -> {level_text(rule.factor, larger)}"
        ratios = adjacent_ratios(experiment, contrast, smaller, larger)
        fewest = min((len(values) for values in ratios.values()), default=0)
        asked = _adjacent_asked(experiment, contrast, smaller, larger)
        yield Case(subject, fewest, partial(_on_levels, rule, subject, ratios, asked))


def _on_levels(
    rule: SaturationRule, subject: str, ratios: Mapping[str, Sequence[float]], asked: ChannelWords
) -> Decision:
    return as_asked(decide.decide_saturation(rule, subject, ratios), asked)


def _adjacent_asked(experiment: ExperimentRuns, contrast: Contrast, smaller: Factor, larger: Factor) -> ChannelWords:
    """Why the channels of two levels, in any stratum, answer nothing of each other or of their baselines."""
    below, above = (contrast.conditions_at(experiment, level) for level in (smaller, larger))
    adjacent = [(condition, below[stratum]) for stratum, condition in above.items() if stratum in below]
    of_baselines = [
        (name, baseline) for name, baseline in experiment.compared() if any(name in pair for pair in adjacent)
    ]
    asked = (experiment.asked(*pair) for pair in (*adjacent, *of_baselines))
    return next((each for each in asked if each.apart), ChannelWords())


class ArtifactTimes(NamedTuple):
    """bucket -> artifact -> one time per session, ms, and whose time that is."""

    by_bucket: dict[int, dict[str, list[float]]]
    source: TimesSource


def artifact_times_ms(experiment: ExperimentRuns, times: Literal[TimesSource, "any"] = "any") -> ArtifactTimes:
    """Time of a step with its bucket exactly full, of every session, by the factors bucket and artifact.

    times: "reported", the model p50 of the server's own report; "steps", the median of whole step periods; "any":
    reported where every session reported it, else steps, because the two differ by more than sessions do.
    """
    reported = _times_by_bucket(experiment, reported_model_ms)
    if times == "reported":
        return ArtifactTimes(reported, "reported")
    steps = _times_by_bucket(experiment, full_bucket_ms)
    is_reported = times == "any" and bool(steps) and _num_sessions(reported) == _num_sessions(steps)
    return ArtifactTimes(reported, "reported") if is_reported else ArtifactTimes(steps, "steps")


def _times_by_bucket(
    experiment: ExperimentRuns, time_of: Callable[[SealedRun, int], float | None]
) -> dict[int, dict[str, list[float]]]:
    times: dict[int, dict[str, list[float]]] = {}
    for condition, factors in experiment.factors.items():
        artifact, bucket = factors.get("artifact"), factors.get("bucket")
        if artifact is None or not isinstance(bucket, int):
            continue
        sessions = [time_of(run, bucket) for run in experiment.runs.get(condition, ())]
        times.setdefault(bucket, {})[str(artifact)] = [value for value in sessions if value is not None]
    return dict(sorted(times.items()))


def _num_sessions(times: Mapping[int, Mapping[str, Sequence[float]]]) -> dict[tuple[int, str], int]:
    return {(bucket, name): len(values) for bucket, artifacts in times.items() for name, values in artifacts.items()}


def _recompilations(rule: RecompilationRule, experiment: ExperimentRuns) -> Iterator[Case]:
    by_bucket, source = artifact_times_ms(experiment, rule.times)
    for bucket, artifacts in by_bucket.items():
        rounded = {
            name: [_rounded(value, rule.resolution_ms) for value in values] for name, values in artifacts.items()
        }
        null_ms = pooled_pair_differences(rounded.values())
        for x, y in rule.comparisons:
            subject, sessions = f"{x} vs {y}, bucket {bucket}", (rounded.get(x, []), rounded.get(y, []))
            decision = partial(decide.decide_recompilation, rule, subject, sessions, null_ms, source)
            yield Case(subject, min(map(len, sessions)), decision)


def _rounded(value: float, step: float) -> float:
    return round(round(value / step) * step, 9) if step else value


def _no_treatments(rule: NoTreatmentRule, experiment: ExperimentRuns) -> Iterator[Case]:
    for condition in experiment.factors:
        a_s, b_s = channels_s(experiment.figures(condition))
        yield Case(condition, len(a_s), partial(decide.decide_no_treatment, rule, condition, a_s, b_s), condition)


def _interference(rule: InterferenceRule, experiment: ExperimentRuns) -> Iterator[Case]:
    smallest = min((len(experiment.runs.get(condition, ())) for condition in experiment.factors), default=0)
    if smallest < rule.min_replicates:
        yield Case("injections", smallest, lambda: withheld(rule.name, "injections", ""))
        return
    for decision in decide_interference(rule, injections(experiment.valid_runs, rule)):
        yield Case(decision.subject, smallest, partial(copy, decision))


def _margins(rule: EquivalenceRule | SuperiorityRule, experiment: ExperimentRuns) -> Iterator[Case]:
    status = declared_status(experiment.all_runs)
    every = log_ratios(experiment.all_runs[0].spec, experiment.all_runs, rule.channel)
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
    ratios: LogRatios,
    status: SequentialStatus | None,
) -> Decision:
    """The decision on device time, unless B contradicts it, or what the decision says of the margin."""
    if isinstance(rule, EquivalenceRule):
        claim, decision = (1 / (1 + rule.margin), 1 + rule.margin), decide.decide_equivalence(rule, ratios, status)
    else:
        claim, decision = (0.0, rule.limit), decide.decide_superiority(rule, ratios, status)
    # What the model cannot know, as neighbours, is asked of B alone: A, which is blind to it, may only deny a claim.
    is_claim = decision.outcome is Outcome.PASS or decision.label in ("CHEAPER", "DEARER")
    if is_claim or rule.channel != "b":
        decision = as_asked(decision, experiment.asked(ratios.condition, ratios.baseline, ratios.channel))
    compared = experiment.compare(ratios.condition, ratios.baseline, ratios.channel)
    if decision.outcome is not Outcome.PASS or compared is None or not compared.is_denied(*claim):
        return decision
    denied = (
        f"{BASIS_NAMES[compared.rests_on]} gives a cost ratio of {compared.main.ratio:.4f} and {BASIS_NAMES['b']} "
        f"{compared.ratio_b:.4f}, wholly beyond the margin"
    )
    return as_asked(decision, ChannelWords(denied))


CASES: Mapping[type, Callable[[Any, ExperimentRuns], Iterator[Case]]] = {
    CostRule: _costs,
    DirectionRule: _directions,
    OccupancyPredictionRule: _occupancy_predictions,
    SaturationRule: _saturations,
    RecompilationRule: _recompilations,
    NoTreatmentRule: _no_treatments,
    InterferenceRule: _interference,
    EquivalenceRule: _margins,
    SuperiorityRule: _margins,
}
