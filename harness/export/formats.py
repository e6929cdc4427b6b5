"""The formats by name, the files that each writes, and what each cannot hold. A format is a row of a table."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.errors import SpecError
from harness.export import aiperf, guidellm, inference_perf, otel, rows, vllm_bench
from harness.export.measured import MeasuredRun, measured
from harness.plan.files import write_atomic
from harness.records import SealedRun

MakeRun = Callable[[MeasuredRun], bytes]
MakeTable = Callable[[Sequence[SealedRun]], bytes]


@dataclass(frozen=True, slots=True)
class Format:
    """One format. of_run: a file for each run. of_all: one file for all runs. no_room: what its shape cannot hold."""

    name: str
    no_room: tuple[str, ...]
    of_run: tuple[tuple[str, MakeRun], ...] = ()
    of_all: tuple[tuple[str, MakeTable], ...] = ()

    def names(self, runs: Sequence[SealedRun]) -> list[str]:
        """The files that these runs make, in the order of ``files``."""
        each = [f"{run.label}/{name}" for run in runs for name, _ in self.of_run]
        return each + [name for name, _ in self.of_all]

    def files(self, runs: Sequence[SealedRun]) -> Iterator[bytes]:
        """Their content."""
        for run in runs if self.of_run else ():
            taken = measured(run)
            for _, make in self.of_run:
                yield make(taken)
        for _, make in self.of_all:
            yield make(runs)


def _json(value: Any) -> bytes:
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode() + b"\n"


def _json_lines(values: Iterator[Any]) -> bytes:
    return b"".join(map(_json, values))


_TABLE = (
    Format(
        name="vllm-bench",
        no_room=vllm_bench.NO_ROOM,
        of_run=(("result.json", lambda run: _json(vllm_bench.result_file(run))),),
    ),
    Format(
        name="aiperf",
        no_room=aiperf.NO_ROOM,
        of_run=(
            ("profile_export.jsonl", lambda run: _json_lines(aiperf.record(run, one) for one in run.window)),
            ("profile_export_aiperf.json", lambda run: _json(aiperf.summary_file(run))),
        ),
    ),
    Format(
        name="guidellm",
        no_room=guidellm.NO_ROOM,
        of_run=(("benchmarks.json", lambda run: _json(guidellm.report(run))),),
    ),
    Format(
        name="inference-perf",
        no_room=inference_perf.NO_ROOM,
        of_run=(
            ("summary_lifecycle_metrics.json", lambda run: _json(inference_perf.summary_file(run))),
            ("stage_0_lifecycle_metrics.json", lambda run: _json(inference_perf.summary_file(run))),
            (
                "per_request_lifecycle_metrics.json",
                lambda run: _json([inference_perf.record(run, one) for one in run.window]),
            ),
        ),
    ),
    Format(
        name="otel",
        no_room=otel.NO_ROOM,
        of_run=(("traces.json", lambda run: _json(otel.resource_spans(run, otel.spans_of(run)))),),
    ),
    Format(
        name="csv",
        no_room=rows.NO_ROOM_IN_CSV,
        of_all=(
            ("requests.csv", lambda runs: rows.csv_bytes(rows.requests_table(runs, has_tokens=False))),
            ("serving.csv", lambda runs: rows.csv_bytes(rows.serving_table(runs))),
        ),
    ),
    Format(
        name="parquet",
        no_room=(),
        of_all=(
            ("requests.parquet", lambda runs: rows.parquet_bytes(rows.requests_table(runs, has_tokens=True))),
            ("serving.parquet", lambda runs: rows.parquet_bytes(rows.serving_table(runs))),
        ),
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
