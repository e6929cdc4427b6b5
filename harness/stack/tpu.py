"""Batches of tpu-inference, the TPU plugin of vLLM: all_batches_stats_*.jsonl, which has no times.

Read from tpu-inference 0.32.0, runner/utils.py (get_batch_composition_stats, AggregatedStatsLogger).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.stack.step_file import StepFile, is_count, json_object, step_table

PACKAGE = "tpu-inference"
HOW = "AGGREGATED_STATS_DIR=FOLDER writes all_batches_stats_*.jsonl"
MARK = b'"padded_total_num_scheduled_tokens"'
_BATCH_COUNTS = (
    "batch_id",
    "total_num_scheduled_tokens",
    "num_prefill_tokens",
    "num_decode_tokens",
    "padded_total_num_scheduled_tokens",
    "num_reqs",
)
_BATCH_NOTES = (
    "times, graph modes, KV use and prefix hits: tpu-inference does not write them to this file",
    "tokens are padded, not requests: b is the padded number of tokens of a decode step",
    "a prompt whose last chunk is one token is counted as a decode request by tpu-inference",
    "the file is written every 100 steps: a killed server loses the last ones",
)


def read(content: bytes) -> StepFile:
    """Batches of tpu-inference; a line that is no batch, or out of order, is damaged."""
    records: list[dict[str, Any]] = []
    damaged: list[bytes] = []
    last_id = num_missing = 0
    for line in content.splitlines():
        batch = json_object(line)
        if not _is_batch(batch) or batch["batch_id"] <= last_id:
            damaged.append(line)
            continue
        num_missing += batch["batch_id"] - last_id - 1
        last_id = batch["batch_id"]
        records.append(_batch_record(batch))
    missing = (f"{num_missing} batches are missing: their numbers are not in the file",) if num_missing else ()
    return StepFile("tpu-inference (format of 0.32.0)", step_table(records), damaged, (*missing, *_BATCH_NOTES))


def _is_batch(batch: Mapping[str, Any]) -> bool:
    if not all(is_count(batch.get(name)) for name in _BATCH_COUNTS):
        return False
    tokens = batch["num_prefill_tokens"] + batch["num_decode_tokens"]
    return (
        batch["num_reqs"] <= tokens
        and tokens == batch["total_num_scheduled_tokens"] <= batch["padded_total_num_scheduled_tokens"]
    )


def _batch_record(batch: Mapping[str, Any]) -> dict[str, Any]:
    padded = batch["padded_total_num_scheduled_tokens"]
    num_requests = batch["num_reqs"]
    record = {
        "unpadded_tokens": batch["total_num_scheduled_tokens"],
        "padded_tokens": padded,
        "context_tokens": batch["num_prefill_tokens"],
        "generation_tokens": batch["num_decode_tokens"],
    }
    if not batch["total_num_scheduled_tokens"]:
        return record | {"kind": "idle"}
    if batch["num_prefill_tokens"]:
        return record | {"kind": "mixed" if batch["num_decode_tokens"] else "prefill"}
    if batch["num_decode_tokens"] != num_requests:
        return record | {"kind": "speculative"}
    return record | {"kind": "decode", "n": num_requests, "b": padded}
