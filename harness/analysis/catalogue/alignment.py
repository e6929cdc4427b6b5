"""Alignment, bucket intervention and dispersion: padding, occupancy and steps of paired conditions.

Ratios are of sums over the replicates that both conditions have. Shares of one n are given only where h(n) is equal.
Definitions: docs/method.md, "Padding", "Decomposition of a bucket change"; Tables I and II.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

from harness.analysis.catalogue import Analysis, of_tables
from harness.analysis.catalogue.costs import cost_table, decode_ns, decomposition_table, ratio_intervals
from harness.analysis.catalogue.reuse import prefill_kinds_table
from harness.analysis.method import decide
from harness.analysis.method.decide import Block
from harness.analysis.method.figures import RunFigures
from harness.analysis.method.padding import direction, removed_slots, shapley_split
from harness.analysis.method.reuse import sum_or_none
from harness.analysis.method.verdicts import ExperimentRuns, blocks_of, waits_pairs
from harness.table import Cell, Table, table_of


def num_sessions(experiment: ExperimentRuns, condition: str) -> int:
    """N of a condition."""
    return experiment.runs[condition][0].workload.num_sessions


def grid_text(experiment: ExperimentRuns, condition: str) -> str:
    """The compiled decode batch sizes, {1,2,4,8}."""
    buckets = experiment.runs[condition][0].server.decode_buckets
    return "{" + ",".join(map(str, buckets)) + "}"


def alignment_table(experiment: ExperimentRuns) -> Table:
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
                "steps_A": sum_or_none(run.num_steps for run in own),
                "steps_C": sum_or_none(run.num_steps for run in base),
                "unpadded_share_A": unpadded_share(own),
                "unpadded_share_C": unpadded_share(base),
                "replicates": len(pairs),
            }
        )
    caption = "Padding, decode time with tool waits (A) and without (C); sums over replicates before dividing (Table I)"
    return table_of("alignment", caption, rows)


def unpadded_share(runs: Sequence[RunFigures]) -> float:
    """Share of decode steps whose bucket was exactly full."""
    total = sum(sum(run.steps_by_n_b.values()) for run in runs)
    full = sum(count for run in runs for (n, b), count in run.steps_by_n_b.items() if n == b)
    return full / total if total else 0.0


def block_table(experiment: ExperimentRuns) -> Table:
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


def histogram_table(experiment: ExperimentRuns) -> Table:
    """h(n) of every condition over its valid runs."""
    rows: list[dict[str, Cell]] = []
    for condition in experiment.runs:
        total: Counter[int] = Counter()
        for run in experiment.figures(condition):
            total.update(run.histogram)
        row: dict[str, Cell] = {"condition": condition, "steps": sum(total.values())}
        rows.append(row | {f"h({n})": total[n] for n in sorted(total)})
    return table_of("histogram", "h(n): decode steps with n requests", rows)


def grid_table(experiment: ExperimentRuns) -> Table:
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


def contribution_table(experiment: ExperimentRuns) -> Table:
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


ANALYSES = (
    Analysis(
        "alignment",
        "padding and occupancy with and without tool waits (Table I)",
        of_tables(
            alignment_table,
            block_table,
            histogram_table,
            cost_table,
            notes=("decode_time_ratio is channel A's decode part: it depends on the cost model",),
        ),
    ),
    Analysis(
        "bucket-intervention",
        "padding under another bucket set, and which request counts it changes (Tables II and S7)",
        of_tables(
            grid_table,
            contribution_table,
            histogram_table,
            cost_table,
            notes=("contributions are shown only where h(n) is the same on both grids",),
        ),
    ),
    Analysis(
        "dispersion",
        "the same total wait, spread otherwise over the requests",
        of_tables(
            prefill_kinds_table,
            decomposition_table,
            cost_table,
            histogram_table,
            notes=("the total wait is the same in both conditions, to the ns",),
            intervals=ratio_intervals,
        ),
    ),
)
