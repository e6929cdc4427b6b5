"""One condition against its baseline: ratios of what is comparable, their intervals, and whether the channels agree.

Totals are compared only where both did the same work, else cost per generated token.
Definitions: docs/reference/method-comparisons.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from harness.analysis.compare.pairs import are_repeats
from harness.analysis.compare.ratio import ALONE, BlockCosts, Family, Ratio, logs_of_blocks, paired_ratio
from harness.analysis.cost.agreement import (
    MAX_TAU,
    Agreement,
    Cause,
    Channels,
    RatioWithInterval,
    cause_of,
    least_noticed,
)
from harness.analysis.cost.cost_errors import NO_ERROR, CostSide, cost_error, with_cost_error
from harness.analysis.cost.devices import DeviceEffect, estimate_of, ratio_effect
from harness.analysis.cost.reconstruct import ChannelA, agreement_tolerance, residual_ns
from harness.analysis.cost.step_parts import MAX_DRIFT
from harness.analysis.figures import RunFigures
from harness.analysis.stats import Interval, grouped, lag_one, log_mean_values, paired
from harness.measure.records.findings import finding
from harness.measure.records.manifest import Finding
from harness.model.engine.cost import CostError
from harness.model.spec.sections import Basis

# Blocks from which on their order is looked at, and the correlation of successive ones that is a finding.
MIN_FOLLOWING, MOST_FOLLOWING = 8, 0.5
BASES: tuple[Basis, ...] = ("a", "s", "b")
BASIS_NAMES: Mapping[Basis, str] = {
    "a": "modelled device time (A)",
    "s": "time in steps (S)",
    "b": "time in flight (B)",
}
# The runs of a condition and of its baseline, block by block.
Sides = tuple[list[RunFigures], list[RunFigures]]


class Work(NamedTuple):
    """What a condition was asked for and gave, summed over the replicates that are compared."""

    num_requests: int
    prompt_tokens: int
    generated_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelRatio(Ratio):
    """The cost ratio of one comparison on one channel, over the same blocks.

    Per generated token where the work differs. request_ratio: per request. interval: None below three blocks. devices:
    None with one. priced: of channel A, the modelled times of each block.
    """

    request_ratio: float
    interval: Interval | None = None
    devices: DeviceEffect | None = None
    priced: tuple[tuple[ChannelA, ChannelA], ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True)
class Comparison:
    """One condition against its baseline over ``replicates``: below 1 it costs less.

    a: channel A; None where a run has no step log or its reuse is unknown. s: time in steps; None where it was not
    measured in every run. rests_on: what answers. channels: what that and B say of each other; None where B answers.
    witness: what A says of S or B where one of these answers; None where A is missing or does not explain them. cause:
    the costs that tell the sides apart; None where A does not answer, or without a cost file. is_predicted: simulated,
    so that both channels are the same cost. is_repeated: its replicates sent the same sessions.
    """

    baseline: str
    replicates: tuple[int, ...]
    a: ChannelRatio | None
    s: ChannelRatio | None
    b: ChannelRatio
    rests_on: Basis
    work: Work
    baseline_work: Work
    channels: Channels | None
    witness: Channels | None = None
    cause: Cause | None = None
    is_predicted: bool = False
    is_repeated: bool = False

    @property
    def main(self) -> ChannelRatio:
        """The channel that answers."""
        return self.on(self.rests_on) or self.b

    def on(self, basis: Basis) -> ChannelRatio | None:
        """The ratio on one channel; None where a run does not show it."""
        return {"a": self.a, "s": self.s, "b": self.b}[basis]

    @property
    def ratio_a(self) -> float | None:
        return None if self.a is None else self.a.ratio

    @property
    def ratio_b(self) -> float:
        return self.b.ratio

    @property
    def device_effects(self) -> dict[str, DeviceEffect]:
        """The comparison device by device, by channel; empty with one device."""
        ratios = {"A": self.a, "S": self.s, "B": self.b}
        effects = {channel: None if ratio is None else ratio.devices for channel, ratio in ratios.items()}
        return {channel: effect for channel, effect in effects.items() if effect is not None}

    @property
    def residual_share(self) -> float | None:
        """r/B of the baseline; None where B alone answers."""
        return None if self.channels is None else self.channels.residual_share

    @property
    def tau(self) -> float | None:
        """The paper's tolerance max(0.02, r_BASE / B_BASE), never above MAX_TAU; None where B alone answers."""
        return None if self.channels is None else min(self.channels.tau, MAX_TAU)

    @property
    def agreement(self) -> Agreement:
        """What may be said of the channels. S is a part of B, which may deny it and never confirms it."""
        if self.is_predicted:
            return Agreement.PREDICTED
        found = Agreement.B_ALONE if self.channels is None else self.channels.agreement
        if self.rests_on == "a" or found.is_missing:
            return found
        if self.witness is not None:
            return self.witness.ratio_agreement
        return Agreement.B_ALONE if self.rests_on == "b" else Agreement.S_ALONE

    @property
    def asked(self) -> Channels | None:
        """The two channels that ``agreement`` is about; None where one answers alone."""
        is_denied = self.channels is not None and self.channels.agreement.is_missing
        return self.channels if self.rests_on == "a" or is_denied else self.witness

    def with_interval(self, basis: Basis, interval: Interval | None) -> Comparison:
        """The same where the ratio of one channel has the interval of a declared sequence."""
        ratio = self.on(basis)
        if ratio is None:
            return self
        found = replace(ratio, interval=interval)
        pairs = {"channels": self.channels, "witness": self.witness}
        seen = {name: None if pair is None else _with_interval(pair, basis, interval) for name, pair in pairs.items()}
        return replace(self, **{basis: found}, **seen)

    def is_denied(self, low: float, high: float) -> bool:
        """Whether the interval of B lies wholly outside a claim about the ratio: from ``low`` to ``high``."""
        interval = None if self.rests_on == "b" or self.is_predicted else self.b.interval
        return interval is not None and (interval.high < low or interval.low > high)

    @property
    def is_agreed(self) -> bool:
        return self.agreement is Agreement.AGREE

    @property
    def is_same_work(self) -> bool:
        return self.work == self.baseline_work

    @property
    def ratio_of(self) -> str:
        """What the ratios compare."""
        return "total" if self.is_same_work else "generated token"


def why_apart(compared: Comparison) -> str:
    """Why a comparison has no answer, in words: what its channels say; empty where it may have one."""
    if not compared.agreement.is_missing or (pair := compared.asked) is None:
        return ""
    names = [BASIS_NAMES[basis] for basis in pair.bases]
    return (
        f"{names[0]} gives a cost ratio of {pair.answers.ratio:.4f} and {names[1]} {pair.asked.ratio:.4f}; the "
        f"baseline's own lie {abs(pair.residual_share):.4f} of the latter apart"
    )


def _with_interval(pair: Channels, basis: Basis, interval: Interval | None) -> Channels:
    if pair.bases[0] == basis:
        return replace(pair, answers=pair.answers._replace(interval=interval))
    return replace(pair, asked=pair.asked._replace(interval=interval)) if pair.bases[1] == basis else pair


def block_of(run: RunFigures) -> tuple[int, str]:
    """Runs of a condition and its baseline with equal blocks are paired: one plan draw on one device."""
    return run.replicate, run.device


def compare(  # noqa: PLR0913  # an option each
    baseline: str,
    own: Sequence[RunFigures],
    base: Sequence[RunFigures],
    *,
    is_predicted: bool = False,
    family: Family = ALONE,
    basis: Basis = "a",
) -> Comparison | None:
    """Compare valid runs of a condition with those of its baseline, over the replicates that both have.

    family: how each interval is made, and which of them hold together. basis: what is to answer; where a run does not
    show it, the next of A, S and B that is there. None without a common replicate, or where one of them cost or did
    nothing.
    """
    pairs = sorted(paired(own, base, block_of), key=lambda pair: pair[0].replicate)
    sides = ([run for run, _ in pairs], [run for _, run in pairs])
    work, baseline_work = map(work_of, sides)
    if not pairs or not all(work) or not all(baseline_work):
        return None
    a, s, b = (_channel_ratio(sides, basis, family) for basis in BASES)
    if b is None:
        return None
    there: dict[Basis, ChannelRatio] = {
        name: ratio for name, ratio in zip(BASES, (a, s, b), strict=True) if ratio is not None
    }
    rests_on = basis if basis in there else next(iter(there))
    priced = [[run.a for run in side if run.a is not None] for side in sides]
    witness = None if rests_on == "a" or a is None else _channels(sides, (rests_on, "a"), there, family)
    return Comparison(
        baseline=baseline,
        replicates=tuple(run.replicate for run in sides[0]),
        a=a,
        s=s,
        b=b,
        rests_on=rests_on,
        work=work,
        baseline_work=baseline_work,
        channels=None if rests_on == "b" else _channels(sides, (rests_on, "b"), there, family),
        witness=witness if witness is not None and abs(witness.residual_share) <= MAX_TAU else None,
        cause=cause_of(*priced) if rests_on == "a" else None,
        is_predicted=is_predicted,
        is_repeated=are_repeats(sides[0]),
    )


def _channels(
    sides: Sides, bases: tuple[Basis, Basis], ratios: Mapping[Basis, ChannelRatio], family: Family
) -> Channels:
    """What two channels of the same blocks say of each other."""
    one, other = (ratios[basis] for basis in bases)
    costs = one.costs if bases[0] == "a" else other.costs
    of_gap = _log_ratio([of_a - of_b for of_a, of_b in zip(one.values, other.values, strict=True)], sides[0], costs)
    of_base, of_own = (_residual(runs, bases, family) for runs in (sides[1], sides[0]))
    gap, estimate = family.interval(of_gap), of_gap.estimate
    base = [tuple(run.cost_ns(basis) or 0 for basis in bases) for run in sides[1]]
    one_ns, other_ns = map(sum, zip(*base, strict=True))
    return Channels(
        answers=RatioWithInterval(one.ratio, one.interval),
        asked=RatioWithInterval(other.ratio, other.interval),
        gap=gap,
        noticed=None if gap is None or estimate is None else least_noticed(gap, estimate),
        residuals=None if of_base is None or of_own is None else (of_base, of_own),
        residual_share=residual_ns(other_ns, one_ns) / other_ns,
        tau=agreement_tolerance(one_ns, other_ns),
        bases=bases,
        is_few=of_gap.blocks is None,
    )


def _log_ratio(values: Sequence[float], runs: Sequence[RunFigures], costs: CostError) -> Ratio:
    """A ratio by one log a block."""
    blocks = estimate_of(values, runs)
    return Ratio(ratio=math.exp(sum(values) / len(values)), values=tuple(values), blocks=blocks, costs=costs)


def _residual(runs: Sequence[RunFigures], bases: tuple[Basis, Basis], family: Family) -> Interval | None:
    """ln(other / one) of the channels of one side, with what its costs leave unknown."""
    one_ns, other_ns = ([run.cost_ns(basis) or 0 for run in runs] for basis in bases)
    sign = -1.0 if bases[0] == "a" else 1.0
    priced = [run.a for run in runs if run.a is not None] if "a" in bases else []
    costs = cost_error(CostSide(priced, sign)) if priced else NO_ERROR
    return family.interval(_log_ratio(log_mean_values(other_ns, one_ns).tolist(), runs, costs), float)


def _channel_ratio(sides: Sides, channel: Basis, family: Family) -> ChannelRatio | None:
    """None where the cost of a run is unknown, or all cost nothing."""
    costs_ns = [[run.cost_ns(channel) for run in runs] for runs in sides]
    own_ns, base_ns = ([cost for cost in costs if cost is not None] for costs in costs_ns)
    if costs_ns != [own_ns, base_ns] or not any(own_ns) or not any(base_ns):
        return None
    own_work, base_work = map(work_of, sides)
    is_same_work = own_work == base_work
    own_units, base_units = ([1 if is_same_work else run.generated_tokens for run in runs] for runs in sides)
    blocks = tuple(map(BlockCosts, own_ns, base_ns, own_units, base_units))
    priced = _priced(sides) if channel == "a" else ()
    found = paired_ratio(blocks, sides[0], _costs_of(priced))
    effect = ratio_effect(*logs_of_blocks(blocks), sides[0])
    return ChannelRatio(
        ratio=found.ratio,
        request_ratio=sum(own_ns) / sum(base_ns) * base_work.num_requests / own_work.num_requests,
        values=found.values,
        of_blocks=blocks,
        blocks=found.blocks,
        costs=found.costs,
        interval=family.interval(found),
        devices=effect and effect.changed(lambda of_devices: with_cost_error(of_devices, found.costs)),
        priced=priced,
    )


def _priced(sides: Sides) -> tuple[tuple[ChannelA, ChannelA], ...]:
    """The modelled times of each block, where every run has one."""
    pairs = zip(*sides, strict=True)
    return tuple((own.a, base.a) for own, base in pairs if own.a is not None and base.a is not None)


def _costs_of(priced: Sequence[tuple[ChannelA, ChannelA]]) -> CostError:
    """What the costs leave unknown of the log ratio of sums."""
    own, base = zip(*priced, strict=True) if priced else ((), ())
    return cost_error(CostSide(own, 1.0), CostSide(base, -1.0)) if priced else NO_ERROR


def work_of(runs: Sequence[RunFigures]) -> Work:
    """What these runs were asked for and gave, summed."""
    return Work(
        sum(run.num_requests for run in runs),
        sum(run.prompt_tokens for run in runs),
        sum(run.generated_tokens for run in runs),
    )


def check_speeds(runs: Sequence[RunFigures]) -> Iterator[Finding]:
    """Conditions whose runs took different times for the decode steps that cost the same by the model."""
    valid = [run for run in runs if run.is_valid and run.parts is not None]
    for condition, group in grouped(valid, lambda run: run.condition).items():
        speeds = [run.parts.decode.speed for run in group if run.parts is not None]
        known = [speed for speed in speeds if speed]
        if len(known) < 2 or max(known) / min(known) - 1 <= MAX_DRIFT:
            continue
        each = ", ".join(
            f"{speed:.2f} (run {run.replicate})" for run, speed in zip(group, speeds, strict=True) if speed
        )
        yield finding(
            "speed-differs",
            f"{condition}: decode steps took {each} of their modelled time, so the slowest run "
            f"{100 * (max(known) / min(known) - 1):.0f} % more than the fastest",
        )


def check_independence(compared: Mapping[str, Comparison | None]) -> Iterator[Finding]:
    """Comparisons, by condition, whose block differences follow each other: intervals count them as independent."""
    for condition, comparison in compared.items():
        values = () if comparison is None else comparison.main.values
        if len(values) < MIN_FOLLOWING or (found := lag_one(values)) <= MOST_FOLLOWING:
            continue
        yield finding(
            "blocks-follow",
            f"{condition}: the differences of successive blocks correlate with {found:.2f} over {len(values)} blocks, "
            "and intervals count them as independent, so they are too narrow",
        )


def check_channels(runs: Sequence[RunFigures]) -> Iterator[Finding]:
    """What the channels of single runs say against their cost model, or about what it was fitted on."""
    yield from check_speeds(runs)
    for run in runs:
        r_ns = run.r_ns if run.is_valid and run.r_ns is not None else 0
        if r_ns < 0:
            yield finding("residual-negative", f"{run.label}: channel A exceeds channel B by {-r_ns / 1e9:.6f} s")
        if r_ns > MAX_TAU * run.b_ns:
            yield finding(
                "channels-apart",
                f"{run.label}: channel A explains {(run.b_ns - r_ns) / 1e9:.3f} s of "
                f"{run.b_ns / 1e9:.3f} s that channel B saw; r/B = {r_ns / run.b_ns:.3f}, above {MAX_TAU:g}",
            )
        if run.a is not None and run.a.context_problem:
            yield finding(
                "context-unknown", f"{run.label}: steps were priced without their contexts ({run.a.context_problem})"
            )
        if run.a is not None and (run.a.num_extrapolated_steps or run.a.num_extrapolated_prefills):
            yield finding(
                "cost-extrapolated",
                f"{run.label}: {run.a.num_extrapolated_steps} steps and {run.a.num_extrapolated_prefills} "
                "prefills lie outside what the cost model was fitted on",
            )
