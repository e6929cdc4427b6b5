"""Any conditions against each other: across experiments, folders and dates, every pair, with one error rate for all.

Runs that replayed the same plan are paired by its hash; where they did not, that is said and no pairing is pretended.
Nothing is decided and no run is left out but invalid ones.
Definitions: docs/method.md, "Comparing any conditions".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from harness.analysis.method.devices import log_ratio_effect, of_blocks
from harness.analysis.method.figures import RunFigures, run_figures
from harness.analysis.method.serving import latencies
from harness.analysis.method.stats import (
    MIN_REPLICATES,
    FloatArray,
    quantile,
    t_quantile,
    t_tail,
)
from harness.clock import NS_PER_MS, NS_PER_S
from harness.records import SealedRun, origin_of
from harness.table import Cell, Table, table_of


@dataclass(frozen=True, slots=True)
class Side:
    """Runs that are compared as one: a condition of an experiment in a folder."""

    name: str
    runs: tuple[SealedRun, ...]

    @property
    def backends(self) -> tuple[str, ...]:
        """What made the runs, each kind once."""
        return tuple(dict.fromkeys(run.manifest.backend for run in self.runs))


def _seconds(duration_ns: int | None, per: int = 1) -> float | None:
    return None if duration_ns is None or not per else duration_ns / NS_PER_S / per


def _percentile_ms(run: SealedRun, of: str, q: float) -> float | None:
    values = getattr(latencies(run), of)
    values = values[~np.isnan(values)]
    return quantile(values, q) / NS_PER_MS if len(values) else None


def _tokens_per_s(run: SealedRun) -> float | None:
    found = latencies(run)
    return int(found.tokens.sum()) / found.span_ns * NS_PER_S if found.span_ns else None


# What is compared: cost of equal work only per generated token, since other sides may have done other work.
MEASURES: Mapping[str, Callable[[SealedRun], float | None]] = {
    "A_s_per_token": lambda run: _seconds(_a_ns(run_figures(run)), run_figures(run).generated_tokens),
    "B_s_per_token": lambda run: _seconds(run_figures(run).b_ns, run_figures(run).generated_tokens),
    "ttft_p50_ms": lambda run: _percentile_ms(run, "ttft_ns", 0.5),
    "itl_p50_ms": lambda run: _percentile_ms(run, "itl_ns", 0.5),
    "e2e_p50_ms": lambda run: _percentile_ms(run, "e2e_ns", 0.5),
    "tokens_per_s": _tokens_per_s,
}


def _a_ns(figures: RunFigures) -> int | None:
    return figures.a_ns


def compare_all(sides: Sequence[Side]) -> Table:
    """Every pair of sides in every measure: ratio of means, its interval, and a p-value adjusted over all of them.

    Paired by plan hash where one side replayed every plan of the other (t test of log ratios), else as independent
    samples (Welch's t test of logs). p_holm: Holm's step-down over every row with a p-value. Rows with fewer than three
    replicates have ratios and no p.
    """
    rows = [
        row
        for one, other in combinations(sides, 2)
        for measure, of in MEASURES.items()
        if (row := _row(one, other, measure, of)) is not None
    ]
    adjusted = holm([p for row in rows if isinstance(p := row["p"], float)])
    for row in rows:
        row["p_holm"] = adjusted.pop(0) if isinstance(row["p"], float) else None
        row["differs"] = None if row["p_holm"] is None else row["p_holm"] < 0.05
    caption = (
        "ratio: geometric mean of this / other; interval: 95 %, not adjusted; p_holm: adjusted over all rows (Holm), "
        "differs: p_holm below 0.05; a dash: fewer than three runs a side. paired: by equal plan hashes, runs of other "
        "plans left out; without, the sides replayed different inputs."
    )
    origin = origin_of(run for side in sides for run in side.runs)
    return table_of("Comparison of all pairs", caption, rows, origin)


def _row(one: Side, other: Side, measure: str, of: Callable[[SealedRun], float | None]) -> dict[str, Cell] | None:
    by_plan = {run.manifest.plan_hash: run for run in other.runs}
    pairs = [(run, by_plan[run.manifest.plan_hash]) for run in one.runs if run.manifest.plan_hash in by_plan]
    is_paired = len(pairs) == len(one.runs) == len(other.runs) or _is_within(pairs, one, other)
    sides = ([run for run, _ in pairs], [run for _, run in pairs]) if is_paired else (one.runs, other.runs)
    values = [[value for run in runs if (value := of(run)) is not None and value > 0] for runs in sides]
    if not values[0] or not values[1] or (is_paired and len(values[0]) != len(values[1])):
        return None
    devices = [[run_figures(run) for run in runs] for runs in sides]
    logs = [np.log(np.asarray(side)) for side in values]
    low, high, p = _paired(values, devices[0]) if is_paired else _welch(logs[0], logs[1])
    return {
        "this": one.name,
        "other": other.name,
        "measure": measure,
        "paired": is_paired,
        **_same_devices(devices, is_paired=is_paired),
        "runs": f"{len(values[0])}:{len(values[1])}",
        "backends": f"{'+'.join(one.backends)}:{'+'.join(other.backends)}",
        "this_mean": float(np.exp(logs[0].mean())),
        "other_mean": float(np.exp(logs[1].mean())),
        "ratio": float(np.exp(logs[0].mean() - logs[1].mean())),
        "low": low,
        "high": high,
        "p": p,
    }


def _is_within(pairs: Sequence[tuple[SealedRun, SealedRun]], one: Side, other: Side) -> bool:
    """Whether one side replayed each plan of the other once, and more: those are left out."""
    return len({run.path for _, run in pairs}) == len(pairs) == min(len(one.runs), len(other.runs))


Test = tuple[float | None, float | None, float | None]


def _same_devices(sides: Sequence[Sequence[RunFigures]], *, is_paired: bool) -> dict[str, Cell]:
    """Whether what is compared was made on the same devices; no column outside fleets."""
    places = [[run.device for run in runs] if is_paired else sorted({run.device for run in runs}) for runs in sides]
    return {"same_device": places[0] == places[1]} if any(map(any, places)) else {}


def _paired(values: Sequence[Sequence[float]], runs: Sequence[RunFigures]) -> Test:
    """(low, high, p) of the mean log ratio, over device means where several devices made the runs; else nothing below
    three pairs.
    """
    effect = log_ratio_effect(values[0], values[1], runs) if len(runs) == len(values[0]) else None
    found = of_blocks(np.log(np.divide(values[0], values[1])).tolist()) if len(values[0]) >= MIN_REPLICATES else None
    found = found if effect is None else effect.estimate
    if found is None:
        return None, None, None
    interval = found.interval()
    return interval.low, interval.high, _p_value(found.mean, found.error, found.degrees)


def _welch(one: FloatArray, other: FloatArray) -> Test:
    """(low, high, p) of the difference of mean logs of independent samples; degrees rounded down (Welch)."""
    if min(len(one), len(other)) < MIN_REPLICATES:
        return None, None, None
    parts = [float(side.var(ddof=1)) / len(side) for side in (one, other)]
    difference, error = float(one.mean() - other.mean()), math.sqrt(sum(parts))
    if error == 0:
        return math.exp(difference), math.exp(difference), _p_value(difference, error, 1)
    spread = sum(part**2 / (len(side) - 1) for part, side in zip(parts, (one, other), strict=True))
    degrees = max(1, math.floor(sum(parts) ** 2 / spread))
    half = t_quantile(0.95, degrees) * error
    return math.exp(difference - half), math.exp(difference + half), _p_value(difference, error, degrees)


def _p_value(difference: float, error: float, degrees: int) -> float:
    """Two-sided p of a t statistic; equal values without scatter give 1, different ones 0."""
    if error == 0:
        return 1.0 if difference == 0 else 0.0
    return t_tail(difference / error, degrees)


def holm(values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values, in the order given: the chance of even one false "differs" stays below the level."""
    order = sorted(range(len(values)), key=values.__getitem__)
    adjusted, highest = [0.0] * len(values), 0.0
    for rank, place in enumerate(order):
        highest = max(highest, min(1.0, (len(values) - rank) * values[place]))
        adjusted[place] = highest
    return adjusted
