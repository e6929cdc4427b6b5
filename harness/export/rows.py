"""Runs as plain tables: a row a request, and the serving figures of each condition."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields

import pyarrow as pa

from harness.analysis import summarise
from harness.export.measured import MeasuredRequest, MeasuredRun, measured
from harness.records import SealedRun, origin_of
from harness.records.schema import column

NO_ROOM_IN_CSV = ("instants of tokens and gaps between them (Parquet has them)",)

_TEXT, _INT = pa.string(), pa.int64()
_RUN = (
    column("experiment", _TEXT, "name of the experiment"),
    column("condition", _TEXT, "name of the condition"),
    column("replicate", _INT, "which replicate, from 0"),
    column("backend", _TEXT, "kind of server"),
    column("origin", _TEXT, "what was simulated or emulated"),
    column("model", _TEXT, "model that the server named; empty where none served"),
)
_TYPES = {
    "str": _TEXT,
    "bool": pa.bool_(),
    "int": _INT,
    "float": pa.float64(),
    "NDArray[np.int64]": pa.list_(_INT),
    "FloatArray": pa.list_(pa.float64()),
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


def serving_table(runs: Sequence[SealedRun]) -> pa.Table:
    """The serving figures of each condition, as ``harness table --serving`` has them, with their origin."""
    origin = origin_of(runs)
    table = summarise(runs).serving_to_arrow()
    return table.append_column("origin", pa.array([origin] * table.num_rows, _TEXT)).replace_schema_metadata(
        {"origin": origin}
    )
