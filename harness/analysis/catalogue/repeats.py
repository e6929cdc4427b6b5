"""Repeats of the same input, and adjacent levels of one factor: how far the channels move.

Pairs of repeats share runs and are no independent samples.
Definitions: docs/method.md, "Decisions"; Tables S1 and S9.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import NamedTuple

from harness.analysis import stats
from harness.analysis.catalogue import Analysis, AnalysisOutput, Rows, of_tables, table
from harness.analysis.catalogue.costs import TAU0_GRID, cost_table
from harness.analysis.decisions import decide
from harness.analysis.decisions.verdicts import Contrast, ExperimentRuns, adjacent_ratios, channels_s
from harness.analysis.stats import Interval, ratio
from harness.table import Cell, Table, table_of

INTERVAL_SEED = 20260912
SUM_SIZE = 3


class _Repeats(NamedTuple):
    """Both channels of the runs of a condition, seconds, and how far they differ from pair to pair."""

    a_s: list[float]
    b_s: list[float]
    singles: list[float]
    sums: list[float]

    @classmethod
    def of(cls, experiment: ExperimentRuns, condition: str) -> _Repeats:
        a_s, b_s = channels_s(experiment.figures(condition))
        return cls(a_s, b_s, *(stats.disjoint_sum_pair_differences(a_s, b_s, size).tolist() for size in (1, SUM_SIZE)))

    def tolerance(self, tau0: float) -> float:
        return decide.agreement_tolerance_s(sum(self.a_s), sum(self.b_s), tau0)


@table("repeats", "Channel ratio differences between runs of the same input; pairs share runs")
def repeats_table(experiment: ExperimentRuns) -> Rows:
    """Table S1: |A_i/A_j - B_i/B_j| over single pairs and over pairs of disjoint sums, and tau."""
    for condition in experiment.runs:
        repeats = _Repeats.of(experiment, condition)
        units = {"single run pair": repeats.singles, f"{SUM_SIZE}-run summed pair": repeats.sums}
        for unit, spread in ((unit, stats.spread(values)) for unit, values in units.items() if values):
            yield {
                "unit": unit,
                "condition": condition,
                "N": experiment.runs[condition][0].workload.num_sessions,
                "pairs": spread.num_values,
                "median": spread.median,
                "q95": spread.q95,
                "max": spread.maximum,
                "tau": repeats.tolerance(0.02),
                "cv_A": stats.coefficient_of_variation(repeats.a_s),
                "cv_B": stats.coefficient_of_variation(repeats.b_s),
            }


@table("tau sensitivity", "Share of pairs within tau = max(tau0, r / B of these runs)")
def repeat_sensitivity_table(experiment: ExperimentRuns) -> Rows:
    """What other defaults of the tolerance would cover of the same distributions (S1): tau0 from 0.005 to 0.05.

    Where r/B of the runs lies above tau0 it is the tolerance, and tau0 changes nothing.
    """
    for condition in experiment.runs:
        repeats = _Repeats.of(experiment, condition)
        if not repeats.sums:
            continue
        for tau0 in TAU0_GRID:
            tau = repeats.tolerance(tau0)
            yield {
                "condition": condition,
                "tau0": tau0,
                "tau": tau,
                "single_pairs_within": sum(value <= tau for value in repeats.singles) / len(repeats.singles),
                "sums_within": sum(value <= tau for value in repeats.sums) / len(repeats.sums),
                "covers_q95_of_sums": stats.spread(repeats.sums).q95 <= tau,
            }


@table("survival by repeat", "Runs by number of re-arrivals that reused; the same input every time")
def survival_variation_table(experiment: ExperimentRuns) -> Rows:
    """How many re-arrivals found their KV in each repeat of the same input."""
    for condition in experiment.runs:
        counts = Counter(run.reuse.num_reused for run in experiment.figures(condition))
        # Those with an unknown number come last.
        for reused in sorted(counts, key=lambda reused: (reused is None, reused)):
            yield {"condition": condition, "reused": reused, "runs": counts[reused]}


@table("saturation by replicate", "Cost ratios to the baseline of the same N and replicate")
def saturation_table(experiment: ExperimentRuns) -> Rows:
    """Table S9: ratios to the baseline and reuse by stratum, replicate and level; and how much the top bucket ran."""
    for condition, baseline in experiment.compared():
        top = experiment.runs[condition][0].server.decode_buckets[-1] if experiment.runs.get(condition) else 0
        for own, base in experiment.pairs(condition, baseline):
            steps = sum(count for (_n, b), count in own.steps_by_n_b.items() if b == top)
            yield {
                "condition": condition,
                "replicate": own.replicate,
                "ratio_A": ratio(own.a_ns, base.a_ns),
                "ratio_B": own.b_ns / base.b_ns,
                "reused": own.reuse.share_text,
                "share_of_top_bucket": ratio(steps, own.num_steps),
            }


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
        pooled = [value for ratios in by_stratum.values() for value in ratios]
        if not pooled:
            continue
        name, bootstrap = f"slots{smaller} -> slots{larger}", stats.Bootstrap(INTERVAL_SEED)
        plain, stratified = (
            stats.stratified_bootstrap_interval(strata, bootstrap, unit="N x replicate comparisons")
            for strata in ({"": pooled}, by_stratum)
        )
        intervals |= {f"median {name}": plain, f"median {name}, by N": stratified}
        rows.append(
            {
                "pair": name,
                "comparisons": len(pooled),
                "median": plain.estimate,
                "low": plain.low,
                "high": plain.high,
                "width": plain.width,
                **{f"median_{stratum}": stats.median(values) for stratum, values in by_stratum.items()},
            }
        )
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
