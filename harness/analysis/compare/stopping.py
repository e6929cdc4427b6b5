"""The stopping rule: intervals of a ratio of sums that stay valid while blocks come in, and the verdict so far.

The interval at a look holds every ratio r at which cost - r x baseline cost has no mean that the blocks tell from 0. A
check after every block uses a confidence sequence; a few preset looks share alpha by a spending function. A fixed-n
interval is not offered: it misses more often the more often it is checked. Only blocks whose runs are all sealed count,
in their order, so that a resumed experiment has the verdicts of an uninterrupted experiment.
Definitions: docs/reference/method-planning.md, "Stopping" and "Preset looks".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from harness.analysis import stats
from harness.analysis.compare.boundaries import spending_boundaries, t_mixture_boundary
from harness.analysis.compare.channels import BASES, BASIS_NAMES, Comparison, block_of, compare, why_apart
from harness.analysis.compare.pairs import num_comparisons, num_plans, prices_by_condition, without_a
from harness.analysis.compare.ratio import (
    ALONE,
    BlockCosts,
    Family,
    Verdict,
    estimate_of_blocks,
    have_ratio,
    ran_until_decided,
    ratio_of_sums,
)
from harness.analysis.cost.agreement import Agreement
from harness.analysis.cost.cost_errors import (
    NO_ERROR,
    WITH_ERRORS,
    errors_of_first,
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

# A plan that n blocks did not show, one in n, may differ by so much: added to the spread of the blocks at each look.
UNSEEN = 0.02
B_CANNOT_TELL = "time in flight cannot tell it"


@dataclass(frozen=True, slots=True)
class Look:
    """The ratio of sums of the first ``num_blocks`` blocks. high: inf while the sample is too small.

    sd: of the differences own - ratio x baseline, as a share of the mean cost. of_costs: the part of the interval, as a
    log ratio, that the errors of the costs take; None where none are stated. apart: why these blocks answer nothing,
    although the interval would: the channels contradict each other, or lie apart, or B could not notice the effect.
    """

    num_blocks: int
    ratio: float
    low: float
    high: float
    sd: float
    verdict: Verdict
    of_costs: float | None = None
    apart: str = ""

    @property
    def has_interval(self) -> bool:
        return math.isfinite(self.high)


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


def looks_at(
    blocks: Sequence[BlockCosts], stop: StopSpec, *, is_over: bool = False, costs: Sequence[CostError] = ()
) -> Iterator[Look]:
    """Every look that the rule takes at the blocks, in order; each holds on its own, and the last one counts.

    is_over: no block comes any more, so that the last look is taken at whatever is there and spends what is left of
    alpha. costs: what the costs leave unknown of the ratio of sums of the first, the first two ... blocks; where it is
    given, the interval is widened by that of the costs, each with half of alpha, which holds whatever both are.
    """
    whole, stop = stop, share_for_sampling_error(stop, has_errors=bool(costs))
    boundary = boundary_of(stop)
    preset = stop.preset_looks
    for num_blocks in range(2, min(len(blocks), stop.budget) + 1):
        is_last = num_blocks == stop.budget or (is_over and num_blocks == len(blocks))
        t = boundary(num_blocks)
        if t is None and is_last:
            # Blocks were lost to INVALID runs: the looks that were, and then this one.
            taken = tuple(look for look in preset if look < num_blocks)
            t = spending_boundaries((*taken, num_blocks), num_blocks, stop.alpha, planned=stop.budget)[-1]
        if t is not None:
            of_costs = half_width(costs[num_blocks - 1], whole.alpha / 2) if costs else None
            look = _look(blocks[:num_blocks], t, stop, of_costs)
            is_open = is_last and not look.verdict.is_answer
            yield replace(look, verdict=Verdict.INCONCLUSIVE) if is_open else look


def _look(blocks: Sequence[BlockCosts], t: float, stop: StopSpec, of_costs: float | None) -> Look:
    num_blocks, low, high = len(blocks), -math.inf, math.inf
    if not have_ratio(blocks):
        return Look(num_blocks, math.nan, 0.0, math.inf, math.nan, Verdict.GO_ON, of_costs)
    found = estimate_of_blocks(blocks)
    # Where nothing varies there is nothing that an interval could be of.
    if math.isfinite(t) and found.error >= NO_SCATTER:
        low, high = found._replace(error=math.hypot(found.error, UNSEEN / num_blocks)).ends(t)
        low, high = low - (of_costs or 0.0), high + (of_costs or 0.0)
    ratio, low, high = map(math.exp, (found.mean, low, high))
    return Look(
        num_blocks, ratio, low, high, found.error * math.sqrt(num_blocks), verdict(low, high, stop.margin), of_costs
    )


def verdict(low: float, high: float, margin: float) -> Verdict:
    """The verdict of an interval: it lies wholly within the margin, below 1 or above 1, or nothing is shown yet."""
    if 1 / (1 + margin) < low and high < 1 + margin:
        return Verdict.EQUIVALENT
    if high < 1:
        return Verdict.LOWER
    return Verdict.HIGHER if low > 1 else Verdict.GO_ON


def looks_after(num_blocks: int, stop: StopSpec, *, has_errors: bool) -> Iterator[tuple[int, float]]:
    """(number of blocks, |t|) of each look after ``num_blocks`` blocks that can have an interval."""
    boundary = boundary_of(share_for_sampling_error(stop, has_errors=has_errors))
    for number in range(num_blocks + 1, stop.budget + 1):
        if (t := boundary(number)) is not None and math.isfinite(t):
            yield number, t


def blocks_left(look: Look, stop: StopSpec) -> int | None:
    """Blocks until the next look that decides, should ratio and spread stay as they are; None: not within the budget,
    or not known, as the channels lie apart or nothing varied.
    """
    if look.apart or not look.sd >= NO_SCATTER:
        return None
    for num_blocks, t in looks_after(look.num_blocks, stop, has_errors=look.of_costs is not None):
        # About half of the log of the interval.
        half = t * math.hypot(look.sd, UNSEEN / math.sqrt(num_blocks)) / math.sqrt(num_blocks) + (look.of_costs or 0.0)
        if verdict(look.ratio / math.exp(half), look.ratio * math.exp(half), stop.margin).is_answer:
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
    of_one = bonferroni(stop, num_comparisons(spec))
    if next(looks_after(1, of_one, has_errors=has_errors), None) is None:
        each = share_for_sampling_error(of_one, has_errors=has_errors)
        first = next(n for n in range(2, 10_000) if math.isfinite(t_mixture_boundary(n, each.alpha)))
        raise SpecError(
            f"{stop.budget} blocks never decide: the confidence sequence at alpha {each.alpha:.3g} of each comparison "
            f"is infinite before block {first}",
            where=f"{source}: stop.budget",
            hint="Raise it (`harness power` says to what), or preset a few looks: looks = [3]",
        )
    return stop


@dataclass(frozen=True, slots=True)
class ComparedBlocks:
    """The blocks of a comparison on one channel: ``channel``, or B where A is missing.

    blocks: what each cost, in the order of ``replicates``; a sequence looks at the first of them. values: one a block,
    whose mean is ln of the ratio of sums. devices: the same device by device, where several made them. num_plans:
    different inputs among the blocks. family: comparisons that are judged together. without: why the channel that was
    asked for is missing. prices: that the sides had different costs. costs: what the costs leave unknown of the ratio.
    costs_at: the same of the first block, the first two ...; empty where no cost file states errors. is_repeated: the
    replicates sent the same sessions.
    """

    condition: str
    baseline: str
    channel: Basis
    blocks: tuple[BlockCosts, ...] = ()
    replicates: tuple[int, ...] = ()
    values: tuple[float, ...] = ()
    devices: DeviceEffect | None = None
    num_plans: int = 0
    family: int = 1
    without: str = ""
    prices: str = ""
    costs: CostError = NO_ERROR
    costs_at: tuple[CostError, ...] = ()
    asked: PairedBlocks | None = field(default=None, compare=False)
    is_repeated: bool = False

    @property
    def estimate(self) -> Estimate | None:
        """By the blocks and the errors of the costs; None of so few that they have none."""
        if self.devices is not None:
            return self.devices.estimate
        return with_cost_error(estimate_of_blocks(self.blocks), self.costs) if len(self.blocks) > 1 else None


@dataclass(frozen=True, slots=True)
class ComparisonLooks:
    """One comparison under the rule.

    blocks, replicates: those that count so far, on ``channel``. blocks_left: until it is decided; None where the budget
    is too small. alpha: that ``family`` comparisons share. is_given_costs: the interval holds only if the costs are
    true. next_look: the next block at which the rule can have an interval; None: none within the budget. is_repeated:
    the replicates sent the same sessions.
    """

    condition: str
    baseline: str
    blocks: tuple[BlockCosts, ...]
    looks: tuple[Look, ...]
    blocks_left: int | None
    replicates: tuple[int, ...] = ()
    channel: Basis = "a"
    alpha: float = 0.05
    family: int = 1
    is_given_costs: bool = False
    next_look: int | None = None
    is_repeated: bool = False

    @property
    def ratio(self) -> float:
        """Of sums, over the blocks of the last look; over all that count before the first."""
        return ratio_of_sums(self.blocks[: self.num_seen])

    @property
    def by_replicate(self) -> dict[int, BlockCosts]:
        return dict(zip(self.replicates, self.blocks, strict=True))

    @property
    def num_seen(self) -> int:
        """Blocks that its figures are of: those of the last look; all before the first."""
        return len(self.blocks) if self.last is None else self.last.num_blocks

    @property
    def interval(self) -> Interval | None:
        """Of the ratio at the last look; None where that has none."""
        last = self.last
        if last is None or not last.has_interval:
            return None
        method = f"interval of the declared sequence{'' if last.of_costs is None else WITH_ERRORS}{self._given}"
        ends = (last.ratio, last.low, last.high)
        return Interval(*ends, 1 - self.alpha, method, "blocks", last.num_blocks, 0, 0, self.family)

    @property
    def _given(self) -> str:
        return stats.GIVEN_COSTS if self.is_given_costs else ""

    @property
    def why_no_interval(self) -> str:
        """Why the last look has none, in words."""
        counted = f"{self.num_blocks} block{'' if self.num_blocks == 1 else 's'}"
        if self.last is not None and math.isnan(self.last.ratio):
            return f"{counted}, too few for a look"
        if self.last is not None and self.last.sd < NO_SCATTER:
            return f"no interval from {counted}, as nothing varied"
        few = "" if self.last is None else ", as so few show nothing at its level"
        first = "" if self.next_look is None else f": the stopping rule has none before block {self.next_look}{few}"
        return f"no interval from {counted}{first}"

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    @property
    def last(self) -> Look | None:
        return self.looks[-1] if self.looks else None

    @property
    def verdict(self) -> Verdict:
        return Verdict.GO_ON if self.last is None else self.last.verdict

    @property
    def description(self) -> str:
        """The estimate behind the verdict, "-2.10 % [-3.00 %, -1.20 %] at block 8", and the blocks still needed."""
        last = self.last
        if last is None or math.isnan(last.ratio):
            return self.why_no_interval
        left = "" if self.verdict.is_final else ", would take more blocks than the rule has, should the spread stay"
        if self.blocks_left is not None:
            left = f", decides after about {self.blocks_left} more block{'s' * (self.blocks_left != 1)}"
        if last.apart:
            left = f"; withheld: {last.apart}"
        if not last.has_interval:
            return f"{percent(math.log(last.ratio))}, {self.why_no_interval}{left}"
        ends = f"[{percent(math.log(last.low))}, {percent(math.log(last.high))}]"
        return f"{percent(math.log(last.ratio))} {ends} at block {last.num_blocks}{self._given}{left}"


@dataclass(frozen=True, slots=True)
class SequentialStatus:
    """All comparisons of an experiment under its rule, after ``num_blocks`` complete blocks."""

    stop: StopSpec
    num_blocks: int
    comparisons: tuple[ComparisonLooks, ...]
    is_uncalibrated: bool = False

    @property
    def is_decided(self) -> bool:
        """Whether every comparison has its final verdict, so that no run is needed any more."""
        return bool(self.comparisons) and all(looks.verdict.is_final for looks in self.comparisons)

    @property
    def channel_note(self) -> str:
        """The comparisons that another channel decides than the rule names; empty where there are none."""
        others = [looks for looks in self.comparisons if looks.channel != self.stop.channel]
        if not others:
            return ""
        where = "" if len(others) == len(self.comparisons) else f" for {', '.join(each.condition for each in others)}"
        deciding = " and ".join(BASIS_NAMES[channel] for channel in BASES if channel in {e.channel for e in others})
        first = f"{deciding[0].upper()}{deciding[1:]} decides{where}"
        if self.is_uncalibrated:
            return f"{first}: the costs of {BASIS_NAMES['a']} come from no calibration"
        needs = "a log of steps and known reuse" if self.stop.channel == "a" else "steps that the engine stamped"
        return f"{first}: {BASIS_NAMES[self.stop.channel]} is not there, as it needs {needs} in every run"

    def of(self, condition: str) -> ComparisonLooks:
        """The comparison of a condition with its baseline; StopIteration where it has none."""
        return next(looks for looks in self.comparisons if looks.condition == condition)

    def basis_of(self, condition: str) -> Basis:
        """The channel that decides a comparison."""
        named: list[Basis] = [looks.channel for looks in self.comparisons if looks.condition == condition]
        return named[0] if named else self.stop.channel

    def seen(self, condition: str, runs: Iterable[RunFigures]) -> list[RunFigures]:
        """Those of the runs whose blocks the figures of its comparison are of: the last look had them."""
        looks = self.of(condition)
        unseen = looks.replicates[looks.num_seen :]
        return [run for run in runs if run.replicate not in unseen]

    def seen_by_all(self, runs: Iterable[RunFigures]) -> list[RunFigures]:
        """Those of the runs that the figures of every comparison are of."""
        listed = list(runs)
        for looks in self.comparisons:
            listed = self.seen(looks.condition, listed)
        return listed

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
    # A device served by costs of which no calibration states the errors: B has to decide.
    is_uncalibrated = stop.channel == "a" and any(
        run.manifest.kind.has_device and not run.cost_model.errors for run in counted
    )
    channel = "b" if is_uncalibrated else stop.channel
    for compared in compared_blocks(spec, counted, channel, Family.under(spec, stop)):
        looks: tuple[Look, ...] = ()
        if compared.num_plans != 1:
            looks = tuple(looks_at(compared.blocks, each, is_over=is_over, costs=compared.costs_at))
        if looks:
            looks = (*looks[:-1], _asked(looks[-1], compared, stop, is_over=is_over))
        left: int | None = None
        if looks and not looks[-1].verdict.is_final and (left := blocks_left(looks[-1], each)) is not None:
            left -= len(compared.blocks) - looks[-1].num_blocks
        after = looks_after(len(compared.blocks), each, has_errors=bool(compared.costs_at))
        is_one_plan = compared.num_plans == 1 < len(compared.blocks)
        next_look = None if is_one_plan else next((number for number, _ in after), None)
        if is_over and not looks:
            nothing = (math.nan, 0.0, math.inf, math.nan)
            looks = (Look(len(compared.blocks), *nothing, Verdict.INCONCLUSIVE),)
        names = (compared.condition, compared.baseline, compared.blocks, looks, left, compared.replicates)
        of_rule = (compared.channel, stop.alpha, family, bool(compared.costs.given))
        comparisons.append(ComparisonLooks(*names, *of_rule, next_look, compared.is_repeated))
    return SequentialStatus(stop, len(whole), tuple(comparisons), is_uncalibrated)


def _asked(look: Look, compared: ComparedBlocks, stop: StopSpec, *, is_over: bool) -> Look:
    """The look without its answer where the channels of its blocks give none."""
    apart = compared.asked.why_open(look, stop.margin) if compared.asked and look.verdict.is_answer else ""
    return replace(look, verdict=Verdict.WITHHELD if is_over else Verdict.GO_ON, apart=apart) if apart else look


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


def compared_blocks(
    spec: ExperimentSpec, runs: Sequence[SealedRun], channel: Basis, family: Family = ALONE
) -> list[ComparedBlocks]:
    """The blocks of every condition that has another one as baseline, from valid runs alone.

    family: how the channels of a comparison are held against each other.
    """
    prices = prices_by_condition(runs)
    priced = (prices[run.condition].figures(run) for run in runs if run.is_valid)
    by_condition = grouped(priced, lambda run: run.condition)
    is_predicted = all(run.manifest.kind.is_virtual for run in runs)
    is_measured = any(run.manifest.kind.has_device for run in runs)
    found: list[ComparedBlocks] = []
    for condition in spec.condition:
        name, baseline = condition.name, spec.baseline_of(condition)
        if name != baseline:
            pairs = sorted(
                paired(by_condition.get(name, []), by_condition.get(baseline, []), block_of),
                key=lambda pair: pair[0].replicate,
            )
            blocks = PairedBlocks(baseline, pairs, channel, family, is_predicted, is_measured)
            compared = blocks.compared(len(pairs))
            if compared is None:
                found.append(ComparedBlocks(name, baseline, channel))
                continue
            sides = [list(side) for side in zip(*pairs, strict=True)]
            one = replace(main_blocks(channel, name, compared), num_plans=num_plans(sides[0]))
            if one.channel != channel:
                without = "no steps that the engine stamped"
                without = without_a([run for side in sides for run in side]) if channel == "a" else without
                one = replace(one, without=without)
            found.append(replace(one, prices=prices[name].short, asked=blocks))
    return found


@dataclass(frozen=True, slots=True)
class PairedBlocks:
    """The blocks of a comparison in their order, so that the first of them can be compared alone.

    is_measured: a device served, so that B is to confirm what A shows.
    """

    baseline: str
    pairs: Sequence[tuple[RunFigures, RunFigures]]
    channel: Basis
    family: Family
    is_predicted: bool
    is_measured: bool = False

    def compared(self, num_blocks: int) -> Comparison | None:
        own, base = ([pair[side] for pair in self.pairs[:num_blocks]] for side in (0, 1))
        return compare(self.baseline, own, base, is_predicted=self.is_predicted, family=self.family, basis=self.channel)

    def why_open(self, look: Look, margin: float) -> str:
        """Why the channels of the blocks of a look answer nothing; empty where they may."""
        compared = self.compared(look.num_blocks)
        if compared is None:
            return ""
        is_equal = look.verdict is Verdict.EQUIVALENT
        is_silent = self.is_measured and _is_silent(compared, math.log1p(margin) if is_equal else math.log(look.ratio))
        return why_apart(compared) or B_CANNOT_TELL * is_silent


def _is_silent(compared: Comparison, effect: float) -> bool:
    """Whether B, asked about what A or S shows, would not notice a contradiction as large as the effect."""
    asked = compared.channels
    if asked is None or compared.agreement is Agreement.AGREE:
        return False
    return asked.noticed is None or asked.noticed > abs(effect)


def main_blocks(channel: Basis, condition: str, compared: Comparison) -> ComparedBlocks:
    """The blocks on a channel. Where A is not there, on what the tables of these runs rest on; where S is not, on B."""
    if compared.on(channel) is None:
        channel = compared.rests_on if channel == "a" else "b"
    ratio = compared.on(channel) or compared.b
    has_errors = states_errors(run for pair in ratio.priced for run in pair)
    of_blocks = (ratio.of_blocks, compared.replicates, ratio.values, ratio.devices)
    return ComparedBlocks(
        *(condition, compared.baseline, channel, *of_blocks),
        costs=ratio.costs,
        costs_at=tuple(errors_of_first(ratio.priced)) if has_errors else (),
        is_repeated=compared.is_repeated,
    )
