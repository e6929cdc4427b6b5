"""What an experiment answers: for each condition and its baseline the cost ratio, its interval, its basis and verdict.

Every form (terminal, report, CSV, ``harness compare``) takes these figures. A ratio is the condition over its
baseline: below 1 is cheaper. Definitions: docs/reference/method.md, "Answers".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from harness.analysis.compare.channels import BASES, BASIS_NAMES, ChannelRatio, Comparison
from harness.analysis.compare.family import Family
from harness.analysis.compare.predictions import Prediction
from harness.analysis.compare.result import Result, result_of
from harness.analysis.compare.stopping import SequentialStatus
from harness.analysis.compare.verdict import Verdict
from harness.analysis.cost.agreement import Agreement, Seen
from harness.analysis.stats import GIVEN_COSTS, Interval
from harness.kinds import kind_of_run
from harness.model.spec.sections import Basis
from harness.table import interval_ends

# Fewer have an interval, which may hold less often than it says (docs/evidence/error-rates.md).
ENOUGH_REPLICATES = 6


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
    def said(self) -> str:
        """The verdict in a word: "cheaper"; "withheld" where the channels contradict each other, or lie apart."""
        return (Verdict.WITHHELD if self.comparison.agreement.is_missing else self.verdict).said()

    @property
    def note(self) -> str:
        """What a reader must know of its interval and its prices."""
        return "; ".join(filter(None, (self.result.note, self.prices)))

    @property
    def doubt(self) -> str:
        """What so few replicates leave open of the interval; empty where there are enough, or there is none."""
        few = len(self.comparison.replicates)
        if self.interval is None or few >= ENOUGH_REPLICATES:
            return ""
        return f"an interval of {few} replicates may hold too seldom"

    @property
    def basis(self) -> str:
        """The runs behind it and what is missing: "8 valid runs, measured, channel B alone (no step log)"."""
        basis = f"{2 * len(self.comparison.replicates)} valid runs, {self.source.value}"
        basis += f", {self.prices}" if self.prices else ""
        missing = f" ({self.without_a})" if self.without_a else ""
        if self.channel == "s":
            return f"{basis}, by the time in steps (S){missing}"
        return f"{basis}, channel B alone{missing}" if self.without_a else basis


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
    return tuple(
        answer for name, pair in compared.items() for answer in _of_pair(name, pair, source_of(backend), family, status)
    )


def _of_pair(
    name: str, pair: Compared, source: Source, family: Family, status: SequentialStatus | None
) -> Iterator[Answer]:
    comparison = pair.comparison
    looks = None if status is None else status.of(name)
    main: Basis = comparison.rests_on if looks is None else looks.channel
    others = () if comparison.is_predicted else BASES
    for channel in dict.fromkeys((main, *others)):
        is_main, figures = channel == main, comparison.on(channel)
        if figures is None:
            continue
        result = result_of(figures, pair.num_plans, family, looks if is_main else None)
        yield Answer(name, comparison, channel, source, result, is_main, pair.without_a, pair.prices)


def main_answers(every: Sequence[Answer]) -> dict[str, Answer]:
    """The main answer of each condition."""
    return {answer.condition: answer for answer in every if answer.is_main}


def answer_on(every: Sequence[Answer], condition: str, channel: Basis) -> Answer | None:
    """The answer of a condition on a channel; None where there is none."""
    return next((one for one in every if (one.condition, one.channel) == (condition, channel)), None)


def cost_sentence(condition: str, baseline: str, interval: Interval) -> str:
    """A cost ratio in words: twelve-slots costs 4.0 % less than base (95 % interval: 1.1 to 6.8 % less)."""
    return f"{condition} costs {change(interval.estimate)} {baseline} ({interval_in_words(interval)})"


def change(ratio: float) -> str:
    """A cost ratio in words: 2.5 % less than."""
    size = abs(100 * (ratio - 1))
    return "the same as" if size < 0.05 else f"{size:.1f} % {'more' if ratio > 1 else 'less'} than"


def interval_in_words(interval: Interval) -> str:
    """A ratio's interval as changes, the smaller change first: 95 % interval: 3.8 to 4.5 % less.

    Where nothing is known of the errors of the costs behind it: "95 % interval, given these costs: ...".
    """
    low, high = 100 * (interval.low - 1), 100 * (interval.high - 1)
    level = f"{100 * interval.level:g} % interval"
    if interval.family > 1:
        level += f" over {interval.family} comparisons"
    level += GIVEN_COSTS if interval.is_given_costs else ""
    if low < 0 < high:
        less, more = (f"{end:.1f}" for end in (-low, high))
        if less == more == "0.0":
            less, more = (f"{end:.2g}" for end in (-low, high))
        return f"{level}: {less} % less to {more} % more"
    least, most = sorted((abs(low), abs(high)))
    near, far = interval_ends(least, most, 1)
    return f"{level}: {near} to {far} % {'less' if high <= 0 else 'more'}"


def seen_in_words(seen: Seen | ChannelRatio) -> str:
    """A channel's ratio in words: 3.3 % less (95 % interval: 3.1 to 3.6 % less)."""
    within = "" if seen.interval is None else f" ({interval_in_words(seen.interval)})"
    return f"{change(seen.ratio).removesuffix(' than').replace('the same as', 'the same')}{within}"


class ChannelWords(NamedTuple):
    """What the channels of a comparison say of each other, in words.

    apart: why they answer nothing; empty where they may. said: what the channel that was asked says of the answer.
    """

    apart: str = ""
    said: str = ""


def asked_in_words(comparison: Comparison) -> str:
    """What the channel that was asked says of the answer, and the least contradiction that it would have noticed."""
    agreement, asked = comparison.agreement, comparison.asked
    if agreement is Agreement.S_ALONE:
        return f"time in flight (B) holds the steps, so it cannot confirm them ({seen_in_words(comparison.b)})"
    if asked is None or comparison.is_predicted:
        return ""
    name, seen = BASIS_NAMES[asked.bases[1]], seen_in_words(asked.b)
    if agreement is Agreement.AGREE:
        return "both channels agree" if asked.bases == ("a", "b") else f"{name} agrees ({seen})"
    if asked.least_noticed is None:
        return f"{name} cannot tell: too few replicates ({seen})"
    noticed = f"{100 * asked.least_noticed:.1f} %"
    if agreement is Agreement.SILENT:
        return f"{name} cannot tell: it would notice a contradiction of {noticed} or more ({seen})"
    return f"{name} does not contradict it, and would notice {noticed} or more ({seen})"
