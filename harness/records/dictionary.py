"""The data dictionary: every table and column of ``harness query``, generated from the schema of the records.

``harness explain tables`` shows it; docs/data-dictionary.md is the same text.
"""

from __future__ import annotations

import pyarrow as pa

from harness.records import schema
from harness.table import markdown_rows

# The meaning of a row of each table, and its file.
TABLES: dict[str, tuple[str, pa.Schema]] = {
    "runs": ("A sealed run, from its manifest.", schema.RUNS),
    "requests": ("A planned request, sent or not; `requests.parquet` of the run.", schema.REQUESTS),
    "chunks": ("A piece of an answer; `chunks.parquet` of the run.", schema.CHUNKS),
    "steps": ("A decode step of the server, from its log; `derived/steps.parquet`.", schema.STEPS),
    "kv_events": ("A line of the server's KV log; `derived/kv_events.parquet`.", schema.KV_EVENTS),
    "metrics": ("A sample of a scrape; `derived/metrics.parquet`.", schema.METRICS),
    "scrapes": ("A scrape of the server's metrics, raw; `scrapes.jsonl`.", schema.SCRAPES),
    "latencies": ("An answered request and what it waited for; computed by each query.", schema.LATENCIES),
}
INTRODUCTION = """\
Each table of `harness query` and of `RunStore.connect()`, also as `valid_...` (`valid_runs`, `valid_requests`, ...)
without the rows of invalid runs. Every table begins with experiment, condition, replicate and is_valid, as `runs` does.
*clock ns*: int64 nanoseconds of the run's clock; only differences mean something, and they are model time where time
was scaled. A missing instant is null, never zero.

`harness query` can only read: it accepts select, describe, summarize, and explain of these, and a statement sees copies
of the tables in memory and no file. It may take 60 s (`--timeout`) and 4 GiB of memory. `RunStore.connect()` gives an
ordinary DuckDB connection without these limits."""


def meaning(field: pa.Field) -> str:
    """The meaning of a column."""
    return _metadata(field, b"meaning")


def unit(field: pa.Field) -> str:
    """Unit of a column; empty where it has none."""
    return _metadata(field, b"unit")


def _metadata(field: pa.Field, key: bytes) -> str:
    return (field.metadata or {}).get(key, b"").decode()


def dictionary_markdown() -> str:
    """docs/data-dictionary.md."""
    parts = ["# Data dictionary", INTRODUCTION]
    for name, (row, columns) in TABLES.items():
        rows = [
            (field.name, _type(field), unit(field), meaning(field))
            for field in columns
            if name == "runs" or field not in schema.RUN_COLUMNS
        ]
        parts.append(f"## {name}\n{row}\n\n{markdown_rows(('column', 'type', 'unit', 'meaning'), rows)}")
    return "\n\n".join(parts) + "\n"


def _type(field: pa.Field) -> str:
    return f"{field.type} or null" if field.nullable else str(field.type)
