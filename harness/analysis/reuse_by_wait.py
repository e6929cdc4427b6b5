"""Reuse against the length of the wait: how many returns of a condition found their prefix still cached.

A return is a request that continues an earlier one. Reuse that the server did not report is None, never zero.
Definitions: docs/reference/method-sessions.md, "Reuse by wait".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from harness.analysis.cost.devices import independent_samples
from harness.analysis.figures import RunFigures, cells
from harness.analysis.stats import FloatArray, Interval, NoInterval, median, share_interval
from harness.clock import NS_PER_S

# Lower ends of the bins, model s; the last bin has no upper end.
EDGES_S = (0.0, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
HOW_REUSED = (
    "wait: from the end of an answer to the next send of its session; reused: returns with any of their prefix still "
    "cached; tokens kept: of the tokens that whole blocks of the turn before allow (of several replicas: the latest "
    "turn that the same one served, so what routing lost is not in it); interval: 95 %, over runs like these, from "
    "six runs on with three returns kept and three lost or more."
)


@dataclass(frozen=True, slots=True)
class ReuseShare:
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
    reused: ReuseShare | None
    kept: ReuseShare | None

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
    returns = [(run, _returns(run)) for run in runs if run.reuse.rearrivals]
    if not returns:
        return None
    places = [np.searchsorted(EDGES_S, each.wait_s, side="right") - 1 for _, each in returns]
    bins: list[WaitBin] = []
    for place in np.unique(np.concatenate(places)).tolist():
        chosen = [(run, each.where(at == place)) for (run, each), at in zip(returns, places, strict=True)]
        bins.append(_bin(place, [(run, each) for run, each in chosen if len(each.wait_s)]))
    return ReuseByWait(condition, tuple(bins))


class _Returns(NamedTuple):
    """Returns of one run, a value each; cached: tokens, nan where unknown."""

    wait_s: FloatArray
    cached: FloatArray
    reusable: FloatArray

    def where(self, is_in: NDArray[np.bool_]) -> _Returns:
        return _Returns(*(column[is_in] for column in self))


def _returns(run: RunFigures) -> _Returns:
    # A None becomes nan.
    rows = [(again.wait_ns / NS_PER_S, again.cached_tokens, again.reusable_tokens) for again in run.reuse.rearrivals]
    return _Returns(*np.array(rows, dtype=np.float64).T)


def _bin(place: int, returns: Sequence[tuple[RunFigures, _Returns]]) -> WaitBin:
    runs, by_run = [run for run, _ in returns], [each for _, each in returns]
    waits_s = np.concatenate([each.wait_s for each in by_run])
    is_known = not any(np.isnan(each.cached).any() for each in by_run)
    reused = [(np.asarray(each.cached > 0, dtype=np.float64), np.ones_like(each.cached)) for each in by_run]
    # What was reused beyond the turn before is no part of it.
    kept = [(np.minimum(each.cached, each.reusable), each.reusable) for each in by_run]
    return WaitBin(
        low_s=EDGES_S[place],
        high_s=EDGES_S[place + 1] if place + 1 < len(EDGES_S) else None,
        median_wait_s=median(waits_s),
        num_runs=len(runs),
        num_returns=len(waits_s),
        reused=_share(reused, runs) if is_known else None,
        kept=_share(kept, runs) if is_known else None,
    )


def _share(sides: Sequence[tuple[FloatArray, FloatArray]], runs: Sequence[RunFigures]) -> ReuseShare | None:
    parts, unit = independent_samples([part for part, _ in sides], runs)
    wholes, _ = independent_samples([whole for _, whole in sides], runs)
    part, whole = (int(sum(sample.sum() for sample in samples)) for samples in (parts, wholes))
    if not whole:
        return None
    found = share_interval(parts, wholes, unit=unit)
    return ReuseShare(part, whole, *((found, None) if isinstance(found, Interval) else (None, found)))


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
