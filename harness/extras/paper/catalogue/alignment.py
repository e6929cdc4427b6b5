"""Tables of padding, occupancy and decode steps of paired conditions: alignment, bucket intervention, dispersion.

Ratios are of sums over the replicates that both conditions have. Shares of one n are given only where h(n) is equal.
Definitions: docs/reference/method.md, "Padding", "Decomposition of a bucket change"; Tables I and II.
"""

from __future__ import annotations

from collections.abc import Sequence

from harness.analysis.compare.answer import ExperimentRuns
from harness.analysis.figures import RunFigures, total_of, totals
from harness.analysis.stats import ratio
from harness.extras.paper.bucket_change import bucket_rule, removed_slots, shapley_split
from harness.extras.paper.rules.cases import waits_pairs
from harness.extras.paper.rules.decide import PaddingPair
from harness.extras.paper.statistics import direction
from harness.judge.catalogue import Rows, table
from harness.table import Cell


def _num_sessions(experiment: ExperimentRuns, condition: str) -> int:
    return experiment.runs[condition][0].workload.num_sessions


def _grid_text(experiment: ExperimentRuns, condition: str) -> str:
    """The compiled decode batch sizes, {1,2,4,8}."""
    return "{" + ",".join(map(str, experiment.runs[condition][0].server.decode_buckets)) + "}"


def _padding_cells(block: PaddingPair) -> dict[str, Cell]:
    p_with, p_without = block.with_waits.ratio or 0.0, block.without_waits.ratio or 0.0
    return {"p_A": p_with, "p_C": p_without, "delta_p": p_without - p_with}


@table(
    "alignment",
    "Padding, decode time with tool waits (A) and without (C); sums over replicates before dividing (Table I)",
)
def alignment_table(experiment: ExperimentRuns) -> Rows:
    """One row per pair of conditions with waits and without: p_A, p_C, delta p, R, steps, decode time ratio."""
    for with_waits, without in waits_pairs(experiment):
        pairs = experiment.pairs(with_waits, without)
        if not pairs:
            continue
        own, base = totals(pairs)
        block = PaddingPair(own.padding, base.padding)
        yield {
            "grid": _grid_text(experiment, with_waits),
            "N": _num_sessions(experiment, with_waits),
            **_padding_cells(block),
            "R": block.occupancy,
            "R_direction": direction(block.occupancy),
            "decode_time_ratio": ratio(own.decode_ns, base.decode_ns),
            "steps_A": own.num_steps,
            "steps_C": base.num_steps,
            "unpadded_share_A": unpadded_share([run for run, _ in pairs]),
            "unpadded_share_C": unpadded_share([run for _, run in pairs]),
            "replicates": len(pairs),
        }


def unpadded_share(runs: Sequence[RunFigures]) -> float:
    """Share of decode steps whose bucket was exactly full."""
    steps = total_of(runs).steps_by_n_b
    full = sum(count for (n, b), count in steps.items() if n == b)
    return full / sum(steps.values()) if steps else 0.0


@table("blocks", "Every input plan by itself; its composition, no uncertainty interval")
def block_table(experiment: ExperimentRuns) -> Rows:
    """One row per pair and replicate (Table S5): p_A, p_C, delta p, R and its place against the band."""
    for with_waits, without in waits_pairs(experiment):
        for own, base in experiment.pairs(with_waits, without):
            block = PaddingPair(own.padding, base.padding)
            yield {
                "condition": with_waits,
                "N": _num_sessions(experiment, with_waits),
                "replicate": own.replicate,
                "R": block.occupancy,
                "direction": direction(block.occupancy),
                **_padding_cells(block),
            }


@table("histogram", "h(n): decode steps with n requests")
def histogram_table(experiment: ExperimentRuns) -> Rows:
    """h(n) of every condition over its valid runs."""
    for condition in experiment.runs:
        histogram = total_of(experiment.counted(condition)).histogram
        counts: dict[str, Cell] = {f"h({n})": count for n, count in histogram.items()}
        yield {"condition": condition, "steps": sum(histogram.values()), **counts}


@table("grids", "Padding by bucket set, with tool waits (A) and without (C)")
def grid_table(experiment: ExperimentRuns) -> Rows:
    """Table II: p_A, p_C and delta p by N and grid, pairing conditions of equal N and grid but other treatment."""
    groups: dict[tuple[int, str], dict[str, str]] = {}
    for condition in experiment.runs:
        key = (_num_sessions(experiment, condition), _grid_text(experiment, condition))
        groups.setdefault(key, {})[experiment.treatments[condition]] = condition
    for (n, grid), conditions in groups.items():
        if not {"as-drawn", "no-waits"} <= conditions.keys():
            continue
        pairs = experiment.pairs(conditions["as-drawn"], conditions["no-waits"])
        cells = _padding_cells(PaddingPair(*(total.padding for total in totals(pairs))))
        per_replicate = [(base.padding.ratio or 0.0) - (own.padding.ratio or 0.0) > 0 for own, base in pairs]
        yield {
            "N": n,
            "grid": grid,
            **cells,
            "replicates_of_that_sign": per_replicate.count(float(cells["delta_p"] or 0) > 0),
            "replicates": len(pairs),
        }


@table(
    "contributions",
    "What each request count contributes to the change of padding (equal h(n) only); Shapley split of p",
)
def contribution_table(experiment: ExperimentRuns) -> Rows:
    """Table S7: by n, slots removed by another bucket set and its share of the drop of p; only at equal h(n)."""
    for condition, baseline in experiment.compared():
        pairs = experiment.pairs(condition, baseline)
        old, new = (experiment.runs[name][0].server.decode_buckets for name in (baseline, condition))
        own, base = (total.histogram for total in totals(pairs))
        if not pairs or old == new or own != base:
            continue
        old_rule, new_rule = bucket_rule(old, own), bucket_rule(new, own)
        removed, shares = removed_slots(own, old_rule, new_rule), shapley_split(own, old_rule, new_rule)
        for n in removed:
            yield {
                "condition": condition,
                "n": n,
                "h(n)": own[n],
                "bucket_change": f"{old_rule[n]} -> {new_rule[n]}",
                "slots_removed": removed[n],
                "share_of_slots": ratio(removed[n], sum(removed.values())),
                "drop_of_p": shares[n],
                "share_of_drop": ratio(shares[n], sum(shares.values())),
            }
