"""Files of engine steps that vLLM or vllm-rbln wrote, and the padding p and h(n) of their decode steps.

A file is recognised by its content and read into the columns of vLLM's step log. A damaged record is counted and
quoted, never repaired. A value that a stack does not show is null.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

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

    @property
    def num_by_kind(self) -> dict[str, int]:
        """How many steps there are of each kind."""
        return dict(Counter(cast("list[str]", self.steps["kind"].to_pylist())))


def _step_table(records: Iterable[Mapping[str, Any]]) -> pa.Table:
    """Records by column name as a table of ``SCHEMA``; what a record lacks is null."""
    return pa.Table.from_pylist([dict(record) for record in records], schema=SCHEMA)


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
    return ForeignSteps(source, _step_table(records), damaged, _NATIVE_NOTES, has_each_step=False)


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


_NO_LONGER_READ = {
    b'"padded_total_num_scheduled_tokens"': "tpu-inference",
    b'_bucket_batch_size"': "vLLM on Gaudi",
}


def load_steps(path: Path) -> ForeignSteps:
    """``read_steps`` of a file."""
    with RecordsError.on_os_error("cannot be read", where=path):
        return read_steps(path.read_bytes(), where=str(path))


@dataclass(frozen=True, slots=True)
class StepPadding:
    """Padding of the pure decode steps of a file.

    steps_by_shape: by (n, b); b is None where the server did not show it. eager_by_shape: those of them without a
    graph; None where no step shows its mode. p: share of padded positions, sum(b - n) / sum(b); None where no b is
    known or no step is counted.
    """

    steps_by_shape: dict[tuple[int, int | None], int]
    eager_by_shape: dict[tuple[int, int | None], int] | None
    p: float | None

    @property
    def h(self) -> dict[int, int]:
        """Decode steps by n."""
        counts: Counter[int] = Counter()
        for (n, _), num_steps in self.steps_by_shape.items():
            counts[n] += num_steps
        return dict(sorted(counts.items()))


def padding_of(file: ForeignSteps) -> StepPadding:
    """(n, b), p and h(n) of the pure decode steps."""
    shapes: Counter[tuple[int, int | None]] = Counter()
    eager: Counter[tuple[int, int | None]] = Counter()
    for step in file.steps.select(["n", "b", "runtime_mode"]).to_pylist():
        if step["n"] is None:
            continue
        shape = (step["n"], step["b"])
        shapes[shape] += 1
        eager[shape] += step["runtime_mode"] == "NONE"
    known = [(n, b, num_steps) for (n, b), num_steps in shapes.items() if b is not None]
    num_positions = sum(b * num_steps for _, b, num_steps in known)
    num_used = sum(n * num_steps for n, _, num_steps in known)
    has_p = file.has_each_step and num_positions > 0
    return StepPadding(
        dict(sorted(shapes.items(), key=lambda item: (item[0][0], item[0][1] or 0))),
        None if file.steps["runtime_mode"].null_count == file.steps.num_rows else dict(eager),
        1 - num_used / num_positions if has_p else None,
    )


def step_tables(file: ForeignSteps) -> tuple[Table, Table]:
    """One row about the file, and its decode shapes, a row each. Counts are absent where the file has none."""
    padding = padding_of(file)
    kinds = file.num_by_kind
    h = padding.h
    num_decode = sum(h.values())
    is_counted = file.has_each_step
    whole: dict[str, Any] = {
        "steps": file.steps.num_rows if is_counted else None,
        "decode_steps": num_decode if is_counted else None,
        "decode_steps_without_b": sum(n for (_, b), n in padding.steps_by_shape.items() if b is None),
        **{f"{kind}_steps": kinds.get(kind, 0) if is_counted else None for kind in ("prefill", "mixed")},
        "other_steps": sum(count for kind, count in kinds.items() if kind not in ("decode", "prefill", "mixed"))
        if is_counted
        else None,
        "padding_p": padding.p,
        "damaged_lines": len(file.damaged),
    }
    first = (f"first damaged line: {file.first_damaged!a}",) if file.damaged else ()
    shapes = [
        (
            n,
            b,
            num_steps if is_counted else None,
            num_steps / num_decode if is_counted else None,
            h[n] if is_counted else None,
            None if padding.eager_by_shape is None else padding.eager_by_shape[n, b],
        )
        for (n, b), num_steps in padding.steps_by_shape.items()
    ]
    columns = ("n", "b", "steps", "share_of_decode_steps", "steps_with_n", "steps_without_graph")
    return (
        Table("steps", file.source, tuple(whole), (tuple(whole.values()),), notes=(*first, *file.notes)),
        Table("decode shapes", "requests n and padded size b of pure decode steps", columns, tuple(shapes)),
    )


def request_records(file: ForeignSteps) -> list[dict[str, Any]]:
    """What became of each request, in the order of admission; empty where the file does not name them."""
    rows = [] if file.requests is None else file.requests.to_pylist()
    return [
        {
            "request_id": row["request_id"],
            "queue_ms": _ms(row["queued_ns"], row["admitted_ns"]),
            "prefill_ms": _ms(row["admitted_ns"], row["first_token_ns"]),
            "decode_ms": _ms(row["first_token_ns"], row["last_ns"]),
            **{name: row[name] for name in _REQUEST_COUNTS},
        }
        for row in rows
    ]


_REQUEST_COUNTS = (
    *("prompt_tokens", "cached_tokens", "computed_tokens", "recomputed_tokens"),
    *("prefill_steps", "decode_steps", "preemptions"),
)


def request_table(file: ForeignSteps) -> Table | None:
    """Median, 99th percentile and maximum over the requests; None where the file does not name them."""
    records = request_records(file)
    if not records:
        return None
    rows: list[tuple[str, int, float, float, float]] = []
    for name in ("queue_ms", "prefill_ms", "decode_ms", *_REQUEST_COUNTS):
        values = [float(record[name]) for record in records if record[name] is not None]
        if values:
            p50, p99 = (float(value) for value in np.percentile(values, [50, 99]))
            rows.append((name, len(values), p50, p99, max(values)))
    caption = "what became of each request: waiting, prompt until its last part, tokens after the first"
    return Table("requests", caption, ("figure", "requests", "p50", "p99", "max"), tuple(rows))


def _ms(since_ns: int | None, at_ns: int | None) -> float | None:
    return None if since_ns is None or at_ns is None else (at_ns - since_ns) / NS_PER_MS
