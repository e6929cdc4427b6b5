"""The formats by name, the files that each writes, and what each cannot hold.

The plain tables (CSV, Parquet) are made here; other formats come from plug-ins.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from harness.analysis.sessions import SessionOutcome, session_times
from harness.analysis.summary import summarise
from harness.errors import SpecError
from harness.measure.records.disk import csv_bytes, parquet_bytes
from harness.measure.records.run import SealedRun, origin_of
from harness.measure.records.schema import column
from harness.outputs import write_atomic
from harness.plugins import Registry
from harness.present.export.measured import UNIX_NS, MeasuredRequest, MeasuredRun, measured

# What a file holds: a table, bytes as they are, lines of JSON in a .jsonl file, else one JSON value.
Content = Any


@dataclass(frozen=True, slots=True)
class Format:
    """One format. of_run: the files of each run. of_all: files for all runs. no_room: what its shape cannot hold.

    send: for a URL, what sends a run there and returns how many of its parts arrived; None where nothing is sent.
    """

    name: str
    no_room: tuple[str, ...]
    of_run: Mapping[str, Callable[[MeasuredRun], Content]] = field(default_factory=dict[str, Any])
    of_all: Mapping[str, Callable[[Sequence[SealedRun]], Content]] = field(default_factory=dict[str, Any])
    send: Callable[[str], Callable[[MeasuredRun], int]] | None = None

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
    if isinstance(content, bytes):
        return content
    values = content if name.endswith(".jsonl") else [content]
    return b"".join(json.dumps(value, allow_nan=False, separators=(",", ":")).encode() + b"\n" for value in values)


_TEXT, _INT = pa.string(), pa.int64()
_RUN = (
    column("experiment", _TEXT, "name of the experiment"),
    column("condition", _TEXT, "name of the condition"),
    column("replicate", _INT, "which replicate, from 0"),
    column("backend", _TEXT, "kind of server"),
    column("origin", _TEXT, "where the figures are from"),
    column("model", _TEXT, "model that the server named; empty where none served"),
)
_TYPES = {
    "str": _TEXT,
    "bool": pa.bool_(),
    "int": _INT,
    "float": pa.float64(),
    "NDArray[np.int64]": pa.list_(_INT),
    "NDArray[np.float64]": pa.list_(pa.float64()),
}


def _request_columns(*, has_tokens: bool) -> Iterator[pa.Field]:
    for attribute in fields(MeasuredRequest):
        name, _, none = str(attribute.type).partition(" | ")
        if has_tokens or not pa.types.is_list(_TYPES[name]):
            yield column(attribute.name, _TYPES[name], **attribute.metadata, nullable=bool(none))


def requests_table(runs: Sequence[SealedRun], *, has_tokens: bool) -> pa.Table:
    """A row for each request that was sent, runs one after another."""
    schema = pa.schema([*_RUN, *_request_columns(has_tokens=has_tokens)], metadata={"origin": origin_of(runs)})
    return pa.concat_tables([schema.empty_table(), *(_rows(measured(run), schema) for run in runs)])


def _rows(run: MeasuredRun, schema: pa.Schema) -> pa.Table:
    named = {**run.metadata, "replicate": run.run.replicate, "model": run.model}
    columns = [
        [named[field.name]] * len(run.requests)
        if field.name in named
        else [getattr(request, field.name) for request in run.requests]
        for field in schema
    ]
    return pa.Table.from_arrays(
        [pa.array(values, field.type) for values, field in zip(columns, schema, strict=True)], schema=schema
    )


_SESSIONS = (
    column("session", _INT, "session of the plan that it begins with"),
    column("num_requests", _INT, "its requests, of all its parts", "requests"),
    column("first_ns", _INT, "its first send", UNIX_NS),
    column("last_ns", _INT, "its last token; of a session that did not finish its last instant", UNIX_NS),
    column("wait_ns", _INT, "time between the two in which nothing of it was due or in flight", "ns"),
    column("outcome", _TEXT, "finished, left (the client left its last answer, as planned) or failed"),
    column("own_ns", _INT, "last_ns - first_ns - wait_ns; null where it did not finish", "ns", nullable=True),
)


def sessions_table(runs: Sequence[SealedRun]) -> pa.Table:
    """A row for each session that began in the measurement window, by its first send; none where a plan is unknown."""
    schema = pa.schema([*_RUN, *_SESSIONS], metadata={"origin": origin_of(runs)})
    return pa.Table.from_pylist([row for run in runs for row in _session_rows(run)], schema=schema)


def _session_rows(run: SealedRun) -> Iterator[dict[str, Any]]:
    times = session_times(run)
    if times is None:
        return
    of_run = measured(run)
    named = {**of_run.metadata, "replicate": run.replicate, "model": of_run.model}
    columns = (times.session, times.num_requests, times.first_ns, times.last_ns, times.wait_ns, times.outcome)
    for session, number, first_ns, last_ns, wait_ns, outcome in zip(*(each.tolist() for each in columns), strict=True):
        is_finished = outcome == SessionOutcome.FINISHED
        yield {
            **named,
            "session": session,
            "num_requests": number,
            "first_ns": first_ns + of_run.wall_ns,
            "last_ns": last_ns + of_run.wall_ns,
            "wait_ns": wait_ns,
            "outcome": SessionOutcome(outcome).name.lower(),
            "own_ns": last_ns - first_ns - wait_ns if is_finished else None,
        }


def serving_table(runs: Sequence[SealedRun]) -> pa.Table:
    """The serving figures of each condition, as ``harness table --serving`` has them, with their origin."""
    origin = origin_of(runs)
    table = summarise(runs).serving_to_arrow()
    return table.append_column("origin", pa.array([origin] * table.num_rows, _TEXT)).replace_schema_metadata(
        {"origin": origin}
    )


def _plain(name: str, no_room: tuple[str, ...], *, has_tokens: bool) -> Format:
    """Tables as files of this name's kind."""
    tables = {"requests": partial(requests_table, has_tokens=has_tokens), "sessions": sessions_table}
    tables["serving"] = serving_table
    return Format(name, no_room, of_all={f"{table}.{name}": make for table, make in tables.items()})


FORMATS: Mapping[str, Format] = Registry(
    "export_formats",
    {
        "csv": _plain("csv", ("instants of tokens and gaps between them (Parquet has them)",), has_tokens=False),
        "parquet": _plain("parquet", (), has_tokens=True),
    },
)
"""The plain tables, and the formats of plug-ins."""


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
        write_atomic(path, [content], what="the export")
    return paths
