"""What a condition changes against its baseline, pair by pair of runs on the same plan: reuse, prefill, waiting, cost.

Every effect is a mean over replicates with its t interval; none where there are fewer than three. Nothing is judged
here. Next: ``catalogue`` shows the table for experiments whose question is one effect, such as ``upstream-lru``.
Definitions: docs/method.md, "Intervals".
"""

from __future__ import annotations

from collections.abc import Sequence

from harness.analysis import RunFigures
from harness.analysis.method import stats
from harness.analysis.method.stats import Interval
from harness.analysis.method.tabular import Cell, ResultTable, table_of
from harness.analysis.method.verdicts import Evidence
from harness.clock import NS_PER_S
from harness.study.repeats import ratio_intervals

Pairs = Sequence[tuple[RunFigures, RunFigures]]


def effects_table(evidence: Evidence) -> ResultTable:
    """One row per condition: what it adds per run to its baseline, with the low and high end of each interval.

    reused: re-arrivals that found KV. prefill_s: device time. W_session_s: session time held back by prefills. cost:
    geometric mean of the ratios of channel A.
    """
    ratios = ratio_intervals(evidence)
    rows: list[dict[str, Cell]] = []
    for condition, baseline in evidence.compared():
        pairs = evidence.pairs(condition, baseline)
        # Without a plan in common, the difference would be one of inputs.
        plans = [{run.manifest.drawn_hash for run in evidence.runs.get(name, ())} for name in (condition, baseline)]
        if not pairs or not plans[0] & plans[1]:
            continue
        row: dict[str, Cell] = {"condition": condition, **evidence.runs[condition][0].manifest.factors}
        for name, values in effects_of(pairs).items():
            row |= _ends(name, stats.mean_interval(values, unit="replicates"))
        row |= _ends("cost_ratio", ratios.get(f"{condition} / {baseline}, channel A"))
        rows.append({**row, "replicates": len(pairs)})
    caption = "Condition less its baseline, mean per run over pairs on the same plan, with 95 % t intervals"
    return table_of("effects", caption, rows)


def effects_of(pairs: Pairs) -> dict[str, list[float]]:
    """What each pair's condition adds to its baseline, by quantity; a pair that lacks one is left out of it."""
    priced = [(own, base) for own, base in pairs if own.a is not None and base.a is not None]
    waited = [
        (own.waiting_session_ns, base.waiting_session_ns)
        for own, base in pairs
        if own.waiting_session_ns is not None and base.waiting_session_ns is not None
    ]
    return {
        "reused": [float(own.reuse.num_reused - base.reuse.num_reused) for own, base in pairs],
        "reused_tokens": [float(own.reuse.reused_tokens - base.reuse.reused_tokens) for own, base in pairs],
        "prefill_s": [
            (own.a.prefill_ns - base.a.prefill_ns) / NS_PER_S
            for own, base in priced
            if own.a is not None and base.a is not None
        ],
        "W_session_s": [(own_ns - base_ns) / NS_PER_S for own_ns, base_ns in waited],
    }


def _ends(name: str, interval: Interval | None) -> dict[str, Cell]:
    if interval is None:
        return {name: None, f"{name}_low": None, f"{name}_high": None}
    return {name: interval.estimate, f"{name}_low": interval.low, f"{name}_high": interval.high}
