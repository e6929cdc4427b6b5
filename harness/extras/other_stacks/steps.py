"""Files of engine steps that vLLM or vllm-rbln wrote, and the padding p and h(n) of their decode steps.

A file is recognised by its content and read into the columns of vLLM's step log. A damaged record is counted and
quoted, never repaired. A value that a stack does not show is null.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from harness.analysis.cost.padding import padding_of
from harness.clock import NS_PER_MS
from harness.errors import RecordsError
from harness.measure.records.schema import values_of
from harness.stacks.vllm.core_steps import MARK, REQUESTS
from harness.stacks.vllm.step_log import SCHEMA, read_step_log
from harness.table import Table


@dataclass(frozen=True, slots=True)
class ForeignSteps:
    """The steps of a file. source: the stack, with the version that the format was read from.

    steps: columns of ``SCHEMA``. first_damaged: of the ``num_damaged`` records, shortened. notes: what the file does
    not show, and what its figures leave out. has_each_step: False where a file names each shape once, so that there are
    no counts. requests: see ``harness.stacks.vllm.core_steps.REQUESTS``; empty where the file does not name them.
    """

    source: str
    steps: pa.Table
    num_damaged: int
    first_damaged: str
    notes: tuple[str, ...]
    has_each_step: bool = True
    requests: pa.Table = field(default_factory=REQUESTS.empty_table)


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
    steps, first = pa.Table.from_pylist(records, schema=SCHEMA), damaged[0][:120] if damaged else b""
    return ForeignSteps(source, steps, len(damaged), first.decode("utf-8", "replace"), _NATIVE_NOTES, False)


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
        source, notes, requests = "step log", log.unseen, REQUESTS.empty_table()
        for core in log.cores:
            source, requests = f"engine core {log.engines[0]}", core.requests
            if core.num_missing or core.num_unended:
                notes = (f"{core.num_missing} steps are not in the file, {core.num_unended} never ended", *notes)
        source = f"vLLM {log.vllm or 'of unknown version'}, {source}"
        return ForeignSteps(source, log.steps, log.num_damaged, log.first_damaged, notes, requests=requests)
    if NATIVE_MARK in content:
        return _read_native(content)
    raise RecordsError(
        "is no file of steps that is known",
        where=where,
        hint="Known are vLLM's step log (docs/reference/step-files.md) and a debug log of vllm-rbln's native path "
        "(VLLM_LOGGING_LEVEL=DEBUG); the harness of commit 1d08ee51 reads those of tpu-inference and of vLLM on Gaudi",
    )


def step_tables(file: ForeignSteps) -> tuple[Table, Table]:
    """One row about the file, and its decode shapes (n, b), a row each; counts are absent where the file has none.

    b is absent where the server did not show it. p: share of padded positions, sum(b - n) / sum(b). Steps without a
    graph are absent where no step shows its mode.
    """
    kinds, modes = (Counter(file.steps[name].to_pylist()) for name in ("kind", "runtime_mode"))
    decodes = file.steps.filter(file.steps["n"].is_valid()).select(["n", "b", "runtime_mode"]).to_pylist()
    by_shape = Counter[tuple[int, int | None]]((row["n"], row["b"]) for row in decodes)
    by_n = Counter(row["n"] for row in decodes)
    eager = Counter((row["n"], row["b"]) for row in decodes if row["runtime_mode"] == "NONE")
    whole: dict[str, Any] = {
        "steps": file.steps.num_rows,
        "decode_steps": len(decodes),
        "decode_steps_without_b": sum(count for (_n, b), count in by_shape.items() if b is None),
        "prefill_steps": kinds["prefill"],
        "mixed_steps": kinds["mixed"],
        "other_steps": file.steps.num_rows - kinds["decode"] - kinds["prefill"] - kinds["mixed"],
        "padding_p": padding_of({(n, b): count for (n, b), count in by_shape.items() if b is not None}).ratio,
    }
    if not file.has_each_step:
        whole |= dict.fromkeys(whole.keys() - {"decode_steps_without_b"})
    whole["damaged_lines"] = file.num_damaged
    notes = (f"first damaged line: {file.first_damaged!a}", *file.notes) if file.num_damaged else file.notes
    has_modes = any(modes.keys() - {None})
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


def request_figures(file: ForeignSteps) -> pa.Table:
    """What became of each request, a row each, in the order of admission; empty where the file does not name them."""
    spans_ms = {
        name: [None if None in (since, until) else (until - since) / NS_PER_MS for since, until in ends_ns]
        for name, ends_ns in ((name, values_of(file.requests, *ends)) for name, ends in _SPANS.items())
    }
    counts = {name: file.requests[name] for name in _REQUEST_COUNTS}
    return pa.table({"request_id": file.requests["request_id"], **spans_ms, **counts})


def request_table(file: ForeignSteps) -> Table | None:
    """Median, 99th percentile and maximum over the requests; None where the file does not name them."""
    figures = request_figures(file).drop_columns("request_id")
    known = {name: figures[name].drop_null().to_numpy() for name in figures.column_names}
    rows = [
        (name, len(values), *np.percentile(values, [50, 99, 100]).tolist())
        for name, values in known.items()
        if len(values)
    ]
    caption = "what became of each request: waiting, prompt until its last part, tokens after the first"
    return Table("requests", caption, ("figure", "requests", "p50", "p99", "max"), tuple(rows)) if rows else None
