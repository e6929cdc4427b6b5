"""Verdicts on an experiment: its rules applied to the numbers of its sealed valid runs.

Runs that are exploratory, and conditions that a rule calls so, are computed and NOT SUBJECT. Nothing is read but
records, rules and predictions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

from harness.analysis.method import decide, stats
from harness.analysis.method.compare import Verdict, compare
from harness.analysis.method.decide import Block, Costs, Decision, Outcome, withheld
from harness.analysis.method.figures import RunFigures, run_figures
from harness.analysis.method.interference import decide_interference, injections
from harness.analysis.method.margins import decide_equivalence, decide_superiority
from harness.analysis.method.predictions import Predictions, drawn_ratio
from harness.analysis.method.scatter import full_bucket_ms, reported_model_ms
from harness.analysis.method.stopping import LogRatios, SequentialStatus, log_ratios, sequential_status
from harness.clock import NS_PER_S
from harness.errors import SpecError
from harness.records import SealedRun, by_condition
from harness.spec import Factor, level_text
from harness.spec.rules import (
    Conditions,
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


class ExperimentRuns:
    """The valid runs of one experiment, their figures computed once, and what was predicted for them."""

    def __init__(self, runs: Sequence[SealedRun], predictions: Predictions | None = None) -> None:
        self.all_runs = tuple(runs)
        self.runs = by_condition(runs)
        self.predictions = predictions or {}
        self._figures: dict[str, list[RunFigures]] = {}
        first = next(iter(self.runs.values()), None)
        spec = None if first is None else first[0].spec
        conditions = () if spec is None else spec.condition
        self.baselines = (
            {condition.name: spec.baseline_of(condition) for condition in conditions} if spec is not None else {}
        )
        self.treatments = {condition.name: condition.treatment for condition in conditions}
        self.factors: Conditions = {} if spec is None else spec.factors

    def figures(self, condition: str) -> list[RunFigures]:
        """Figures of a condition's valid runs, by replicate."""
        if condition not in self._figures:
            self._figures[condition] = [run_figures(run) for run in self.runs.get(condition, ())]
        return self._figures[condition]

    def compared(self) -> Iterator[tuple[str, str]]:
        """(condition, its baseline) of every condition that has another one as baseline."""
        return ((name, baseline) for name, baseline in self.baselines.items() if name != baseline)

    def pairs(self, condition: str, baseline: str) -> list[tuple[RunFigures, RunFigures]]:
        """Figures of both conditions in the replicates where both are valid, have a step log, and share a device."""
        others = {(run.replicate, run.device): run for run in self.figures(baseline) if run.a is not None}
        own = (run for run in self.figures(condition) if run.a is not None and (run.replicate, run.device) in others)
        return [(run, others[run.replicate, run.device]) for run in own]

    def looked(self) -> SequentialStatus | None:
        """Where the experiment stands under its stopping rule; None when it declares none."""
        spec = self.all_runs[0].spec
        return None if spec.stop is None else sequential_status(spec, self.all_runs, spec.stop)

    def seen_pairs(self, condition: str, baseline: str) -> list[tuple[RunFigures, RunFigures]]:
        """``pairs``; where no pair has a step log, those that channel B alone knows."""
        others = {(run.replicate, run.device): run for run in self.figures(baseline)}
        return self.pairs(condition, baseline) or [
            (run, others[run.replicate, run.device])
            for run in self.figures(condition)
            if (run.replicate, run.device) in others
        ]


def decide_experiment(
    rules: Sequence[DecisionRule], experiment: ExperimentRuns, *, is_confirmatory: bool
) -> list[Decision]:
    """Every rule on everything it applies to, in the order of the rules and the conditions."""
    decisions: list[Decision] = []
    for rule in rules:
        nothing = withheld(rule.name, "-", "no condition of this experiment is subject to it")
        judged = list(_apply(rule, experiment)) or [nothing]
        missing = rule.missing_from(experiment.factors) if judged != [nothing] else []
        decisions += judged
        decisions += [withheld(rule.name, what, "no condition of this experiment is that") for what in missing]
    return decisions if is_confirmatory else [_without_standing(decision) for decision in decisions]


def _without_standing(decision: Decision) -> Decision:
    is_subject = decision.outcome in (Outcome.PASS, Outcome.FAIL)
    return decision.not_subject(EXPLORATORY) if is_subject else decision


def _apply(rule: DecisionRule, experiment: ExperimentRuns) -> Iterator[Decision]:
    match rule:
        case CostRule():
            yield from _costs(rule, experiment)
        case DirectionRule():
            yield from _directions(rule, experiment)
        case OccupancyPredictionRule():
            yield from _occupancy_predictions(rule, experiment)
        case SaturationRule():
            yield from _saturations(rule, experiment)
        case RecompilationRule():
            yield from _recompilations(rule, experiment)
        case NoTreatmentRule():
            yield from _no_treatments(rule, experiment)
        case InterferenceRule():
            yield from _interference(rule, experiment)
        case EquivalenceRule():
            yield from _equivalences(rule, experiment)
        case SuperiorityRule():
            yield from _superiorities(rule, experiment)


def _applies(rule: DecisionRule, experiment: ExperimentRuns, condition: str) -> bool:
    return rule.applies_to(condition, experiment.factors[condition])


def _standing(rule: DecisionRule, experiment: ExperimentRuns, condition: str, decision: Decision) -> Decision:
    is_exploratory = rule.is_exploratory(condition, experiment.factors[condition])
    return decision.not_subject("exploratory condition") if is_exploratory else decision


def costs_of(experiment: ExperimentRuns, condition: str, baseline: str) -> Costs | str:
    """Sums over the replicates that both conditions have; or, in words, what is missing."""
    pairs = experiment.pairs(condition, baseline)
    predicted = [experiment.predictions.get(name, {}) for name in (condition, baseline)]
    replicates = [own.replicate for own, _base in pairs]
    if not pairs:
        return "no replicate is valid, and has channel A, in both conditions"
    if any(replicate not in table for table in predicted for replicate in replicates):
        return "nothing was predicted for these runs"
    own_s, base_s = (sum(table[k].device_ns for k in replicates) / NS_PER_S for table in predicted)
    return Costs(
        a_s=sum(own.a.total_ns for own, _ in pairs if own.a is not None) / NS_PER_S,
        b_s=sum(own.b_ns for own, _ in pairs) / NS_PER_S,
        baseline_a_s=sum(base.a.total_ns for _, base in pairs if base.a is not None) / NS_PER_S,
        baseline_b_s=sum(base.b_ns for _, base in pairs) / NS_PER_S,
        predicted_s=own_s,
        baseline_predicted_s=base_s,
        predicted_interval=drawn_ratio(*([table[k] for k in replicates] for table in predicted)),
    )


def _costs(rule: CostRule, experiment: ExperimentRuns) -> Iterator[Decision]:
    for condition, baseline in experiment.compared():
        if not _applies(rule, experiment, condition):
            continue
        costs = costs_of(experiment, condition, baseline)
        if (few := _too_few(rule, condition, len(experiment.pairs(condition, baseline)))) is not None:
            yield few
        elif isinstance(costs, str):
            yield withheld(rule.name, condition, costs)
        else:
            yield _standing(rule, experiment, condition, decide.decide_cost(rule, condition, costs))


def _too_few(rule: DecisionRule, subject: str, num_replicates: int) -> Decision | None:
    if num_replicates >= rule.min_replicates:
        return None
    reason = f"{num_replicates} valid replicates, the rule needs {rule.min_replicates}"
    return withheld(rule.name, subject, reason, num_replicates=num_replicates)


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


def _directions(rule: DirectionRule, experiment: ExperimentRuns) -> Iterator[Decision]:
    for with_waits, without in waits_pairs(experiment):
        if not _applies(rule, experiment, with_waits):
            continue
        blocks = blocks_of(experiment, with_waits, without)
        few = _too_few(rule, with_waits, len(blocks))
        yield few or _standing(rule, experiment, with_waits, decide.decide_direction(rule, with_waits, blocks))


def _occupancy_predictions(rule: OccupancyPredictionRule, experiment: ExperimentRuns) -> Iterator[Decision]:
    for with_waits, without in waits_pairs(experiment):
        if not _applies(rule, experiment, with_waits):
            continue
        blocks = blocks_of(experiment, with_waits, without)
        few = _too_few(rule, with_waits, len(blocks))
        predicted = [experiment.predictions.get(name, {}) for name in (with_waits, without)]
        replicates = [own.replicate for own, _ in experiment.pairs(with_waits, without)]
        if few is not None:
            yield few
        elif any(k not in table for table in predicted for k in replicates):
            yield withheld(rule.name, with_waits, "nothing was predicted for these runs")
        else:
            promised = decide.pooled([Block(predicted[0][k].padding, predicted[1][k].padding) for k in replicates])
            measured = decide.pooled(blocks)
            decision = decide.decide_occupancy_prediction(rule, with_waits, promised.occupancy, measured.occupancy)
            yield _standing(rule, experiment, with_waits, decision)


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
            own.a.total_ns / base.a.total_ns
            for own, base in experiment.pairs(condition, below[stratum])
            if own.a is not None and base.a is not None
        ]
        for stratum, condition in above.items()
        if stratum in below
    }


def _saturations(rule: SaturationRule, experiment: ExperimentRuns) -> Iterator[Decision]:
    contrast = Contrast(rule.factor, rule.strata)
    for smaller, larger in pairwise(rule.levels):
        subject = f"{level_text(rule.factor, smaller)} -> {level_text(rule.factor, larger)}"
        ratios = adjacent_ratios(experiment, contrast, smaller, larger)
        fewest = min((len(values) for values in ratios.values()), default=0)
        yield _too_few(rule, subject, fewest) or decide.decide_saturation(rule, subject, ratios)


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


def _recompilations(rule: RecompilationRule, experiment: ExperimentRuns) -> Iterator[Decision]:
    found = artifact_times_ms(experiment, rule.times)
    for bucket, artifacts in found.by_bucket.items():
        rounded = {
            name: [_to_resolution(value, rule.resolution_ms) for value in values] for name, values in artifacts.items()
        }
        null_ms = stats.pooled_pair_differences(rounded.values())
        for x, y in rule.comparisons:
            subject = f"{x} vs {y}, bucket {bucket}"
            few = _too_few(rule, subject, min(len(rounded.get(x, ())), len(rounded.get(y, ()))))
            yield few or decide.decide_recompilation(rule, subject, (rounded[x], rounded[y]), null_ms, found.source)


def _to_resolution(value: float, step: float) -> float:
    return round(round(value / step) * step, 9) if step else value


def _no_treatments(rule: NoTreatmentRule, experiment: ExperimentRuns) -> Iterator[Decision]:
    for condition in experiment.factors:
        if not _applies(rule, experiment, condition):
            continue
        runs = [run for run in experiment.figures(condition) if run.a is not None]
        few = _too_few(rule, condition, len(runs))
        a_s = [run.a.total_ns / NS_PER_S for run in runs if run.a is not None]
        b_s = [run.b_ns / NS_PER_S for run in runs]
        yield few or _standing(rule, experiment, condition, decide.decide_no_treatment(rule, condition, a_s, b_s))


def _interference(rule: InterferenceRule, experiment: ExperimentRuns) -> Iterator[Decision]:
    smallest = min((len(experiment.runs.get(condition, ())) for condition in experiment.factors), default=0)
    few = _too_few(rule, "injections", smallest)
    if few is not None:
        yield few
        return
    runs = [run for group in experiment.runs.values() for run in group]
    yield from decide_interference(rule, injections(runs, rule))


def _equivalences(rule: EquivalenceRule, experiment: ExperimentRuns) -> Iterator[Decision]:
    looked = experiment.looked()
    for ratios in log_ratios(experiment.all_runs[0].spec, experiment.all_runs, rule.channel):
        if not _applies(rule, experiment, ratios.condition):
            continue
        few = _too_few(rule, f"{ratios.condition} vs {ratios.baseline}", len(ratios.values))
        yield few or _standing(rule, experiment, ratios.condition, decide_equivalence(rule, ratios, looked))


def _superiorities(rule: SuperiorityRule, experiment: ExperimentRuns) -> Iterator[Decision]:
    looked = experiment.looked()
    for ratios in log_ratios(experiment.all_runs[0].spec, experiment.all_runs, rule.channel):
        if not _applies(rule, experiment, ratios.condition):
            continue
        few = _too_few(rule, f"{ratios.condition} vs {ratios.baseline}", len(ratios.values))
        decision = _channels_apart(rule, experiment, ratios) or decide_superiority(rule, ratios, looked)
        yield few or _standing(rule, experiment, ratios.condition, decision)


def _channels_apart(rule: SuperiorityRule, experiment: ExperimentRuns, ratios: LogRatios) -> Decision | None:
    """WITHHELD where both channels are there and do not say the same, as in the report; None otherwise."""
    found = compare(ratios.baseline, experiment.figures(ratios.condition), experiment.figures(ratios.baseline))
    if ratios.channel == "b" or found is None or found.verdict not in (Verdict.DIFFER, Verdict.CANNOT_TELL):
        return None
    reason = (
        f"modelled device time (A) gives a cost ratio of {found.ratio_a:.4f} and time in flight (B) "
        f"{found.ratio_b:.4f}; the baseline's own channels lie {found.residual_share:.4f} of B apart"
    )
    return withheld(rule.name, f"{ratios.condition} vs {ratios.baseline}", reason)
