"""Answers that the client left as planned: what of them is known, and which checks they stand outside of, and why.

Usage comes with the end of an answer, so that of one that was left is unknown: its length, its reuse, how many steps it
still took. None of that is guessed.
Definitions: docs/method.md, "Answers that the client leaves".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from harness.analysis.method.lateness import ROUNDING_NS
from harness.analysis.method.reconstruct import join_request_id
from harness.clock import NS_PER_MS
from harness.records import Finding
from harness.records.schema import ABORTED, rows_where

if TYPE_CHECKING:
    from harness.plan import Plan


def aborted_rows(requests: pa.Table) -> list[dict[str, Any]]:
    """The rows whose answer the client left."""
    return rows_where(requests, "status", ABORTED).to_pylist()


def response_id_of(row: Mapping[str, Any]) -> str:
    """The server's name of a request that was left, which may have said nothing yet: made of the client's own."""
    return row["response_id"] or f"cmpl-{row['request_id']}"


def most_decode_tokens(requests: pa.Table) -> int:
    """How many decode tokens the step log may hold of answers that were left."""
    return sum(row["planned_generate_tokens"] - 1 for row in aborted_rows(requests))


def with_logged_prefills(requests: pa.Table, kv_events: pa.Table) -> pa.Table:
    """The requests, with prompt, reuse and name of those that were left, where the log shows that they were admitted.

    Their prefills are device time like all others. The prompt is what was sent.
    """
    rows = requests.to_pylist()
    left = {response_id_of(row): row for row in rows if row["status"] == ABORTED}
    if not left:
        return requests
    names = zip(*(kv_events.column(name).to_pylist() for name in ("kind", "request_id", "reused_tokens")), strict=True)
    for kind, log_id, reused in names:
        if kind not in ("alloc", "cache_hit") or (name := join_request_id(log_id, left)) is None:
            continue
        row = left[name]
        row["response_id"], row["prompt_tokens"] = name, row["planned_prompt_tokens"]
        row["cached_tokens"] = (row["cached_tokens"] or 0) + ((reused or 0) if kind == "cache_hit" else 0)
    return pa.Table.from_pylist(rows, schema=requests.schema)


def check_aborts(requests: pa.Table, plan: Plan | None, scale: float, limit_ms: float) -> Iterator[Finding]:
    """Whether the client left what it was to leave, and when; what the checks of lengths and reuse leave out.

    scale: model ns per wall ns. limit_ms: the most that leaving may come late, wall (p99).
    """
    left = {(row["session"], row["request"]): row for row in aborted_rows(requests)}
    if left:
        yield Finding(
            code="left-as-planned",
            severity="info",
            evidence=f"the client left {len(left)} answers as planned: their usage is unknown, so that the checks of "
            "lengths, of decode tokens and of cached tokens leave them out",
        )
    if plan is None:
        return
    planned = {(session.index, place): one for session in plan.sessions for place, one in enumerate(session.requests)}
    if strangers := [key for key in left if key not in planned or not planned[key].is_abortable]:
        yield _invalid("abort-unplanned", f"{len(strangers)} answers were left that the plan stays for", strangers[0])
    columns = zip(*(requests.column(name).to_pylist() for name in ("session", "request", "status")), strict=True)
    ended = {(session, request) for session, request, status in columns if status == "ok"}
    if missed := [key for key in sorted(ended) if key in planned and planned[key].abort_after_tokens]:
        yield _invalid("abort-missed", f"{len(missed)} answers ended that the client was to leave", missed[0])
    late_ms = {
        key: (row["done_ns"] - row["sent_ns"] - planned[key].abort_after_ns) / (scale * NS_PER_MS)
        for key, row in left.items()
        if key in planned and planned[key].abort_after_ns
    }
    early_ms = -ROUNDING_NS * max(1.0, scale) / (scale * NS_PER_MS)
    if early := [key for key, late in late_ms.items() if late < early_ms]:
        yield _invalid("abort-early", f"the client left {len(early)} answers before their instant", early[0])
    if late_ms and (p99_ms := float(np.quantile(list(late_ms.values()), 0.99, method="higher"))) > limit_ms:
        told = f"the client left up to {p99_ms:.3f} ms late (p99, wall), the limit of re-arrivals is {limit_ms:g} ms"
        yield _invalid("abort-late", told, max(late_ms, key=lambda key: late_ms[key]))


def _invalid(code: str, evidence: str, key: tuple[int, int]) -> Finding:
    return Finding(code=code, severity="invalid", evidence=f"{evidence}, first session {key[0]} request {key[1]}")
