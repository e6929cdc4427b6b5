"""What plots need from the tables of one run: the lanes of a timeline, and requests that met a stall.

What was not observed stays None. Instants are the run's clock. Nothing is judged here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from harness.analysis.method import reuse
from harness.analysis.method.reconstruct import with_tokens
from harness.clock import NS_PER_S
from harness.records import SealedRun
from harness.report.view import Bar, TimelineView


def _rows(requests: pa.Table) -> list[dict[str, Any]]:
    return requests.sort_by([("session", "ascending"), ("request", "ascending")]).to_pylist()


def requests_in_stalls(requests: pa.Table, stalls_ns: Sequence[Sequence[int]]) -> int:
    """Requests that were due, sent or done while the client's machine stood still.

    stalls_ns: (start, duration) pairs of the run's clock.
    """
    sent = requests.column("sent_ns").combine_chunks()
    due_ns = requests.column("due_ns").to_numpy()
    sent_ns = sent.fill_null(0).to_numpy()
    done_ns = requests.column("done_ns").fill_null(0).to_numpy()
    is_hit = np.zeros(len(due_ns), dtype=np.bool_)
    for start_ns, duration_ns in stalls_ns:
        end_ns = start_ns + duration_ns
        is_hit |= (due_ns <= end_ns) & (sent_ns >= start_ns)
        is_hit |= (done_ns >= start_ns) & (done_ns <= end_ns)
    return int(np.count_nonzero(is_hit & sent.is_valid().to_numpy(zero_copy_only=False)))


def timeline(run: SealedRun, color: int) -> TimelineView | None:
    """The timeline of one run; None when no request of it was ever due."""
    requests, steps = _rows(run.table("requests")), run.table("steps")
    if not requests:
        return None
    start_ns = min(row["due_ns"] for row in requests)
    first_tokens = _first_tokens(run.table("chunks"))
    bars = _bars(requests, first_tokens, start_ns)
    timed = steps.filter(steps.column("log_ns").is_valid()).sort_by("log_ns")
    if timed.num_rows < steps.num_rows:  # some steps without a time would leave false gaps
        timed = steps.slice(0, 0)
    step_s = (timed.column("log_ns").to_numpy() - start_ns) / NS_PER_S
    ends = [bar.done_s for bar in bars if bar.done_s is not None] + [float(value) for value in step_s[-1:]]
    return TimelineView(
        label=run.label,
        condition=run.condition,
        color=color,
        num_sessions=1 + max(row["session"] for row in requests),
        bars=tuple(bars),
        step_s=np.asarray(step_s, dtype=np.float64),
        step_n=timed.column("n").to_numpy().astype(np.int64),
        step_b=timed.column("b").to_numpy().astype(np.int64),
        end_s=max(ends, default=1.0) * 1.005,
        start_ns=start_ns,
        stalls_s=tuple(
            ((at_ns - start_ns) / NS_PER_S, duration_ns / NS_PER_S)
            for at_ns, duration_ns in run.audit.stall_intervals_ns or ()
            if at_ns + duration_ns > start_ns  # the meter also watches the preparations
        ),
    )


def _first_tokens(chunks: pa.Table) -> dict[tuple[int, int], int]:
    """First instant at which a token of each request was received; the header's first byte may come long before."""
    # Threads would be waited for for ever where none can be started (a limit of memory).
    by_request = with_tokens(chunks).group_by(["session", "request"], use_threads=False)
    grouped = by_request.aggregate([("received_ns", "min")])
    return {(row["session"], row["request"]): row["received_ns_min"] for row in grouped.to_pylist()}


def _bars(rows: list[dict[str, Any]], first_tokens: dict[tuple[int, int], int], start_ns: int) -> list[Bar]:
    def seconds(instant_ns: int | None) -> float | None:
        return None if instant_ns is None else (instant_ns - start_ns) / NS_PER_S

    bars: list[Bar] = []
    previous: dict[str, Any] | None = None
    for row in rows:
        before = previous if previous is not None and previous["session"] == row["session"] else None
        bars.append(
            Bar(
                session=row["session"],
                request=row["request"],
                due_s=(row["due_ns"] - start_ns) / NS_PER_S,
                sent_s=seconds(row["sent_ns"]),
                first_token_s=seconds(first_tokens.get((row["session"], row["request"]))),
                done_s=seconds(row["done_ns"]),
                reuse=_reuse(row, before),
                status=row["status"],
                prompt_tokens=row["prompt_tokens"],
                completion_tokens=row["completion_tokens"],
                cached_tokens=row["cached_tokens"],
            )
        )
        previous = row
    return bars


def _reuse(row: dict[str, Any], before: dict[str, Any] | None) -> str:
    if row["prompt_tokens"] is None:
        return "unknown"
    if row["cached_tokens"] is None:
        return "unknown" if before is not None else "first"
    if row["cached_tokens"] == 0:
        return "first" if before is None else "recomputed"
    if before is None:
        return "cached"
    expected = reuse.reusable_tokens(before["prompt_tokens"] or before["planned_prompt_tokens"], row["prompt_tokens"])
    return "cached" if row["cached_tokens"] >= expected else "partial"
