"""The tool calls of a TraceLab release: JSON lines (gzipped or not) or tables in a DuckDB file, and exact quantiles.

Whatever the size of the file, one line or one batch is in memory. Latencies are counted in a temporary DuckDB file.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import tempfile
import zlib
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, NamedTuple

import duckdb
import pyarrow as pa

from harness.errors import SpecError
from harness.inputs import open_regular, open_unpacked

MAX_LINE_BYTES = 256 << 20  # a longer "line" is a binary file
READ_BYTES = 1 << 20
BATCH_ROWS = 20_000
MAX_PENDING = 200_000
MEMORY_LIMIT = "1GB"

_FOREIGN_STARTS = {
    b"PAR1": "a Parquet file",
    b"SQLite format 3": "an SQLite file",
    b"PK\x03\x04": "a ZIP archive: unpack it first",
    b"\x28\xb5\x2f\xfd": "compressed with zstd: unpack it first",
    b"BZh": "compressed with bzip2: unpack it first",
    b"\xfd7zXZ": "compressed with xz: unpack it first",
}


def is_duckdb(source: Path) -> bool:
    """Whether a release is a DuckDB file, by its first bytes; SpecError for a foreign or unreadable file."""
    try:
        with open_regular(source) as stream:
            start = stream.read(16)
    except OSError as error:
        raise SpecError(f"cannot be read ({error.strerror})", where=str(source), hint="Check the path") from error
    for magic, meaning in _FOREIGN_STARTS.items():
        if start.startswith(magic):
            raise SpecError(
                f"is {meaning}", where=str(source), hint="Give the release's JSONL, JSONL.gz or DuckDB file"
            )
    return start[8:12] == b"DUCK"


class RoundLine(NamedTuple):
    """The content of one line; None when it is not JSON. number: from 1."""

    number: int
    record: object


def sha256_of(source: Path) -> str:
    """Hex digest of a file; SpecError when it cannot be read."""
    digest = hashlib.sha256()
    try:
        with open_regular(source) as stream:
            while part := stream.read(READ_BYTES):
                digest.update(part)
    except OSError as error:
        raise SpecError(f"cannot be read ({error.strerror})", where=str(source), hint="Check the disk") from error
    return digest.hexdigest()


def round_lines(source: Path) -> Iterator[RoundLine]:
    """Every line that is not blank, of a file of JSON lines, gzipped or not.

    Raises SpecError when the file cannot be read to its end or is binary.
    """
    number = 0
    try:
        with open_unpacked(source) as stream:
            while line := stream.readline(MAX_LINE_BYTES):
                number += 1
                if len(line) >= MAX_LINE_BYTES:
                    raise SpecError(
                        f"is no JSONL: line {number} is longer than {MAX_LINE_BYTES >> 20} MiB",
                        where=str(source),
                        hint="Give a file with one round per line",
                    )
                if line.strip():
                    yield RoundLine(number, _parsed(line))
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise SpecError(
            f"is damaged or cut off gzip ({error})", where=str(source), hint="Download it again and check its hash"
        ) from error
    except OSError as error:
        raise SpecError(f"cannot be read ({error.strerror})", where=str(source), hint="Check the disk") from error


def _parsed(line: bytes) -> object:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


class CountedCalls(NamedTuple):
    """Calls of one tool with the same two latencies."""

    tool: str
    internal_ms: float | None
    wall_ms: float | None
    num_calls: int


_FIELDS = ("tool_name", "tool_internal_latency_ms", "tool_wall_latency_ms")
_JSON_SHAPE = '[{"tool_name":"VARCHAR","tool_internal_latency_ms":"DOUBLE","tool_wall_latency_ms":"DOUBLE"}]'

# CASE, because the type of invalid JSON is an error; a NULL has no tools and is no fault.
_IS_JSON_LIST = (
    "CASE WHEN tools IS NULL THEN true WHEN json_valid(tools::VARCHAR) "
    "THEN json_type(tools::VARCHAR) IN ('ARRAY', 'NULL') ELSE false END"
)


class _Table(NamedTuple):
    """A table that holds tool calls: as a list of structs, as JSON, or one call per row."""

    database: str
    schema: str
    name: str
    form: Literal["structs", "json", "flat"]
    columns: dict[str, str]

    @property
    def quoted(self) -> str:
        return ".".join('"' + part.replace('"', '""') + '"' for part in (self.database, self.schema, self.name))


@dataclass
class DuckdbCalls:
    """The tool calls in some tables of one open DuckDB file."""

    _connection: duckdb.DuckDBPyConnection
    _tables: list[_Table]
    num_rows: int
    num_malformed: int

    def calls(self) -> Iterator[CountedCalls]:
        """Distinct (tool, latencies) with their counts, batch by batch."""
        for table in self._tables:
            cursor = self._connection.execute(
                f"SELECT tool, internal_ms, wall_ms, count(*) FROM ({_calls_sql(table)}) WHERE tool IS NOT NULL "
                "GROUP BY ALL"
            )
            while batch := cursor.fetchmany(BATCH_ROWS):
                yield from (CountedCalls(*row) for row in batch)


@contextmanager
def read_duckdb_calls(source: Path, wanted: tuple[str, ...]) -> Generator[DuckdbCalls]:
    """The tool calls of a DuckDB file, read-only. wanted: names of tables; else tables are recognised by their columns.

    Raises SpecError when the file cannot be opened, has no such table, or several of them.
    """
    with tempfile.TemporaryDirectory(prefix="harness-duckdb-") as scratch:
        config: dict[str, str | bool | int | float | list[str]] = {
            "memory_limit": "1GB",
            "temp_directory": scratch,
            "preserve_insertion_order": False,
        }
        try:
            connection = duckdb.connect(str(source), read_only=True, config=config)
            with connection:
                tables = _find_tables(connection, source, wanted)
                yield DuckdbCalls(connection, tables, *_count_rows(connection, tables))
        except duckdb.Error as error:
            raise SpecError(
                f"cannot be read as DuckDB ({str(error).splitlines()[0]})",
                where=str(source),
                hint="Close other programs that have it open, or use the release's JSONL",
            ) from error


def _find_tables(connection: duckdb.DuckDBPyConnection, source: Path, wanted: tuple[str, ...]) -> list[_Table]:
    columns: dict[tuple[str, str, str], dict[str, str]] = {}
    rows = connection.execute(
        "SELECT database_name, schema_name, table_name, column_name, data_type FROM duckdb_columns() WHERE NOT internal"
        " AND database_name = current_database() ORDER BY ALL"
    ).fetchall()
    for database, schema, table, column, data_type in rows:
        columns.setdefault((database, schema, table), {})[column] = data_type
    candidates = [table for key, types in columns.items() if (table := _as_calls_table(*key, types)) is not None]
    names = sorted({table for _, _, table in columns})
    if wanted:
        found = [table for table in candidates if table.name in wanted]
        if absent := sorted(set(wanted) - {table.name for table in found}):
            raise _no_table(source, f"has no table {', '.join(absent)} with tool calls", names)
        return found
    for form in ("structs", "json", "flat"):
        of_form = [table for table in candidates if table.form == form]
        if len(of_form) > 1:
            raise SpecError(
                f"has several tables with tool calls: {', '.join(table.name for table in of_form)}",
                where=str(source),
                hint="Name the ones to count (a view beside its table would be counted twice)",
            )
        if of_form:
            return of_form
    raise _no_table(source, "has no table with tool calls", names)


def _no_table(source: Path, what: str, names: list[str]) -> SpecError:
    looked_for = f"a `tools` column (a list of structs, or JSON) or the columns {', '.join(_FIELDS)}"
    return SpecError(
        f"{what}; looked for {looked_for}; it has {', '.join(names) or 'no table'}",
        where=str(source),
        hint="Give the DuckDB file of a TraceLab release",
    )


def _as_calls_table(database: str, schema: str, name: str, types: dict[str, str]) -> _Table | None:
    tools = types.get("tools", "")
    if tools.startswith("STRUCT(") and tools.endswith("[]") and "tool_name" in tools:
        return _Table(database, schema, name, "structs", types)
    if tools in {"JSON", "VARCHAR", "JSON[]"}:
        return _Table(database, schema, name, "json", types)
    if "tool_name" in types and any(column in types for column in _FIELDS[1:]):
        return _Table(database, schema, name, "flat", types)
    return None


def _count_rows(connection: duckdb.DuckDBPyConnection, tables: list[_Table]) -> tuple[int, int]:
    """(rows, rows whose JSON cannot be read)."""
    num_rows = num_malformed = 0
    for table in tables:
        bad = "0" if table.form != "json" else f"count(*) FILTER (NOT {_IS_JSON_LIST})"
        row = connection.execute(f"SELECT count(*), {bad} FROM {table.quoted}").fetchone()
        assert row is not None  # an aggregate without GROUP BY always gives a row
        num_rows, num_malformed = num_rows + int(row[0]), num_malformed + int(row[1])
    return num_rows - num_malformed, num_malformed


def _calls_sql(table: _Table) -> str:
    """A query of (tool, internal_ms, wall_ms), one row per call; a latency that is no finite number is NULL."""
    if table.form == "flat":
        fields = [column if column in table.columns else "NULL" for column in _FIELDS]
        rows = table.quoted
    elif table.form == "structs":
        # A release may lack one of the two latencies.
        fields = [f"call.{column}" if column in table.columns["tools"] else "NULL" for column in _FIELDS]
        rows = f"(SELECT unnest(tools) AS call FROM {table.quoted})"
    else:
        fields = [f"call.{column}" for column in _FIELDS]
        valid = f"SELECT tools::VARCHAR AS text FROM {table.quoted} WHERE {_IS_JSON_LIST}"
        rows = f"(SELECT unnest(from_json(text, '{_JSON_SHAPE}')) AS call FROM ({valid}))"
    tool, *latencies = fields
    numbers = [f"TRY_CAST({latency} AS DOUBLE)" for latency in latencies]
    finite = [f"CASE WHEN isfinite({number}) THEN {number} END" for number in numbers]
    return f"SELECT {tool}::VARCHAR AS tool, {finite[0]} AS internal_ms, {finite[1]} AS wall_ms FROM {rows}"


class LatencyCounts:
    """Counts of latencies in whole microseconds by tool, in a temporary file while the context is open."""

    def __init__(self, max_pending: int = MAX_PENDING) -> None:
        self._max_pending = max_pending
        # DuckDB holds a number for each tool: a name in a trace's JSON may not be valid UTF-8.
        self._tools: dict[str, int] = {}
        self._pending: Counter[tuple[int, int]] = Counter()
        self._folder = tempfile.TemporaryDirectory(prefix="harness-latencies-")
        folder = Path(self._folder.name)
        self._db = duckdb.connect(
            str(folder / "counts.duckdb"), config={"memory_limit": MEMORY_LIMIT, "temp_directory": str(folder)}
        )
        self._db.execute("CREATE TABLE counts (tool INTEGER, us BIGINT, calls BIGINT)")

    def __enter__(self) -> LatencyCounts:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._db.close()
        self._folder.cleanup()

    def add(self, tool: str, latency_us: int, count: int = 1) -> None:
        """Count ``count`` calls of ``tool`` that took ``latency_us``."""
        self._pending[self._tools.setdefault(tool, len(self._tools)), latency_us] += count
        if len(self._pending) >= self._max_pending:
            self._store()

    def quantiles_us(self, shares: Sequence[float]) -> dict[str, tuple[int, list[float]]]:
        """By tool: number of calls, and exact quantiles in microseconds, linear between the two nearest calls.

        Of n ascending values v[0..n-1] a quantile is the one at place share * (n - 1), as numpy.percentile has it.
        """
        self._store()
        places = ", ".join(
            f"min(us) FILTER (up_to > {rounding}({share!r} * (total - 1)))"
            for share in shares
            for rounding in ("floor", "ceil")
        )
        rows = self._db.execute(
            f"""
            WITH distinct_values AS (SELECT tool, us, sum(calls) AS calls FROM counts GROUP BY tool, us),
            running AS (
                SELECT tool, us, (sum(calls) OVER (PARTITION BY tool ORDER BY us))::DOUBLE AS up_to,
                    (sum(calls) OVER (PARTITION BY tool))::DOUBLE AS total
                FROM distinct_values
            )
            SELECT tool, any_value(total)::BIGINT, {places} FROM running GROUP BY tool
            """
        ).fetchall()
        names = list(self._tools)
        return {names[tool]: (total, _interpolated(total, shares, values)) for tool, total, *values in rows}

    def _store(self) -> None:
        if not self._pending:
            return
        tools, values = zip(*self._pending, strict=True)
        batch = pa.table({"tool": tools, "us": values, "calls": list(self._pending.values())})
        self._db.register("batch", batch)
        self._db.execute("INSERT INTO counts SELECT * FROM batch")
        self._db.unregister("batch")
        self._pending.clear()


def _interpolated(total: int, shares: Sequence[float], values: Sequence[int]) -> list[float]:
    quantiles: list[float] = []
    for share, low, high in zip(shares, values[::2], values[1::2], strict=True):
        place = share * (total - 1)
        quantiles.append(low + (place - int(place)) * (high - low))
    return quantiles
