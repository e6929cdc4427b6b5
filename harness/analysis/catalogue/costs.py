"""Tables of cost: sums of both channels, ratios to the baseline per replicate, predictions beside measurements.

Ratios are of sums over the replicates that both conditions have. A replicate's row shows the composition of a sum and
is no uncertainty interval.
Definitions: docs/method.md, "Decisions"; Tables IX and S8.
"""

from __future__ import annotations

from collections.abc import Sequence

from harness.analysis.catalogue import Analysis, of_tables
from harness.analysis.catalogue.reuse import ceilings_table, exceptions_table, formula_table, prefill_kinds_table
from harness.analysis.method import decide
from harness.analysis.method.answer import source_of, source_of_prediction
from harness.analysis.method.compare import compare
from harness.analysis.method.figures import RunFigures
from harness.analysis.method.padding import Padding
from harness.analysis.method.predictions import drawn_ratio, predicted_ratio
from harness.analysis.method.reuse import sum_or_none
from harness.analysis.method.stats import Interval
from harness.analysis.method.verdicts import ExperimentRuns, costs_of
from harness.clock import NS_PER_S
from harness.table import Cell, Table, table_of

TAU0_GRID = tuple(k / 1000 for k in range(5, 55, 5))


def decode_ns(runs: Sequence[RunFigures]) -> int:
    """Decode part of channel A, summed."""
    return sum(run.a.decode_ns for run in runs if run.a is not None)


def channels_s(runs: Sequence[RunFigures]) -> tuple[list[float], list[float]]:
    """Channels A and B of every run with a step log, seconds."""
    observed = [run for run in runs if run.a is not None]
    return [run.a.total_ns / NS_PER_S for run in observed if run.a], [run.b_ns / NS_PER_S for run in observed]


def cost_table(experiment: ExperimentRuns) -> Table:
    """One row per condition: sums of both channels, of W, of reuse; ratios to its baseline and their agreement."""
    rows: list[dict[str, Cell]] = []
    for condition in experiment.runs:
        baseline = experiment.baselines.get(condition, condition)
        pairs = experiment.seen_pairs(condition, baseline)
        own, base = [run for run, _ in pairs], [run for _, run in pairs]
        if not pairs:
            continue
        (a_s, b_s), (base_a_s, base_b_s) = _sum_s(own), _sum_s(base)
        tau = None if base_a_s is None else decide.agreement_tolerance_s(base_a_s, base_b_s, 0.02, is_revised=True)
        padding = Padding(sum(run.padding.padded_slots for run in own), sum(run.padding.bucket_slots for run in own))
        waiting_ns = sum_or_none(run.waiting_session_ns for run in own)
        rows.append(
            {
                "condition": condition,
                "baseline": baseline,
                "A_s": a_s,
                "B_s": b_s,
                "r_s": None if a_s is None else b_s - a_s,
                "ratio_A": _ratio(a_s, base_a_s),
                "ratio_B": _ratio(b_s, base_b_s),
                "tau": tau,
                "decode_ratio": decode_ns(own) / decode_ns(base) if decode_ns(base) else None,
                "p": padding.ratio,
                "reused": sum_or_none(run.reuse.num_reused for run in own),
                "rearrivals": sum(run.reuse.num_rearrivals for run in own),
                "reused_tokens": sum_or_none(run.reuse.reused_tokens for run in own),
                "computed_tokens": sum_or_none(run.computed_prefill_tokens for run in own),
                "W_session_s": None if waiting_ns is None else waiting_ns / NS_PER_S,
                "replicates": len(pairs),
            }
        )
    return table_of("costs", "Sums over replicates; every ratio is a ratio of sums to the named baseline", rows)


def _sum_s(runs: Sequence[RunFigures]) -> tuple[float | None, float]:
    """Channels A and B, summed, seconds; A is None where a run lacks it."""
    a_ns = sum_or_none(run.a_ns for run in runs)
    return None if a_ns is None else a_ns / NS_PER_S, sum(run.b_ns for run in runs) / NS_PER_S


def _ratio(cost: float | None, baseline_cost: float | None) -> float | None:
    return cost / baseline_cost if cost is not None and baseline_cost else None


def decomposition_table(experiment: ExperimentRuns) -> Table:
    """Table S8: both channels of every replicate and of their sum, ratios, channel difference and savings."""
    rows: list[dict[str, Cell]] = []
    for condition, baseline in experiment.compared():
        pairs = experiment.seen_pairs(condition, baseline)
        parts = [(str(own.replicate), [own], [base]) for own, base in pairs]
        if pairs:
            parts.append(("sum", [own for own, _ in pairs], [base for _, base in pairs]))
        for replicate, own, base in parts:
            (a_s, b_s), (base_a_s, base_b_s) = _sum_s(own), _sum_s(base)
            ratio_a, ratio_b = _ratio(a_s, base_a_s), _ratio(b_s, base_b_s)
            rows.append(
                {
                    "condition": condition,
                    "N": experiment.runs[condition][0].workload.num_sessions,
                    "replicate": replicate,
                    "baseline_A_s": base_a_s,
                    "changed_A_s": a_s,
                    "ratio_A": ratio_a,
                    "ratio_B": ratio_b,
                    "difference": None if ratio_a is None or ratio_b is None else abs(ratio_a - ratio_b),
                    "saving_A": None if ratio_a is None else 1 - ratio_a,
                    "saving_B": None if ratio_b is None else 1 - ratio_b,
                    "reused": sum_or_none(run.reuse.num_reused for run in own),
                    "rearrivals": sum(run.reuse.num_rearrivals for run in own),
                }
            )
    return table_of("decomposition", "The sum decides; a replicate shows its composition, it is no interval", rows)


def prediction_table(experiment: ExperimentRuns) -> Table:
    """Table IX: predicted and observed cost ratio, error e, and reuse as predicted and as observed, with intervals."""
    rows: list[dict[str, Cell]] = []
    for condition, baseline in experiment.compared():
        pairs = experiment.seen_pairs(condition, baseline)
        own, base = [experiment.predictions.get(name, {}) for name in (condition, baseline)]
        replicates = [run.replicate for run, _ in pairs]
        compared = compare(baseline, experiment.figures(condition), experiment.figures(baseline))
        if compared is None or any(k not in table for table in (own, base) for k in replicates):
            continue
        promised, base_promised = [own[k] for k in replicates], [base[k] for k in replicates]
        predicted = predicted_ratio(promised, base_promised)
        drawn, observed = drawn_ratio(promised, base_promised), compared.main
        rows.append(
            {
                "condition": condition,
                "prediction": source_of_prediction(promised).value,
                "observation": source_of(experiment.runs[condition][0].manifest.backend).value,
                "predicted_ratio": predicted,
                "predicted_low": None if drawn is None else drawn.low,
                "predicted_high": None if drawn is None else drawn.high,
                "observed_ratio_A": compared.ratio_a,
                "observed_ratio_B": compared.ratio_b,
                "observed_low": None if observed.interval is None else observed.interval.low,
                "observed_high": None if observed.interval is None else observed.interval.high,
                "error": observed.ratio - predicted,
                "predicted_reuse": sum(one.num_reused for one in promised),
                "observed_reuse": sum_or_none(run.reuse.num_reused for run, _ in pairs),
                "has_filled_in_buckets": any(one.filled_in_buckets for one in promised),
            }
        )
    caption = (
        "Cost of the condition over its baseline's, predicted (mean and interval of draws of these plans) and observed "
        "(ratio of sums; t interval of replicates, from three on; on channel A, or B where A is missing); error > 0: "
        "the prediction promised too much; has_filled_in_buckets: the cost of some bucket was not measured"
    )
    return table_of("predictions", caption, rows)


def sensitivity_table(experiment: ExperimentRuns) -> Table:
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
    """t interval of every cost ratio, on channel A where it is there; none below three replicates."""
    found: dict[str, Interval] = {}
    for condition, baseline in experiment.compared():
        compared = compare(baseline, experiment.figures(condition), experiment.figures(baseline))
        if compared is not None and compared.main.interval is not None:
            found[f"{condition} / {baseline}, channel {'A' if compared.a else 'B'}"] = compared.main.interval
    return found


ANALYSES = (
    Analysis(
        "general",
        "cost on both channels, ceilings of reuse, formula C against measurement",
        of_tables(
            cost_table,
            decomposition_table,
            ceilings_table,
            formula_table,
            exceptions_table,
            intervals=ratio_intervals,
        ),
    ),
    Analysis(
        "configuration",
        "predicted and measured cost ratios of configurations, and how far the channels agree",
        of_tables(
            prediction_table,
            decomposition_table,
            cost_table,
            prefill_kinds_table,
            sensitivity_table,
            intervals=ratio_intervals,
        ),
    ),
)
