"""The stopping rule: intervals of a mean log cost ratio that stay valid while blocks come in, and the verdict so far.

A check after every block uses a confidence sequence; a few preset looks share alpha by a spending function. A fixed-n
interval is not offered: it misses more often the more often it is checked. Only blocks whose runs are all sealed count,
in their order, so that a resumed experiment has the verdicts of an uninterrupted experiment.
Definitions: docs/reference/method.md, "Stopping" and "Preset looks".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from harness.analysis import stats
from harness.analysis.compare.boundaries import spending_boundaries, t_mixture_boundary
from harness.analysis.compare.channels import BASIS_NAMES, Comparison, block_of, compare, why_apart
from harness.analysis.compare.pairs import num_comparisons, num_plans, prices_by_condition, without_a
from harness.analysis.compare.ratio import ALONE, Family, Verdict, ran_until_decided
from harness.analysis.cost.cost_errors import (
    NO_ERROR,
    WITH_ERRORS,
    errors_of_means,
    half_width,
    states_errors,
    with_cost_error,
)
from harness.analysis.cost.devices import DeviceEffect
from harness.analysis.figures import RunFigures
from harness.analysis.stats import NO_SCATTER, Estimate, Interval, grouped, paired, percent
from harness.errors import SpecError
from harness.measure.records.run import SealedRun
from harness.model.engine.cost import CostError, load_cost_model
from harness.model.spec import ExperimentSpec
from harness.model.spec.sections import EVERY, Basis, StopSpec


@dataclass(frozen=True, slots=True)
class Look:
    """The mean log ratio of the first ``num_blocks`` blocks. half_width: inf while the sample is too small.

    of_costs: the part of it that the errors of the costs take; None where none are stated. apart: why these blocks
    answer nothing, although the interval would: the channels contradict each other, or lie apart.
    """

    num_blocks: int
    mean: float
    sd: float
    half_width: float
    verdict: Verdict
    of_costs: float | None = None
    apart: str = ""

    @property
    def low(self) -> float:
        return self.mean - self.half_width

    @property
    def high(self) -> float:
        return self.mean + self.half_width


def boundary_of(stop: StopSpec) -> Callable[[int], float | None]:
    """|t| by the number of blocks, as the rule looks; None at a number at which it does not look."""
    if stop.looks == EVERY:
        return lambda num_blocks: t_mixture_boundary(num_blocks, stop.alpha)
    preset = stop.preset_looks
    by_look = dict(zip(preset, spending_boundaries(preset, stop.budget, stop.alpha), strict=True))
    return by_look.get


def bonferroni(stop: StopSpec, num_parts: int) -> StopSpec:
    """The rule of one of several comparisons that share alpha: together they are wrong as seldom as one alone.

    In equal parts (Bonferroni), as the comparisons are looked at and end at different blocks.
    """
    return stop.model_copy(update={"alpha": stop.alpha / max(num_parts, 1)})


def share_for_sampling_error(stop: StopSpec, *, has_errors: bool) -> StopSpec:
    """The rule of what scatters between the blocks. has_errors: those of the costs have the other half of alpha."""
    return bonferroni(stop, 2) if has_errors else stop


def never_apart(num_blocks: int) -> str:  # noqa: ARG001  # the form of ``looks_at``
    """Of comparisons whose channels are not asked."""
    return ""


def looks_at(
    differences: Sequence[float],
    stop: StopSpec,
    *,
    is_over: bool = False,
    costs: Sequence[CostError] = (),
    apart_at: Callable[[int], str] = never_apart,
) -> Iterator[Look]:
    """Every look that the rule takes at the blocks' log ratios, in order, up to the first that decides.

    differences: shape (blocks,), ln(cost / baseline cost), in the order of the blocks. is_over: no block comes any
    more, so that the last look is taken at whatever is there and spends what is left of alpha. costs: what the costs
    leave unknown of the mean of the first, the first two ...; where it is given, the half width is the sum of that of
    the blocks and that of the costs, each with half of alpha, which holds whatever both are. apart_at: why so many
    blocks answer nothing, whatever their interval shows, "" where they may; such a look does not end the sequence.
    """
    whole, stop = stop, share_for_sampling_error(stop, has_errors=bool(costs))
    boundary = boundary_of(stop)
    preset = stop.preset_looks
    for num_blocks in range(2, min(len(differences), stop.budget) + 1):
        is_last = num_blocks == stop.budget or (is_over and num_blocks == len(differences))
        t = boundary(num_blocks)
        if t is None and is_last:
            # Blocks were lost to INVALID runs: the looks that were, and then this one.
            taken = tuple(look for look in preset if look < num_blocks)
            t = spending_boundaries((*taken, num_blocks), num_blocks, stop.alpha, planned=stop.budget)[-1]
        if t is not None:
            of_costs = half_width(costs[num_blocks - 1], whole.alpha / 2) if costs else None
            look = _look(differences[:num_blocks], t, stop, of_costs)
            if look.verdict.is_answer and (apart := apart_at(num_blocks)):
                look = replace(look, verdict=Verdict.WITHHELD if is_last else Verdict.GO_ON, apart=apart)
            elif is_last and not look.verdict.is_answer:
                look = replace(look, verdict=Verdict.INCONCLUSIVE)
            yield look
            if look.verdict.is_final:
                return


def _look(differences: Sequence[float], t: float, stop: StopSpec, of_costs: float | None) -> Look:
    values = np.asarray(differences, dtype=np.float64)
    mean, sd = float(values.mean()), float(values.std(ddof=1))
    # Where nothing varies there is nothing that an interval could be of.
    half = math.inf if math.isinf(t) or sd < NO_SCATTER else t * sd / math.sqrt(len(values)) + (of_costs or 0.0)
    return Look(len(values), mean, sd, half, verdict(mean, half, stop.log_margin), of_costs)


def verdict(mean: float, half_width: float, log_margin: float) -> Verdict:
    """The verdict of an interval: it lies wholly within the margin, below 0 or above 0, or nothing is shown yet."""
    low, high = mean - half_width, mean + half_width
    if -log_margin < low and high < log_margin:
        return Verdict.EQUIVALENT
    if high < 0:
        return Verdict.LOWER
    return Verdict.HIGHER if low > 0 else Verdict.GO_ON


def blocks_left(look: Look, stop: StopSpec) -> int | None:
    """Blocks until the next look that decides, should mean and spread stay as they are; None: not within the budget,
    or not known, as the channels lie apart.
    """
    if look.apart:
        return None
    boundary = boundary_of(share_for_sampling_error(stop, has_errors=look.of_costs is not None))
    for num_blocks in range(look.num_blocks + 1, stop.budget + 1):
        t = boundary(num_blocks)
        half = math.inf if t is None or math.isinf(t) or look.sd < NO_SCATTER else t * look.sd / math.sqrt(num_blocks)
        if verdict(look.mean, half + (look.of_costs or 0.0), stop.log_margin).is_answer:
            return num_blocks - look.num_blocks
    return None


def check_can_decide(spec: ExperimentSpec, stop: StopSpec, source: str) -> StopSpec:
    """The same rule, unless no look within its budget can have an interval: then SpecError that names its source."""
    if spec.same_input:
        raise SpecError(
            "one plan, repeated, decides nothing of other plans",
            where=f"{source}: same_input",
            hint="Leave same_input out, so that each block draws a plan, or leave the stopping rule out",
        )
    costs = {spec.server_of(condition).cost_model for condition in spec.condition}
    has_errors = stop.channel == "a" and any(load_cost_model(name).errors for name in costs)
    each = share_for_sampling_error(bonferroni(stop, num_comparisons(spec)), has_errors=has_errors)
    boundary = boundary_of(each)
    if all(math.isinf(boundary(n) or math.inf) for n in range(2, stop.budget + 1)):
        first = next(n for n in range(2, 10_000) if math.isfinite(t_mixture_boundary(n, each.alpha)))
        raise SpecError(
            f"{stop.budget} blocks never decide: the confidence sequence at alpha {each.alpha:.3g} of each comparison "
            f"is infinite before block {first}",
            where=f"{source}: stop.budget",
            hint="Raise it (`harness power` says to what), or preset a few looks: looks = [3]",
        )
    return stop


@dataclass(frozen=True, slots=True)
class LogRatios:
    """The blocks of a comparison on one channel: ``channel``, or B where A is missing.

    logs: ln(cost / baseline cost) of each block, in order; each is known once its block is sealed, so that a sequence
    may look at them. values: one a block, whose mean is ln of the ratio of sums. devices: the same device by device,
    where several made them. num_plans: different inputs among the blocks. family: comparisons that are judged together.
    without: why the channel that was asked for is missing. prices: that the sides had different costs. costs: what the
    costs leave unknown of the ratio of sums. costs_at: the same of the mean of the first log, the first two ...; empty
    where no cost file states errors.
    """

    condition: str
    baseline: str
    channel: Basis
    logs: tuple[float, ...] = ()
    values: tuple[float, ...] = ()
    devices: DeviceEffect | None = None
    num_plans: int = 0
    family: int = 1
    without: str = ""
    prices: str = ""
    costs: CostError = NO_ERROR
    costs_at: tuple[CostError, ...] = ()
    apart_at: Callable[[int], str] = field(default=never_apart, compare=False)

    @property
    def estimate(self) -> Estimate | None:
        """By the blocks and the errors of the costs; None of so few that they have none."""
        if self.devices is not None:
            return self.devices.estimate
        return with_cost_error(stats.of_blocks(self.values), self.costs) if len(self.values) > 1 else None


@dataclass(frozen=True, slots=True)
class ComparisonLooks:
    """One comparison under the rule.

    values: log ratio of each block that counts, on ``channel``. blocks_left: None where the budget is too small.
    alpha: that ``family`` comparisons share. is_given_costs: the interval holds only if the costs are true.
    """

    condition: str
    baseline: str
    values: tuple[float, ...]
    looks: tuple[Look, ...]
    blocks_left: int | None
    channel: Basis = "a"
    alpha: float = 0.05
    family: int = 1
    is_given_costs: bool = False

    @property
    def interval(self) -> Interval | None:
        """Of the ratio at the last look; None where that has none."""
        last = self.last
        if last is None or math.isnan(last.mean) or math.isinf(last.half_width):
            return None
        mean, low, high = (math.exp(value) for value in (last.mean, last.low, last.high))
        method = f"interval of the declared sequence{'' if last.of_costs is None else WITH_ERRORS}{self._given}"
        return Interval(mean, low, high, 1 - self.alpha, method, "blocks", last.num_blocks, 0, 0, self.family)

    @property
    def _given(self) -> str:
        return stats.GIVEN_COSTS if self.is_given_costs else ""

    @property
    def why_no_interval(self) -> str:
        """Why the last look has none, in words."""
        counted = f"{self.num_blocks} block{'' if self.num_blocks == 1 else 's'}"
        if self.last is None:
            return f"{counted}, no look yet"
        if math.isnan(self.last.mean):
            return f"{counted}, too few for a look"
        return f"no interval from {counted}" + (", as nothing varied" if self.last.sd < NO_SCATTER else "")

    @property
    def num_blocks(self) -> int:
        return len(self.values)

    @property
    def last(self) -> Look | None:
        return self.looks[-1] if self.looks else None

    @property
    def verdict(self) -> Verdict:
        return Verdict.GO_ON if self.last is None else self.last.verdict

    @property
    def description(self) -> str:
        """The estimate behind the verdict, "-2.10 % [-3.00 %, -1.20 %] at block 8", and the blocks still needed."""
        if self.last is None or math.isnan(self.last.mean):
            return self.why_no_interval
        left = "" if self.verdict.is_final else ", more blocks needed than the budget has"
        if self.blocks_left is not None:
            left = f", about {self.blocks_left} more"
        if self.last.apart:
            left = f"; withheld: {self.last.apart}"
        if math.isinf(self.last.half_width):
            return f"{percent(self.last.mean)}, {self.why_no_interval}{left}"
        ends = f"[{percent(self.last.low)}, {percent(self.last.high)}]"
        return f"{percent(self.last.mean)} {ends} at block {self.last.num_blocks}{self._given}{left}"


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
        """The comparisons that channel B decides although the rule names A or S; empty where there are none."""
        on_b = [looks.condition for looks in self.comparisons if looks.channel != self.stop.channel]
        if not on_b:
            return ""
        where = "" if len(on_b) == len(self.comparisons) else f" for {', '.join(on_b)}"
        needs = "a log of steps and known reuse" if self.stop.channel == "a" else "steps that the engine stamped"
        return (
            f"Time in flight (B) decides{where}: {BASIS_NAMES[self.stop.channel]} is not there, "
            f"as it needs {needs} in every run"
        )

    def of(self, condition: str) -> ComparisonLooks:
        """The comparison of a condition with its baseline; StopIteration where it has none."""
        return next(looks for looks in self.comparisons if looks.condition == condition)

    def applied_to(self, condition: str, compared: Comparison) -> Comparison:
        """A comparison with the interval of its last look, on the channel that was looked at."""
        looks = self.of(condition)
        return compared.with_interval(looks.channel, looks.interval)


def sequential_status(spec: ExperimentSpec, runs: Sequence[SealedRun], stop: StopSpec) -> SequentialStatus:
    """The status of an experiment under ``stop``. runs: those that are sealed, INVALID ones included."""
    whole = whole_blocks(spec, runs)
    is_over = len(whole) >= stop.budget
    family = num_comparisons(spec)
    each = bonferroni(stop, family)
    comparisons: list[ComparisonLooks] = []
    counted = [run for run in runs if run.replicate in whole[: stop.budget]]
    for ratios in log_ratios(spec, counted, stop.channel, Family.under(spec, stop)):
        found = looks_at(ratios.logs, each, is_over=is_over, costs=ratios.costs_at, apart_at=ratios.apart_at)
        looks = tuple(found) if ratios.num_plans != 1 else ()
        left = blocks_left(looks[-1], each) if looks and not looks[-1].verdict.is_final else None
        if is_over and not looks:
            looks = (Look(len(ratios.logs), math.nan, math.nan, math.inf, Verdict.INCONCLUSIVE),)
        names = (ratios.condition, ratios.baseline)
        of_rule = (ratios.channel, stop.alpha, family, bool(ratios.costs.given))
        comparisons.append(ComparisonLooks(*names, ratios.logs, looks, left, *of_rule))
    return SequentialStatus(stop, len(whole), tuple(comparisons))


def declared_status(runs: Sequence[SealedRun]) -> SequentialStatus | None:
    """The status of sealed runs of one experiment under the rule of its first run; None without a rule."""
    first = min(runs, key=lambda run: (run.replicate, run.condition))
    if not first.manifest.requested_experiment.get("stop"):
        return None
    assert first.spec.stop is not None, "the spec holds the requested rule"
    return sequential_status(first.spec, runs, first.spec.stop)


def status_until_decided(runs: Sequence[SealedRun]) -> SequentialStatus | None:
    """The status of an experiment that its stopping rule was to end; None of one with a fixed number of replicates."""
    status = declared_status(runs)
    return status if status is not None and any(map(ran_until_decided, runs)) else None


def whole_blocks(spec: ExperimentSpec, runs: Sequence[SealedRun]) -> list[int]:
    """Replicates of which every condition is sealed, ascending."""
    sealed = {(run.condition, run.replicate) for run in runs}
    names = [condition.name for condition in spec.condition]
    return [k for k in sorted({k for _, k in sealed}) if all((name, k) in sealed for name in names)]


def log_ratios(
    spec: ExperimentSpec, runs: Sequence[SealedRun], channel: Basis, family: Family = ALONE
) -> list[LogRatios]:
    """The blocks' log ratios of every condition that has another one as baseline, from valid runs alone.

    family: how the channels of a comparison are held against each other.
    """
    prices = prices_by_condition(runs)
    priced = (prices[run.condition].figures(run) for run in runs if run.is_valid)
    by_condition = grouped(priced, lambda run: run.condition)
    is_predicted = all(run.manifest.kind.is_virtual for run in runs)
    ratios: list[LogRatios] = []
    for condition in spec.condition:
        name, baseline = condition.name, spec.baseline_of(condition)
        if name != baseline:
            pairs = sorted(
                paired(by_condition.get(name, []), by_condition.get(baseline, []), block_of),
                key=lambda pair: pair[0].replicate,
            )
            blocks = PairedBlocks(baseline, pairs, channel, family, is_predicted)
            compared = blocks.compared(len(pairs))
            if compared is None:
                ratios.append(LogRatios(name, baseline, channel))
                continue
            sides = [list(side) for side in zip(*pairs, strict=True)]
            found = replace(_on(channel, name, compared), num_plans=num_plans(sides[0]))
            if found.channel != channel:
                found = replace(found, without=_without(channel, [run for side in sides for run in side]))
            ratios.append(replace(found, prices=prices[name].short, apart_at=blocks.apart_at))
    return ratios


@dataclass(frozen=True, slots=True)
class PairedBlocks:
    """The blocks of a comparison in their order, so that the first of them can be compared alone."""

    baseline: str
    pairs: Sequence[tuple[RunFigures, RunFigures]]
    channel: Basis
    family: Family
    is_predicted: bool

    def compared(self, num_blocks: int) -> Comparison | None:
        own, base = ([pair[side] for pair in self.pairs[:num_blocks]] for side in (0, 1))
        return compare(self.baseline, own, base, is_predicted=self.is_predicted, family=self.family, basis=self.channel)

    def apart_at(self, num_blocks: int) -> str:
        """Why the channels of the first blocks answer nothing; empty where they may."""
        compared = self.compared(num_blocks)
        return "" if compared is None else why_apart(compared)


def _without(channel: Basis, runs: Sequence[RunFigures]) -> str:
    return without_a(runs) if channel == "a" else "no steps that the engine stamped"


def _on(channel: Basis, condition: str, compared: Comparison) -> LogRatios:
    named = compared.on(channel)
    ratio, channel = (compared.b, "b") if named is None else (named, channel)
    logs = tuple(math.log(of_block) for of_block in ratio.by_block if of_block)
    has_errors = states_errors(run for pair in ratio.priced for run in pair)
    return LogRatios(
        *(condition, compared.baseline, channel, logs, ratio.values, ratio.devices),
        costs=ratio.costs,
        costs_at=tuple(errors_of_means(ratio.priced)) if has_errors else (),
    )
