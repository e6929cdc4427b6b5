"""Reuse against the length of the wait: how many returns of a condition found their prefix still cached.

A return is a request that continues an earlier one. Reuse that the server did not report is None, never zero.
Definitions: docs/method.md, "Reuse by wait".
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from harness.analysis.cost.devices import independent_samples
from harness.analysis.figures import RunFigures, cells
from harness.analysis.reuse import Rearrival
from harness.analysis.stats import FloatArray, Interval, NoInterval, grouped, median, share_interval
from harness.clock import NS_PER_S

# Lower ends of the bins, model s; the last bin has no upper end.
EDGES_S = (0.0, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
HOW_REUSED = (
    "wait: from the end of an answer to the next send of its session; reused: returns with any of their prefix still "
    "cached; tokens kept: of the tokens that whole blocks of the turn before allow; interval: 95 %, over runs like "
    "these, from six runs on with three returns kept and three lost or more."
)


@dataclass(frozen=True, slots=True)
class Share:
    """part / whole, summed over runs. interval: over runs like these; why: why there is none."""

    part: int
    whole: int
    interval: Interval | None
    why: NoInterval | None

    @property
    def value(self) -> float:
        return self.part / self.whole


@dataclass(frozen=True, slots=True)
class WaitBin:
    """Returns of a condition after waits from low_s to below high_s (None: or longer), model s.

    reused: returns with any of the prefix still cached. kept: reusable tokens that were reused; None where nothing was
    reusable. Both are None where the server did not report the reuse of every return.
    """

    low_s: float
    high_s: float | None
    median_wait_s: float
    num_runs: int
    num_returns: int
    reused: Share | None
    kept: Share | None

    @property
    def range_text(self) -> str:
        """The range of waits, "0.3-1" or "300+"."""
        return f"{self.low_s:g}+" if self.high_s is None else f"{self.low_s:g}\u2013{self.high_s:g}"


@dataclass(frozen=True, slots=True)
class ReuseByWait:
    """The bins of one condition that hold returns, by ascending wait."""

    condition: str
    bins: tuple[WaitBin, ...]


def reuse_by_wait(condition: str, runs: Sequence[RunFigures]) -> ReuseByWait | None:
    """Reuse of one condition over its counted ``runs`` by the wait before each return; None where nothing returned."""
    by_bin = grouped(
        ((again, run) for run in runs for again in run.reuse.rearrivals),
        lambda pair: bisect_right(EDGES_S, pair[0].wait_ns / NS_PER_S) - 1,
    )
    bins = tuple(_bin(place, by_bin[place]) for place in sorted(by_bin))
    return ReuseByWait(condition, bins) if bins else None


def _bin(place: int, returns: Sequence[tuple[Rearrival, RunFigures]]) -> WaitBin:
    by_run = grouped(returns, lambda pair: pair[1].key)
    runs = [group[0][1] for group in by_run.values()]
    rearrivals = [[again for again, _ in group] for group in by_run.values()]
    is_known = all(again.cached_tokens is not None for group in rearrivals for again in group)
    return WaitBin(
        low_s=EDGES_S[place],
        high_s=EDGES_S[place + 1] if place + 1 < len(EDGES_S) else None,
        median_wait_s=median(again.wait_ns / NS_PER_S for again, _ in returns),
        num_runs=len(runs),
        num_returns=len(returns),
        reused=_share([[(bool(a.is_reused), 1) for a in group] for group in rearrivals], runs) if is_known else None,
        kept=_share([list(map(_kept, group)) for group in rearrivals], runs) if is_known else None,
    )


def _kept(again: Rearrival) -> tuple[int, int]:
    """Reused and reusable tokens; what was reused beyond the turn before is no part of it."""
    return min(again.cached_tokens or 0, again.reusable_tokens), again.reusable_tokens


def _share(by_run: Sequence[Sequence[tuple[int, int]]], runs: Sequence[RunFigures]) -> Share | None:
    part, whole = (sum(pair[side] for group in by_run for pair in group) for side in (0, 1))
    if not whole:
        return None
    sides = [[_values(group, side) for group in by_run] for side in (0, 1)]
    (parts, unit), (wholes, _) = (independent_samples(samples, runs) for samples in sides)
    found = share_interval(parts, wholes, unit=unit)
    return Share(part, whole, *((found, None) if isinstance(found, Interval) else (None, found)))


def _values(pairs: Iterable[tuple[int, int]], side: int) -> FloatArray:
    return np.array([pair[side] for pair in pairs], dtype=np.float64)


_SHARE_CELLS = {"": "value", "_low": "interval.low", "_high": "interval.high", "_no_interval": "why.value"}


def reuse_by_wait_rows(conditions: Sequence[ReuseByWait]) -> list[dict[str, object]]:
    """One row per condition and bin: waits in model s, counts, tokens, shares from 0 to 1 and ends of intervals."""
    return [
        {
            "condition": each.condition,
            **cells(one, {"wait_low_s": "low_s", "wait_high_s": "high_s", "wait_median_s": "median_wait_s"}),
            "num_runs": one.num_runs,
            "num_returns": one.num_returns,
            "num_reused": one.reused and one.reused.part,
            **cells(one.reused, {f"reused_share{end}": path for end, path in _SHARE_CELLS.items()}),
            "reusable_tokens": one.kept and one.kept.whole,
            "kept_tokens": one.kept and one.kept.part,
            **cells(one.kept, {f"kept_share{end}": path for end, path in _SHARE_CELLS.items()}),
        }
        for each in conditions
        for one in each.bins
    ]
