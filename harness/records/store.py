"""Sealed runs, as tables and as SQL: a run is visible when its manifest is, and not before.

A damaged run is named, never skipped. Nothing here writes to a run. Next: ``harness.analysis`` computes figures from
what this returns; ``harness query`` hands SQL to ``RunStore.query``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

import duckdb
import pyarrow as pa

from harness.errors import RecordsError, SpecError
from harness.records import layout, schema
from harness.records.manifest import load_manifest
from harness.records.run import RunKey, SealedRun, damaged

# "multi" is what DuckDB makes of a pivot.
READING_STATEMENTS = (duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN, duckdb.StatementType.MULTI)
# In this order: nothing can be changed after the last one.
LOCKED_SETTINGS = {"python_enable_replacements": False, "enable_external_access": False, "lock_configuration": True}
MAX_SCRAPE_BYTES = 64 << 20
RUN_COLUMNS = ("experiment", "condition", "replicate", "is_valid")


class RunStore:
    """All sealed runs below one records folder."""

    def __init__(self, root: Path) -> None:
        self.root = Path(root)

    def sealed(self, experiment: str | None = None) -> list[SealedRun]:
        """Sealed runs, sorted by key; raises RecordsError naming the file when one is damaged (no bytes are read)."""
        folders = [folder for folder in self._folders() if layout.is_replicate_name(folder.name)]
        wanted = [folder for folder in folders if experiment in (None, folder.parent.parent.name)]
        return sorted((self._load(folder) for folder in wanted), key=lambda run: run.key)

    def foreign(self) -> list[Path]:
        """Folders where runs lie whose names no run has, such as 00 beside 0: never read, never counted."""
        marks = (layout.PARTIAL, layout.ABORTED)
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
        runs = self.sealed()
        for run in runs:
            run.verify()
        return len(runs)

    def connect(self) -> duckdb.DuckDBPyConnection:
        """An in-memory DuckDB connection with the views runs, requests, chunks, steps, kv_events, metrics, scrapes.

        Every view but runs starts with experiment, condition, replicate, is_valid. Rows of all sealed runs, invalid
        ones included: add ``where is_valid`` for what counts.
        """
        runs = self.sealed()
        connection = duckdb.connect()
        arrow_runs = runs_table(runs)
        connection.register("arrow_runs", arrow_runs)
        connection.execute("create table runs as select * from arrow_runs")
        connection.unregister("arrow_runs")
        for name in schema.TABLES:
            _create_table_view(connection, name, runs)
        _create_scrapes_view(connection, runs)
        return connection

    def query(self, sql: str) -> pa.Table:
        """Rows of one reading SQL statement over all sealed runs, which sees their tables and no other file.

        SpecError says what is wrong with the statement.
        """
        connection = self.connect()
        try:
            _require_one_reading_statement(connection, sql)
            self._lock(connection)
            # None: a statement without rows.
            relation = cast("duckdb.DuckDBPyRelation | None", connection.sql(sql))
            return pa.table({}) if relation is None else relation.to_arrow_table()
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
                hint='Tables: runs requests chunks steps kv_events metrics scrapes; see "describe requests"',
            ) from error
        finally:
            connection.close()

    def _lock(self, connection: duckdb.DuckDBPyConnection) -> None:
        """Leave ``connection`` the files that its views read: no other file, no network, no extension, no setting."""
        files = [run.path / layout.table_path(name) for run in self.sealed() for name in schema.TABLES]
        files += [run.file(layout.SCRAPES) for run in self.sealed()]
        # A path is asked for as the view words it, and again as it was found.
        allowed = [_quoted(form) for path in files for form in dict.fromkeys((str(path), _glob_literal(str(path))))]
        connection.execute(f"set allowed_paths = [{', '.join(allowed)}]")
        for setting, value in LOCKED_SETTINGS.items():
            connection.execute(f"set {setting} = {value}")

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
            "is_baseline": run.manifest.condition == run.manifest.baseline,
            "backend": run.manifest.backend,
            "label": run.manifest.label,
            "treatment": run.manifest.treatment,
            "factors": json.dumps(run.manifest.factors),
            "plan_hash": run.manifest.plan_hash,
            "drawn_hash": run.manifest.drawn_hash,
            "planned_requests": run.manifest.planned_requests,
            "time_scale": run.manifest.clock.scale,
            "requested": json.dumps(run.manifest.requested),
            "effective": json.dumps(run.manifest.effective),
            "client_audit": json.dumps(run.manifest.client_audit),
            "provenance": json.dumps(run.manifest.provenance),
            "timings": json.dumps(run.manifest.timings),
            "folder": str(run.path),
        }
        for run in runs
    ]
    return pa.Table.from_pylist(rows, schema=RUNS)


RUNS = pa.schema(
    [
        ("experiment", pa.string()),
        ("condition", pa.string()),
        ("replicate", pa.int32()),
        ("is_valid", pa.bool_()),
        ("invalid_reasons", pa.list_(pa.string())),
        ("findings", pa.string()),
        ("order_index", pa.int32()),
        ("is_baseline", pa.bool_()),
        ("backend", pa.string()),
        # "confirmatory" or "exploratory".
        ("label", pa.string()),
        ("treatment", pa.string()),
        # As the experiment gives them: a JSON object, e.g. factors->>'N'.
        ("factors", pa.string()),
        ("plan_hash", pa.string()),
        ("drawn_hash", pa.string()),
        ("planned_requests", pa.int32()),
        ("time_scale", pa.float64()),
        ("requested", pa.string()),
        ("effective", pa.string()),
        ("client_audit", pa.string()),
        ("provenance", pa.string()),
        ("timings", pa.string()),
        ("folder", pa.string()),
    ]
)


def _create_table_view(connection: duckdb.DuckDBPyConnection, name: str, runs: list[SealedRun]) -> None:
    present = {path: run for run in runs if (path := run.table_file(name)) is not None}
    if not present:
        connection.register("arrow_empty", _with_run_columns(schema.empty(name)))
        connection.execute(f"create table {name} as select * from arrow_empty")
        connection.unregister("arrow_empty")
        return
    _create_run_view(connection, name, present, f"read_parquet({_path_list(present)}, filename = 'source_file')")


def _create_scrapes_view(connection: duckdb.DuckDBPyConnection, runs: list[SealedRun]) -> None:
    present = {run.file(layout.SCRAPES): run for run in runs if layout.SCRAPES in run.manifest.files}
    columns = "{at_ns: 'BIGINT', reason: 'VARCHAR', status: 'INTEGER', body: 'VARCHAR'}"
    if not present:
        connection.execute(
            "create table scrapes (experiment varchar, condition varchar, replicate integer, is_valid boolean, "
            "at_ns bigint, reason varchar, status integer, body varchar)"
        )
        return
    source = (
        f"read_json({_path_list(present)}, format = 'newline_delimited', columns = {columns}, "
        f"maximum_object_size = {MAX_SCRAPE_BYTES}, filename = 'source_file')"
    )
    _create_run_view(connection, "scrapes", present, source)


def _create_run_view(
    connection: duckdb.DuckDBPyConnection, name: str, present: dict[Path, SealedRun], source: str
) -> None:
    files = pa.Table.from_pylist(
        [{"source_file": str(path), **run.key._asdict(), "is_valid": run.is_valid} for path, run in present.items()],
        schema=pa.schema([pa.field("source_file", pa.string()), *(RUNS.field(column) for column in RUN_COLUMNS)]),
    )
    connection.register("arrow_files", files)
    connection.execute(f"create table files_of_{name} as select * from arrow_files")
    connection.unregister("arrow_files")
    run_columns = ", ".join(f"f.{column}" for column in RUN_COLUMNS)
    connection.execute(
        f"create view {name} as select {run_columns}, t.* exclude (source_file) "
        f"from {source} t join files_of_{name} f using (source_file)"
    )


def _with_run_columns(table: pa.Table) -> pa.Table:
    types = {name: RUNS.field(name).type for name in RUN_COLUMNS}
    columns = {name: pa.array([], type=type_) for name, type_ in types.items()}
    columns.update({name: table.column(name).combine_chunks() for name in table.column_names})
    return pa.table(columns)


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
    if statements[0].type not in READING_STATEMENTS:
        kind = statements[0].type.name.lower()
        raise SpecError(f"the query is refused: {kind} does not only read", hint="Write select, describe or explain")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
