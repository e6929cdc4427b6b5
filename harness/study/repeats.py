"""No-treatment repeats and per-replicate decompositions: how far channels move when nothing, or one thing, is changed.

Pairs of repeats share runs and are no independent samples. A replicate's row shows the composition of a sum, it is no
uncertainty interval. Next: ``catalogue`` names these analyses; ``verdicts`` decides on the sums.
Definitions: docs/method.md, "Decisions"; Tables S1, S8, S9.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from harness.analysis.method import decide, stats
from harness.analysis.method.devices import log_ratio_interval
from harness.analysis.method.figures import RunFigures
from harness.analysis.method.stats import Interval
from harness.analysis.method.tabular import Cell, ResultTable, table_of
from harness.analysis.method.verdicts import Contrast, ExperimentRuns, adjacent_ratios, costs_of
from harness.clock import NS_PER_S

TAU0_GRID = tuple(k / 1000 for k in range(5, 55, 5))
INTERVAL_SEED = 20260912


def channels_s(runs: Sequence[RunFigures]) -> tuple[list[float], list[float]]:
    """Channels A and B of every run with a step log, seconds."""
    observed = [run for run in runs if run.a is not None]
    return [run.a.total_ns / NS_PER_S for run in observed if run.a], [run.b_ns / NS_PER_S for run in observed]


def repeats_table(experiment: ExperimentRuns, sum_size: int = 3) -> ResultTable:
    """Table S1: |A_i/A_j - B_i/B_j| over single pairs and over pairs of disjoint sums, and tau."""
    rows: list[dict[str, Cell]] = []
    for condition in experiment.runs:
        a_s, b_s = channels_s(experiment.figures(condition))
        units = {
            "single run pair": stats.single_pair_differences(a_s, b_s),
            f"{sum_size}-run summed pair": stats.disjoint_sum_pair_differences(a_s, b_s, sum_size).tolist(),
        }
        for unit, values in units.items():
            if not values:
                continue
            one = stats.spread(values)
            rows.append(
                {
                    "unit": unit,
                    "condition": condition,
                    "N": experiment.runs[condition][0].workload.num_sessions,
                    "pairs": one.num_values,
                    "median": one.median,
                    "q95": one.q95,
                    "max": one.maximum,
                    "tau": decide.agreement_tolerance_s(sum(a_s), sum(b_s), 0.02, is_revised=True),
                    "cv_A": stats.coefficient_of_variation(a_s),
                    "cv_B": stats.coefficient_of_variation(b_s),
                }
            )
    return table_of("repeats", "Channel ratio differences between runs of the same input; pairs share runs", rows)


def repeat_sensitivity_table(experiment: ExperimentRuns, sum_size: int = 3) -> ResultTable:
    """What other defaults of the tolerance would cover of the same distributions (S1): tau0 from 0.005 to 0.05.

    Where r/B of the runs lies above tau0 it is the tolerance, and tau0 changes nothing.
    """
    rows: list[dict[str, Cell]] = []
    for condition in experiment.runs:
        a_s, b_s = channels_s(experiment.figures(condition))
        singles = stats.single_pair_differences(a_s, b_s)
        sums = stats.disjoint_sum_pair_differences(a_s, b_s, sum_size).tolist()
        if not singles or not sums:
            continue
        for tau0 in TAU0_GRID:
            tau = decide.agreement_tolerance_s(sum(a_s), sum(b_s), tau0, is_revised=True)
            rows.append(
                {
                    "condition": condition,
                    "tau0": tau0,
                    "tau": tau,
                    "single_pairs_within": sum(value <= tau for value in singles) / len(singles),
                    "sums_within": sum(value <= tau for value in sums) / len(sums),
                    "covers_q95_of_sums": stats.spread(sums).q95 <= tau,
                }
            )
    return table_of("tau sensitivity", "Share of pairs within tau = max(tau0, r / B of these runs)", rows)


def survival_variation_table(experiment: ExperimentRuns) -> ResultTable:
    """How many re-arrivals found their KV in each repeat of the same input."""
    rows: list[dict[str, Cell]] = []
    for condition in experiment.runs:
        counts = [run.reuse.num_reused for run in experiment.figures(condition)]
        rows.extend(
            {"condition": condition, "reused": reused, "runs": counts.count(reused)} for reused in sorted(set(counts))
        )
    return table_of("survival by repeat", "Runs by number of re-arrivals that reused; the same input every time", rows)


def decomposition_table(experiment: ExperimentRuns) -> ResultTable:
    """Table S8: both channels of every replicate and of their sum, ratios, channel difference and savings."""
    rows: list[dict[str, Cell]] = []
    for condition, baseline in experiment.compared():
        pairs = experiment.pairs(condition, baseline)
        parts = [(str(own.replicate), [own], [base]) for own, base in pairs]
        if pairs:
            parts.append(("sum", [own for own, _ in pairs], [base for _, base in pairs]))
        for replicate, own, base in parts:
            (a_s, b_s), (base_a_s, base_b_s) = (tuple(map(sum, channels_s(runs))) for runs in (own, base))
            ratio_a, ratio_b = a_s / base_a_s, b_s / base_b_s
            rows.append(
                {
                    "condition": condition,
                    "N": experiment.runs[condition][0].workload.num_sessions,
                    "replicate": replicate,
                    "baseline_A_s": base_a_s,
                    "changed_A_s": a_s,
                    "ratio_A": ratio_a,
                    "ratio_B": ratio_b,
                    "difference": abs(ratio_a - ratio_b),
                    "saving_A": 1 - ratio_a,
                    "saving_B": 1 - ratio_b,
                    "reused": sum(run.reuse.num_reused for run in own),
                    "rearrivals": sum(run.reuse.num_rearrivals for run in own),
                }
            )
    return table_of("decomposition", "The sum decides; a replicate shows its composition, it is no interval", rows)


def prediction_table(experiment: ExperimentRuns) -> ResultTable:
    """Table IX: predicted and observed cost ratio, error e, and reuse as predicted and as observed, with intervals."""
    rows: list[dict[str, Cell]] = []
    intervals = ratio_intervals(experiment)
    for condition, baseline in experiment.compared():
        costs = costs_of(experiment, condition, baseline)
        if isinstance(costs, str):
            continue
        predicted, observed = costs.predicted_ratio, costs.ratio_a
        replicates = [own.replicate for own, _ in experiment.pairs(condition, baseline)]
        promised = [experiment.predictions[condition][k] for k in replicates]
        among = intervals.get(f"{condition} / {baseline}, channel A")
        rows.append(
            {
                "condition": condition,
                "predicted_ratio": predicted,
                "predicted_low": None if costs.predicted_interval is None else costs.predicted_interval.low,
                "predicted_high": None if costs.predicted_interval is None else costs.predicted_interval.high,
                "observed_ratio_A": observed,
                "observed_low": None if among is None else among.low,
                "observed_high": None if among is None else among.high,
                "error": observed - predicted,
                "predicted_reuse": sum(one.num_reused for one in promised),
                "observed_reuse": sum(own.reuse.num_reused for own, _ in experiment.pairs(condition, baseline)),
                "has_filled_in_buckets": any(one.filled_in_buckets for one in promised),
            }
        )
    caption = (
        "Cost of the condition over its baseline's, predicted (mean and interval of draws of these plans) and measured "
        "(ratio of sums; t interval of replicates, from three on); error > 0: the prediction promised too "
        "much; has_filled_in_buckets: the cost of some bucket was not measured"
    )
    return table_of("predictions", caption, rows)


def sensitivity_table(experiment: ExperimentRuns) -> ResultTable:
    """Channel agreement of every comparison under other defaults of the tolerance (S1)."""
    rows: list[dict[str, Cell]] = []
    for condition, baseline in experiment.compared():
        costs = costs_of(experiment, condition, baseline)
        if isinstance(costs, str):
            continue
        for one in decide.tau_sensitivity(costs, TAU0_GRID):
            rows.append({"condition": condition, "tau0": one.tau0, "tau": one.tau, "is_agreed": one.is_agreed})
    return table_of("tau sensitivity", "tau = max(tau0, r / B of the baseline)", rows)


def ratio_intervals(experiment: ExperimentRuns) -> dict[str, Interval]:
    """t interval of every mean log cost ratio over its replicates; none below three."""
    found: dict[str, Interval] = {}
    for condition, baseline in experiment.compared():
        pairs = experiment.pairs(condition, baseline)
        runs = [run for run, _ in pairs]
        own, _ = channels_s(runs)
        base, _ = channels_s([run for _, run in pairs])
        if (interval := log_ratio_interval(own, base, runs)) is not None:
            found[f"{condition} / {baseline}, channel A"] = interval
    return found


def saturation_table(experiment: ExperimentRuns) -> ResultTable:
    """Table S9: ratios to the baseline and reuse by stratum, replicate and level; and how much the top bucket ran."""
    rows: list[dict[str, Cell]] = []
    for condition, baseline in experiment.compared():
        top = experiment.runs[condition][0].server.decode_buckets[-1] if experiment.runs.get(condition) else 0
        for own, base in experiment.pairs(condition, baseline):
            steps = sum(count for (_n, b), count in own.steps_by_n_b.items() if b == top)
            a_ratio = own.a.total_ns / base.a.total_ns if own.a is not None and base.a is not None else None
            rows.append(
                {
                    "condition": condition,
                    "replicate": own.replicate,
                    "ratio_A": a_ratio,
                    "ratio_B": own.b_ns / base.b_ns,
                    "reused": f"{own.reuse.num_reused}/{own.reuse.num_rearrivals}",
                    "share_of_top_bucket": steps / own.num_steps if own.num_steps else None,
                }
            )
    return table_of("saturation by replicate", "Cost ratios to the baseline of the same N and replicate", rows)


def adjacent_table(experiment: ExperimentRuns) -> tuple[ResultTable, dict[str, Interval]]:
    """Ratios between adjacent slot counts, pooled and stratified by N, with bootstrap intervals of the median.

    Slot counts: the values of the factor ``slots`` that conditions other than baselines have.
    """
    contrast = Contrast("slots", ("N",))
    changed = (experiment.factors[condition].get("slots") for condition, _baseline in experiment.compared())
    levels = sorted({value for value in changed if isinstance(value, int)})
    rows: list[dict[str, Cell]] = []
    intervals: dict[str, Interval] = {}
    for smaller, larger in pairwise(levels):
        every = adjacent_ratios(experiment, contrast, smaller, larger)
        by_stratum = {stratum: ratios for stratum, ratios in every.items() if ratios}
        pooled = [ratio for ratios in by_stratum.values() for ratio in ratios]
        if not pooled:
            continue
        unit = "N x replicate comparisons"
        plain = stats.bootstrap_interval(pooled, seed=INTERVAL_SEED, unit=unit)
        name = f"slots{smaller} -> slots{larger}"
        intervals[f"median {name}"] = plain
        intervals[f"median {name}, by N"] = stats.stratified_bootstrap_interval(
            by_stratum, seed=INTERVAL_SEED, unit=unit
        )
        row: dict[str, Cell] = {
            "pair": name,
            "comparisons": len(pooled),
            "median": plain.estimate,
            "low": plain.low,
            "high": plain.high,
            "width": plain.width,
        }
        rows.append(row | {f"median_{stratum}": stats.median(values) for stratum, values in by_stratum.items()})
    return table_of("adjacent levels", "Cost ratio between adjacent slot counts", rows), intervals
