"""SQL over sealed runs: the tables of the runs as views, and statements that can only read them.

A statement sees copies of the tables in memory and no file, so it cannot change a sealed record.
"""

from __future__ import annotations

import io
import json
import re
import resource
import sys
import threading
from collections.abc import Generator, Iterable
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pyarrow as pa

from harness.errors import RecordsError, SpecError, in_one_line
from harness.measure.records import layout, schema
from harness.measure.records.run import SealedRun
from harness.processes import optional

if TYPE_CHECKING:
    import duckdb
else:
    duckdb = optional("duckdb", "sql", "query")

# DuckDB's types of statements: "MULTI" is a pivot whose columns it must look up first.
READING_STATEMENTS = ("SELECT", "MULTI")
_EXPLAIN = re.compile(r"\s*explain\b(\s+analyze\b)?(\s*\(\s*(analyze|format)\b[^()]*\))?", re.IGNORECASE)
MEMORY_LIMIT_BYTES = 4 << 30
# The order matters: no setting can be changed after the last.
LOCKED_SETTINGS = {
    "python_enable_replacements": "false",
    "enable_external_access": "false",
    "lock_configuration": "true",
}
ROWS_PER_BATCH = 100_000
# Interval between interrupts once the time is over: DuckDB ignores an interrupt between two steps.
INTERRUPT_EVERY_S = 0.1
MAX_SCRAPE_BYTES = 64 << 20
_TOO_LARGE = ("Out of Memory", "maximum total string size")
# The limit is of the whole process.
_memory_lock = threading.RLock()
# What each run has files of.
RUN_TABLES = (*schema.TABLES, "scrapes")
COMPUTED = ("latencies", "sessions")
"""Views of other tables, each by the statement in its .sql file."""
VIEWS = ("runs", *RUN_TABLES, *COMPUTED)
QUERY_HINT = f'Tables: {" ".join(VIEWS)}, each also as valid_...; see "describe requests" or `harness explain tables`'
# The suffix that the engine adds to a response id in its log (docs/reference/stack.md, "Request ids").
ENGINE_SUFFIX = r"(-\d+)?(-[0-9a-f]{8})?$|(_\d+)?-[0-9a-f]{8}$"


@dataclass(frozen=True)
class QueryRows:
    """The rows of a statement, and the connection that made them, while it is open."""

    rows: pa.Table
    connection: duckdb.DuckDBPyConnection

    def drawn(self, width: int) -> str:
        """The rows as DuckDB draws them."""
        with redirect_stdout(io.StringIO()) as text:
            if self.rows.num_columns:
                self.connection.from_arrow(self.rows).show(max_width=width)
        return text.getvalue().rstrip("\n")


def connected(runs: list[SealedRun]) -> duckdb.DuckDBPyConnection:
    """A connection whose views read the files of the runs; see ``RunStore.connect``."""
    connection = duckdb.connect()
    connection.execute("create schema internal")
    for name in RUN_TABLES:
        source = _source_of(connection, name, runs)
        if source is None:
            _create_table(connection, name, _empty_table(name))
        else:
            connection.execute(f"create view internal.{name} as {source}")
    _create_views(connection, runs)
    return connection


@contextmanager
def answered(runs: list[SealedRun], sql: str, timeout_s: float) -> Generator[QueryRows]:
    """The answer to a statement that only reads, within ``timeout_s`` seconds and MEMORY_LIMIT_BYTES."""
    # Without a folder for temporary files DuckDB writes nothing.
    connection = duckdb.connect(config={"memory_limit": f"{MEMORY_LIMIT_BYTES}B", "temp_directory": ""})
    try:
        with _limited_memory(), _interrupted_after(connection, timeout_s), _refusals():
            _require_reading(connection, sql)
            _load_tables(connection, runs, sql)
            for setting, value in LOCKED_SETTINGS.items():
                connection.execute(f"set {setting} = {value}")
            yield QueryRows(_rows(connection, sql), connection)
    finally:
        connection.close()


def _require_reading(connection: duckdb.DuckDBPyConnection, sql: str) -> None:
    """SpecError unless DuckDB parses ``sql`` as a single statement that reads, or explains one."""
    try:
        sql.encode()
    except UnicodeEncodeError as error:
        hint = "Write the statement in UTF-8; bytes are from_hex('ff')"
        raise SpecError(f"the query is not UTF-8 at character {error.start + 1}", hint=hint) from error
    statements = connection.extract_statements(sql)
    if len(statements) != 1:
        # DuckDB before 2.0 parses a pivot without named columns as two statements.
        hint = "Leave out extra semicolons, and name the columns of a pivot (pivot ... on b in (1, 2))"
        raise SpecError(f"one SQL statement is needed, got {len(statements)}", hint=hint)
    kind = statements[0].type.name
    if kind == "EXPLAIN":
        explained = connection.extract_statements(_EXPLAIN.sub("", statements[0].query, count=1))
        kind = explained[0].type.name if len(explained) == 1 else kind
    if kind not in READING_STATEMENTS:
        hint = "Write select, describe, summarize, or explain with one of them"
        raise SpecError(f"the query is refused: {kind.lower()} does not only read", hint=hint)


def _load_tables(connection: duckdb.DuckDBPyConnection, runs: list[SealedRun], sql: str) -> None:
    """Copy into memory the tables that ``sql`` reads; the others exist and are empty."""
    connection.execute("create schema internal")
    for name in RUN_TABLES:
        _create_table(connection, name, _empty_table(name))
        source = _source_of(connection, name, runs) if _is_read(name, sql.lower()) else None
        if source is not None:
            with _unreadable_records():
                connection.execute(f"insert into internal.{name} by name {source}")
    _create_views(connection, runs)


def _is_read(name: str, sql: str) -> bool:
    """Whether a statement, in lower case, may read this table: by its name, by way of a view over it, or by query()."""
    # query() and query_table() take names as text, which may be concatenated.
    is_below = any(view in sql and name in tables for view, tables in _BELOW.items())
    return name in sql or is_below or "query" in sql


# The tables that computed views read.
_BELOW = {"latencies": ("requests", "chunks", "kv_events"), "sessions": ("requests", "chunks")}


def _rows(connection: duckdb.DuckDBPyConnection, sql: str) -> pa.Table:
    reader = connection.sql(sql).to_arrow_reader(ROWS_PER_BATCH)
    batches: list[pa.RecordBatch] = []
    num_bytes = 0
    try:
        for batch in reader:
            batches.append(batch)
            num_bytes += batch.nbytes
            if num_bytes > MEMORY_LIMIT_BYTES:
                raise duckdb.OutOfMemoryException("the rows of the answer")
    except OSError as error:  # how Arrow hands on what DuckDB says while rows are fetched
        if any(words in str(error) for words in _TOO_LARGE):
            raise duckdb.OutOfMemoryException("the values of the answer") from error
        raise SpecError(f"the rows cannot be fetched: {_short(error)}", hint=QUERY_HINT) from error
    return pa.Table.from_batches(batches, reader.schema)


@contextmanager
def _limited_memory() -> Generator[None]:
    """Let this process have MEMORY_LIMIT_BYTES more: DuckDB's own limit leaves out long values that it fetches."""
    with _memory_lock:
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        wanted = psutil.Process().memory_info().vms + MEMORY_LIMIT_BYTES
        if wanted < (sys.maxsize if soft == resource.RLIM_INFINITY else soft):
            resource.setrlimit(resource.RLIMIT_AS, (wanted, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def too_slow(timeout_s: float) -> SpecError:
    """The error about a query that was stopped."""
    return SpecError(
        f"the query took longer than {timeout_s:g} s and was stopped",
        hint="Ask for fewer rows, or give it longer: --timeout SECONDS",
    )


@contextmanager
def _interrupted_after(connection: duckdb.DuckDBPyConnection, timeout_s: float) -> Generator[None]:
    """Interrupt ``connection`` after ``timeout_s`` seconds, with a SpecError; DuckDB ends its current value first."""
    done, is_over = threading.Event(), threading.Event()

    def watch() -> None:
        wait_s = timeout_s
        while not done.wait(wait_s):
            is_over.set()
            connection.interrupt()
            wait_s = INTERRUPT_EVERY_S

    watcher = threading.Thread(target=watch, name="query-timeout", daemon=True)
    watcher.start()
    try:
        yield
    except (duckdb.InterruptException, pa.ArrowException, SpecError) as error:
        if not is_over.is_set():
            raise
        raise too_slow(timeout_s) from error
    finally:
        done.set()
        watcher.join()


@contextmanager
def _refusals() -> Generator[None]:
    """Turn errors of DuckDB into one line each."""
    try:
        yield
    except duckdb.InterruptException:
        raise
    except duckdb.PermissionException as error:
        raise SpecError(
            f"the query is refused: {_short(error)}",
            hint="It reads the tables of the runs and nothing else; for more, harness.RunStore(...).connect()",
        ) from error
    except (duckdb.OutOfMemoryException, MemoryError) as error:
        raise SpecError(
            f"the query needs more than {MEMORY_LIMIT_BYTES / (1 << 30):g} GiB of memory",
            hint="Aggregate or choose rows first, or use harness.RunStore(...).connect(), which has no limit",
        ) from error
    except duckdb.Error as error:
        raise SpecError(f"the query is not valid: {_short(error)}", hint=QUERY_HINT) from error


@contextmanager
def _unreadable_records() -> Generator[None]:
    try:
        yield
    except (duckdb.IOException, duckdb.InvalidInputException) as error:
        raise RecordsError(
            f"a record cannot be read: {_short(error)}", hint="`harness verify` names the damaged file"
        ) from error


def _create_table(connection: duckdb.DuckDBPyConnection, name: str, rows: pa.Table) -> None:
    connection.register("arrow_rows", rows)
    connection.execute(f"create table internal.{name} as select * from arrow_rows")
    connection.unregister("arrow_rows")


def _create_views(connection: duckdb.DuckDBPyConnection, runs: list[SealedRun]) -> None:
    """The views that people query, over the tables and views of the schema ``internal``."""
    rows = pa.Table.from_pylist([_run_row(run) for run in runs], schema=schema.RUNS)
    _create_table(connection, "runs", rows)
    _create_parts(connection, runs)
    for name in VIEWS:
        source = f"select * from internal.{name}"
        if name in COMPUTED:
            source = Path(__file__).with_name(f"{name}.sql").read_text(encoding="utf-8")
            source = source.replace("$ENGINE_SUFFIX", ENGINE_SUFFIX)
        connection.execute(f"create view {name} as {source}")
        connection.execute(f"create view valid_{name} as select * from {name} where is_valid")


def _create_parts(connection: duckdb.DuckDBPyConnection, runs: list[SealedRun]) -> None:
    """A function of a run's place that says which session each session of its plan is a part of; read when called."""

    def parts_of(place: int) -> list[dict[str, object]]:
        # Only the view of sessions needs the plans' code, which brings the specs.
        from harness.model.plan.event_queue import begun_in_the_middle, whole_sessions

        plan = runs[place].plan_if_readable
        if plan is None:
            return []
        whole = whole_sessions(plan)
        begun = begun_in_the_middle(plan, whole)
        return [{"whole": index, "is_whole": index not in begun} for index in whole.tolist()]

    connection.create_function("parts_of", parts_of, ["BIGINT"], "STRUCT(whole BIGINT, is_whole BOOLEAN)[]")
    keys = [{**run.key._asdict(), "is_valid": run.is_valid, "place": place} for place, run in enumerate(runs)]
    columns = pa.schema([*schema.RUN_COLUMNS, pa.field("place", pa.int64())])
    _create_table(connection, "plans", pa.Table.from_pylist(keys, schema=columns))


def _run_row(run: SealedRun) -> dict[str, object]:
    """A run's manifest, nested parts as JSON text."""
    manifest = run.manifest
    fleet = {} if manifest.fleet is None else manifest.fleet.model_dump()
    computed: dict[str, object] = {
        "findings": [finding.model_dump() for finding in manifest.findings],
        "num_earlier_tries": len(manifest.earlier_tries),
        "is_baseline": manifest.condition == manifest.baseline,
        "device": run.device,
        "host": fleet.get("host") or None,
        "neighbours": fleet.get("neighbours"),
        "folder": str(run.path),
    }
    row = {name: computed[name] if name in computed else getattr(manifest, name) for name in schema.RUNS.names}
    return {name: json.dumps(value) if isinstance(value, (dict, list)) else value for name, value in row.items()}


def _empty_table(name: str) -> pa.Table:
    columns = schema.SCRAPES if name == "scrapes" else schema.TABLES[name]
    return pa.schema([*schema.RUN_COLUMNS, *columns]).empty_table()


def _source_of(connection: duckdb.DuckDBPyConnection, name: str, runs: list[SealedRun]) -> str | None:
    """A statement for a table's rows of all runs, with the keys of the runs; None where no run has the table."""
    if name == "scrapes":
        files = {run.file(layout.SCRAPES): run for run in runs if layout.SCRAPES in run.manifest.files}
        columns = "{at_ns: 'BIGINT', reason: 'VARCHAR', status: 'INTEGER', body: 'VARCHAR'}"
        source = (
            f"select * from read_json({_path_list(files)}, format = 'newline_delimited', columns = {columns}, "
            f"maximum_object_size = {MAX_SCRAPE_BYTES}, filename = 'source_file')"
        )
    else:
        files = {path: run for run in runs if (path := run.table_file(name)) is not None}
        # By name: an older record lacks columns that a newer one has.
        read = f"read_parquet({_path_list(files)}, filename = 'source_file', union_by_name = true)"
        _create_table(connection, f"columns_of_{name}", schema.TABLES[name].empty_table())
        source = f"select * from internal.columns_of_{name} union all by name select * from {read}"
    if not files:
        return None
    rows = [{"source_file": str(path), **run.key._asdict(), "is_valid": run.is_valid} for path, run in files.items()]
    columns = pa.schema([pa.field("source_file", pa.string()), *schema.RUN_COLUMNS])
    _create_table(connection, f"files_of_{name}", pa.Table.from_pylist(rows, schema=columns))
    run_columns = ", ".join(f"f.{field.name}" for field in schema.RUN_COLUMNS)
    return (
        f"select {run_columns}, t.* exclude (source_file) "
        f"from ({source}) t join internal.files_of_{name} f using (source_file)"
    )


def _path_list(paths: Iterable[Path]) -> str:
    # DuckDB reads file names as glob patterns; a bracket class makes each special character stand for itself.
    return (
        "[" + ", ".join("'" + re.sub(r"[*?[]", r"[\g<0>]", str(path)).replace("'", "''") + "'" for path in paths) + "]"
    )


def _short(error: Exception) -> str:
    return in_one_line(error)[:300]
