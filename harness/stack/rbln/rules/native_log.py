"""Shapes of vllm-rbln's native path, from a debug log.

Read from vllm-rbln 0.12.0, v1/worker/rbln_model_runner.py (_determine_batch_execution_and_padding). The line is written
once for each shape (``debug_once``): the log shows which sizes occurred and how they were padded, not how often.
"""

from __future__ import annotations

import re
from typing import Any

from harness.stack.step_file import StepFile, step_table

PACKAGE = "vllm-rbln"
HOW = "VLLM_LOGGING_LEVEL=DEBUG logs each shape of the native path once"
MARK = b"RBLN batch: dp_rank="
_SHAPE = re.compile(
    rb"RBLN batch: dp_rank=\d{1,9} route=(?P<route>\w{1,40}) prefill=(?P<prefill>[01]) idle=(?P<idle>[01]) "
    rb"in=\(num_reqs=(?P<n>\d{1,9}) query_len=(?P<query>\d{1,9})\) -> "
    rb"\(num_reqs_padded=(?P<b>\d{1,9}) query_len=(?P<padded_query>\d{1,9}) num_tokens_padded=(?:None|\d{1,9})\)\s*$"
)
_NATIVE_NOTES = (
    "counts, p and h(n): vllm-rbln writes each shape once, not each step",
    "times, KV use and prefix hits: not in these lines",
    "shapes of the warm-up are in the list where their route is not PINNED",
)


def read(content: bytes) -> StepFile:
    """Shapes of vllm-rbln; other lines are passed over, a damaged shape line is counted."""
    records: list[dict[str, Any]] = []
    damaged: list[bytes] = []
    for line in content.splitlines():
        if MARK not in line:
            continue
        shape = _SHAPE.search(line)
        if shape is not None and int(shape["n"]) <= int(shape["b"]):
            records.append(_shape_record(shape))
        elif not line.rstrip().endswith(b"-> nothing to run"):
            damaged.append(line)
    source = "vllm-rbln native path (format of 0.12.0)"
    return StepFile(source, step_table(records), damaged, _NATIVE_NOTES, has_each_step=False)


def _shape_record(shape: re.Match[bytes]) -> dict[str, Any]:
    n, b, query = int(shape["n"]), int(shape["b"]), int(shape["query"])
    record = {"unpadded_tokens": n * query, "padded_tokens": b * int(shape["padded_query"])}
    if shape["idle"] == b"1" or shape["route"] == b"PINNED":
        return record | {"kind": "dummy"}
    if shape["prefill"] == b"1":
        return record | {"kind": "prefill"}
    return record | ({"kind": "decode", "n": n, "b": b} if query == 1 else {"kind": "speculative"})
