"""What a condition changes against its baseline, pair by pair of runs on the same plan: reuse, prefill, waiting, cost.

Every effect is a mean over replicates with its t interval, from three replicates on. Nothing is judged here.
Definitions: docs/method.md, "Intervals".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from harness.analysis import RunFigures
from harness.analysis.catalogue import Analysis, of_tables
from harness.analysis.catalogue.costs import cost_table, ratio_intervals
from harness.analysis.catalogue.reuse import prefill_kinds_table
from harness.analysis.method.devices import mean_interval
from harness.analysis.method.stats import Interval
from harness.analysis.method.verdicts import ExperimentRuns
from harness.clock import NS_PER_S
from harness.table import Cell, Table, table_of

Pairs = Sequence[tuple[RunFigures, RunFigures]]


def effects_table(experiment: ExperimentRuns) -> Table:
    """One row per condition: what it adds per run to its baseline, with the low and high end of each interval.

    reused: re-arrivals that found KV. prefill_s: device time. W_session_s: session time held back by prefills. cost:
    geometric mean of the ratios of channel A.
    """
    ratios = ratio_intervals(experiment)
    rows: list[dict[str, Cell]] = []
    for condition, baseline in experiment.compared():
        pairs = experiment.pairs(condition, baseline)
        # Without a plan in common, the difference would be one of inputs.
        plans = [{run.manifest.drawn_hash for run in experiment.runs.get(name, ())} for name in (condition, baseline)]
        if not pairs or not plans[0] & plans[1]:
            continue
        row: dict[str, Cell] = {"condition": condition, **experiment.runs[condition][0].manifest.factors}
        for name, found in effects_of(pairs).items():
            values, of = [value for _, value in found], [run for run, _ in found]
            row |= _ends(name, mean_interval(values, of, unit="replicates"))
        row |= _ends("cost_ratio", ratios.get(f"{condition} / {baseline}, channel A"))
        rows.append({**row, "replicates": len(pairs)})
    caption = "Condition less its baseline, mean per run over pairs on the same plan, with 95 % t intervals"
    return table_of("effects", caption, rows)


def effects_of(pairs: Pairs) -> dict[str, list[tuple[RunFigures, float]]]:
    """What each pair's condition adds to its baseline, by quantity; a pair that lacks one is left out of it."""
    found: dict[str, list[tuple[RunFigures, float]]] = {}
    for name, (of, unit) in EFFECTS.items():
        values = [(own, of(own), of(base)) for own, base in pairs]
        found[name] = [
            (run, (value - before) / unit) for run, value, before in values if value is not None and before is not None
        ]
    return found


# Whole numbers of each run, and how many of them are one of the column's unit.
EFFECTS: Mapping[str, tuple[Callable[[RunFigures], int | None], int]] = {
    "reused": (lambda run: run.reuse.num_reused, 1),
    "reused_tokens": (lambda run: run.reuse.reused_tokens, 1),
    "prefill_s": (lambda run: None if run.a is None else run.a.prefill_ns, NS_PER_S),
    "W_session_s": (lambda run: run.waiting_session_ns, NS_PER_S),
}


def _ends(name: str, interval: Interval | None) -> dict[str, Cell]:
    if interval is None:
        return {name: None, f"{name}_low": None, f"{name}_high": None}
    return {name: interval.estimate, f"{name}_low": interval.low, f"{name}_high": interval.high}


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
