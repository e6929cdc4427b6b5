"""What an experiment answers: for each condition and its baseline the cost ratio, its interval, its basis and verdict.

Every form (terminal, report, CSV, ``harness compare``) takes these figures. A ratio is the condition over its
baseline: below 1 is cheaper. Interval, p and verdict are all of the same level, so that they cannot contradict: a
difference is shown where the interval of its family leaves 1 out.
Definitions: docs/reference/method-comparisons.md, "Answers".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import NamedTuple

import numpy as np

from harness.analysis.compare.channels import BASES, BASIS_NAMES, ChannelRatio, Comparison, block_of, compare, why_apart
from harness.analysis.compare.drawn import Prediction, Predictions
from harness.analysis.compare.pairs import common_replicates, num_plans, prices_by_condition
from harness.analysis.compare.rare import shape_in_words
from harness.analysis.compare.ratio import ALONE, Family, Ratio, Verdict
from harness.analysis.compare.stopping import ComparisonLooks, SequentialStatus, status_until_decided
from harness.analysis.cost.agreement import Agreement, RatioWithInterval
from harness.analysis.figures import RunFigures
from harness.analysis.stats import GIVEN_COSTS, NO_SCATTER, Interval, paired
from harness.kinds import kind_of_run
from harness.measure.records.run import SealedRun, by_condition, kind_of
from harness.model.spec.rules import Conditions
from harness.model.spec.sections import Basis
from harness.table import interval_ends


@dataclass(frozen=True, slots=True)
class Result:
    """One ratio. interval: of all comparisons of the family together. p: of this one alone; p_adjusted: min(1, size p).

    note: what a reader must know of the interval, or why there is none; empty for replicates of different plans.
    """

    ratio: float
    interval: Interval | None
    p: float | None
    p_adjusted: float | None
    verdict: Verdict
    family: int
    note: str = ""


def result_of(of: Ratio, num_plans: int, family: Family, looks: ComparisonLooks | None = None) -> Result:
    """What one ratio shows. num_plans: different inputs among the blocks. looks: of the stopping rule that decides."""
    if looks is not None and num_plans != 1:
        note = looks.why_no_interval if looks.interval is None else ""
        return Result(of.ratio, looks.interval, None, None, looks.verdict, looks.family, note)
    ratio, values, estimate = of.ratio, of.values, of.estimate
    is_varied = bool(len(values)) and float(np.ptp(values)) >= NO_SCATTER
    if num_plans == 1 and len(values) > 1:
        note = one_plan(len(values))
        interval = Family(family.size).interval(of) if is_varied else None
        what = "nothing varied between the runs" if interval is None else "the interval is over the machine's noise"
        what = "" if len(values) < 3 else f"; {what}"
        return Result(ratio, interval, None, None, Verdict.ONE_PLAN, family.size, note + what)
    if estimate is None:
        return Result(ratio, None, None, None, Verdict.TOO_FEW, family.size)
    if not is_varied:
        return Result(ratio, None, None, None, Verdict.NOTHING_VARIED, family.size, unvaried(len(values)))
    interval = family.interval(of)
    if interval is None:
        return Result(ratio, None, None, None, Verdict.TOO_FEW, family.size)
    p = None if family.is_checked else estimate.p
    return Result(ratio, interval, p, p and min(1.0, family.size * p), shown(interval), family.size)


def shown(interval: Interval) -> Verdict:
    """What an interval of a ratio shows."""
    if interval.contains(1):
        return Verdict.NO_DIFFERENCE
    return Verdict.LOWER if interval.high < 1 else Verdict.HIGHER


def why_no_interval(values: Sequence[float], num_plans: int) -> str:
    """Why blocks with these log ratios say nothing of other blocks; empty where they do."""
    if num_plans == 1 and len(values) > 1:
        return one_plan(len(values))
    return unvaried(len(values)) if len(values) > 1 and float(np.ptp(values)) < NO_SCATTER else ""


def one_plan(num_runs: int) -> str:
    """What must stand beside figures of one plan."""
    return f"one plan, repeated {num_runs} times: says nothing of other plans"


def unvaried(num_blocks: int) -> str:
    """Why there is no interval although there are blocks."""
    return f"the same ratio in each of {num_blocks} replicates: nothing varied, so there is no interval"


class Source(str, Enum):
    """Where a cost comes from. Two of them may differ: each figure carries its name."""

    NOMINAL = "nominal simulation"
    MEAN_OF_DRAWS = "mean of draws"
    SIMULATED = "simulated, one draw of each plan"
    EMULATED = "emulated, one draw of each plan"
    MEASURED = "measured"


def source_of(backend: str) -> Source:
    """The source of what runs of this backend cost."""
    kind = kind_of_run(backend)
    if kind.is_virtual:
        return Source.SIMULATED
    return Source.EMULATED if kind.has_device is False else Source.MEASURED


def source_of_prediction(predicted: Sequence[Prediction]) -> Source:
    """The source of predicted costs: the mean of draws, or one simulation where nothing was drawn."""
    return Source.MEAN_OF_DRAWS if all(run.draws is not None for run in predicted) else Source.NOMINAL


@dataclass(frozen=True, slots=True)
class Answer:
    """One condition against its baseline on one channel: below 1 it is cheaper.

    is_main: on the channel that answers: what the comparison rests on, or what the stopping rule names. without_a: why
    A is missing. prices: that the sides had different costs; empty where they had not.
    """

    condition: str
    comparison: Comparison
    channel: Basis
    source: Source
    result: Result
    is_main: bool = True
    without_a: str = ""
    prices: str = ""

    @property
    def baseline(self) -> str:
        return self.comparison.baseline

    @property
    def ratio(self) -> float:
        """Condition over baseline, of sums over the pairs of runs; per generated token where the work differs."""
        return self.result.ratio

    @property
    def interval(self) -> Interval | None:
        """With ``ratio`` inside; it holds together with those of the other comparisons."""
        return self.result.interval

    @property
    def verdict(self) -> Verdict:
        return self.result.verdict

    @property
    def label(self) -> str:
        """The verdict in a word: "cheaper"; "withheld" where the channels contradict each other, or lie apart."""
        return (Verdict.WITHHELD if self.comparison.agreement.is_missing else self.verdict).label()

    @property
    def note(self) -> str:
        """What a reader must know of its interval and its prices."""
        return "; ".join(filter(None, (self.result.note, self.prices)))

    @property
    def doubt(self) -> str:
        """What so few replicates and their shape leave open; empty where there is no interval."""
        comparison, figures = self.comparison, self.comparison.on(self.channel)
        if self.interval is None or figures is None:
            return ""
        return shape_in_words(figures.of_blocks, comparison.replicates, is_repeated=comparison.is_repeated)

    @property
    def basis(self) -> str:
        """The runs behind it and what is missing: "8 valid runs, measured, channel B alone (no step log)"."""
        basis = f"{2 * len(self.comparison.replicates)} valid runs, {self.source.value}"
        basis += f", {self.prices}" if self.prices else ""
        missing = f" ({self.without_a})" if self.without_a else ""
        if self.channel == "s":
            return f"{basis}, by the time in steps (S){missing}"
        if self.without_a:
            return f"{basis}, channel B alone{missing}"
        return f"{basis}, by the time in flight (B)" if self.channel == "b" else basis


class Compared(NamedTuple):
    """A comparison, and the number of different plans among its blocks; without_a, prices: see ``Answer``."""

    comparison: Comparison
    num_plans: int
    without_a: str = ""
    prices: str = ""


def answers(
    compared: Mapping[str, Compared], backend: str, family: Family, status: SequentialStatus | None = None
) -> tuple[Answer, ...]:
    """Every answer of an experiment; compared: by condition. status: under the stopping rule, where one was declared.

    Each pair has its main answer, then the other channels beside it. Simulated runs have the main one alone, as all
    channels are the same cost.
    """
    source, made = source_of(backend), list[Answer]()
    for name, pair in compared.items():
        comparison, looks = pair.comparison, None if status is None else status.of(name)
        main: Basis = comparison.rests_on if looks is None else looks.channel
        others = () if comparison.is_predicted else BASES
        for channel in dict.fromkeys((main, *others)):
            is_main, figures = channel == main, comparison.on(channel)
            if figures is not None:
                result = result_of(figures, pair.num_plans, family, looks if is_main else None)
                made.append(Answer(name, comparison, channel, source, result, is_main, pair.without_a, pair.prices))
    return tuple(made)


def main_answers(every: Sequence[Answer]) -> dict[str, Answer]:
    """The main answer of each condition."""
    return {answer.condition: answer for answer in every if answer.is_main}


def answer_on(every: Sequence[Answer], condition: str, channel: Basis) -> Answer | None:
    """The answer of a condition on a channel; None where there is none."""
    return next((one for one in every if (one.condition, one.channel) == (condition, channel)), None)


def cost_sentence(condition: str, baseline: str, interval: Interval) -> str:
    """A cost ratio in words: twelve-slots costs 4.0 % less than base (1.1 to 6.8 % less)."""
    return f"{condition} costs {change(interval.estimate)} {baseline} ({ends_in_words(interval)})"


def change(ratio: float) -> str:
    """A cost ratio in words: 2.5 % less than."""
    size = abs(100 * (ratio - 1))
    return "the same as" if size < 0.05 else f"{size:.1f} % {'more' if ratio > 1 else 'less'} than"


def interval_in_words(interval: Interval) -> str:
    """A ratio's interval as changes: 95 % interval: 3.8 to 4.5 % less."""
    return f"{level_in_words(interval)}: {ends_in_words(interval)}"


def level_in_words(interval: Interval) -> str:
    """What an interval is: 95 % interval; ", cost model assumed exact" where no errors of its costs are known."""
    level = f"{100 * interval.level:g} % interval"
    if interval.family > 1:
        level += f" over {interval.family} comparisons"
    return level + (GIVEN_COSTS if interval.is_given_costs else "")


def ends_in_words(interval: Interval) -> str:
    """The ends of a ratio's interval as changes, the smaller change first: 3.8 to 4.5 % less."""
    low, high = 100 * (interval.low - 1), 100 * (interval.high - 1)
    if low < 0 < high:
        less, more = (f"{end:.1f}" for end in (-low, high))
        if less == more == "0.0":
            less, more = (f"{end:.2g}" for end in (-low, high))
        return f"{less} % less to {more} % more"
    least, most = sorted((abs(low), abs(high)))
    near, far = interval_ends(least, most, 1)
    return f"{near} to {far} % {'less' if high <= 0 else 'more'}"


def change_alone(ratio: float) -> str:
    """A cost ratio in words, of nothing named: 2.5 % less."""
    return change(ratio).removesuffix(" than").removesuffix(" as")


def seen_in_words(seen: RatioWithInterval | ChannelRatio) -> str:
    """A channel's ratio in words: 3.3 % less (95 % interval: 3.1 to 3.6 % less)."""
    within = "" if seen.interval is None else f" ({interval_in_words(seen.interval)})"
    return f"{change_alone(seen.ratio)}{within}"


class ChannelWords(NamedTuple):
    """What the channels of a comparison say of each other, in words.

    apart: why they answer nothing; empty where they may. reason: what the channel that was asked says of the answer.
    """

    apart: str = ""
    reason: str = ""


def asked_in_words(comparison: Comparison) -> str:
    """What the channel that was asked says of the answer, and the least contradiction that it would have noticed."""
    agreement, asked = comparison.agreement, comparison.asked
    if agreement is Agreement.S_ALONE:
        return f"time in flight (B) holds the steps, so it cannot confirm them ({seen_in_words(comparison.b)})"
    if asked is None or comparison.is_predicted:
        return ""
    name, seen = BASIS_NAMES[asked.bases[1]], seen_in_words(asked.asked)
    if agreement is Agreement.AGREE:
        return "both channels agree" if asked.bases == ("a", "b") else f"{name} agrees ({seen})"
    if asked.least_noticed is None:
        return f"{name} cannot tell: too few replicates ({seen})"
    noticed = f"{100 * asked.least_noticed:.1f} %"
    if agreement is Agreement.SILENT:
        return f"{name} cannot tell: it would notice a contradiction of {noticed} or more ({seen})"
    return f"{name} does not contradict it, and would notice {noticed} or more ({seen})"


Pairs = Sequence[tuple[RunFigures, RunFigures]]


class ExperimentRuns:
    """The valid runs of one experiment, their figures computed once, and what was predicted for them."""

    def __init__(self, runs: Sequence[SealedRun], predictions: Predictions | None = None) -> None:
        self.all_runs = tuple(runs)
        self.runs = by_condition(runs)
        self.valid_runs = [run for group in self.runs.values() for run in group]
        self.predictions = predictions or {}
        self._figures: dict[str, list[RunFigures]] = {}
        self.baselines: dict[str, str] = {}
        self.treatments: dict[str, str] = {}
        self.factors: Conditions = runs[0].spec.factors if runs else {}
        self.prices = prices_by_condition(self.all_runs)
        self.family = ALONE
        if self.valid_runs:
            spec = self.valid_runs[0].spec
            self.baselines = {condition.name: spec.baseline_of(condition) for condition in spec.condition}
            self.treatments = {condition.name: condition.treatment for condition in spec.condition}
            self.family = Family.of(self.valid_runs)

    def figures(self, condition: str) -> list[RunFigures]:
        """Figures of a condition's valid runs, by replicate."""
        if condition not in self._figures:
            runs = self.runs.get(condition, ())
            self._figures[condition] = [self.prices[run.condition].figures(run) for run in runs]
        return self._figures[condition]

    def counted(self, condition: str) -> list[RunFigures]:
        """Its figures in the replicates that every condition has: only their sums stand side by side."""
        return [run for run in self.figures(condition) if run.replicate in self.common]

    @cached_property
    def status(self) -> SequentialStatus | None:
        """Under the stopping rule that was to end it; None where none was."""
        return status_until_decided(self.all_runs)

    @property
    def basis(self) -> Basis:
        """The channel that its tables rest on, where every run shows it."""
        return "a" if self.status is None else self.status.stop.channel

    @cached_property
    def common(self) -> tuple[int, ...]:
        """The replicates in which every condition has a valid run."""
        figures = [run for name in self.runs for run in self.figures(name)]
        return common_replicates(figures if self.status is None else self.status.seen_by_all(figures))

    def counted_pairs(self, condition: str, baseline: str) -> list[tuple[RunFigures, RunFigures]]:
        """``seen_pairs`` in the replicates that every condition has."""
        return [pair for pair in self.seen_pairs(condition, baseline) if pair[0].replicate in self.common]

    def compared(self) -> Iterator[tuple[str, str]]:
        """(condition, its baseline) of every condition that has another one as baseline."""
        return ((name, baseline) for name, baseline in self.baselines.items() if name != baseline)

    def pairs(self, condition: str, baseline: str) -> list[tuple[RunFigures, RunFigures]]:
        """Figures of both conditions in the replicates where both are valid, have a step log, and share a device."""
        pairs = paired(self.figures(condition), self.figures(baseline), block_of)
        return [(run, base) for run, base in pairs if run.a is not None and base.a is not None]

    def sealed_pairs(self, condition: str, baseline: str) -> list[tuple[SealedRun, SealedRun]]:
        """Sealed runs of both conditions in the replicates where both are valid."""
        return paired(self.runs.get(condition, ()), self.runs.get(baseline, ()), lambda run: run.replicate)

    def compare(self, condition: str, baseline: str, basis: Basis | None = None) -> Comparison | None:
        """The cost ratios of a condition to its baseline; None without a pair of valid runs.

        basis: what answers; default: what the tables rest on.
        """
        sides, status = [self.figures(condition), self.figures(baseline)], self.status
        if status is None or self.baselines.get(condition) != baseline:
            return compare(baseline, *sides, family=self.family, basis=basis or self.basis)
        sides = [status.seen(condition, side) for side in sides]
        compared = compare(baseline, *sides, family=self.family, basis=basis or status.basis_of(condition))
        return None if compared is None else status.applied_to(condition, compared)

    def asked(self, condition: str, baseline: str, basis: Basis | None = None) -> ChannelWords:
        """What the channels of a comparison say of each other.

        basis: what a rule rests on; what the tables rest on is asked in any case.
        """
        of_tables, of_rule = (self.compare(condition, baseline, each) for each in (None, basis))
        apart = (why_apart(compared) for compared in (of_tables, of_rule) if compared is not None)
        reason = "" if of_rule is None else asked_in_words(of_rule)
        if of_rule is not None and all(run.manifest.kind.is_virtual for run in self.valid_runs):
            reason = "simulated: both channels are one cost"
        return ChannelWords(next(filter(None, apart), ""), reason)

    def result(self, condition: str, baseline: str) -> Result | None:
        """What the runs show of a condition's cost, as every view has it; None without a pair of valid runs."""
        comparison = self.compare(condition, baseline)
        if comparison is None:
            return None
        plans = num_plans(run for run in self.figures(condition) if run.replicate in comparison.replicates)
        pair = {condition: Compared(comparison, plans)}
        return answers(pair, kind_of(self.valid_runs).name, self.family, self.status)[0].result

    def predicted(self, pairs: Pairs) -> tuple[list[Prediction], list[Prediction]] | None:
        """What was predicted for the runs of each side; None where something of it is missing."""
        sides = [
            [self.predictions.get(pair[at].condition, {}).get(pair[at].replicate) for pair in pairs] for at in (0, 1)
        ]
        known = [[prediction for prediction in side if prediction is not None] for side in sides]
        return (known[0], known[1]) if sides == known else None

    def seen_pairs(self, condition: str, baseline: str) -> list[tuple[RunFigures, RunFigures]]:
        """``pairs``; where no pair has a step log, those that channel B alone knows."""
        return self.pairs(condition, baseline) or paired(self.figures(condition), self.figures(baseline), block_of)
