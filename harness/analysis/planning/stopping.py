"""The stopping rule applied to sealed runs: for each comparison its looks so far, its verdict and the blocks left.

Only blocks whose runs are all sealed count, in their order, so that a resumed experiment has the verdicts of an
uninterrupted one. Where channel A is missing, channel B decides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from harness.analysis.cost.compare import Comparison, compare
from harness.analysis.cost.devices import DeviceEffect
from harness.analysis.figures import run_figures
from harness.analysis.planning.sequential import Look, StopVerdict, blocks_left, looks_at
from harness.analysis.stats import grouped, percent
from harness.records import SealedRun
from harness.spec import ExperimentSpec
from harness.spec.sections import Channel, StopSpec


@dataclass(frozen=True, slots=True)
class LogRatios:
    """The blocks of one comparison on one channel: ``channel``, or B where A is missing.

    by_block: (block, ln(cost / baseline cost)), in order; each is known once its block is sealed, so that a sequence
    may look at them. values: one a block, whose mean is ln of the ratio of sums. devices: the same device by device,
    where several made them.
    """

    condition: str
    baseline: str
    channel: Channel
    by_block: tuple[tuple[int, float], ...] = ()
    values: tuple[float, ...] = ()
    devices: DeviceEffect | None = None

    @property
    def logs(self) -> list[float]:
        return [value for _, value in self.by_block]


@dataclass(frozen=True, slots=True)
class ComparisonLooks:
    """One comparison under the rule.

    values: log ratio of each block that counts, on ``channel``. blocks_left: None where the budget is too small.
    """

    condition: str
    baseline: str
    values: tuple[float, ...]
    looks: tuple[Look, ...]
    blocks_left: int | None
    channel: Channel = "a"

    @property
    def num_blocks(self) -> int:
        return len(self.values)

    @property
    def last(self) -> Look | None:
        return self.looks[-1] if self.looks else None

    @property
    def verdict(self) -> StopVerdict:
        return StopVerdict.GO_ON if self.last is None else self.last.verdict

    @property
    def description(self) -> str:
        """The estimate behind the verdict, "-2.10 % [-3.00 %, -1.20 %] at block 8", and the blocks still needed."""
        counted = f"{self.num_blocks} block{'' if self.num_blocks == 1 else 's'}"
        if self.last is None:
            return f"{counted}, no look yet"
        if math.isnan(self.last.mean):
            return f"{counted}, too few for a look"
        left = "" if self.verdict.is_final else ", more blocks needed than the budget has"
        if self.blocks_left is not None:
            left = f", about {self.blocks_left} more"
        if math.isinf(self.last.half_width):
            return f"{percent(self.last.mean)}, no interval from {counted}{left}"
        ends = f"[{percent(self.last.low)}, {percent(self.last.high)}]"
        return f"{percent(self.last.mean)} {ends} at block {self.last.num_blocks}{left}"


@dataclass(frozen=True, slots=True)
class SequentialStatus:
    """All comparisons of an experiment under its rule, after ``num_blocks`` complete blocks."""

    stop: StopSpec
    num_blocks: int
    comparisons: tuple[ComparisonLooks, ...]

    @property
    def is_decided(self) -> bool:
        """Whether every comparison has its final verdict, so that no run is needed any more."""
        return bool(self.comparisons) and all(looks.verdict.is_final for looks in self.comparisons)

    @property
    def channel_note(self) -> str:
        """The comparisons that channel B decides although the rule names A; empty where there are none."""
        on_b = [looks.condition for looks in self.comparisons if looks.channel != self.stop.channel]
        if not on_b:
            return ""
        where = "" if len(on_b) == len(self.comparisons) else f" for {', '.join(on_b)}"
        return (
            f"Channel B (time in flight) decides{where}: channel A (modelled device time) is not there, "
            "as it needs a log of steps and known reuse in every run"
        )

    def of(self, condition: str) -> ComparisonLooks:
        """The comparison of a condition with its baseline; StopIteration where it has none."""
        return next(looks for looks in self.comparisons if looks.condition == condition)


def sequential_status(spec: ExperimentSpec, runs: Sequence[SealedRun], stop: StopSpec) -> SequentialStatus:
    """The status of an experiment under ``stop``. runs: those that are sealed, INVALID ones included."""
    whole = whole_blocks(spec, runs)
    is_over = len(whole) >= stop.budget
    comparisons: list[ComparisonLooks] = []
    for ratios in log_ratios(spec, [run for run in runs if run.replicate in whole[: stop.budget]], stop.channel):
        looks = tuple(looks_at(ratios.logs, stop, is_over=is_over))
        left = blocks_left(looks[-1], stop) if looks and not looks[-1].verdict.is_final else None
        if is_over and not looks:
            looks = (Look(len(ratios.logs), math.nan, math.nan, math.inf, StopVerdict.INCONCLUSIVE),)
        names = (ratios.condition, ratios.baseline)
        comparisons.append(ComparisonLooks(*names, tuple(ratios.logs), looks, left, ratios.channel))
    return SequentialStatus(stop, len(whole), tuple(comparisons))


def declared_status(runs: Sequence[SealedRun]) -> SequentialStatus | None:
    """The status of sealed runs of one experiment under the rule of its first run; None without a rule."""
    first = min(runs, key=lambda run: (run.replicate, run.condition))
    if not first.manifest.requested_experiment.get("stop"):
        return None
    assert first.spec.stop is not None, "the spec holds the requested rule"
    return sequential_status(first.spec, runs, first.spec.stop)


def whole_blocks(spec: ExperimentSpec, runs: Sequence[SealedRun]) -> list[int]:
    """Replicates of which every condition is sealed, ascending."""
    sealed = {(run.condition, run.replicate) for run in runs}
    names = [condition.name for condition in spec.condition]
    return [k for k in sorted({k for _, k in sealed}) if all((name, k) in sealed for name in names)]


def log_ratios(spec: ExperimentSpec, runs: Sequence[SealedRun], channel: Channel) -> list[LogRatios]:
    """The blocks' log ratios of every condition that has another one as baseline, from valid runs alone."""
    by_condition = grouped((run_figures(run) for run in runs if run.is_valid), lambda run: run.condition)
    pairs = [(one.name, spec.baseline_of(one)) for one in spec.condition if spec.baseline_of(one) != one.name]
    return [
        _log_ratios(
            name, baseline, compare(baseline, by_condition.get(name, []), by_condition.get(baseline, [])), channel
        )
        for name, baseline in pairs
    ]


def _log_ratios(name: str, baseline: str, compared: Comparison | None, wanted: Channel) -> LogRatios:
    if compared is None:
        return LogRatios(name, baseline, wanted)
    channel: Channel = "b" if compared.a is None else wanted
    found = compared.main if channel == "a" else compared.b
    by_block = zip(compared.replicates, found.by_block, strict=True)
    logs = tuple((block, math.log(ratio)) for block, ratio in by_block if ratio)
    return LogRatios(name, baseline, channel, logs, found.values, found.devices)
