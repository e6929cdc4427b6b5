"""Tables of cost: sums and ratios of both channels, predictions beside measurements, effects against the baseline.

Ratios are of sums over the replicates that both conditions have. A replicate's row shows the composition of a sum and
is no uncertainty interval.
Definitions: docs/reference/method-comparisons.md, "Decisions"; Tables IX, S8 and S9.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from harness.analysis import stats
from harness.analysis.compare.answer import ExperimentRuns
from harness.analysis.compare.channels import work_of
from harness.analysis.cost.devices import mean_interval
from harness.analysis.cost.reconstruct import agreement_tolerance
from harness.analysis.figures import RunFigures, cells, figure_at, same, totals
from harness.analysis.stats import Interval, ratio, seconds, when_known
from harness.clock import NS_PER_S
from harness.extras.paper.rules.cases import Contrast, adjacent_ratios
from harness.extras.paper.rules.decide import median_intervals
from harness.judge.catalogue import Rows, table
from harness.judge.decisions.verdicts import costs_of
from harness.table import Cell

INTERVAL_SEED = 20260912
TAU0_GRID = tuple(k / 1000 for k in range(5, 55, 5))


class _Channels(NamedTuple):
    """Both channels of runs, summed, seconds; their ratios to a baseline. A is None where a run lacks it.

    ratio_of: "total", or "generated token" where the two did different work.
    """

    a_s: float | None
    b_s: float | None
    base_a_s: float | None
    ratio_a: float | None
    ratio_b: float | None
    ratio_of: str

    @classmethod
    def of(cls, pairs: Sequence[tuple[RunFigures, RunFigures]]) -> _Channels:
        own, base = totals(pairs)
        works = [work_of(side) for side in zip(*pairs, strict=True)]
        is_same_work = works[0] == works[1]
        more = 1.0 if is_same_work else ratio(works[1].generated_tokens, works[0].generated_tokens)
        return cls(
            seconds(own.a_ns),
            seconds(own.b_ns),
            seconds(base.a_ns),
            when_known(operator.mul, ratio(own.a_ns, base.a_ns), more),
            when_known(operator.mul, ratio(own.b_ns, base.b_ns), more),
            "total" if is_same_work else "generated token",
        )


@table("costs", "Sums over replicates; ratio A and B are ratios of sums to the named baseline, per ratio_of")
def cost_table(experiment: ExperimentRuns) -> Rows:
    """One row per condition: sums of both channels, of W, of reuse; ratios to its baseline and their agreement."""
    for condition in experiment.runs:
        baseline = experiment.baselines.get(condition, condition)
        pairs = experiment.counted_pairs(condition, baseline)
        if not pairs:
            continue
        own, base = totals(pairs)
        channels = _Channels.of(pairs)
        yield {
            "condition": condition,
            "baseline": baseline,
            "A_s": channels.a_s,
            "B_s": channels.b_s,
            "r_s": when_known(operator.sub, channels.b_s, channels.a_s),
            "ratio_A": channels.ratio_a,
            "ratio_B": channels.ratio_b,
            "ratio_of": channels.ratio_of,
            "tau": when_known(agreement_tolerance, base.a_ns, base.b_ns),
            "decode_ratio": ratio(own.decode_ns, base.decode_ns),
            "p": own.padding.ratio,
            "reused": own.reuse.num_reused,
            "rearrivals": own.reuse.num_rearrivals,
            "reused_tokens": own.reuse.reused_tokens,
            "computed_tokens": own.computed_prefill_tokens,
            "W_session_s": seconds(own.waiting_session_ns),
            "replicates": len(pairs),
        }


@table(
    "decomposition", "The sum decides; a replicate shows its composition, it is no interval; ratios are per ratio_of"
)
def decomposition_table(experiment: ExperimentRuns) -> Rows:
    """Table S8: both channels of every replicate and of their sum, ratios, channel difference and savings."""
    for condition, baseline in experiment.compared():
        pairs = experiment.seen_pairs(condition, baseline)
        parts = [*((str(pair[0].replicate), [pair]) for pair in pairs), *([("sum", pairs)] if pairs else [])]
        for replicate, part in parts:
            own, channels = totals(part)[0], _Channels.of(part)
            ratio_a, ratio_b = channels.ratio_a, channels.ratio_b
            yield {
                "condition": condition,
                "N": experiment.runs[condition][0].workload.num_sessions,
                "replicate": replicate,
                "baseline_A_s": channels.base_a_s,
                "changed_A_s": channels.a_s,
                "ratio_A": ratio_a,
                "ratio_B": ratio_b,
                "ratio_of": channels.ratio_of,
                "difference": None if ratio_a is None or ratio_b is None else abs(ratio_a - ratio_b),
                "saving_A": None if ratio_a is None else 1 - ratio_a,
                "saving_B": None if ratio_b is None else 1 - ratio_b,
                "reused": own.reuse.num_reused,
                "rearrivals": own.reuse.num_rearrivals,
            }


@table("tau sensitivity", "tau = max(tau0, r / B of the baseline)")
def sensitivity_table(experiment: ExperimentRuns) -> Rows:
    """Channel agreement of every comparison under other defaults of the tolerance (S1)."""
    for condition, baseline in experiment.compared():
        costs = costs_of(experiment, condition, baseline)
        if not isinstance(costs, str):
            for tau0 in TAU0_GRID:
                yield {"condition": condition, "tau0": tau0, **cells(costs.agreement(tau0), same("tau", "is_agreed"))}


def ratio_intervals(experiment: ExperimentRuns) -> dict[str, Interval]:
    """The interval of every cost ratio, as the summary has it; none where it has none."""
    intervals: dict[str, Interval] = {}
    for condition, baseline in experiment.compared():
        comparison, result = experiment.compare(condition, baseline), experiment.result(condition, baseline)
        if comparison is None or result is None or result.interval is None:
            continue
        unit = "" if comparison.is_same_work else ", per generated token"
        channel = "A" if comparison.a else "B"
        intervals[f"{condition} / {baseline}, channel {channel}{unit}"] = result.interval
    return intervals


# Where a run's figures have each quantity, and how many of its units make a unit of the column.
EFFECTS = {
    "reused": ("reuse.num_reused", 1),
    "reused_tokens": ("reuse.reused_tokens", 1),
    "prefill_s": ("prefill_ns", NS_PER_S),
    "W_session_s": ("waiting_session_ns", NS_PER_S),
}


@table("effects", "Condition less its baseline, mean per run over pairs on the same plan, with 95 % t intervals")
def effects_table(experiment: ExperimentRuns) -> Rows:
    """One row per condition: what it adds per run to its baseline, with the low and high end of each interval.

    reused: re-arrivals that reused KV. prefill_s: device time. W_session_s: session time held back by prefills. cost:
    geometric mean of the ratios of channel A.
    """
    ratios = ratio_intervals(experiment)
    for condition, baseline in experiment.compared():
        pairs = experiment.pairs(condition, baseline)
        # Without a plan in common, the difference would be a difference of inputs.
        plans = [{run.manifest.drawn_hash for run in experiment.runs.get(name, ())} for name in (condition, baseline)]
        if not pairs or not plans[0] & plans[1]:
            continue
        row: dict[str, Cell] = {"condition": condition, **experiment.runs[condition][0].manifest.factors}
        for name, (figure, unit) in EFFECTS.items():
            values = [(own, figure_at(own, figure), figure_at(base, figure)) for own, base in pairs]
            known = [(own, (value - before) / unit) for own, value, before in values if None not in (value, before)]
            interval = mean_interval([value for _, value in known], [run for run, _ in known], unit="replicates")
            row |= _ends(name, interval)
        row |= _ends("cost_ratio", ratios.get(f"{condition} / {baseline}, channel A"))
        yield {**row, "replicates": len(pairs)}


def _ends(name: str, interval: Interval | None) -> dict[str, Cell]:
    return cells(interval, {name: "estimate", f"{name}_low": "low", f"{name}_high": "high"})


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


def _adjacent(experiment: ExperimentRuns) -> Iterator[tuple[str, dict[str, list[float]], Interval, Interval]]:
    """(name, ratios by stratum, ``median_intervals`` of them) of a slot count and the next smaller one.

    Slot counts: the values of the factor ``slots`` that conditions other than baselines have.
    """
    contrast = Contrast("slots", ("N",))
    changed = (experiment.factors[condition].get("slots") for condition, _baseline in experiment.compared())
    levels = sorted({value for value in changed if isinstance(value, int)})
    for smaller, larger in pairwise(levels):
        ratios = adjacent_ratios(experiment, contrast, smaller, larger)
        by_stratum = {stratum: values for stratum, values in ratios.items() if values}
        if by_stratum:
            intervals = median_intervals(by_stratum, stats.Bootstrap(INTERVAL_SEED))
            yield f"slots{smaller} -> slots{larger}", by_stratum, *intervals


@table("adjacent levels", "Cost ratio between adjacent slot counts")
def adjacent_table(experiment: ExperimentRuns) -> Rows:
    """Median ratio between adjacent slot counts, pooled and by N, with its bootstrap interval."""
    for name, by_stratum, pooled, _stratified in _adjacent(experiment):
        yield {
            "pair": name,
            "comparisons": pooled.num_units,
            **cells(pooled, {"median": "estimate"} | same("low", "high", "width")),
            **{f"median_{stratum}": stats.median(values) for stratum, values in by_stratum.items()},
        }


def adjacent_intervals(experiment: ExperimentRuns) -> dict[str, Interval]:
    """Bootstrap intervals of the median ratio between adjacent slot counts, pooled and stratified by N."""
    intervals: dict[str, Interval] = {}
    for name, _by_stratum, pooled, stratified in _adjacent(experiment):
        intervals |= {f"median {name}": pooled, f"median {name}, by N": stratified}
    return intervals
