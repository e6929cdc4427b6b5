"""What a newer vLLM counts of itself: where cached tokens came from, drafts, refused and watermarked requests.

A server that counts one of them not has no such column. Source: vLLM 0.33.0, v1/metrics/loggers.py,
v1/metrics/cache_hit_source.py, v1/metrics/stats.py and v1/spec_decode/metrics.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import pyarrow as pa

from harness.analysis.run_tables import counter_increment
from harness.measure.records.schema import rows_where, values_of

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
COLUMNS = (*COUNTERS, *PEAKS, *RATIOS)


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
