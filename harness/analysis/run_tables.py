"""Keys and joins of a run's tables: (session, request), the server's request ids, and counters of the scrapes.

Everything in analysis stands on these. Nothing is priced or judged here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from harness.measure.records.schema import ABORTED, rows_where, values_of

IntArray = NDArray[np.int64]
RequestKey = tuple[int, int]
"""(session, request)."""
KEY_BITS = 32
# Model ns that converting a wall instant to model time and back may lose.
ROUNDING_NS = 2
CACHED_COUNTER = "vllm:prompt_tokens_cached_total"
EXTERNAL_COUNTER = "vllm:external_prefix_cache_hits_total"
ASKED_COUNTER = "vllm:external_prefix_cache_queries_total"
LOADED_BYTES, STORED_BYTES = "vllm:kv_offload_load_bytes_total", "vllm:kv_offload_store_bytes_total"
PREEMPTED_COUNTER = "vllm:num_preemptions_total"
MOVED_COUNTER = "emulator:schedule_moved_seconds_total"
# What the engine adds to a response id (docs/reference/stack.md, "Request ids"): the prompt's index (always for
# completions,
# for a chat only when it has several prompts), then 8 random hex digits unless randomisation is off.
_COMPLETION_SUFFIX = re.compile(r"-\d+(?:-[0-9a-f]{8})?")
_OTHER_SUFFIX = re.compile(r"(?:_\d+)?(?:-[0-9a-f]{8})?")


def request_keys(requests: pa.Table) -> IntArray:
    """A number for each (session, request), in their order."""
    session, request = (requests.column(name).to_numpy().astype(np.int64) for name in ("session", "request"))
    return session << KEY_BITS | request


def aborted_rows(requests: pa.Table) -> list[dict[str, Any]]:
    """The rows whose answer the client left."""
    return rows_where(requests, "status", ABORTED).to_pylist()


def left_answers(requests: pa.Table) -> dict[str, dict[str, Any]]:
    """``aborted_rows`` by the server's name of the request, made of the client's where no answer had begun."""
    names = requests.column("response_id").to_pylist()
    prefix = "chatcmpl" if any(name and name.startswith("chatcmpl-") for name in names) else "cmpl"
    return {row["response_id"] or f"{prefix}-{row['request_id']}": row for row in aborted_rows(requests)}


def with_logged_prefills(requests: pa.Table, kv_events: pa.Table) -> pa.Table:
    """The requests, with prompt, reuse and name of those that were left, where the log shows that they were admitted.

    Their prefills are device time like all others. The prompt is what was sent.
    """
    left = left_answers(requests)
    if not left:
        return requests
    for kind, log_id, reused in values_of(kv_events, "kind", "request_id", "reused_tokens"):
        if kind not in ("alloc", "cache_hit") or (name := join_request_id(log_id, left)) is None:
            continue
        row = left[name]
        row["response_id"], row["prompt_tokens"] = name, row["planned_prompt_tokens"]
        row["cached_tokens"] = (row["cached_tokens"] or 0) + ((reused or 0) if kind == "cache_hit" else 0)
    changed = {(row["session"], row["request"]): row for row in left.values()}
    rows = [changed.get((row["session"], row["request"]), row) for row in requests.to_pylist()]
    return pa.Table.from_pylist(rows, schema=requests.schema)


def join_request_id(log_id: str, response_ids: Mapping[str, Any]) -> str | None:
    """The response id that an id in the log belongs to; None when none or more than one fits.

    completions: response ``cmpl-X``, log ``cmpl-X-0-<8 hex>``; chat: ``chatcmpl-X``, log ``chatcmpl-X-<8 hex>``.
    """
    suffix = _COMPLETION_SUFFIX if log_id.startswith("cmpl-") else _OTHER_SUFFIX
    ends = [len(log_id), *(match.start() for match in re.finditer(r"[-_]", log_id))]
    fitting = [
        log_id[:end]
        for end in ends
        if log_id[:end] in response_ids and (end == len(log_id) or suffix.fullmatch(log_id[end:]))
    ]
    return fitting[0] if len(fitting) == 1 else None


def counter_increment(metrics: pa.Table, name: str, label: str = "") -> float | None:
    """Last minus first scraped value of a counter, summed over its labels; None unless scraped before and after.

    label: only samples with it, such as ``source="host"``. NaN and infinity are no values.
    """
    by_scrape: dict[int, float] = {}
    reasons: dict[int, str] = {}
    samples = values_of(rows_where(metrics, "name", name), "scrape", "reason", "labels", "value")
    for scrape, reason, labels, value in samples:
        if label not in labels:
            continue
        by_scrape[scrape] = by_scrape.get(scrape, 0.0) + value
        reasons[scrape] = reason
    before = [scrape for scrape, reason in reasons.items() if reason == "before"]
    after = [scrape for scrape, reason in reasons.items() if reason == "after"]
    increment = by_scrape[max(after)] - by_scrape[min(before)] if before and after else math.nan
    return increment if math.isfinite(increment) else None
