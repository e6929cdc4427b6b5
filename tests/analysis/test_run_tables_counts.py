"""Counters and gauges of newer vLLMs become columns, and are absent where the server has none of them."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest

from harness.analysis.logs.parse import metrics_table
from harness.analysis.run_tables import COUNT_COLUMNS, count_cells, counts_of, counts_over

LABELS = 'engine="{engine}",model_name="m"'


def body(**values: float) -> str:
    """Samples of two engines; a name's double underscore stands before its further label."""
    lines: list[str] = []
    for key, value in values.items():
        name, _, label = key.partition("__")
        more = f",{label.replace('_is_', '=')}" if label else ""
        more = more.replace("=", '="') + '"' if more else ""
        for engine in (0, 1):
            labels = LABELS.format(engine=engine)
            lines.append(f"vllm:{name}{{{labels}{more}}} {value / 2}")
    return "\n".join(lines) + "\n"


def scraped(*bodies: str) -> pa.Table:
    """Before, between and after."""
    reasons = ["before", *["interval"] * (len(bodies) - 2), "after"]
    records: list[dict[str, Any]] = [
        {"at_ns": at, "reason": reason, "status": 200, "body": text}
        for at, (reason, text) in enumerate(zip(reasons, bodies, strict=True))
    ]
    return metrics_table([json.dumps(record).encode() + b"\n" for record in records])[0]


def test_reuse_is_told_apart_by_the_memory_that_it_came_from() -> None:
    first = body(
        prompt_tokens_cached_by_source_total__source_is_device=100,
        prompt_tokens_cached_by_source_total__source_is_host=10,
    )
    last = body(
        prompt_tokens_cached_by_source_total__source_is_device=700,
        prompt_tokens_cached_by_source_total__source_is_host=74,
    )
    assert counts_of(scraped(first, last)) == {"cached_device_tokens": 600, "cached_host_tokens": 64}


def test_accepted_drafts_are_a_share_of_the_drafted_tokens_of_the_run() -> None:
    names = ("spec_decode_num_drafts_total", "spec_decode_num_draft_tokens_total")
    accepted = "spec_decode_num_accepted_tokens_total"
    first = body(**dict.fromkeys(names, 50), **{accepted: 50})
    last = body(**{names[0]: 150, names[1]: 450, accepted: 150})
    cells = count_cells(counts_of(scraped(first, last)))
    assert (cells["drafts"], cells["draft_tokens"], cells["accepted_draft_tokens"]) == (100, 400, 100)
    assert cells["accepted_draft_share"] == 0.25
    assert count_cells(counts_of(scraped(last, last)))["accepted_draft_share"] is None


def test_refused_watermarked_and_waiting_requests_are_counted() -> None:
    kinds = ("waiting_to_start", "in_progress")
    texts = [
        body(
            admission_rejections_total__reason_is_max_num_queued_reqs=number,
            watermark_requests_total__status_is_watermarked=2 * number,
            watermark_requests_total__status_is_not_watermarked=8 * number,
            **{f"num_requests_kv_fetch_by_stage__stage_is_{kind}": waiting for kind in kinds},
        )
        for number, waiting in ((0, 0), (2, 6), (4, 2))
    ]
    counts = counts_of(scraped(*texts))
    assert counts["rejected_admissions"] == 4
    assert counts["watermarked_requests"] == 8
    # In one scrape, of both stages and both engines.
    assert counts["kv_fetch_most_requests"] == 12
    both = counts_over([counts, counts])
    assert (both["rejected_admissions"], both["kv_fetch_most_requests"]) == (8, 12)


@pytest.mark.parametrize("others", [[], [{}], [{"drafts": 3}, {}]])
def test_what_one_server_does_not_count_is_unknown_of_all(others: list[dict[str, int]]) -> None:
    assert counts_over(others) == {}
    assert count_cells({}) == dict.fromkeys(COUNT_COLUMNS)
    assert counts_of(scraped(body(num_requests_running=2), body(num_requests_running=2))) == {}


def test_what_a_server_that_was_started_again_counts_is_no_increment() -> None:
    one, two = "prompt_tokens_cached_by_source_total__source_is_device", "admission_rejections_total__reason_is_x"
    before, after = body(**{one: 150, two: 4}), body(**{one: 20, two: 6})
    assert counts_of(scraped(before, after)) == {"rejected_admissions": 2}
