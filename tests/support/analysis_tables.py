"""Golden logs, and small tables of a run, for the tests of the analysis.

The golden logs tell one story in the vendor's two formats: two requests, a re-arrival that lost its slot to the dummy
block, one that found it, a preemption. Nothing here is measured.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa

from harness.measure.records import schema
from harness.measure.records.manifest import ClockRecord, Manifest

GOLDEN = Path(__file__).parent / "golden"


def request_row(session: int, request: int, **changes: Any) -> dict[str, Any]:
    """A request that was answered as planned: 300 prompt tokens, 3 generated, in flight for 1 s of model time."""
    start_ns = (10 * session + request) * 1_000_000_000
    return {
        "session": session,
        "request": request,
        "trigger_ns": start_ns if request else 0,
        "due_ns": start_ns,
        "sent_ns": start_ns,
        "response_head_ns": start_ns + 400_000_000,
        "done_ns": start_ns + 1_000_000_000,
        "status": "ok",
        "http_status": 200,
        "error": "",
        "planned_prompt_tokens": 300,
        "planned_generate_tokens": 3,
        "planned_wait_ns": 0,
        "prompt_tokens": 300,
        "completion_tokens": 3,
        "cached_tokens": 0,
        "request_id": f"r-{session}-{request}",
        "response_id": f"cmpl-r-{session}-{request}",
        "finish_reason": "length",
        "token_digest": "",
        **changes,
    }


def requests_table(*rows: dict[str, Any]) -> pa.Table:
    return pa.Table.from_pylist(list(rows), schema=schema.REQUESTS)


def steps_table(*pairs: tuple[int, int]) -> pa.Table:
    """Decode steps from (n, b) pairs, without times."""
    rows = [{"step": step, "log_ns": None, "n": n, "b": b} for step, (n, b) in enumerate(pairs)]
    return pa.Table.from_pylist(rows, schema=schema.STEPS)


def manifest(**changes: Any) -> Manifest:
    facts: dict[str, Any] = {
        "experiment": "e",
        "condition": "c",
        "replicate": 0,
        "plan_hash": "0" * 64,
        "planned_requests": 1,
        "clock": ClockRecord(scale=1.0),
        "requested": {"server": {"decode_buckets": [1, 2, 4, 8], "cost_model": "paper"}},
    }
    return Manifest.model_validate({**facts, **changes})
