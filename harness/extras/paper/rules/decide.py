"""The paper's rules applied to numbers: blocks of padding, ratios of adjacent levels, sessions of artifacts, repeats.

Pure functions. Definitions: docs/reference/method-comparisons.md, "Decisions".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from harness.analysis import stats
from harness.analysis.cost.padding import Padding, total_padding
from harness.analysis.cost.reconstruct import ROUNDING
from harness.extras.paper.rules import (
    DirectionRule,
    NoTreatmentRule,
    OccupancyPredictionRule,
    RecompilationRule,
    SaturationRule,
    TimesSource,
)
from harness.extras.paper.statistics import direction, disjoint_sum_pair_differences, occupancy_ratio, spread
from harness.judge.decisions.decide import Decision, Number, Outcome, agreement_tolerance_s, of_prediction, same_side


class PaddingPair(NamedTuple):
    """Padding of one input plan with waits and without."""

    with_waits: Padding
    without_waits: Padding

    @property
    def occupancy(self) -> float:
        """R of this block; 1 where nothing was decoded."""
        with_p, without_p = self.with_waits.ratio, self.without_waits.ratio
        return 1.0 if with_p is None or without_p is None else occupancy_ratio(with_p, without_p)


def pooled(blocks: Sequence[PaddingPair]) -> PaddingPair:
    """Numerators and denominators summed before dividing."""
    return PaddingPair(
        total_padding(block.with_waits for block in blocks), total_padding(block.without_waits for block in blocks)
    )


def decide_occupancies(rule: DirectionRule, subject: str, occupancies: Sequence[float], pooled_r: float) -> Decision:
    """CONFIRMED when enough blocks and the pooled ratio lie outside the band on the same side, else NOT CONFIRMED."""
    places = [direction(occupancy, rule.band) for occupancy in occupancies]
    above, below = places.count("above"), places.count("below")
    numbers: dict[str, Number] = {f"R_block{k}": occupancy for k, occupancy in enumerate(occupancies)}
    numbers |= {"R_pooled": pooled_r, "num_above": above, "num_below": below, "num_inside": places.count("inside")}
    numbers |= {"band_low": rule.band[0], "band_high": rule.band[1], "min_blocks_outside": rule.min_blocks_outside}
    if len(occupancies) < rule.num_blocks:
        reason = f"{len(occupancies)} blocks, the rule needs {rule.num_blocks}"
        return Decision(rule.name, subject, Outcome.WITHHELD, reason, numbers=numbers)
    side = "above" if above >= below else "below"
    is_confirmed = max(above, below) >= rule.min_blocks_outside and direction(pooled_r, rule.band) == side
    reason = f"{above} blocks above, {below} below, pooled R {pooled_r:.4f} {direction(pooled_r, rule.band)} the band"
    label = f"CONFIRMED {side}" if is_confirmed else "NOT CONFIRMED"
    return Decision(rule.name, subject, Outcome.of(is_confirmed), reason, label, numbers)


def decide_occupancy_prediction(
    rule: OccupancyPredictionRule, subject: str, predicted_r: float, measured_r: float
) -> Decision:
    """|R_hat - R| small enough and both on the same side of 1, or both inside the band (S4)."""
    error = measured_r - predicted_r
    is_same_side = same_side(predicted_r, measured_r, rule.equivalence_band)
    is_met = abs(error) <= rule.max_error + ROUNDING and is_same_side
    numbers: dict[str, Number] = {
        "predicted_R": predicted_r,
        "measured_R": measured_r,
        "error": error,
        "max_error": rule.max_error,
        "is_same_side": is_same_side,
    }
    reason = f"predicted R {predicted_r:.4f}, found {measured_r:.4f}"
    sentence = of_prediction(subject, reason, "pads less")
    return Decision(rule.name, subject, Outcome.of(is_met), reason, "", numbers, sentence=sentence)


def median_intervals(
    ratios: Mapping[str, Sequence[float]], bootstrap: stats.Bootstrap
) -> tuple[stats.Interval, stats.Interval]:
    """Of the median ratio between adjacent levels, by stratum (N): of all ratios, and drawn within each stratum."""
    pooled_ratios = [ratio for values in ratios.values() for ratio in values]
    unit = "N x replicate comparisons"
    return (
        stats.bootstrap_interval(pooled_ratios, bootstrap, unit=unit),
        stats.bootstrap_interval(ratios, bootstrap, unit=unit),
    )


def decide_saturation(rule: SaturationRule, subject: str, ratios: Mapping[str, Sequence[float]]) -> Decision:
    """SATURATED when the bootstrap interval of the median ratio contains 1 and is narrow enough.

    ratios: by stratum (N), the cost ratio between the adjacent levels in each replicate.
    """
    plain, by_stratum = median_intervals(ratios, stats.Bootstrap(rule.seed, rule.resamples, rule.confidence))
    interval = by_stratum if rule.is_stratified else plain
    is_saturated = interval.contains(1.0) and interval.width <= rule.max_width + ROUNDING
    numbers: dict[str, Number] = {
        "median": interval.estimate,
        **{name: getattr(interval, name) for name in ("low", "high", "width")},
        "max_width": rule.max_width,
        "num_comparisons": interval.num_units,
        "seed": rule.seed,
    }
    label = "SATURATED" if is_saturated else "NOT SATURATED"
    intervals = {"median": plain, "median_stratified": by_stratum}
    outcome, reason = Outcome.of(is_saturated), f"median {interval}"
    return Decision(rule.name, subject, outcome, reason, label, numbers, intervals)


def decide_recompilation(
    rule: RecompilationRule,
    subject: str,
    sessions_ms: tuple[Sequence[float], Sequence[float]],
    null_ms: Sequence[float],
    source: TimesSource = "steps",
) -> Decision:
    """WITHIN when the difference of medians is at most the quantile of same-artifact session-pair differences.

    sessions_ms: one time per session of either artifact. null_ms: pooled pair differences of all artifacts. source:
    whose times they are.
    """
    median_x, median_y = map(stats.median, sessions_ms)
    difference, limit = abs(median_x - median_y), stats.quantile(null_ms, rule.null_quantile)
    # The paper compares what it prints: both figures at the resolution of the recording.
    step = rule.resolution_ms
    shown, shown_limit = (round(value / step) * step if step else value for value in (difference, limit))
    is_within = shown <= shown_limit + ROUNDING
    numbers: dict[str, Number] = {
        "median_x_ms": median_x,
        "median_y_ms": median_y,
        "difference_ms": difference,
        "threshold_ms": limit,
        "num_null_pairs": len(null_ms),
        "null_median_ms": stats.median(null_ms),
        "null_max_ms": max(null_ms),
    }
    whose = "model p50 of the server's report" if source == "reported" else "whole step periods"
    reason = f"{whose}: medians {median_x:.3f} and {median_y:.3f} ms differ by {difference:.3f}, threshold {limit:.3f}"
    reason += nothing_varied(null_ms)
    label = "WITHIN" if is_within else "OUTSIDE"
    return Decision(rule.name, subject, Outcome.of(is_within), reason, label, numbers)


def decide_no_treatment(rule: NoTreatmentRule, subject: str, a_s: Sequence[float], b_s: Sequence[float]) -> Decision:
    """COVERED when tau is at least the 95th percentile of channel differences of disjoint sums (the decision unit).

    a_s, b_s: channels of runs of the same input, in run order.
    """
    singles = spread(disjoint_sum_pair_differences(a_s, b_s, 1))
    sums = spread(disjoint_sum_pair_differences(a_s, b_s, rule.sum_size))
    tolerance = partial(agreement_tolerance_s, sum(a_s), sum(b_s))
    tau = tolerance(rule.tau0)
    is_covered = sums.q95 <= tau + ROUNDING
    numbers: dict[str, Number] = {"tau": tau, "num_runs": len(a_s)}
    for name, one in (("single", singles), ("sum", sums)):
        numbers |= {f"{name}_pairs": one.num_values, f"{name}_median": one.median}
        numbers |= {f"{name}_q95": one.q95, f"{name}_max": one.maximum}
    covering = (tau0 for tau0 in sorted(rule.tau0_grid) if sums.q95 <= tolerance(tau0) + ROUNDING)
    numbers["least_covering_tau0"] = next(covering, None)
    reason = f"q95 of {sums.num_values} pairs of {rule.sum_size}-run sums {sums.q95:.4f}, tau {tau:.4f}"
    reason += nothing_varied((singles.maximum, sums.maximum))
    label = "COVERED" if is_covered else "NOT COVERED"
    return Decision(rule.name, subject, Outcome.of(is_covered), reason, label, numbers)


def nothing_varied(differences: Iterable[float]) -> str:
    """The words beside a decision on a spread that is zero, as runs in virtual time have it; empty otherwise."""
    varied = any(difference > ROUNDING for difference in differences)
    return "" if varied else "; nothing varied between these runs, so this says nothing of a device that varies"
