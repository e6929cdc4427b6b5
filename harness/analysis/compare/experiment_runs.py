"""The valid runs of one experiment: figures and prices computed once, and their pairs and comparisons."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

from harness.analysis.compare.answer import ChannelWords, Compared, answers, asked_in_words
from harness.analysis.compare.channels import Comparison, block_of, compare, why_apart
from harness.analysis.compare.family import ALONE, Family
from harness.analysis.compare.pairs import common_replicates, num_plans
from harness.analysis.compare.predictions import Prediction, Predictions
from harness.analysis.compare.prices import prices_by_condition
from harness.analysis.compare.result import Result
from harness.analysis.compare.stopping import (
    SequentialStatus,
    status_until_decided,
)
from harness.analysis.figures import RunFigures
from harness.analysis.stats import paired
from harness.measure.records.run import SealedRun, by_condition, kind_of
from harness.model.spec.rules import (
    Conditions,
)
from harness.model.spec.sections import Basis

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
        self.factors: Conditions = {}
        self.prices = prices_by_condition(self.all_runs)
        self.family = ALONE
        if self.valid_runs:
            spec = self.valid_runs[0].spec
            self.baselines = {condition.name: spec.baseline_of(condition) for condition in spec.condition}
            self.treatments = {condition.name: condition.treatment for condition in spec.condition}
            self.factors = spec.factors
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
        return common_replicates(run for name in self.runs for run in self.figures(name))

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
        sides = self.figures(condition), self.figures(baseline)
        compared = compare(baseline, *sides, family=self.family, basis=basis or self.basis)
        if compared is None or self.status is None or self.baselines.get(condition) != baseline:
            return compared
        return self.status.applied_to(condition, compared)

    def asked(self, condition: str, baseline: str, basis: Basis | None = None) -> ChannelWords:
        """What the channels of a comparison say of each other.

        basis: what a rule rests on; what the tables rest on is asked in any case.
        """
        of_tables, of_rule = (self.compare(condition, baseline, each) for each in (None, basis))
        apart = (why_apart(compared) for compared in (of_tables, of_rule) if compared is not None)
        return ChannelWords(next(filter(None, apart), ""), "" if of_rule is None else asked_in_words(of_rule))

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
