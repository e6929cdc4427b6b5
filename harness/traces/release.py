"""The rounds of a TraceLab release: JSON lines (gzipped or not), or tables in a DuckDB file.

Whatever the size of the file, one line or one batch is in memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import duckdb

from harness.errors import SpecError
from harness.inputs import open_regular
from harness.traces.base import bounded_lines, opened, parsed_json

READ_BYTES = 1 << 20
BATCH_ROWS = 2_000
_FOREIGN_STARTS = {
    b"PAR1": "a Parquet file",
    b"SQLite format 3": "an SQLite file",
    b"PK\x03\x04": "a ZIP archive: unpack it first",
    b"\x28\xb5\x2f\xfd": "compressed with zstd: unpack it first",
    b"BZh": "compressed with bzip2: unpack it first",
    b"\xfd7zXZ": "compressed with xz: unpack it first",
}
_LATENCIES = ("tool_internal_latency_ms", "tool_wall_latency_ms")


def rounds_of(source: Path, tables: tuple[str, ...] = ()) -> Iterator[tuple[int, object]]:
    """(number from 1, round) of every line that is not blank, or of every row; None for what is not JSON.

    tables: names of the tables of a DuckDB file; default: the table that has the columns of tool calls.
    Raises SpecError for a file that is unreadable, foreign, or has no such table or several of them.
    """
    if is_duckdb(source):
        yield from enumerate(_rows(source, tables), 1)
        return
    with opened(source) as stream:
        for number, line in enumerate(bounded_lines(stream), 1):
            if line.strip():
                yield number, parsed_json(line)


def is_duckdb(source: Path) -> bool:
    """Whether a release is a DuckDB file, by its first bytes; SpecError for a foreign or unreadable file."""
    with opened(source, open_regular) as stream:
        start = stream.read(16)
    for magic, meaning in _FOREIGN_STARTS.items():
        if start.startswith(magic):
            hint = "Give the release's JSONL, JSONL.gz or DuckDB file"
            raise SpecError(f"is {meaning}", where=str(source), hint=hint)
    return start[8:12] == b"DUCK"


def sha256_of(source: Path) -> str:
    """Hex digest of a file; SpecError when it cannot be read."""
    digest = hashlib.sha256()
    with opened(source, open_regular) as stream:
        while part := stream.read(READ_BYTES):
            digest.update(part)
    return digest.hexdigest()


def _rows(source: Path, wanted: tuple[str, ...]) -> Iterator[object]:
    """Every row as a round: an object with "tools"."""
    try:
        with duckdb.connect(str(source), read_only=True, config={"memory_limit": "1GB"}) as connection:
            for query in _queries(connection, source, wanted):
                cursor = connection.execute(query)
                while batch := cursor.fetchmany(BATCH_ROWS):
                    yield from (_round(tools) for (tools,) in batch)
    except duckdb.Error as error:
        raise SpecError(
            f"cannot be read as DuckDB ({str(error).splitlines()[0]})",
            where=str(source),
            hint="Close other programs that have it open, or use the release's JSONL",
        ) from error


def _round(tools: object) -> object:
    if not isinstance(tools, str):
        return {"tools": tools}
    parsed = parsed_json(tools.encode())
    # JSON's own null has no tools; a text that is not JSON is no round.
    return None if parsed is None and tools.strip() != "null" else {"tools": parsed}


def _queries(connection: duckdb.DuckDBPyConnection, source: Path, wanted: tuple[str, ...]) -> list[str]:
    """A query of the calls of each table that is read."""
    columns: dict[tuple[str, ...], dict[str, str]] = {}
    for *place, column, data_type in connection.execute(
        "SELECT database_name, schema_name, table_name, column_name, data_type FROM duckdb_columns() WHERE NOT internal"
        " AND database_name = current_database() ORDER BY ALL"
    ).fetchall():
        columns.setdefault(tuple(place), {})[column] = data_type
    names = sorted({place[-1] for place in columns})
    readable = {place: selected for place, types in columns.items() if (selected := _selected(types))}
    if absent := sorted(set(wanted) - {place[-1] for place in readable}):
        raise _no_table(source, f"has no table {', '.join(absent)} with tool calls", names)
    if wanted:
        chosen = [place for place in readable if place[-1] in wanted]
    else:
        best = min((preference for preference, _ in readable.values()), default=0)
        chosen = [place for place, (preference, _) in readable.items() if preference == best]
        if not chosen:
            raise _no_table(source, "has no table with tool calls", names)
        if len(chosen) > 1:
            raise SpecError(
                f"has several tables with tool calls: {', '.join(place[-1] for place in chosen)}",
                where=str(source),
                hint="Name the tables to count (a view beside its table would be counted twice)",
            )
    return [f"SELECT {readable[place][1]} AS tools FROM {'.'.join(map(_quoted, place))}" for place in chosen]


def _selected(types: Mapping[str, str]) -> tuple[int, str] | None:
    """(preference, expression for a list of calls) of a table with these columns; None where it holds no calls."""
    tools = types.get("tools", "")
    if tools.startswith("STRUCT(") and tools.endswith("[]") and "tool_name" in tools:
        return 0, "tools"
    if tools in {"JSON", "VARCHAR", "JSON[]"}:
        return 1, "tools::VARCHAR"
    known = [f"'{name}': TRY_CAST({name} AS DOUBLE)" for name in _LATENCIES if name in types]
    return (2, f"[{{'tool_name': tool_name::VARCHAR, {', '.join(known)}}}]") if known and "tool_name" in types else None


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _no_table(source: Path, what: str, names: list[str]) -> SpecError:
    fields = ", ".join(("tool_name", *_LATENCIES))
    looked_for = f"a `tools` column (a list of structs, or JSON) or the columns {fields}"
    return SpecError(
        f"{what}; looked for {looked_for}; it has {', '.join(names) or 'no table'}",
        where=str(source),
        hint="Give the DuckDB file of a TraceLab release",
    )
