"""Repeats of the same input, and adjacent levels of one factor: how far the channels move.

Pairs of repeats share runs and are no independent samples.
Definitions: docs/method.md, "Decisions"; Tables S1 and S9.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from harness.analysis.catalogue import Analysis, AnalysisOutput, of_tables
from harness.analysis.catalogue.costs import TAU0_GRID, channels_s, cost_table
from harness.analysis.method import decide, stats
from harness.analysis.method.stats import Interval
from harness.analysis.method.verdicts import Contrast, ExperimentRuns, adjacent_ratios
from harness.table import Cell, Table, table_of

INTERVAL_SEED = 20260912


def repeats_table(experiment: ExperimentRuns, sum_size: int = 3) -> Table:
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


def repeat_sensitivity_table(experiment: ExperimentRuns, sum_size: int = 3) -> Table:
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


def survival_variation_table(experiment: ExperimentRuns) -> Table:
    """How many re-arrivals found their KV in each repeat of the same input."""
    rows: list[dict[str, Cell]] = []
    for condition in experiment.runs:
        counts = Counter(run.reuse.num_reused for run in experiment.figures(condition))
        known = sorted(reused for reused in counts if reused is not None)
        rows.extend({"condition": condition, "reused": reused, "runs": counts[reused]} for reused in known)
        if None in counts:
            rows.append({"condition": condition, "reused": None, "runs": counts[None]})
    return table_of("survival by repeat", "Runs by number of re-arrivals that reused; the same input every time", rows)


def saturation_table(experiment: ExperimentRuns) -> Table:
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
                    "reused": own.reuse.share_text,
                    "share_of_top_bucket": steps / own.num_steps if own.num_steps else None,
                }
            )
    return table_of("saturation by replicate", "Cost ratios to the baseline of the same N and replicate", rows)


def adjacent_table(experiment: ExperimentRuns) -> tuple[Table, dict[str, Interval]]:
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
        plain = stats.bootstrap_interval(pooled, stats.Bootstrap(INTERVAL_SEED), unit=unit)
        name = f"slots{smaller} -> slots{larger}"
        intervals[f"median {name}"] = plain
        intervals[f"median {name}, by N"] = stats.stratified_bootstrap_interval(
            by_stratum, stats.Bootstrap(INTERVAL_SEED), unit=unit
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


def _saturation(experiment: ExperimentRuns) -> AnalysisOutput:
    adjacent, intervals = adjacent_table(experiment)
    tables = (adjacent, saturation_table(experiment), cost_table(experiment))
    return AnalysisOutput(tables, intervals, ("an operational classification, no equivalence test",))


ANALYSES = (
    Analysis(
        "no-treatment",
        "how far both channels move between runs of the same input (Table S1)",
        of_tables(
            repeats_table,
            repeat_sensitivity_table,
            survival_variation_table,
            notes=("pairs share runs: they are not counted as independent samples",),
        ),
    ),
    Analysis("saturation", "from which number of slots on more of them change nothing (Table S9)", _saturation),
)
