"""What an experiment answers: for each condition and its baseline the cost ratio, its interval, its basis and verdict.

Every form (terminal, report, CSV, ``harness compare``) takes these figures. A ratio is the condition over its
baseline: below 1 is cheaper. Definitions: docs/method.md, "Answers".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from harness.analysis.cost.compare import ChannelRatio, Comparison
from harness.analysis.stats import DEFAULT_LEVEL, GIVEN_COSTS, Interval, holm
from harness.judge.decisions.predictions import Prediction
from harness.kinds import kind_of_run
from harness.spec.sections import Channel

ALPHA = 1 - DEFAULT_LEVEL


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


class AnswerVerdict(str, Enum):
    """What the runs show; TOO_FEW where they have no interval."""

    CHEAPER = "cheaper"
    DEARER = "dearer"
    NO_DIFFERENCE = "no difference shown"
    TOO_FEW = "too few runs for an interval"


@dataclass(frozen=True, slots=True)
class Answer:
    """One condition against its baseline on one channel: below 1 it is cheaper.

    is_main: on A, or on B where A is missing. p_adjusted: Holm's, over the ``family_size`` comparisons of the
    experiment; the verdict is by it; None below three blocks.
    """

    condition: str
    comparison: Comparison
    channel: Channel
    source: Source
    p_adjusted: float | None
    family_size: int
    is_main: bool = True

    @property
    def baseline(self) -> str:
        return self.comparison.baseline

    @property
    def figures(self) -> ChannelRatio:
        return self.comparison.main if self.is_main else self.comparison.b

    @property
    def ratio(self) -> float:
        """Condition over baseline, of sums over the pairs of runs; per generated token where the work differs."""
        return self.figures.ratio

    @property
    def interval(self) -> Interval | None:
        """95 %, with ``ratio`` inside; None below three blocks."""
        return self.figures.interval

    @property
    def verdict(self) -> AnswerVerdict:
        if self.p_adjusted is None:
            return AnswerVerdict.TOO_FEW
        return verdict_of(self.ratio, self.p_adjusted)

    @property
    def basis(self) -> str:
        """The runs behind it and what is missing: "8 valid runs, measured, channel B alone (...)"."""
        basis = f"{2 * len(self.comparison.replicates)} valid runs, {self.source.value}"
        if self.comparison.a is not None:
            return basis
        return f"{basis}, channel B alone (no step log, unknown reuse, or no costs of this server)"

    @property
    def family(self) -> str:
        """What Holm's adjustment counts; empty for a single comparison."""
        return "" if self.family_size < 2 else f"adjusted over {self.family_size} comparisons (Holm)"


def verdict_of(ratio: float, p_adjusted: float) -> AnswerVerdict:
    """What an adjusted p-value shows of a cost ratio."""
    if p_adjusted >= ALPHA:
        return AnswerVerdict.NO_DIFFERENCE
    return AnswerVerdict.CHEAPER if ratio < 1 else AnswerVerdict.DEARER


def answers(compared: Mapping[str, Comparison | None], backend: str) -> tuple[Answer, ...]:
    """Every answer of an experiment; compared: by condition.

    Each pair has its main answer, then B beside A. Simulated runs have the main one alone, as both channels are the
    same cost.
    """
    known = {name: comparison for name, comparison in compared.items() if comparison is not None}
    main = _adjusted({name: comparison.main for name, comparison in known.items()})
    has_both = {name: pair for name, pair in known.items() if pair.a is not None and not pair.is_predicted}
    beside = _adjusted({name: comparison.b for name, comparison in has_both.items()})
    source, made = source_of(backend), list[Answer]()
    for name, comparison in known.items():
        made.append(Answer(name, comparison, "b" if comparison.a is None else "a", source, *main[name]))
        if name in beside:
            made.append(Answer(name, comparison, "b", source, *beside[name], is_main=False))
    return tuple(made)


def _adjusted(ratios: Mapping[str, ChannelRatio]) -> dict[str, tuple[float | None, int]]:
    """The adjusted p of each ratio, and the number of hypotheses that were adjusted together."""
    adjusted = holm([ratio.p for ratio in ratios.values()])
    num_tested = sum(p is not None for p in adjusted)
    return {name: (p, num_tested) for name, p in zip(ratios, adjusted, strict=True)}


def main_answers(every: Sequence[Answer]) -> dict[str, Answer]:
    """The main answer of each condition."""
    return {answer.condition: answer for answer in every if answer.is_main}


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
    level = f"{100 * interval.level:g} % interval{GIVEN_COSTS if interval.is_given_costs else ''}"
    if low < 0 < high:
        return f"{level}: {-low:.1f} % less to {high:.1f} % more"
    near, far = sorted((abs(low), abs(high)))
    return f"{level}: {near:.1f} to {far:.1f} % {'less' if high <= 0 else 'more'}"
