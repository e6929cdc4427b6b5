"""Reads the batch statistics of tpu-inference: ``all_batches_stats_*.jsonl`` in its AGGREGATED_STATS_DIR.

Read from tpu-inference 0.32.0, runner/utils.py (get_batch_composition_stats, AggregatedStatsLogger). The file has no
times.
"""

from __future__ import annotations

from typing import Any

from harness.stack.vllm.step_file import StepFile, is_count, json_object, step_table

SOURCE = "tpu-inference (format of 0.32.0)"
MARK = b'"padded_total_num_scheduled_tokens"'
_COUNTS = (
    "batch_id",
    "total_num_scheduled_tokens",
    "num_prefill_tokens",
    "num_decode_tokens",
    "padded_total_num_scheduled_tokens",
    "num_reqs",
)
_NOTES = (
    "times, graph modes, KV use and prefix hits: tpu-inference does not write them to this file",
    "tokens are padded, not requests: b is the padded number of tokens of a decode step",
    "a prompt whose last chunk is one token is counted as a decode request by tpu-inference",
    "the file is written every 100 steps: a killed server loses the last ones",
)


def read_batch_stats(content: bytes) -> StepFile:
    """The steps of a file; a line that is no batch, or out of order, is damaged."""
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
        records.append(_record(batch))
    missing = (f"{num_missing} batches are missing: their numbers are not in the file",) if num_missing else ()
    return StepFile(SOURCE, step_table(records), damaged, (*missing, *_NOTES))


def _is_batch(batch: dict[str, Any]) -> bool:
    if not all(is_count(batch.get(name)) for name in _COUNTS):
        return False
    tokens = batch["num_prefill_tokens"] + batch["num_decode_tokens"]
    return (
        batch["num_reqs"] <= tokens
        and tokens == batch["total_num_scheduled_tokens"] <= batch["padded_total_num_scheduled_tokens"]
    )


def _record(batch: dict[str, Any]) -> dict[str, Any]:
    kind = _kind(batch)
    padded = batch["padded_total_num_scheduled_tokens"]
    return {
        "unpadded_tokens": batch["total_num_scheduled_tokens"],
        "padded_tokens": padded,
        "context_tokens": batch["num_prefill_tokens"],
        "generation_tokens": batch["num_decode_tokens"],
        "kind": kind,
        "n": batch["num_reqs"] if kind == "decode" else None,
        "b": padded if kind == "decode" else None,
    }


def _kind(batch: dict[str, Any]) -> str:
    if not batch["total_num_scheduled_tokens"]:
        return "idle"
    if batch["num_prefill_tokens"]:
        return "mixed" if batch["num_decode_tokens"] else "prefill"
    return "decode" if batch["num_decode_tokens"] == batch["num_reqs"] else "speculative"
