"""Sealed runs, as tables and as SQL: a run is visible when its manifest is, and not before.

A damaged run is named, never skipped. Nothing here writes to a run. Next: ``harness.analysis`` computes figures from
what this returns; ``harness query`` hands SQL to ``RunStore.query``.
"""

from __future__ import annotations

import io
import json
from collections.abc import Generator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pyarrow as pa

from harness.errors import RecordsError, SpecError
from harness.records import layout, schema
from harness.records.manifest import load_manifest
from harness.records.run import RunKey, SealedRun, damaged

if TYPE_CHECKING:
    import duckdb

# "multi" is what DuckDB makes of a pivot.
READING_STATEMENTS = ("SELECT", "EXPLAIN", "MULTI")
# In this order: nothing can be changed after the last one.
LOCKED_SETTINGS = {"python_enable_replacements": False, "enable_external_access": False, "lock_configuration": True}
MAX_SCRAPE_BYTES = 64 << 20
RUN_COLUMNS = tuple(field.name for field in schema.RUN_COLUMNS)
VIEWS = ("runs", *schema.TABLES, "scrapes", "latencies")
# The suffix that the engine adds to a response id in its log (docs/stack.md, "Request ids").
ENGINE_SUFFIX = r"(-\d+)?(-[0-9a-f]{8})?$|(_\d+)?-[0-9a-f]{8}$"


class RunStore:
    """All sealed runs below one records folder."""

    def __init__(self, root: Path) -> None:
        self.root = Path(root)

    def __repr__(self) -> str:
        return f"RunStore({str(self.root)!r}): {len(self.sealed())} sealed runs"

    def sealed(self, experiment: str | None = None) -> list[SealedRun]:
        """Sealed runs, sorted by key; raises RecordsError naming the file when one is damaged (no bytes are read)."""
        folders = [folder for folder in self._folders() if layout.is_replicate_name(folder.name)]
        wanted = [folder for folder in folders if experiment in (None, folder.parent.parent.name)]
        return sorted((self._load(folder) for folder in wanted), key=lambda run: run.key)

    def foreign(self) -> list[Path]:
        """Folders where runs lie whose names no run has, such as 00 beside 0: never read, never counted."""
        marks = (layout.PARTIAL, layout.ABORTED, layout.RETRIED)
        named = [folder for folder in self._folders() if not any(mark in folder.name for mark in marks)]
        return sorted(folder for folder in named if not layout.is_replicate_name(folder.name))

    def _folders(self) -> list[Path]:
        return [folder for folder in self.root.glob("*/*/*") if folder.is_dir() or folder.is_symlink()]

    def run(self, experiment: str, condition: str, replicate: int) -> SealedRun:
        """One sealed run; SpecError when there is none."""
        folder = layout.run_folder(self.root, experiment, condition, replicate)
        if not folder.is_dir():
            raise SpecError("there is no sealed run of that name", where=str(folder), hint="See `harness query`")
        return self._load(folder)

    def unsealed(self) -> list[Path]:
        """Folders of runs that are being written, or were cut short."""
        found = [*self.root.glob(f"*/*/*{layout.PARTIAL}/"), *self.root.glob(f"*/*/*{layout.ABORTED}*/")]
        return sorted(folder for folder in found if folder.is_dir())

    def verify(self) -> int:
        """Verify every sealed run by hash and return how many there are; RecordsError names the first damage.

        A foreign folder that holds a manifest is damage: a run that somebody copied or renamed.
        """
        for folder in self.foreign():
            if (folder / layout.MANIFEST).exists():
                raise damaged(folder, "is not the name of a run", hint="A replicate is named 0, 1, 2; move it away")
        runs = [kept for run in self.sealed() for kept in (run, *self.earlier_tries(run))]
        for run in runs:
            run.verify()
        return len(runs)

    def earlier_tries(self, run: SealedRun) -> list[SealedRun]:
        """The INVALID runs that ``run`` repeats, as they were sealed; RecordsError where one is gone or another."""
        kept: list[SealedRun] = []
        for told in run.manifest.earlier_tries:
            folder = run.path.with_name(told.folder)
            found = SealedRun(folder, load_manifest(folder / layout.MANIFEST))
            if (found.key, found.manifest.seal) != (run.key, told.seal):
                raise damaged(folder, f"is not the earlier try that {run.label} names")
            kept.append(found)
        return kept

    def connect(self) -> duckdb.DuckDBPyConnection:
        """An in-memory DuckDB connection with a view for each of VIEWS, and ``valid_`` before each of their names.

        Every view starts with experiment, condition, replicate, is_valid (docs/data-dictionary.md). The plain ones hold
        rows of all sealed runs, invalid ones included; ``valid_runs``, ``valid_requests``, ... hold what counts.
        """
        return _connect(self.sealed(), VIEWS)

    def query(self, sql: str) -> pa.Table:
        """Rows of one reading SQL statement over all sealed runs, which sees their tables and no other file.

        SpecError says what is wrong with the statement.
        """
        with self._answered(sql) as (rows, _):
            return rows

    def drawn(self, sql: str, width: int) -> str:
        """The rows of ``query`` as DuckDB draws them: types under names, the middle of many rows left out."""
        with self._answered(sql) as (rows, connection), redirect_stdout(io.StringIO()) as drawn:
            if rows.num_columns:
                connection.from_arrow(rows).show(max_width=width)
            return drawn.getvalue().rstrip("\n")

    @contextmanager
    def _answered(self, sql: str) -> Generator[tuple[pa.Table, duckdb.DuckDBPyConnection]]:
        """The rows, and the connection while it is open: making another one takes a twentieth of a second."""
        # Imported where SQL is asked for: most commands read runs without it.
        import duckdb

        runs = self.sealed()
        connection = _connect(runs, _read_views(sql))
        try:
            _require_one_reading_statement(connection, sql)
            _lock(connection, runs)
            # None: a statement without rows.
            relation = cast("duckdb.DuckDBPyRelation | None", connection.sql(sql))
            yield pa.table({}) if relation is None else relation.to_arrow_table(), connection
        except duckdb.PermissionException as error:
            raise SpecError(
                f"the query is refused: {_one_line(error)}",
                hint="It reads the tables of the runs and nothing else; for more, harness.RunStore(...).connect()",
            ) from error
        except (duckdb.IOException, duckdb.InvalidInputException) as error:
            raise RecordsError(
                f"a record cannot be read: {_one_line(error)}", hint="`harness verify` names the damaged file"
            ) from error
        except duckdb.Error as error:
            raise SpecError(
                f"the query is not valid: {_one_line(error)}",
                hint=_query_hint(error),
            ) from error
        finally:
            connection.close()

    def _load(self, folder: Path) -> SealedRun:
        if folder.is_symlink():
            raise damaged(folder, "is a symbolic link", hint="Copy the run to where it is read")
        run = SealedRun(folder, load_manifest(folder / layout.MANIFEST))
        named = RunKey(folder.parent.parent.name, folder.parent.name, int(folder.name))
        if run.key != named:
            raise damaged(folder / layout.MANIFEST, f"belongs to run {'/'.join(map(str, run.key))}")
        run.check_listing()
        return run


def runs_table(runs: list[SealedRun]) -> pa.Table:
    """One row per run: what its manifest says, the nested parts as JSON text."""
    rows = [
        {
            **run.key._asdict(),
            "is_valid": run.is_valid,
            "invalid_reasons": list(run.manifest.invalid_reasons),
            "findings": json.dumps([finding.model_dump() for finding in run.manifest.findings]),
            "order_index": run.manifest.order_index,
            "num_earlier_tries": len(run.manifest.earlier_tries),
            "is_baseline": run.manifest.condition == run.manifest.baseline,
            "backend": run.manifest.backend,
            "label": run.manifest.label,
            "treatment": run.manifest.treatment,
            "factors": json.dumps(run.manifest.factors),
            "plan_hash": run.manifest.plan_hash,
            "drawn_hash": run.manifest.drawn_hash,
            "planned_requests": run.manifest.planned_requests,
            "time_scale": run.manifest.clock.scale,
            "device": run.device,
            "host": run.host or None,
            "neighbours": None if run.manifest.fleet is None else run.manifest.fleet.neighbours,
            "requested": json.dumps(run.manifest.requested),
            "effective": json.dumps(run.manifest.effective),
            "client_audit": json.dumps(run.manifest.client_audit),
            "provenance": json.dumps(run.manifest.provenance),
            "timings": json.dumps(run.manifest.timings),
            "folder": str(run.path),
        }
        for run in runs
    ]
    return pa.Table.from_pylist(rows, schema=schema.RUNS)


def _read_views(sql: str) -> Sequence[str]:
    """The views that ``sql`` reads, and what they are made of: each looks into the files of all runs, which takes time.

    All of them where it names none, or may read what its text does not name.
    """
    text = sql.lower()
    named = [name for name in VIEWS if name in text]
    if not named or any(unseen in text for unseen in ("query", "_schema", "duckdb_", "sqlite_", "pg_")):
        return VIEWS
    below = ("requests", "chunks", "kv_events") if "latencies" in named else ()
    return [name for name in VIEWS if name in named or name in below]


def _connect(runs: list[SealedRun], views: Sequence[str]) -> duckdb.DuckDBPyConnection:
    import duckdb

    connection = duckdb.connect()
    # What the views are made of, out of the way of "show tables".
    connection.execute("create schema internal")
    connection.register("arrow_runs", runs_table(runs))
    connection.execute("create table internal.all_runs as select * from arrow_runs")
    connection.unregister("arrow_runs")
    connection.execute("create view runs as select * from internal.all_runs")
    for name in schema.TABLES.keys() & views:
        _create_table_view(connection, name, runs)
    if "scrapes" in views:
        _create_scrapes_view(connection, runs)
    if "latencies" in views:
        connection.execute(_LATENCIES)
    for name in {"runs", *views}:
        connection.execute(f"create view valid_{name} as select * from {name} where is_valid")
    return connection


def _lock(connection: duckdb.DuckDBPyConnection, runs: list[SealedRun]) -> None:
    """Leave ``connection`` the files that its views read: no other file, no network, no extension, no setting."""
    files = [run.path / layout.table_path(name) for run in runs for name in schema.TABLES]
    files += [run.path / layout.SCRAPES for run in runs]
    # A path is asked for as the view words it, and again as it was found.
    allowed = [_quoted(form) for path in files for form in dict.fromkeys((str(path), _glob_literal(str(path))))]
    connection.execute(f"set allowed_paths = [{', '.join(allowed)}]")
    for setting, value in LOCKED_SETTINGS.items():
        connection.execute(f"set {setting} = {value}")


_LATENCIES = f"""
create view latencies as
with first_tokens as (
    select experiment, condition, replicate, session, request, min(coalesce(kernel_ns, received_ns)) as first_ns,
        max(coalesce(kernel_ns, received_ns)) as last_ns
    from chunks where num_tokens > 0 group by all
), admissions as (
    select experiment, condition, replicate, regexp_replace(request_id, '{ENGINE_SUFFIX}', '') as response_id,
        min(log_ns) as admitted_ns
    from kv_events where kind = 'alloc' group by all
)
select r.experiment, r.condition, r.replicate, r.is_valid, r.session, r.request,
    case when r.cached_tokens > 0 then 'reused' when r.request > 0 then 'recomputed' else 'first' end as prefix,
    case when a.admitted_ns is not null then greatest(a.admitted_ns - r.sent_ns, 0) end as queue_ns,
    case when is_streamed then t.first_ns - r.sent_ns end as ttft_ns,
    case when is_streamed and r.completion_tokens > 1
        then (t.last_ns - t.first_ns)::double / (r.completion_tokens - 1) end as tpot_ns,
    r.done_ns - r.sent_ns as e2e_ns, r.prompt_tokens, r.cached_tokens, r.completion_tokens
from requests r
join (select experiment, condition, replicate,
        coalesce(json_extract(requested, '$.client.stream')::boolean, true) as is_streamed from internal.all_runs) s
    using (experiment, condition, replicate)
left join first_tokens t using (experiment, condition, replicate, session, request)
left join admissions a using (experiment, condition, replicate, response_id)
where r.status = 'ok'
"""


def _create_table_view(connection: duckdb.DuckDBPyConnection, name: str, runs: list[SealedRun]) -> None:
    present = {path: run for run in runs if (path := run.table_file(name)) is not None}
    sources: list[str] = []
    for is_earlier in (True, False):
        paths = {
            path: run
            for path, run in present.items()
            if (run.manifest.schema_version < schema.RENAMED_SINCE) == is_earlier
        }
        if paths:
            renamed = ", ".join(
                f"{old} as {new}" for old, new in schema.EARLIER_NAMES.items() if new in schema.TABLES[name].names
            )
            columns = f"* rename ({renamed})" if is_earlier and renamed else "*"
            sources.append(f"select {columns} from read_parquet({_path_list(paths)}, filename = 'source_file')")
    _create_run_view(connection, name, present, " union all by name ".join(sources), schema.TABLES[name])


def _create_scrapes_view(connection: duckdb.DuckDBPyConnection, runs: list[SealedRun]) -> None:
    present = {run.file(layout.SCRAPES): run for run in runs if layout.SCRAPES in run.manifest.files}
    columns = "{at_ns: 'BIGINT', reason: 'VARCHAR', status: 'INTEGER', body: 'VARCHAR'}"
    source = (
        f"select * from read_json({_path_list(present)}, format = 'newline_delimited', columns = {columns}, "
        f"maximum_object_size = {MAX_SCRAPE_BYTES}, filename = 'source_file')"
    )
    _create_run_view(connection, "scrapes", present, source, schema.SCRAPES)


def _create_run_view(
    connection: duckdb.DuckDBPyConnection, name: str, present: dict[Path, SealedRun], source: str, columns: pa.Schema
) -> None:
    """The rows of ``source`` beside the names of their runs; no rows where no run has such a file."""
    if not present:
        nothing = pa.schema([*schema.RUN_COLUMNS, *columns]).empty_table()
        connection.register("arrow_nothing", nothing)
        connection.execute(f"create table internal.no_{name} as select * from arrow_nothing")
        connection.unregister("arrow_nothing")
        connection.execute(f"create view {name} as select * from internal.no_{name}")
        return
    files = pa.Table.from_pylist(
        [{"source_file": str(path), **run.key._asdict(), "is_valid": run.is_valid} for path, run in present.items()],
        schema=pa.schema([pa.field("source_file", pa.string()), *schema.RUN_COLUMNS]),
    )
    connection.register("arrow_files", files)
    connection.execute(f"create table internal.files_of_{name} as select * from arrow_files")
    connection.unregister("arrow_files")
    run_columns = ", ".join(f"f.{column}" for column in RUN_COLUMNS)
    connection.execute(
        f"create view {name} as select {run_columns}, t.* exclude (source_file) "
        f"from ({source}) t join internal.files_of_{name} f using (source_file)"
    )


def _path_list(paths: dict[Path, SealedRun]) -> str:
    return "[" + ", ".join(_quoted(_glob_literal(str(path))) for path in paths) + "]"


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _glob_literal(path: str) -> str:
    # DuckDB reads file names as glob patterns; a bracket class makes each special character stand for itself.
    return "".join(f"[{char}]" if char in "*?[" else char for char in path)


def _require_one_reading_statement(connection: duckdb.DuckDBPyConnection, sql: str) -> None:
    statements = connection.extract_statements(sql)
    if len(statements) != 1:
        # DuckDB before 2.0 makes two statements of a pivot whose columns it must find first.
        hint = "Leave out extra semicolons, and name the columns of a pivot (pivot ... on b in (1, 2))"
        raise SpecError(f"one SQL statement is needed, got {len(statements)}", hint=hint)
    if statements[0].type.name not in READING_STATEMENTS:
        kind = statements[0].type.name.lower()
        raise SpecError(f"the query is refused: {kind} does not only read", hint="Write select, describe or explain")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def _query_hint(error: Exception) -> str:
    for old, new in schema.EARLIER_NAMES.items():
        if f'"{old}"' in str(error):
            return f"{old} is called {new} now: it is the head of the response; the first token's time is in latencies"
    return f'Tables: {" ".join(VIEWS)}, each also as valid_...; see "describe requests" or `harness explain tables`'
