"""Exact quantiles of any number of latencies in bounded memory: distinct values are counted, not kept.

Values are integer microseconds. When too many distinct ones are in memory they go to a temporary folder, sorted, and
a quantile is then found by bisection over all of them; nothing is sampled or approximated.
"""

from __future__ import annotations

import tempfile
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]

MAX_DISTINCT_IN_MEMORY = 1_000_000  # about 150 MB of Python integers


class LatencyCounts:
    """Counts of latencies by tool; a context manager, because it may hold temporary files."""

    def __init__(self, max_distinct: int = MAX_DISTINCT_IN_MEMORY) -> None:
        self._max_distinct = max_distinct
        self._num_distinct = 0
        self._counts: dict[str, Counter[int]] = {}
        self._totals: Counter[str] = Counter()
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self.num_spilled = 0
        # Per tool, the stored runs: ascending values and the running total of their counts.
        self._runs: dict[str, list[tuple[IntArray, IntArray]]] = {}

    def __enter__(self) -> LatencyCounts:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._runs.clear()
        if self._folder is not None:
            self._folder.cleanup()

    @property
    def totals(self) -> dict[str, int]:
        """Calls by tool."""
        return dict(self._totals)

    def add(self, tool: str, latency_us: int, count: int = 1) -> None:
        """Count ``count`` calls of ``tool`` that took ``latency_us``."""
        counts = self._counts.get(tool)
        if counts is None:
            counts = self._counts[tool] = Counter()
        before = len(counts)
        counts[latency_us] += count
        self._num_distinct += len(counts) - before
        self._totals[tool] += count
        if self._num_distinct > self._max_distinct:
            self._spill()

    def quantile_us(self, tool: str, share: float) -> float:
        """The exact quantile in microseconds, interpolated linearly between the two nearest calls.

        Of n ascending values v[0..n-1] it is the one at place share * (n - 1), as numpy.percentile and DuckDB's
        quantile_cont have it. Raises KeyError for a tool without calls.
        """
        place = share * (self._totals[tool] - 1)
        lower = int(place)
        low_us = self._value_at(tool, lower)
        if place == lower:
            return float(low_us)
        return low_us + (place - lower) * (self._value_at(tool, lower + 1) - low_us)

    def _value_at(self, tool: str, place: int) -> int:
        """The value at ``place`` (from 0) in ascending order: the smallest that more than ``place`` calls reach."""
        num_up_to, low, high = self._distribution(tool)
        while low < high:
            middle = (low + high) // 2
            if num_up_to(middle) > place:
                high = middle
            else:
                low = middle + 1
        return low

    def _distribution(self, tool: str) -> tuple[Callable[[int], int], int, int]:
        """(number of calls up to a value, lowest value, highest value)."""
        counts = self._counts.get(tool, Counter())
        values = sorted(counts)
        running = list(accumulate((counts[value] for value in values), initial=0))
        runs = self._runs.get(tool, [])

        def num_up_to(value: int) -> int:
            total = running[bisect_right(values, value)]
            for stored, stored_running in runs:
                place = int(np.searchsorted(stored, value, side="right"))
                total += int(stored_running[place - 1]) if place else 0
            return total

        lows = [*values[:1], *(int(stored[0]) for stored, _ in runs)]
        highs = [*values[-1:], *(int(stored[-1]) for stored, _ in runs)]
        return num_up_to, min(lows), max(highs)

    def _spill(self) -> None:
        """Write all counters as one file, a sorted run per tool, and forget them."""
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="harness-latencies-")
        values = {tool: np.array(sorted(counts), dtype=np.int64) for tool, counts in self._counts.items()}
        running = [
            np.cumsum([counts[value] for value in values[tool].tolist()], dtype=np.int64)
            for tool, counts in self._counts.items()
        ]
        # One file for all tools: every mapped file holds a descriptor, and those are few.
        path = Path(self._folder.name) / f"{self.num_spilled}.npy"
        np.save(path, np.stack([np.concatenate(list(values.values())), np.concatenate(running)]))
        stored = np.load(path, mmap_mode="r")
        start = 0
        for tool, tool_values in values.items():
            run = slice(start, start + len(tool_values))
            self._runs.setdefault(tool, []).append((stored[0, run], stored[1, run]))
            start += len(tool_values)
        self.num_spilled += 1
        self._counts.clear()
        self._num_distinct = 0
