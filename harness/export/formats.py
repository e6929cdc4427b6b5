"""The formats by name, the files that each writes, and what each cannot hold. A format is a row of a table."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from harness.errors import SpecError
from harness.export import aiperf, guidellm, inference_perf, otel, rows, vllm_bench
from harness.export.measured import MeasuredRun, measured
from harness.plan.files import write_atomic
from harness.records import SealedRun
from harness.records.disk import csv_bytes, parquet_bytes

# What a file holds: a table, lines of JSON in a .jsonl file, else one JSON value.
Content = Any


@dataclass(frozen=True, slots=True)
class Format:
    """One format. of_run: the files of each run. of_all: files for all runs. no_room: what its shape cannot hold."""

    name: str
    no_room: tuple[str, ...]
    of_run: Mapping[str, Callable[[MeasuredRun], Content]] = field(default_factory=dict[str, Any])
    of_all: Mapping[str, Callable[[Sequence[SealedRun]], Content]] = field(default_factory=dict[str, Any])

    def names(self, runs: Sequence[SealedRun]) -> list[str]:
        """The files that these runs make, in the order of ``files``."""
        return [*(f"{run.label}/{name}" for run in runs for name in self.of_run), *self.of_all]

    def files(self, runs: Sequence[SealedRun]) -> Iterator[bytes]:
        """Their bytes."""
        for run in runs if self.of_run else ():
            measured_run = measured(run)
            for name, make in self.of_run.items():
                yield _encoded(name, make(measured_run))
        for name, make in self.of_all.items():
            yield _encoded(name, make(runs))


def _encoded(name: str, content: Content) -> bytes:
    if isinstance(content, pa.Table):
        return csv_bytes(content) if name.endswith(".csv") else parquet_bytes(content)
    values = content if name.endswith(".jsonl") else [content]
    return b"".join(json.dumps(value, allow_nan=False, separators=(",", ":")).encode() + b"\n" for value in values)


_TABLE = (
    Format("vllm-bench", vllm_bench.NO_ROOM, {"result.json": vllm_bench.result_file}),
    Format(
        "aiperf",
        aiperf.NO_ROOM,
        {"profile_export.jsonl": aiperf.records, "profile_export_aiperf.json": aiperf.summary_file},
    ),
    Format("guidellm", guidellm.NO_ROOM, {"benchmarks.json": guidellm.report}),
    Format(
        "inference-perf",
        inference_perf.NO_ROOM,
        {
            "summary_lifecycle_metrics.json": inference_perf.summary_file,
            "stage_0_lifecycle_metrics.json": inference_perf.summary_file,
            "per_request_lifecycle_metrics.json": inference_perf.records,
        },
    ),
    Format("otel", otel.NO_ROOM, {"traces.json": lambda run: otel.resource_spans(run, otel.spans_of(run))}),
    Format(
        "csv",
        rows.NO_ROOM_IN_CSV,
        of_all={
            "requests.csv": partial(rows.requests_table, has_tokens=False),
            "serving.csv": rows.serving_table,
        },
    ),
    Format(
        "parquet",
        (),
        of_all={
            "requests.parquet": partial(rows.requests_table, has_tokens=True),
            "serving.parquet": rows.serving_table,
        },
    ),
)
FORMATS = {form.name: form for form in _TABLE}


def named_format(name: str) -> Format:
    """The format of this name; SpecError that lists those there are."""
    if name not in FORMATS:
        raise SpecError(f"unknown format {name!r}", where="--format", hint=f"Use {', '.join(FORMATS)}")
    return FORMATS[name]


def write_runs(runs: Sequence[SealedRun], form: Format, folder: Path, *, may_replace: bool) -> list[Path]:
    """The files of the format, written below ``folder``; SpecError before the first where one is there already."""
    paths = [folder / name for name in form.names(runs)]
    there = [path for path in paths if path.exists()]
    if there and not may_replace:
        more = f" and {len(there) - 1} more" if len(there) > 1 else ""
        raise SpecError(
            f"is there already{more}", where=str(there[0]), hint="Replace with --force, or name another folder with -o"
        )
    for path, content in zip(paths, form.files(runs), strict=True):
        write_atomic(path, iter([content]), what="the export")
    return paths
