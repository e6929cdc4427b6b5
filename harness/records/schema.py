"""The Arrow schemas of a run's tables: one column, one meaning, one unit.

Intended, sent and received instants are separate columns and are never overwritten; a missing instant is null, never
zero. Nothing here computes. Next: ``writer`` fills these tables, ``store`` shows them to SQL, ``harness.analysis``
turns them into figures.
"""

from __future__ import annotations

import hashlib
import json

import pyarrow as pa

from harness.errors import RecordsError

SCHEMA_VERSION = 2
# From this version on a manifest carries a hash of itself.
SEALED_SINCE = 2

REQUESTS = pa.schema(
    [
        pa.field("session", pa.int32(), nullable=False),
        pa.field("request", pa.int32(), nullable=False),
        # Completion of the previous request (or of the session it follows, or the common start).
        pa.field("trigger_ns", pa.int64(), nullable=False),
        # trigger_ns + planned wait or start offset: when the request should leave.
        pa.field("due_ns", pa.int64(), nullable=False),
        pa.field("sent_ns", pa.int64()),
        pa.field("first_byte_ns", pa.int64()),
        pa.field("done_ns", pa.int64()),
        # ok, http_error, timeout, connection, bad_response, wrong_length, not_sent; all but "ok" make a run invalid.
        pa.field("status", pa.string(), nullable=False),
        pa.field("http_status", pa.int16()),
        pa.field("error", pa.string(), nullable=False),
        pa.field("planned_prompt_tokens", pa.int32(), nullable=False),
        pa.field("planned_generate_tokens", pa.int32(), nullable=False),
        pa.field("planned_wait_ns", pa.int64(), nullable=False),
        pa.field("prompt_tokens", pa.int32()),
        pa.field("completion_tokens", pa.int32()),
        # 0 when the server sent no prompt_tokens_details: the vendor leaves it out when nothing was cached.
        pa.field("cached_tokens", pa.int32(), nullable=False),
        pa.field("request_id", pa.string(), nullable=False),
        pa.field("response_id", pa.string(), nullable=False),
        pa.field("finish_reason", pa.string(), nullable=False),
        # SHA-256 of the generated ids as little-endian int32; "" when the server returned none.
        pa.field("token_digest", pa.string(), nullable=False),
    ]
)

CHUNKS = pa.schema(
    [
        pa.field("session", pa.int32(), nullable=False),
        pa.field("request", pa.int32(), nullable=False),
        pa.field("chunk", pa.int32(), nullable=False),
        pa.field("received_ns", pa.int64(), nullable=False),
        # Kernel receive stamp as an instant of the run's clock, where the client could read one.
        pa.field("kernel_ns", pa.int64()),
        pa.field("num_tokens", pa.int32(), nullable=False),
        pa.field("is_coalesced", pa.bool_(), nullable=False),
    ]
)

STEPS = pa.schema(
    [
        pa.field("step", pa.int32(), nullable=False),
        pa.field("log_ns", pa.int64()),
        pa.field("n", pa.int32(), nullable=False),
        pa.field("b", pa.int32(), nullable=False),
    ]
)

KV_EVENTS = pa.schema(
    [
        pa.field("index", pa.int32(), nullable=False),
        # Decode steps logged before this event: the common order of the two tables.
        pa.field("step", pa.int32(), nullable=False),
        pa.field("log_ns", pa.int64()),
        # "alloc" "eviction" "cache_hit" "cache_partial" "free_request" "mapping_remove" "fault"
        pa.field("kind", pa.string(), nullable=False),
        # The id in the log (with the engine's own suffix); "" where the line carries none.
        pa.field("request_id", pa.string(), nullable=False),
        pa.field("slots", pa.list_(pa.int32()), nullable=False),
        # Inner (128-token) blocks of the line.
        pa.field("num_blocks", pa.int32(), nullable=False),
        # Who caused an eviction: "request" "dummy" "preempt"; "" when the log does not tell.
        pa.field("caller", pa.string(), nullable=False),
        pa.field("reused_tokens", pa.int32(), nullable=False),
    ]
)

METRICS = pa.schema(
    [
        pa.field("scrape", pa.int32(), nullable=False),
        pa.field("at_ns", pa.int64(), nullable=False),
        pa.field("reason", pa.string(), nullable=False),
        pa.field("name", pa.string(), nullable=False),
        # key="value" pairs, sorted by key, joined by commas.
        pa.field("labels", pa.string(), nullable=False),
        pa.field("value", pa.float64(), nullable=False),
    ]
)

# What is measured, and what is computed from it again at will (``harness derive``).
RAW_TABLES: dict[str, pa.Schema] = {"requests": REQUESTS, "chunks": CHUNKS}
DERIVED_TABLES: dict[str, pa.Schema] = {"steps": STEPS, "kv_events": KV_EVENTS, "metrics": METRICS}
TABLES: dict[str, pa.Schema] = {**RAW_TABLES, **DERIVED_TABLES}


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
            raise RecordsError(f"table {name!r}: column {field.name!r} is not {field.type} ({error})") from error
    return pa.Table.from_arrays(columns, schema=schema.with_metadata(table.schema.metadata))


def empty(name: str) -> pa.Table:
    """Table ``name`` with no rows."""
    return TABLES[name].empty_table()


def content_sha256(table: pa.Table) -> str:
    """SHA-256 of a table's columns and values: the same for every Parquet writer that stored it."""
    digest = hashlib.sha256()
    for name in table.column_names:
        # Values and names only: Parquet writers differ in how they spell a list type.
        digest.update(json.dumps(name).encode())
        digest.update(json.dumps(table.column(name).to_pylist()).encode())
    return digest.hexdigest()
