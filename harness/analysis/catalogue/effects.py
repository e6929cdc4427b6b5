"""What a condition changes against its baseline, pair by pair of runs on the same plan: reuse, prefill, waiting, cost.

Every effect is a mean over replicates with its t interval, from three replicates on. Nothing is judged here.
Definitions: docs/method.md, "Intervals".
"""

from __future__ import annotations

from harness.analysis.catalogue import Analysis, Rows, of_tables, table
from harness.analysis.catalogue.costs import cost_table, ratio_intervals
from harness.analysis.catalogue.reuse import prefill_kinds_table
from harness.analysis.cost.devices import mean_interval
from harness.analysis.decisions.verdicts import ExperimentRuns
from harness.analysis.figures import cells, figure_at
from harness.analysis.stats import Interval
from harness.clock import NS_PER_S
from harness.table import Cell

# Where a run's figures have each quantity, and how many of its units are one of the column's.
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
        # Without a plan in common, the difference would be one of inputs.
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


ANALYSES = (
    Analysis(
        "effects",
        "what each condition changes against its baseline, pair by pair",
        of_tables(
            effects_table,
            prefill_kinds_table,
            cost_table,
            notes=("an interval that holds 0 (a cost ratio: 1) shows no effect",),
            intervals=ratio_intervals,
        ),
    ),
)
