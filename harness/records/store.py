"""Sealed runs, as tables and as SQL: a run is visible when its manifest is, and not before.

A damaged run is named, never skipped. Nothing here writes to a run. Next: ``harness.analysis`` computes figures from
what this returns; ``harness query`` hands SQL to ``RunStore.query``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, cast

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from harness.errors import RecordsError, SpecError
from harness.records import schema
from harness.records.disk import file_entry
from harness.records.manifest import MANIFEST_NAME, Manifest, load_manifest

MAX_SCRAPE_BYTES = 64 << 20
RUN_COLUMNS = ("experiment", "condition", "replicate", "is_valid")


class RunKey(NamedTuple):
    """What names a run: one condition of one replicate of an experiment."""

    experiment: str
    condition: str
    replicate: int


@dataclass(frozen=True, slots=True)
class SealedRun:
    """One sealed run: its folder and its manifest; tables are read when asked for."""

    path: Path
    manifest: Manifest

    @property
    def experiment(self) -> str:
        return self.manifest.experiment

    @property
    def condition(self) -> str:
        return self.manifest.condition

    @property
    def replicate(self) -> int:
        return self.manifest.replicate

    @property
    def invalid_reasons(self) -> tuple[str, ...]:
        return self.manifest.invalid_reasons

    @property
    def key(self) -> RunKey:
        return RunKey(self.manifest.experiment, self.manifest.condition, self.manifest.replicate)

    @property
    def is_valid(self) -> bool:
        return self.manifest.is_valid

    def file(self, name: str) -> Path:
        """Path of a file of this run, e.g. "server.log"."""
        return self.path / name

    def table(self, name: str) -> pa.Table:
        """Table ``name`` of this run (a key of schema.TABLES), empty when the run has none."""
        path = self.path / schema.table_path(name)
        if not path.exists():
            return schema.empty(name)
        try:
            # One file, not a dataset: a folder named key=value above it must not become a column.
            return pq.ParquetFile(path).read()
        except (OSError, pa.ArrowException) as error:
            raise _damaged(path, f"cannot be read ({error})") from error

    def check_sizes(self) -> None:
        """Raise RecordsError when a file of the manifest is missing or has another size (cheap: no bytes read)."""
        for name, entry in self.manifest.files.items():
            path = self.path / name
            try:
                size_bytes = path.stat().st_size
            except OSError as error:
                raise _damaged(path, f"is missing ({error.strerror})") from error
            if size_bytes != entry.size_bytes:
                raise _damaged(path, f"has {size_bytes} bytes, {entry.size_bytes} were sealed")

    def verify(self) -> None:
        """Raise RecordsError naming the first file whose bytes differ from what was sealed, or that was added."""
        self.check_sizes()
        for name, entry in self.manifest.files.items():
            if file_entry(self.path / name).sha256 != entry.sha256:
                raise _damaged(self.path / name, "differs from what was sealed (SHA-256)")
        for name, derived in self.manifest.derived.items():
            if schema.content_sha256(self.table(name)) != derived.content_sha256:
                path = self.path / schema.table_path(name)
                raise _damaged(path, "differs from what was sealed", hint="`harness derive` rebuilds derived tables")
        known = {*self.manifest.files, MANIFEST_NAME, *(schema.table_path(name) for name in schema.TABLES)}
        for path in sorted(self.path.rglob("*")):
            if path.is_file() and str(path.relative_to(self.path)) not in known:
                raise _damaged(path, "was added after sealing")


class RunStore:
    """All sealed runs below one records folder."""

    def __init__(self, root: Path) -> None:
        self.root = Path(root)

    def sealed(self, experiment: str | None = None) -> list[SealedRun]:
        """Sealed runs, sorted by key; raises RecordsError naming the file when one is damaged (sizes are checked)."""
        pattern = f"{experiment or '*'}/*/*/"
        folders = [folder for folder in self.root.glob(pattern) if folder.name.isdigit() and folder.is_dir()]
        runs = [self._load(folder) for folder in folders]
        return sorted(runs, key=lambda run: run.key)

    def run(self, experiment: str, condition: str, replicate: int) -> SealedRun:
        """One sealed run; SpecError when there is none."""
        folder = self.root / experiment / condition / str(replicate)
        if not folder.is_dir():
            raise SpecError("there is no sealed run of that name", where=str(folder), hint="See `harness query`")
        return self._load(folder)

    def unsealed(self) -> list[Path]:
        """Folders of runs that are being written, or were cut short."""
        found = [*self.root.glob("*/*/*.partial/"), *self.root.glob("*/*/*.aborted-*/")]
        return sorted(folder for folder in found if folder.is_dir())

    def verify(self) -> int:
        """Verify every sealed run by hash and return how many there are; RecordsError names the first damage."""
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
        """Rows of a SQL statement over all sealed runs; SpecError says what is wrong with the statement."""
        connection = self.connect()
        try:
            _require_one_statement(connection, sql)
            # None: a statement without rows, such as "create table".
            relation = cast("duckdb.DuckDBPyRelation | None", connection.sql(sql))
            return pa.table({}) if relation is None else relation.to_arrow_table()
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

    def _load(self, folder: Path) -> SealedRun:
        run = SealedRun(folder, load_manifest(folder / MANIFEST_NAME))
        named = RunKey(folder.parent.parent.name, folder.parent.name, int(folder.name))
        if run.key != named:
            raise _damaged(folder / MANIFEST_NAME, f"belongs to run {'/'.join(map(str, run.key))}")
        run.check_sizes()
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
    paths = {run.path / schema.table_path(name): run for run in runs}
    present = {path: run for path, run in paths.items() if path.exists()}
    if not present:
        connection.register("arrow_empty", _with_run_columns(schema.empty(name)))
        connection.execute(f"create table {name} as select * from arrow_empty")
        connection.unregister("arrow_empty")
        return
    _create_run_view(connection, name, present, f"read_parquet({_path_list(present)}, filename = 'source_file')")


def _create_scrapes_view(connection: duckdb.DuckDBPyConnection, runs: list[SealedRun]) -> None:
    present = {run.file("scrapes.jsonl"): run for run in runs if "scrapes.jsonl" in run.manifest.files}
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
    return "[" + ", ".join("'" + _glob_literal(str(path)).replace("'", "''") + "'" for path in paths) + "]"


def _glob_literal(path: str) -> str:
    # DuckDB reads file names as glob patterns; a bracket class makes each special character stand for itself.
    return "".join(f"[{char}]" if char in "*?[" else char for char in path)


def _require_one_statement(connection: duckdb.DuckDBPyConnection, sql: str) -> None:
    statements = connection.extract_statements(sql)
    if len(statements) != 1:
        raise SpecError(f"one SQL statement is needed, got {len(statements)}", hint="Leave out extra semicolons")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def _damaged(
    path: Path, what: str, *, hint: str = "Restore the file from a copy, or move the run away"
) -> RecordsError:
    return RecordsError(what, where=str(path), hint=hint)
