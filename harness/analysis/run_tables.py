"""Keys and joins of a run's tables: (session, request), the server's request ids, and counters of the scrapes.

Everything in analysis stands on these. Nothing is priced or judged here. A server that does not count something has no
such column. Source of the newer counters: vLLM 0.33.0, v1/metrics/loggers.py, v1/metrics/cache_hit_source.py,
v1/metrics/stats.py and v1/spec_decode/metrics.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
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

    label: only samples with it, such as ``source="host"``. NaN and infinity are no values. Nor is a fall: the server
    counts from 0 again.
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
    return increment if math.isfinite(increment) and increment >= 0 else None


Counts = Mapping[str, int]
CACHED_BY_SOURCE = "vllm:prompt_tokens_cached_by_source_total"
REJECTIONS, WATERMARKS = "vllm:admission_rejections_total", "vllm:watermark_requests_total"
KV_FETCHES = "vllm:num_requests_kv_fetch_by_stage"
# Column: name of a counter, and the label that its samples have; "" for all.
COUNTERS = {
    "cached_device_tokens": (CACHED_BY_SOURCE, 'source="device"'),
    "cached_host_tokens": (CACHED_BY_SOURCE, 'source="host"'),
    "cached_disk_tokens": (CACHED_BY_SOURCE, 'source="disk"'),
    "cached_p2p_tokens": (CACHED_BY_SOURCE, 'source="p2p"'),
    "cached_external_tokens": (CACHED_BY_SOURCE, 'source="external_unspecified"'),
    "drafts": ("vllm:spec_decode_num_drafts_total", ""),
    "draft_tokens": ("vllm:spec_decode_num_draft_tokens_total", ""),
    "accepted_draft_tokens": ("vllm:spec_decode_num_accepted_tokens_total", ""),
    "rejected_admissions": (REJECTIONS, ""),
    "watermarked_requests": (WATERMARKS, 'status="watermarked"'),
    "watermark_skipped_requests": (WATERMARKS, 'status="skipped"'),
}
PEAKS = {"kv_fetch_most_requests": KV_FETCHES}
"""Column: a gauge, of which the largest sum in a scrape counts. They wait for KV that is fetched from elsewhere."""
RATIOS = {"accepted_draft_share": ("accepted_draft_tokens", "draft_tokens")}
COUNT_COLUMNS = (*COUNTERS, *PEAKS, *RATIOS)


def counts_of(metrics: pa.Table) -> dict[str, int]:
    """What the server counted in a run, by column. metrics: METRICS schema."""
    counts = {column: counter_increment(metrics, *of) for column, of in COUNTERS.items()}
    return {
        **{column: round(count) for column, count in counts.items() if count is not None},
        **{column: most for column, gauge in PEAKS.items() if (most := _most(metrics, gauge)) is not None},
    }


def _most(metrics: pa.Table, gauge: str) -> int | None:
    by_scrape: dict[int, float] = {}
    for scrape, value in values_of(rows_where(metrics, "name", gauge), "scrape", "value"):
        by_scrape[scrape] = by_scrape.get(scrape, 0.0) + value
    known = [value for value in by_scrape.values() if math.isfinite(value)]
    return round(max(known)) if known else None


def counts_over(runs: Sequence[Counts]) -> dict[str, int]:
    """Of several runs: sums, of a gauge the largest; only what every run has."""
    shared = [column for column in (*COUNTERS, *PEAKS) if runs and all(column in run for run in runs)]
    return {column: (max if column in PEAKS else sum)(run[column] for run in runs) for column in shared}


def count_cells(counts: Counts) -> dict[str, float | int | None]:
    """Cells of a row of a table; None for what is not counted."""
    ratios = {
        column: counts[part] / counts[whole] if part in counts and counts.get(whole) else None
        for column, (part, whole) in RATIOS.items()
    }
    return {**{column: counts.get(column) for column in (*COUNTERS, *PEAKS)}, **ratios}
