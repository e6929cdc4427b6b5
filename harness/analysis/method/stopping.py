"""The stopping rule applied to what is sealed: for each comparison its looks so far, its verdict and the blocks left.

Only blocks whose runs are all sealed count, in their order, so that a resumed experiment says what an uninterrupted one
says. Nothing is decided by a name.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from harness.analysis.method.compare import Comparison, compare
from harness.analysis.method.devices import DeviceEffect
from harness.analysis.method.figures import RunFigures, run_figures
from harness.analysis.method.sequential import Look, StopVerdict, blocks_left, looks_at
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
    """One comparison under the rule. values: log ratio of each block that counts; blocks_left: None: not in budget."""

    condition: str
    baseline: str
    values: tuple[float, ...]
    looks: tuple[Look, ...]
    blocks_left: int | None

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
    def told(self) -> str:
        """What led to the verdict, "-2.10 % [-3.00 %, -1.20 %] at block 8", and what is still to come."""
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
class Standing:
    """All comparisons of an experiment under its rule, after ``num_blocks`` whole blocks."""

    stop: StopSpec
    num_blocks: int
    comparisons: tuple[ComparisonLooks, ...]

    @property
    def is_decided(self) -> bool:
        """Whether every comparison has its final verdict: nothing more need be run."""
        return bool(self.comparisons) and all(one.verdict.is_final for one in self.comparisons)

    def of(self, condition: str) -> ComparisonLooks:
        """The comparison of one condition with its baseline; StopIteration when it is compared with none."""
        return next(one for one in self.comparisons if one.condition == condition)


def percent(log_ratio: float) -> str:
    """A log ratio as a change in per cent."""
    return f"{100 * math.expm1(log_ratio):+.2f} %"


def standing(spec: ExperimentSpec, runs: Sequence[SealedRun], stop: StopSpec) -> Standing:
    """Where an experiment stands under ``stop``, from those of its runs that are sealed, INVALID ones included."""
    whole = whole_blocks(spec, runs)
    is_over = len(whole) >= stop.budget
    found: list[ComparisonLooks] = []
    for ratios in log_ratios(spec, [run for run in runs if run.replicate in whole[: stop.budget]], stop.channel):
        looks = tuple(looks_at(ratios.logs, stop, is_over=is_over))
        left = blocks_left(looks[-1], stop) if looks and not looks[-1].verdict.is_final else None
        if is_over and not looks:
            looks = (Look(len(ratios.logs), math.nan, math.nan, math.inf, StopVerdict.INCONCLUSIVE),)
        found.append(ComparisonLooks(ratios.condition, ratios.baseline, tuple(ratios.logs), looks, left))
    return Standing(stop, len(whole), tuple(found))


def standing_of(runs: Sequence[SealedRun]) -> Standing | None:
    """Where sealed runs of one experiment stand under the rule that the first of them declared; None without one."""
    first = min(runs, key=lambda run: (run.replicate, run.condition))
    if not first.manifest.requested_experiment.get("stop"):
        return None
    assert first.spec.stop is not None, "what was asked for is in the spec"
    return standing(first.spec, runs, first.spec.stop)


def whole_blocks(spec: ExperimentSpec, runs: Sequence[SealedRun]) -> list[int]:
    """Replicates of which every condition is sealed, ascending."""
    sealed = {(run.condition, run.replicate) for run in runs}
    names = [condition.name for condition in spec.condition]
    return [k for k in sorted({k for _, k in sealed}) if all((name, k) in sealed for name in names)]


def log_ratios(spec: ExperimentSpec, runs: Sequence[SealedRun], channel: Channel) -> list[LogRatios]:
    """The blocks' log ratios of every condition that has another one as baseline, from valid runs alone."""
    by_condition: dict[str, list[RunFigures]] = {}
    for run in runs:
        if run.is_valid:
            by_condition.setdefault(run.condition, []).append(run_figures(run))
    pairs = [(one.name, spec.baseline_of(one)) for one in spec.condition if spec.baseline_of(one) != one.name]
    return [
        _log_ratios(
            name, baseline, compare(baseline, by_condition.get(name, []), by_condition.get(baseline, [])), channel
        )
        for name, baseline in pairs
    ]


def _log_ratios(name: str, baseline: str, compared: Comparison | None, asked: Channel) -> LogRatios:
    if compared is None:
        return LogRatios(name, baseline, asked)
    channel: Channel = "b" if compared.a is None else asked
    found = compared.main if channel == "a" else compared.b
    by_block = zip(compared.replicates, found.by_block, strict=True)
    logs = tuple((block, math.log(ratio)) for block, ratio in by_block if ratio)
    return LogRatios(name, baseline, channel, logs, found.values, found.devices)
