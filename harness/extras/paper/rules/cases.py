"""What the paper's rules are applied to: cases from the sealed valid runs of one experiment."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from functools import partial
from itertools import pairwise
from typing import Literal, NamedTuple

from harness.analysis.compare.answer import ChannelWords, ExperimentRuns
from harness.analysis.figures import RunFigures
from harness.clock import NS_PER_S
from harness.errors import SpecError
from harness.extras.paper.rules import (
    DirectionRule,
    InterferenceRule,
    NoTreatmentRule,
    OccupancyPredictionRule,
    RecompilationRule,
    SaturationRule,
    TimesSource,
    decide,
)
from harness.extras.paper.rules.decide import PaddingPair
from harness.extras.paper.rules.interference import decide_interference, injections
from harness.extras.paper.statistics import full_bucket_ms, pooled_pair_differences, reported_model_ms
from harness.judge.decisions.decide import Decision, as_asked, withheld
from harness.judge.decisions.verdicts import NO_PREDICTION, Case
from harness.measure.records.run import SealedRun
from harness.model.spec import Factor, level_text


def channels_s(runs: Sequence[RunFigures]) -> tuple[list[float], list[float]]:
    """Channels A and B of every run with a step log, seconds."""
    sums = [(run.a_ns / NS_PER_S, run.b_ns / NS_PER_S) for run in runs if run.a_ns is not None]
    return [a_s for a_s, _ in sums], [b_s for _, b_s in sums]


def waits_pairs(experiment: ExperimentRuns) -> Iterator[tuple[str, str]]:
    """(condition with waits, condition without) wherever one is the other's baseline."""
    for condition, baseline in experiment.compared():
        treatments = (experiment.treatments[condition], experiment.treatments.get(baseline))
        if treatments == ("as-drawn", "no-waits"):
            yield condition, baseline
        elif treatments == ("no-waits", "as-drawn"):
            yield baseline, condition


def blocks_of(experiment: ExperimentRuns, with_waits: str, without: str) -> list[PaddingPair]:
    """Padding of both conditions, block by block."""
    return [PaddingPair(own.padding, base.padding) for own, base in experiment.pairs(with_waits, without)]


def direction_cases(rule: DirectionRule, experiment: ExperimentRuns) -> Iterator[Case]:
    for with_waits, without in waits_pairs(experiment):
        blocks = blocks_of(experiment, with_waits, without)
        occupancies = [block.occupancy for block in blocks], decide.pooled(blocks).occupancy
        decision = partial(decide.decide_occupancies, rule, with_waits, *occupancies)
        yield Case(with_waits, len(blocks), decision, with_waits)


def occupancy_cases(rule: OccupancyPredictionRule, experiment: ExperimentRuns) -> Iterator[Case]:
    for with_waits, without in waits_pairs(experiment):
        blocks = blocks_of(experiment, with_waits, without)
        predicted = experiment.predicted(experiment.pairs(with_waits, without))
        promised = [PaddingPair(own.padding, base.padding) for own, base in zip(*(predicted or ([], [])), strict=True)]
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


def saturation_cases(rule: SaturationRule, experiment: ExperimentRuns) -> Iterator[Case]:
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


def artifact_times_ms(
    experiment: ExperimentRuns, times: Literal[TimesSource, "any"] = "any"
) -> tuple[dict[int, dict[str, list[float]]], TimesSource]:
    """(bucket -> artifact -> time of a step with its bucket exactly full, one per session, ms; whose time that is).

    times: "reported", the model p50 of the server's own report; "steps", the median of whole step periods; "any":
    reported where every session reported it, else steps, because the two differ by more than sessions do.
    """
    reported = _times_by_bucket(experiment, reported_model_ms)
    if times == "reported":
        return reported, "reported"
    steps = _times_by_bucket(experiment, full_bucket_ms)
    is_reported = times == "any" and bool(steps) and _num_sessions(reported) == _num_sessions(steps)
    return (reported, "reported") if is_reported else (steps, "steps")


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


def recompilation_cases(rule: RecompilationRule, experiment: ExperimentRuns) -> Iterator[Case]:
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


def no_treatment_cases(rule: NoTreatmentRule, experiment: ExperimentRuns) -> Iterator[Case]:
    for condition in experiment.factors:
        a_s, b_s = channels_s(experiment.figures(condition))
        yield Case(condition, len(a_s), partial(decide.decide_no_treatment, rule, condition, a_s, b_s), condition)


def interference_cases(rule: InterferenceRule, experiment: ExperimentRuns) -> Iterator[Case]:
    smallest = min((len(experiment.runs.get(condition, ())) for condition in experiment.factors), default=0)
    if smallest < rule.min_replicates:
        yield Case("injections", smallest, lambda: withheld(rule.name, "injections", ""))
        return
    for decision in decide_interference(rule, injections(experiment.valid_runs, rule)):
        yield Case(decision.subject, smallest, partial(copy, decision))
