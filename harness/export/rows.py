"""Runs as plain tables: a row a request, and the serving figures of each condition."""

from __future__ import annotations

import io
from collections.abc import Sequence

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from harness.analysis import summarise
from harness.export.measured import MeasuredRun, measured
from harness.records import SealedRun, origin_of
from harness.records.schema import column

NO_ROOM_IN_CSV = ("instants of tokens and gaps between them (Parquet has them)",)

_TEXT, _INT, _FLOAT = pa.string(), pa.int64(), pa.float64()
_RUN = (
    column("experiment", _TEXT, "name of the experiment"),
    column("condition", _TEXT, "name of the condition"),
    column("replicate", _INT, "which replicate, from 0"),
    column("backend", _TEXT, "kind of server"),
    column("origin", _TEXT, "what was simulated or emulated"),
    column("model", _TEXT, "model that the server named; empty where none served"),
)
_UNIX_NS = "ns since 1970"
_REQUEST = (
    column("session", _INT, "which session of the plan, from 0"),
    column("turn", _INT, "which request of that session, from 0"),
    column("request_id", _TEXT, "id that the client sent along"),
    column("response_id", _TEXT, "id that the server answered with"),
    column("status", _TEXT, "ok or aborted (the client left, as planned)"),
    column("http_status", _INT, "status of the response", nullable=True),
    column("finish_reason", _TEXT, "why the answer ended, in the server's word"),
    column("trigger_ns", _INT, "end of what it waited for", _UNIX_NS),
    column("due_ns", _INT, "when it should leave", _UNIX_NS),
    column("sent_ns", _INT, "when it left", _UNIX_NS),
    column("head_ns", _INT, "head of the response", _UNIX_NS, nullable=True),
    column("done_ns", _INT, "end of the response", _UNIX_NS),
    column("prompt_tokens", _INT, "prompt", "tokens"),
    column("cached_tokens", _INT, "reused part of it; null where unknown", "tokens", nullable=True),
    column("output_tokens", _INT, "generated tokens", "tokens"),
    column("max_tokens", _INT, "answer of the plan", "tokens"),
    column("wait_ns", _INT, "planned tool wait after it", "ns"),
    column("is_in_window", pa.bool_(), "whether it was due in the measurement window"),
    column("prefix", _TEXT, "first, reused, recomputed or unknown; empty outside the figures"),
    column("ttft_ns", _FLOAT, "from sending to its first token", "ns", nullable=True),
    column("tpot_ns", _FLOAT, "mean time between its tokens after the first", "ns", nullable=True),
    column("e2e_ns", _FLOAT, "sent until the end of the response", "ns", nullable=True),
    column("queue_ns", _FLOAT, "from sending to its slot, by the log", "ns", nullable=True),
)
_TOKENS = (
    column("token_ns", pa.list_(_INT), "instant of each token", _UNIX_NS),
    column("itl_ns", pa.list_(_FLOAT), "gap before each token after the first", "ns"),
)


def requests_table(runs: Sequence[SealedRun], *, has_tokens: bool) -> pa.Table:
    """A row for each request that was sent, runs one after another."""
    schema = pa.schema([*_RUN, *_REQUEST, *(_TOKENS if has_tokens else ())], metadata={"origin": origin_of(runs)})
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


def serving_table(runs: Sequence[SealedRun]) -> pa.Table:
    """The serving figures of each condition, as ``harness table --serving`` has them, with their origin."""
    origin = origin_of(runs)
    table = summarise(runs).serving_to_arrow()
    return table.append_column("origin", pa.array([origin] * table.num_rows, _TEXT)).replace_schema_metadata(
        {"origin": origin}
    )


def csv_bytes(table: pa.Table) -> bytes:
    """The table as CSV."""
    buffer = io.BytesIO()
    pyarrow.csv.write_csv(table, buffer)
    return buffer.getvalue()


def parquet_bytes(table: pa.Table) -> bytes:
    """The table as Parquet; columns carry their meaning and unit."""
    buffer = io.BytesIO()
    pq.write_table(table, buffer)
    return buffer.getvalue()
