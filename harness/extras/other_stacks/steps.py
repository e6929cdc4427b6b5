"""Files of engine steps that vLLM or vllm-rbln wrote, and the padding p and h(n) of their decode steps.

A file is recognised by its content and read into the columns of vLLM's step log. A damaged record is counted and
quoted, never repaired. A value that a stack does not show is null.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from harness.clock import NS_PER_MS
from harness.errors import RecordsError
from harness.stacks.vllm.core_steps import MARK
from harness.stacks.vllm.step_log import SCHEMA, read_step_log
from harness.table import Table


@dataclass(frozen=True, slots=True)
class ForeignSteps:
    """The steps of a file. source: the stack, with the version that the format was read from.

    steps: columns of ``SCHEMA``. has_each_step: False where a file names each shape once, so that there are no counts.
    notes: what the file does not show, and what its figures leave out. requests: see
    ``harness.stacks.vllm.core_steps.REQUESTS``; None where the file does not name them.
    """

    source: str
    steps: pa.Table
    damaged: Sequence[bytes]
    notes: tuple[str, ...]
    has_each_step: bool = True
    requests: pa.Table | None = None

    @property
    def first_damaged(self) -> str:
        """The first damaged record, shortened; "" for none."""
        return self.damaged[0][:120].decode("utf-8", "replace") if self.damaged else ""


NATIVE_MARK = b"RBLN batch: dp_rank="
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


def _read_native(content: bytes) -> ForeignSteps:
    """Shapes of vllm-rbln's native path in a debug log; other lines are passed over.

    A line is written once for each shape (``debug_once``): the log shows which sizes occurred and how they were
    padded, not how often. Source: vllm-rbln 0.12.0, v1/worker/rbln_model_runner.py
    (_determine_batch_execution_and_padding).
    """
    records: list[dict[str, Any]] = []
    damaged: list[bytes] = []
    for line in content.splitlines():
        if NATIVE_MARK not in line:
            continue
        shape = _SHAPE.search(line)
        if shape is not None and int(shape["n"]) <= int(shape["b"]):
            records.append(_shape_record(shape))
        elif not line.rstrip().endswith(b"-> nothing to run"):
            damaged.append(line)
    source = "vllm-rbln native path (format of 0.12.0)"
    steps = pa.Table.from_pylist(records, schema=SCHEMA)
    return ForeignSteps(source, steps, damaged, _NATIVE_NOTES, has_each_step=False)


def _shape_record(shape: re.Match[bytes]) -> dict[str, Any]:
    n, b, query = int(shape["n"]), int(shape["b"]), int(shape["query"])
    record = {"unpadded_tokens": n * query, "padded_tokens": b * int(shape["padded_query"])}
    if shape["idle"] == b"1" or shape["route"] == b"PINNED":
        return record | {"kind": "dummy"}
    if shape["prefill"] == b"1":
        return record | {"kind": "prefill"}
    return record | ({"kind": "decode", "n": n, "b": b} if query == 1 else {"kind": "speculative"})


def read_steps(content: bytes, *, where: str = "step file") -> ForeignSteps:
    """The steps in a file of any known stack; RecordsError for any other file."""
    if any(mark in content.partition(b"\n")[0] for mark in (b'"vllm_step_log"', MARK)):
        log = read_step_log(content, where=where)
        damaged = [log.first_damaged.encode()] * log.num_damaged
        name = f"vLLM {log.vllm or 'of unknown version'}"
        if not log.cores:
            return ForeignSteps(f"{name}, step log", log.steps, damaged, log.unseen)
        (core,) = log.cores
        lost = f"{core.num_missing} steps are not in the file, {core.num_unended} never ended"
        notes = (*([lost] if core.num_missing or core.num_unended else []), *log.unseen)
        return ForeignSteps(f"{name}, engine core {log.engines[0]}", log.steps, damaged, notes, requests=core.requests)
    if NATIVE_MARK in content:
        return _read_native(content)
    for mark, stack in _NO_LONGER_READ.items():
        if mark in content:
            raise RecordsError(
                f"is a step file of {stack}, which this version does not read",
                where=where,
                hint="rbln-harness 0.1.0 at commit 1d08ee51 reads it: harness stack steps FILE",
            )
    raise RecordsError(
        "is no file of steps that is known",
        where=where,
        hint="Known are vLLM's step log (docs/reference/step-files.md) and a debug log of vllm-rbln's native path "
        "(VLLM_LOGGING_LEVEL=DEBUG)",
    )


_NO_LONGER_READ = {b'"padded_total_num_scheduled_tokens"': "tpu-inference", b'_bucket_batch_size"': "vLLM on Gaudi"}


def step_tables(file: ForeignSteps) -> tuple[Table, Table]:
    """One row about the file, and its decode shapes (n, b), a row each; counts are absent where the file has none.

    b is absent where the server did not show it. p: share of padded positions, sum(b - n) / sum(b). Steps without a
    graph are absent where no step shows its mode.
    """
    columns = (file.steps[name].to_pylist() for name in ("n", "b", "runtime_mode"))
    decodes = [row for row in zip(*columns, strict=True) if row[0] is not None]
    kinds, by_n = Counter(file.steps["kind"].to_pylist()), Counter(n for n, _b, _mode in decodes)
    by_shape = Counter[tuple[int, int | None]]((n, b) for n, b, _mode in decodes)
    eager = Counter[tuple[int, int | None]]((n, b) for n, b, mode in decodes if mode == "NONE")
    has_modes = any(file.steps["runtime_mode"].to_pylist())
    num_positions = sum(b or 0 for _n, b, _mode in decodes)
    num_used = sum(n for n, b, _mode in decodes if b is not None)
    whole: dict[str, Any] = {
        "steps": file.steps.num_rows,
        "decode_steps": len(decodes),
        "decode_steps_without_b": sum(b is None for _n, b, _mode in decodes),
        "prefill_steps": kinds["prefill"],
        "mixed_steps": kinds["mixed"],
        "other_steps": file.steps.num_rows - kinds["decode"] - kinds["prefill"] - kinds["mixed"],
        "padding_p": 1 - num_used / num_positions if num_positions else None,
    }
    if not file.has_each_step:
        whole |= dict.fromkeys(whole.keys() - {"decode_steps_without_b"})
    whole["damaged_lines"] = len(file.damaged)
    notes = (f"first damaged line: {file.first_damaged!a}", *file.notes) if file.damaged else file.notes
    shapes = [
        (n, b, count, count / len(decodes), by_n[n], eager[n, b] if has_modes else None)
        if file.has_each_step
        else (n, b, None, None, None, None)
        for (n, b), count in sorted(by_shape.items(), key=lambda item: (item[0][0], item[0][1] or 0))
    ]
    names = ("n", "b", "steps", "share_of_decode_steps", "steps_with_n", "steps_without_graph")
    return (
        Table("steps", file.source, tuple(whole), (tuple(whole.values()),), notes=notes),
        Table("decode shapes", "requests n and padded size b of pure decode steps", names, tuple(shapes)),
    )


_SPANS = {
    "queue_ms": ("queued_ns", "admitted_ns"),
    "prefill_ms": ("admitted_ns", "first_token_ns"),
    "decode_ms": ("first_token_ns", "last_ns"),
}
_REQUEST_COUNTS = (
    *("prompt_tokens", "cached_tokens", "computed_tokens", "recomputed_tokens"),
    *("prefill_steps", "decode_steps", "preemptions"),
)


def request_records(file: ForeignSteps) -> list[dict[str, Any]]:
    """What became of each request, in the order of admission; empty where the file does not name them."""

    def span_ms(row: dict[str, Any], since: str, until: str) -> float | None:
        return None if None in (row[since], row[until]) else (row[until] - row[since]) / NS_PER_MS

    return [
        {"request_id": row["request_id"]}
        | {name: span_ms(row, *ends) for name, ends in _SPANS.items()}
        | {name: row[name] for name in _REQUEST_COUNTS}
        for row in ([] if file.requests is None else file.requests.to_pylist())
    ]


def request_table(file: ForeignSteps) -> Table | None:
    """Median, 99th percentile and maximum over the requests; None where the file does not name them."""
    records = request_records(file)
    rows: list[tuple[str, int, float, float, float]] = []
    for name in (*_SPANS, *_REQUEST_COUNTS):
        if values := [float(record[name]) for record in records if record[name] is not None]:
            p50, p99 = np.percentile(values, [50, 99]).tolist()
            rows.append((name, len(values), p50, p99, max(values)))
    caption = "what became of each request: waiting, prompt until its last part, tokens after the first"
    return Table("requests", caption, ("figure", "requests", "p50", "p99", "max"), tuple(rows)) if rows else None
