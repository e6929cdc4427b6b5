"""Exact quantiles of any number of latencies in bounded memory: DuckDB counts distinct values, on disk if need be."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import duckdb
import pyarrow as pa

MAX_PENDING = 200_000
MEMORY_LIMIT = "1GB"


class LatencyCounts:
    """Counts of latencies in whole microseconds by tool; a context manager, because it holds a temporary file."""

    def __init__(self, max_pending: int = MAX_PENDING) -> None:
        self._max_pending = max_pending
        # DuckDB holds numbers for tools: a trace's JSON may name one that UTF-8 cannot hold.
        self._tools: dict[str, int] = {}
        self._pending: Counter[tuple[int, int]] = Counter()
        self._folder = tempfile.TemporaryDirectory(prefix="harness-latencies-")
        folder = Path(self._folder.name)
        self._db = duckdb.connect(
            str(folder / "counts.duckdb"), config={"memory_limit": MEMORY_LIMIT, "temp_directory": str(folder)}
        )
        self._db.execute("CREATE TABLE counts (tool INTEGER, us BIGINT, calls BIGINT)")

    def __enter__(self) -> LatencyCounts:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._db.close()
        self._folder.cleanup()

    def add(self, tool: str, latency_us: int, count: int = 1) -> None:
        """Count ``count`` calls of ``tool`` that took ``latency_us``."""
        self._pending[self._tools.setdefault(tool, len(self._tools)), latency_us] += count
        if len(self._pending) >= self._max_pending:
            self._store()

    def quantiles_us(self, shares: Sequence[float]) -> dict[str, tuple[int, list[float]]]:
        """By tool: number of calls, and exact quantiles in microseconds, linear between the two nearest calls.

        Of n ascending values v[0..n-1] a quantile is the one at place share * (n - 1), as numpy.percentile has it.
        """
        self._store()
        places = ", ".join(
            f"min(us) FILTER (up_to > {rounding}({share!r} * (total - 1)))"
            for share in shares
            for rounding in ("floor", "ceil")
        )
        rows = self._db.execute(
            f"""
            WITH distinct_values AS (SELECT tool, us, sum(calls) AS calls FROM counts GROUP BY tool, us),
            running AS (
                SELECT tool, us, (sum(calls) OVER (PARTITION BY tool ORDER BY us))::DOUBLE AS up_to,
                    (sum(calls) OVER (PARTITION BY tool))::DOUBLE AS total
                FROM distinct_values
            )
            SELECT tool, any_value(total)::BIGINT, {places} FROM running GROUP BY tool
            """
        ).fetchall()
        names = list(self._tools)
        return {names[tool]: (total, _interpolated(total, shares, values)) for tool, total, *values in rows}

    def _store(self) -> None:
        if not self._pending:
            return
        tools, values = zip(*self._pending, strict=True)
        batch = pa.table({"tool": tools, "us": values, "calls": list(self._pending.values())})
        self._db.register("batch", batch)
        self._db.execute("INSERT INTO counts SELECT * FROM batch")
        self._db.unregister("batch")
        self._pending.clear()


def _interpolated(total: int, shares: Sequence[float], values: Sequence[int]) -> list[float]:
    quantiles: list[float] = []
    for share, low, high in zip(shares, values[::2], values[1::2], strict=True):
        place = share * (total - 1)
        quantiles.append(low + (place - int(place)) * (high - low))
    return quantiles
