"""The Arrow schemas of a run's tables: one column, one meaning, one unit; and the data dictionary made from them.

Intended, sent and received instants are separate columns and are never overwritten; a missing instant is null, never
zero.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from harness.errors import RecordsError, in_one_line
from harness.table import markdown_rows

# Imported before Arrow imports it: with little address space, its OpenBLAS would wait for ever.
del np

SCHEMA_VERSION = 4
# Layouts that are read. Keys of an experiment that layout 3 called otherwise, by their name there.
READABLE_VERSIONS = (3, SCHEMA_VERSION)
NAMES_OF_LAYOUT_3 = {"law": "distribution", "slower": "speed_offset"}

_INT16, _INT32, _INT64 = pa.int16(), pa.int32(), pa.int64()
_TEXT, _FLOAT, _BOOL = pa.string(), pa.float64(), pa.bool_()
CLOCK_NS = "clock ns"
# As Python objects, values take many times the memory of their column.
VALUES_AT_ONCE = 16_384
# Status of a request whose answer the client left because the plan has it leave; it is no failure.
ABORTED = "aborted"


def column(name: str, type_: pa.DataType, meaning: str, unit: str = "", *, nullable: bool = False) -> pa.Field:
    """A column with its meaning and unit, which the data dictionary prints and the Parquet file carries."""
    return pa.field(name, type_, nullable=nullable, metadata={"meaning": meaning, "unit": unit})


REQUESTS = pa.schema(
    [
        column("session", _INT32, "which session of the plan, from 0"),
        column("request", _INT32, "which turn of that session, from 0"),
        column("trigger_ns", _INT64, "end of what it waited for, or the common start", CLOCK_NS),
        column("due_ns", _INT64, "when it should leave: trigger_ns + planned wait or start offset", CLOCK_NS),
        column(
            "sent_ns", _INT64, "when it left; due_ns to sent_ns is how late the client was", CLOCK_NS, nullable=True
        ),
        column(
            "response_head_ns",
            _INT64,
            "head of the HTTP response; with streaming it comes before any token",
            CLOCK_NS,
            nullable=True,
        ),
        column("done_ns", _INT64, "end of the response", CLOCK_NS, nullable=True),
        column(
            "status",
            _TEXT,
            "ok, aborted (the client left, as planned), http_error, timeout, connection, bad_response, wrong_length or "
            "not_sent; all but ok and aborted make a run INVALID",
        ),
        column("http_status", _INT16, "status of the response", nullable=True),
        column("error", _TEXT, "what went wrong, in the server's or the system's words; empty: nothing"),
        column("planned_prompt_tokens", _INT32, "prompt of the plan", "tokens"),
        column("planned_generate_tokens", _INT32, "answer of the plan", "tokens"),
        column("planned_wait_ns", _INT64, "tool wait after it", "ns"),
        column("prompt_tokens", _INT32, "prompt as the server counted it", "tokens", nullable=True),
        column("completion_tokens", _INT32, "answer as the server counted it", "tokens", nullable=True),
        column(
            "cached_tokens",
            _INT32,
            "reused prompt, as the response states; 0 where it states none and the server's counters, or its other "
            "answers, show that none was reused; null where that is unknown",
            "tokens",
            nullable=True,
        ),
        column("request_id", _TEXT, "id that the client sent along"),
        column("response_id", _TEXT, "id that the server answered with"),
        column("finish_reason", _TEXT, "why the answer ended, in the server's word"),
        column("token_digest", _TEXT, "SHA-256 of the generated ids (little-endian int32); empty: none came"),
    ]
)

CHUNKS = pa.schema(
    [
        column("session", _INT32, "session of its request"),
        column("request", _INT32, "turn of its request"),
        column("chunk", _INT32, "which piece of the answer, from 0"),
        column("received_ns", _INT64, "when the client had it", CLOCK_NS),
        column("kernel_ns", _INT64, "when the kernel had received it, where it was stamped", CLOCK_NS, nullable=True),
        column(
            "earliest_ns",
            _INT64,
            "the earliest instant at which it can have come, where the client read it late; null where its stamp is "
            "exact",
            CLOCK_NS,
            nullable=True,
        ),
        column("num_tokens", _INT32, "tokens in it; the first with any is the first token", "tokens"),
        column("is_coalesced", _BOOL, "whether one read brought it together with others, so that they share a stamp"),
    ]
)

STEPS = pa.schema(
    [
        column("step", _INT32, "which decode step, from 0"),
        column("log_ns", _INT64, "stamp of its log line", CLOCK_NS, nullable=True),
        column("n", _INT32, "requests really in it", "requests"),
        column("b", _INT32, "compiled batch size that it ran in", "positions"),
    ]
)

KV_EVENTS = pa.schema(
    [
        column("index", _INT32, "which line of its kind of log, from 0"),
        column("step", _INT32, "decode steps logged before it: the common order of both tables", "steps"),
        column("log_ns", _INT64, "stamp of its log line", CLOCK_NS, nullable=True),
        column("kind", _TEXT, "alloc, eviction, cache_hit, cache_partial, free_request, mapping_remove or fault"),
        column("request_id", _TEXT, "id in the log, with the engine's suffix; empty where the line has none"),
        column("slots", pa.list_(_INT32), "KV slots of the line"),
        column("num_blocks", _INT32, "inner blocks of the line, 128 tokens each", "blocks"),
        column("caller", _TEXT, "cause of an eviction: request, dummy, preempt; empty where the log has none"),
        column("reused_tokens", _INT32, "tokens that a hit reused", "tokens"),
    ]
)

METRICS = pa.schema(
    [
        column("scrape", _INT32, "which scrape, from 0"),
        column("at_ns", _INT64, "when it was requested", CLOCK_NS),
        column("reason", _TEXT, "before, interval or after the replay"),
        column("name", _TEXT, "Prometheus name of the sample"),
        column("labels", _TEXT, 'key="value" pairs, sorted by key, joined by commas'),
        column("value", _FLOAT, "value of the sample, in the unit of its name"),
    ]
)

SCRAPES = pa.schema(
    [
        column("at_ns", _INT64, "when it was requested", CLOCK_NS),
        column("reason", _TEXT, "before, interval or after the replay"),
        column("status", _INT32, "HTTP status of the answer"),
        column("body", _TEXT, "the unchanged answer"),
    ]
)

RUN_COLUMNS = (
    column("experiment", _TEXT, "name of the experiment"),
    column("condition", _TEXT, "name of the condition"),
    column("replicate", _INT32, "which replicate, from 0"),
    column("is_valid", _BOOL, "whether the run counts"),
)

RUNS = pa.schema(
    [
        *RUN_COLUMNS,
        column("invalid_reasons", pa.list_(_TEXT), "why it does not count"),
        column("findings", _TEXT, "its findings: a JSON list of code, severity, evidence, hint"),
        column("order_index", _INT32, "its place in the order of its replicate, from 0"),
        column("num_earlier_tries", _INT32, "INVALID runs that it repeats, in folders beside it", "runs"),
        column("is_baseline", _BOOL, "whether its condition is the experiment's baseline"),
        column("backend", _TEXT, "kind of server"),
        column("label", _TEXT, "confirmatory or exploratory"),
        column("treatment", _TEXT, "change of the plan's waits: as-drawn, no-waits or equal-waits"),
        column("factors", _TEXT, "factors of its condition: a JSON object, e.g. factors->>'N'"),
        column("plan_hash", _TEXT, "SHA-256 of what was sent"),
        column("drawn_hash", _TEXT, "SHA-256 of the plan before its treatment; equal in a replicate"),
        column("planned_requests", _INT32, "requests of the plan", "requests"),
        column("time_scale", _FLOAT, "model time per wall time"),
        column("device", _INT32, "device of its fleet; null outside one", nullable=True),
        column("host", _TEXT, "host of that device; null outside a fleet", nullable=True),
        column(
            "neighbours",
            pa.list_(_INT32),
            "devices of that host that were busy then; null outside a fleet",
            nullable=True,
        ),
        column("requested", _TEXT, "requested configuration: JSON"),
        column("effective", _TEXT, "configuration that server and client really used: JSON"),
        column("client_audit", _TEXT, "the client's measurements of itself and its host: JSON"),
        column("provenance", _TEXT, "machine, versions, source: JSON"),
        column("timings", _TEXT, "named instants: JSON; " + CLOCK_NS),
        column("folder", _TEXT, "the run's folder"),
    ]
)

# Computed from requests, chunks and kv_events by each query.
LATENCIES = pa.schema(
    [
        column("session", _INT32, "session of the request"),
        column("request", _INT32, "which turn of that session, from 0"),
        column("prefix", _TEXT, "first (nothing to reuse), reused, recomputed, or unknown"),
        column("queue_ns", _INT64, "from sending to its slot, by the log; null without a KV log", "ns", nullable=True),
        column("ttft_ns", _INT64, "from sending to its first token; null without streaming", "ns", nullable=True),
        column("tpot_ns", _FLOAT, "mean time between its tokens after the first", "ns", nullable=True),
        column(
            "ttft_at_least_ns",
            _INT64,
            "ttft_ns if its chunk came as early as it can; null where exact",
            "ns",
            nullable=True,
        ),
        column(
            "tpot_at_least_ns",
            _FLOAT,
            "tpot_ns if its last chunk came as early as it can; null where exact",
            "ns",
            nullable=True,
        ),
        column(
            "tpot_at_most_ns",
            _FLOAT,
            "tpot_ns if its first chunk came as early as it can; null where exact",
            "ns",
            nullable=True,
        ),
        column("e2e_ns", _INT64, "sent until the end of the response", "ns", nullable=True),
        column("prompt_tokens", _INT32, "prompt as the server counted it", "tokens", nullable=True),
        column("cached_tokens", _INT32, "reused part of it; null where unknown", "tokens", nullable=True),
        column("completion_tokens", _INT32, "generated tokens", "tokens", nullable=True),
    ]
)

# Computed from requests, chunks and the plan by each query.
SESSIONS = pa.schema(
    [
        column("session", _INT32, "the session of the plan that it begins with; its parts are one session"),
        column("num_requests", _INT64, "its requests, of all its parts", "requests"),
        column("due_ns", _INT64, "when its first request should leave", CLOCK_NS),
        column("first_ns", _INT64, "its first send", CLOCK_NS),
        column(
            "last_ns",
            _INT64,
            "its last token; the end of its last answer without streaming, or where it did not finish",
            CLOCK_NS,
        ),
        column("wait_ns", _INT64, "time between the two in which nothing of it was due or in flight", "ns"),
        column("own_ns", _INT64, "last_ns - first_ns - wait_ns; null where it did not finish", "ns", nullable=True),
        column("outcome", _TEXT, "finished, left (the client left its last answer, as planned) or failed"),
        column("is_whole", _BOOL, "false where a steady start begins it in the middle"),
    ]
)

# Tables that ``harness records derive`` computes from raw files again, and with them all tables of a run.
DERIVED_TABLES: dict[str, pa.Schema] = {"steps": STEPS, "kv_events": KV_EVENTS, "metrics": METRICS}
TABLES: dict[str, pa.Schema] = {"requests": REQUESTS, "chunks": CHUNKS, **DERIVED_TABLES}


@dataclass(frozen=True, slots=True)
class RowStream:
    """The rows of a table that may be too long for memory.

    batches: gives all rows from the first one on, each time it is called.
    """

    schema: pa.Schema
    num_rows: int
    batches: Callable[[], Iterator[pa.RecordBatch]]

    @classmethod
    def of(cls, table: pa.Table) -> RowStream:
        """The rows of a table."""

        def batches() -> Iterator[pa.RecordBatch]:
            yield from table.to_batches(max_chunksize=VALUES_AT_ONCE)

        return cls(table.schema, table.num_rows, batches)

    def to_table(self) -> pa.Table:
        """All rows in memory."""
        return pa.Table.from_batches(self.batches(), self.schema)


def conform(name: str, table: pa.Table) -> pa.Table:
    """``table`` cast to the schema of ``name``, its own metadata kept; raises RecordsError where it does not fit.

    Columns may come in any order; a missing, extra, wrongly typed or null-where-forbidden column is an error.
    """
    schema = TABLES[name]
    if missing := [field.name for field in schema if field.name not in table.column_names]:
        raise RecordsError(f"table {name!r} lacks column(s) {', '.join(missing)}")
    if extra := [column for column in table.column_names if column not in schema.names]:
        raise RecordsError(f"table {name!r} has unknown column(s) {', '.join(extra)}")
    columns: list[pa.ChunkedArray] = []
    for field in schema:
        column = table.column(field.name)
        if not field.nullable and column.null_count:
            raise RecordsError(f"table {name!r} has {column.null_count} null(s) in column {field.name!r}")
        try:
            columns.append(column.cast(field.type))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise RecordsError(
                f"table {name!r}: column {field.name!r} is not {field.type} ({in_one_line(error)})"
            ) from error
    # Not with empty metadata: that is written as other bytes than none, and reads back as none.
    metadata = table.schema.metadata
    return pa.Table.from_arrays(columns, schema=schema.with_metadata(metadata) if metadata else schema)


def conform_stream(name: str, rows: RowStream) -> RowStream:
    """``rows`` with every batch as ``conform`` has it; a column that is missing or extra is an error at once."""
    conform(name, rows.schema.empty_table())

    def batches() -> Iterator[pa.RecordBatch]:
        for batch in rows.batches():
            yield from conform(name, pa.Table.from_batches([batch])).to_batches()

    return RowStream(TABLES[name], rows.num_rows, batches)


def with_newer_columns(name: str, table: pa.Table) -> pa.Table:
    """A stored table with the columns that it lacks since an earlier release wrote it, filled with nulls."""
    for place, field in enumerate(TABLES[name]):
        if field.nullable and field.name not in table.column_names:
            table = table.add_column(place, field, pa.nulls(table.num_rows, field.type))
    return table


def empty(name: str) -> pa.Table:
    """Table ``name`` with no rows."""
    return TABLES[name].empty_table()


def rows_where(table: pa.Table, column: str, value: str | int) -> pa.Table:
    """The rows with this value, by a mask: a filter expression needs threads, and would wait for ever where a memory
    limit lets none start."""
    # Imported here: commands that only read manifests, or query, start 0.1 s sooner without.
    from pyarrow.compute import call_function

    batches = table.to_batches(max_chunksize=VALUES_AT_ONCE)
    kept = [batch.filter(call_function("equal", [batch[column], pa.scalar(value)])) for batch in batches]
    return pa.Table.from_batches(kept, table.schema)


def values_of(table: pa.Table, *names: str) -> Iterator[tuple[Any, ...]]:
    """The values of some columns row by row. Only few rows at a time are Python objects."""
    columns = [table.column(name) for name in names]
    for first in range(0, table.num_rows, VALUES_AT_ONCE):
        yield from zip(*(column.slice(first, VALUES_AT_ONCE).to_pylist() for column in columns), strict=True)


def content_sha256(rows: pa.Table | RowStream) -> str:
    """SHA-256 of a table's columns and values: the same for every Parquet writer that stored it."""
    stream = RowStream.of(rows) if isinstance(rows, pa.Table) else rows
    digest = hashlib.sha256()
    for name in stream.schema.names:
        # Values and names only: Parquet writers differ in how they spell a list type.
        digest.update(json.dumps(name).encode())
        for text in _json_list(batch.column(name) for batch in stream.batches()):
            digest.update(text.encode())
    return digest.hexdigest()


def _json_list(pieces: Iterable[pa.Array]) -> Iterator[str]:
    """The values of a column as one JSON list, a piece at a time."""
    yield "["
    separator = ""
    for piece in pieces:
        if len(piece):
            yield separator + json.dumps(_values(piece))[1:-1]
            separator = ", "
    yield "]"


def _values(column: pa.Array) -> list[object]:
    """The values of a column as Python's own; whole numbers by way of numpy, which is several times faster."""
    is_plain = pa.types.is_integer(column.type) and not column.null_count
    return column.to_numpy(zero_copy_only=False).tolist() if is_plain else column.to_pylist()


# The tables of ``harness query``: the meaning of a row, and the file that it is from.
EXPLAINED_TABLES: dict[str, tuple[str, pa.Schema]] = {
    "runs": ("A sealed run, from its manifest.", RUNS),
    "requests": ("A planned request, sent or not; `requests.parquet` of the run.", REQUESTS),
    "chunks": ("A piece of an answer; `chunks.parquet` of the run.", CHUNKS),
    "steps": ("A decode step of the server, from its log; `derived/steps.parquet`.", STEPS),
    "kv_events": ("A line of the server's KV log; `derived/kv_events.parquet`.", KV_EVENTS),
    "metrics": ("A sample of a scrape; `derived/metrics.parquet`.", METRICS),
    "scrapes": ("A scrape of the server's metrics, raw; `scrapes.jsonl`. None of a simulated run.", SCRAPES),
    "latencies": ("An answered request and what it waited for; computed by each query.", LATENCIES),
    "sessions": ("A whole session, in the window or not; computed by each query.", SESSIONS),
}
INTRODUCTION = """\
Each table of `harness query` and of `RunStore.connect()`, also as `valid_...` (`valid_runs`, `valid_requests`, ...)
without the rows of invalid runs. Every table begins with experiment, condition, replicate and is_valid, as `runs` does.
*clock ns*: int64 nanoseconds of the run's clock; only differences mean something, and they are model time where time
was scaled. A missing instant is null, never zero. `harness query` can only read: select, describe, summarize, and
explain of these, within 60 s (`--timeout`) and 4 GiB. `RunStore.connect()` is an ordinary DuckDB connection."""


def explained(name: str) -> list[tuple[str, str, str, str]]:
    """(column, type, unit, meaning) of each column of a table of ``harness query``, but for the keys of the run."""
    return [
        (
            field.name,
            f"{field.type} or null" if field.nullable else str(field.type),
            *(field.metadata[key].decode() for key in (b"unit", b"meaning")),
        )
        for field in EXPLAINED_TABLES[name][1]
        if name == "runs" or field not in RUN_COLUMNS
    ]


def dictionary_markdown() -> str:
    """docs/reference/data-dictionary.md, the text of ``harness explain tables``."""
    parts = ["# Data dictionary", INTRODUCTION]
    for name, (row, _columns) in EXPLAINED_TABLES.items():
        cells = [(column, ", ".join(filter(None, kind)), meaning) for column, *kind, meaning in explained(name)]
        rows = markdown_rows(("column", "type, unit", "meaning"), cells)
        parts.append(f"## {name}\n{row}\n\n{rows}")
    return "\n\n".join(parts) + "\n"
