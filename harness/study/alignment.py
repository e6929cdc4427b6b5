"""Alignment, bucket intervention and dispersion: padding, occupancy and steps of paired conditions.

Ratios are of sums over replicates that both conditions have; shares of single n only where h(n) is equal. Next:
``catalogue`` names these analyses; ``verdicts`` decides directions.
Definitions: docs/method.md, "Padding", "Decomposition of a bucket change"; Tables I and II.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

from harness.analysis.method import decide
from harness.analysis.method.decide import Block
from harness.analysis.method.figures import RunFigures
from harness.analysis.method.padding import Padding, direction, removed_slots, shapley_split
from harness.analysis.method.tabular import Cell, ResultTable, table_of
from harness.analysis.method.verdicts import ExperimentRuns, blocks_of, waits_pairs
from harness.clock import NS_PER_S


def num_sessions(experiment: ExperimentRuns, condition: str) -> int:
    """N of a condition."""
    return experiment.runs[condition][0].workload.num_sessions


def grid_text(experiment: ExperimentRuns, condition: str) -> str:
    """The compiled decode batch sizes, {1,2,4,8}."""
    buckets = experiment.runs[condition][0].server.decode_buckets
    return "{" + ",".join(map(str, buckets)) + "}"


def decode_ns(runs: Sequence[RunFigures]) -> int:
    """Decode part of channel A, summed."""
    return sum(run.a.decode_ns for run in runs if run.a is not None)


def alignment_table(experiment: ExperimentRuns) -> ResultTable:
    """One row per pair of conditions with waits and without: p_A, p_C, delta p, R, steps, decode time ratio."""
    rows: list[dict[str, Cell]] = []
    for with_waits, without in waits_pairs(experiment):
        pairs = experiment.pairs(with_waits, without)
        if not pairs:
            continue
        total = decide.pooled(blocks_of(experiment, with_waits, without))
        own, base = [run for run, _ in pairs], [run for _, run in pairs]
        p_with, p_without = total.with_waits.ratio or 0.0, total.without_waits.ratio or 0.0
        rows.append(
            {
                "grid": grid_text(experiment, with_waits),
                "N": num_sessions(experiment, with_waits),
                "p_A": p_with,
                "p_C": p_without,
                "delta_p": p_without - p_with,
                "R": total.occupancy,
                "R_direction": direction(total.occupancy),
                "decode_time_ratio": decode_ns(own) / decode_ns(base),
                "steps_A": sum(run.num_steps for run in own),
                "steps_C": sum(run.num_steps for run in base),
                "unpadded_share_A": unpadded_share(own),
                "unpadded_share_C": unpadded_share(base),
                "replicates": len(pairs),
            }
        )
    caption = "Padding, decode time with tool waits (A) and without (C); sums over replicates before dividing (Table I)"
    return table_of("alignment", caption, rows)


def unpadded_share(runs: Sequence[RunFigures]) -> float:
    """Share of decode steps whose bucket was exactly full."""
    total = sum(run.num_steps for run in runs)
    full = sum(count for run in runs for (n, b), count in run.steps_by_n_b.items() if n == b)
    return full / total if total else 0.0


def block_table(experiment: ExperimentRuns) -> ResultTable:
    """One row per pair and replicate (Table S5): p_A, p_C, delta p, R and its place against the band."""
    rows: list[dict[str, Cell]] = []
    for with_waits, without in waits_pairs(experiment):
        for own, base in experiment.pairs(with_waits, without):
            block = Block(own.padding, base.padding)
            p_with, p_without = own.padding.ratio or 0.0, base.padding.ratio or 0.0
            rows.append(
                {
                    "condition": with_waits,
                    "N": num_sessions(experiment, with_waits),
                    "replicate": own.replicate,
                    "R": block.occupancy,
                    "direction": direction(block.occupancy),
                    "p_A": p_with,
                    "p_C": p_without,
                    "delta_p": p_without - p_with,
                }
            )
    return table_of("blocks", "Every input plan by itself; its composition, no uncertainty interval", rows)


def histogram_table(experiment: ExperimentRuns) -> ResultTable:
    """h(n) of every condition over its valid runs."""
    rows: list[dict[str, Cell]] = []
    for condition in experiment.runs:
        total: Counter[int] = Counter()
        for run in experiment.figures(condition):
            total.update(run.histogram)
        row: dict[str, Cell] = {"condition": condition, "steps": sum(total.values())}
        rows.append(row | {f"h({n})": total[n] for n in sorted(total)})
    return table_of("histogram", "h(n): decode steps with n requests", rows)


def grid_table(experiment: ExperimentRuns) -> ResultTable:
    """Table II: p_A, p_C and delta p by N and grid, pairing conditions of equal N and grid but other treatment."""
    groups: dict[tuple[int, str], dict[str, str]] = {}
    for condition in experiment.runs:
        key = (num_sessions(experiment, condition), grid_text(experiment, condition))
        groups.setdefault(key, {})[experiment.treatments[condition]] = condition
    rows: list[dict[str, Cell]] = []
    for (n, grid), conditions in groups.items():
        if not {"as-drawn", "no-waits"} <= conditions.keys():
            continue
        with_waits, without = conditions["as-drawn"], conditions["no-waits"]
        total = decide.pooled(blocks_of(experiment, with_waits, without))
        p_with, p_without = total.with_waits.ratio or 0.0, total.without_waits.ratio or 0.0
        per_replicate = [
            (base.padding.ratio or 0.0) - (own.padding.ratio or 0.0)
            for own, base in experiment.pairs(with_waits, without)
        ]
        rows.append(
            {
                "N": n,
                "grid": grid,
                "p_A": p_with,
                "p_C": p_without,
                "delta_p": p_without - p_with,
                "replicates_of_that_sign": sum((one > 0) == (p_without > p_with) for one in per_replicate),
                "replicates": len(per_replicate),
            }
        )
    return table_of("grids", "Padding by bucket set, with tool waits (A) and without (C)", rows)


def contribution_table(experiment: ExperimentRuns) -> ResultTable:
    """Table S7: by n, slots removed by another bucket set and its share of the drop of p; only at equal h(n)."""
    rows: list[dict[str, Cell]] = []
    for condition, baseline in experiment.compared():
        pairs = experiment.pairs(condition, baseline)
        old, new = (experiment.runs[name][0].server.decode_buckets for name in (baseline, condition))
        own, base = (_summed([pair[side].histogram for pair in pairs]) for side in (0, 1))
        if not pairs or old == new or own != base:
            continue
        old_rule, new_rule = ({n: rule[bisect_left(rule, n)] for n in own} for rule in (old, new))
        removed = removed_slots(own, old_rule, new_rule)
        shares = shapley_split(own, old_rule, new_rule)
        total_removed, drop = sum(removed.values()), sum(shares.values())
        rows.extend(
            {
                "condition": condition,
                "n": n,
                "h(n)": own[n],
                "bucket_change": f"{old_rule[n]} -> {new_rule[n]}",
                "slots_removed": removed[n],
                "share_of_slots": removed[n] / total_removed if total_removed else None,
                "drop_of_p": shares[n],
                "share_of_drop": shares[n] / drop if drop else None,
            }
            for n in removed
        )
    caption = "What each request count contributes to the change of padding (equal h(n) only); Shapley split of p"
    return table_of("contributions", caption, rows)


def _summed(histograms: Sequence[dict[int, int]]) -> dict[int, int]:
    total: Counter[int] = Counter()
    for histogram in histograms:
        total.update(histogram)
    return dict(sorted(total.items()))


def cost_table(experiment: ExperimentRuns) -> ResultTable:
    """One row per condition: sums of both channels, of W, of reuse; ratios to its baseline and their agreement."""
    rows: list[dict[str, Cell]] = []
    for condition in experiment.runs:
        baseline = experiment.baselines.get(condition, condition)
        pairs = experiment.pairs(condition, baseline)
        own, base = [run for run, _ in pairs], [run for _, run in pairs]
        if not pairs:
            continue
        a_s, b_s = sum_s(own)
        base_a_s, base_b_s = sum_s(base)
        padding = Padding(sum(run.padding.padded_slots for run in own), sum(run.padding.bucket_slots for run in own))
        rows.append(
            {
                "condition": condition,
                "baseline": baseline,
                "A_s": a_s,
                "B_s": b_s,
                "r_s": b_s - a_s,
                "ratio_A": a_s / base_a_s,
                "ratio_B": b_s / base_b_s,
                "tau": decide.agreement_tolerance_s(base_a_s, base_b_s, 0.02, is_revised=True),
                "decode_ratio": decode_ns(own) / decode_ns(base) if decode_ns(base) else None,
                "p": padding.ratio,
                "reused": sum(run.reuse.num_reused for run in own),
                "rearrivals": sum(run.reuse.num_rearrivals for run in own),
                "reused_tokens": sum(run.reuse.reused_tokens for run in own),
                "computed_tokens": sum(run.computed_prefill_tokens for run in own),
                "W_session_s": sum(run.waiting_session_ns or 0 for run in own) / NS_PER_S,
                "replicates": len(pairs),
            }
        )
    return table_of("costs", "Sums over replicates; every ratio is a ratio of sums to the named baseline", rows)


def sum_s(runs: Sequence[RunFigures]) -> tuple[float, float]:
    """Channels A and B, summed, seconds."""
    a_ns = sum(run.a.total_ns for run in runs if run.a is not None)
    return a_ns / NS_PER_S, sum(run.b_ns for run in runs) / NS_PER_S
