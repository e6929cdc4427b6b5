"""Records: sealed in one rename or not at all, counted, never overwritten, damage named, readable by other tools.

Crashes are real: a child process ends itself at each of its file operations in turn, or is refused more bytes by the
kernel. No part of the writer is replaced.
"""

from __future__ import annotations

import json
import os
import re
import resource
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from harness.errors import RecordsError, SpecError
from harness.measure.records import schema
from harness.measure.records.manifest import Finding, Manifest
from harness.measure.records.run import SealedRun
from harness.measure.records.sql import VIEWS
from harness.measure.records.store import RunStore
from harness.measure.records.writer import RunWriter

FILE_OPERATIONS = ("open", "os.mkdir", "os.rename", "os.remove", "os.truncate", "os.rmdir")


def requests_table(num_rows: int = 1) -> pa.Table:
    blank = {field.name: 0 if pa.types.is_integer(field.type) else "" for field in schema.REQUESTS}
    rows = [{**blank, "session": session, "status": "ok", "sent_ns": None} for session in range(num_rows)]
    return pa.Table.from_pylist(rows, schema=schema.REQUESTS)


def write_run(root: Path, condition: str = "c", replicate: int = 0, reasons: tuple[str, ...] = ()) -> SealedRun:
    with RunWriter(root, "e", condition, replicate, 2) as writer:
        writer.raw("server.log").write(b"one\n")
        writer.raw("server.log").write(b"two\n")
        writer.raw("scrapes.jsonl").write(b'{"at_ns": 7, "reason": "before", "status": 200, "body": "x 1\\n"}\n')
        writer.write("requests", requests_table(2))
        writer.write("steps", pa.table({"step": [0], "log_ns": [5], "n": [3], "b": [4]}))
        return writer.seal({"plan_hash": "p", "treatment": "no-waits"}, reasons)


def in_child(work: Callable[[], Any]) -> int:
    """Run ``work`` in a forked process and return how it ended; its output goes nowhere."""
    with warnings.catch_warnings():
        # Python warns of forking beside Arrow's threads; Arrow restarts its pools in the child.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_sealed_run_reads_back_as_it_was_written(tmp_path: Path) -> None:
    sealed = write_run(tmp_path)
    (run,) = RunStore(tmp_path).sealed()
    assert run == sealed
    assert run.key == ("e", "c", 0)
    assert run.is_valid
    assert run.file("server.log").read_bytes() == b"one\ntwo\n"
    assert run.table("requests").to_pylist() == requests_table(2).to_pylist()
    assert run.table("chunks").num_rows == 0
    run.verify()


def test_records_are_plain_parquet_and_json(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    assert pq.read_table(run.path / "requests.parquet").num_rows == 2
    manifest = json.loads((run.path / "manifest.json").read_text())
    assert manifest["status"] == "valid"
    assert sorted(manifest["files"]) == ["requests.parquet", "scrapes.jsonl", "server.log"]
    assert manifest["derived"]["steps"]["rows"] == 1
    assert not (run.path / "writer.lock").exists()


def test_a_run_being_written_is_invisible(tmp_path: Path) -> None:
    with RunWriter(tmp_path, "e", "c", 0, 1) as writer:
        writer.write("requests", requests_table())
        assert RunStore(tmp_path).sealed() == []
        assert RunStore(tmp_path).unsealed() == [writer.folder]


def test_a_run_is_discarded_without_a_trace_and_a_sealed_one_not_at_all(tmp_path: Path) -> None:
    with RunWriter(tmp_path, "e", "c", 0, 1) as writer:
        writer.write("requests", requests_table())
        writer.discard()
    assert list(tmp_path.iterdir()) == []
    with RunWriter(tmp_path, "e", "c", 0, 2) as writer:
        writer.write("requests", requests_table(2))
        run = writer.seal({"plan_hash": "p", "treatment": "no-waits"}, ())
        writer.discard()
    assert RunStore(tmp_path).sealed() == [run]


def test_a_crash_at_any_file_operation_never_leaves_a_run_that_looks_whole(tmp_path: Path) -> None:
    operation = 0
    while True:
        root = tmp_path / str(operation)

        def crash_at(root: Path = root, fatal: int = operation) -> None:
            seen = 0

            def on_audit(event: str, arguments: tuple[Any, ...]) -> None:
                nonlocal seen
                if event in FILE_OPERATIONS and str(root) in str(arguments):
                    if seen == fatal:
                        os._exit(9)
                    seen += 1

            sys.addaudithook(on_audit)
            write_run(root)

        status = in_child(crash_at)
        assert status in (0, 9)
        visible = RunStore(root).sealed()
        for run in visible:
            run.verify()
        if status == 0:
            break
        # Whatever was left behind, the run can be performed again, and then it is whole.
        if not visible:
            write_run(root).verify()
        operation += 1
    assert operation > 15
    assert len(visible) == 1


@pytest.mark.parametrize("limit_bytes", [0, 3, 200, 1500, 4000])
def test_a_full_disk_gives_one_records_error_and_nothing_whole(tmp_path: Path, limit_bytes: int) -> None:
    heard, said = os.pipe()

    def fill_up() -> None:
        # A file may not grow beyond this: the kernel refuses the rest, as a full disk does (EFBIG for ENOSPC).
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))
        try:
            write_run(tmp_path / "runs")
        except RecordsError as error:
            os.write(said, str(error).encode())
            os._exit(3)

    assert in_child(fill_up) == 3
    os.close(said)
    with open(heard) as message:
        assert re.fullmatch(r"[^\n]*: cannot write records: File too large\. Free space [^\n]*", message.read())
    assert RunStore(tmp_path / "runs").sealed() == []


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "e").write_text("a file where a folder is needed")
    with pytest.raises(RecordsError, match="cannot write records") as error:
        RunWriter(tmp_path, "e", "c", 0, 1)
    assert str(tmp_path / "e") in str(error.value)


def test_a_sealed_run_is_never_overwritten(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    before = (run.path / "manifest.json").read_bytes()
    with pytest.raises(RecordsError, match="sealed already"):
        RunWriter(tmp_path, "e", "c", 0, 1)
    assert (run.path / "manifest.json").read_bytes() == before


def test_what_a_killed_harness_left_is_set_aside_not_lost(tmp_path: Path) -> None:
    def killed() -> None:
        writer = RunWriter(tmp_path, "e", "c", 0, 1)
        writer.raw("server.log").write(b"evidence\n")
        os._exit(9)

    assert in_child(killed) == 9
    assert write_run(tmp_path).is_valid
    (aside,) = RunStore(tmp_path).unsealed()
    assert aside.name == "0.aborted-1"
    assert (aside / "server.log").read_bytes() == b"evidence\n"


def test_two_harnesses_cannot_write_the_same_run(tmp_path: Path) -> None:
    with RunWriter(tmp_path, "e", "c", 0, 1) as writer:
        with pytest.raises(RecordsError, match=rf"another harness process, pid {os.getpid()}, is .* --resume"):
            RunWriter(tmp_path, "e", "c", 0, 1)
        writer.write("requests", requests_table())
        writer.seal({"plan_hash": "p"})


@pytest.mark.parametrize("num_rows", [0, 1, 3])
def test_a_run_whose_rows_do_not_match_its_plan_is_refused(tmp_path: Path, num_rows: int) -> None:
    with RunWriter(tmp_path, "e", "c", 0, 2) as writer:
        writer.write("requests", requests_table(num_rows))
        with pytest.raises(RecordsError, match=f"2 requests planned, {num_rows} recorded"):
            writer.seal({"plan_hash": "p"})
    assert RunStore(tmp_path).sealed() == []


def test_a_run_without_its_requests_is_refused(tmp_path: Path) -> None:
    with RunWriter(tmp_path, "e", "c", 0, 0) as writer, pytest.raises(RecordsError, match="never written"):
        writer.seal({"plan_hash": "p"})


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda table: table.drop_columns(["status"]), "lacks column"),
        (lambda table: table.append_column("extra", pa.array([1])), "unknown column"),
        (lambda table: table.set_column(0, "session", pa.array([None], pa.int32())), "1 null"),
        (lambda table: table.set_column(0, "session", pa.array(["x"])), "is not int32"),
    ],
)
def test_a_table_that_does_not_fit_its_schema_is_refused(
    tmp_path: Path, change: Callable[[pa.Table], pa.Table], problem: str
) -> None:
    with RunWriter(tmp_path, "e", "c", 0, 1) as writer, pytest.raises(RecordsError, match=problem):
        writer.write("requests", change(requests_table()))


@pytest.mark.parametrize(
    "name", ["../up", "a/b", "manifest.json", "writer.lock", "requests.parquet", "steps.parquet", ".hidden", ""]
)
def test_raw_files_stay_inside_their_run(tmp_path: Path, name: str) -> None:
    with RunWriter(tmp_path, "e", "c", 0, 1) as writer, pytest.raises(RecordsError, match="cannot name"):
        writer.raw(name)


def test_names_that_are_no_folder_names_are_a_bad_spec(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="must match"):
        RunWriter(tmp_path, "../up", "c", 0, 1)


def test_a_missing_added_or_foreign_file_is_named(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    (run.path / "added").write_text("x")
    with pytest.raises(RecordsError, match="added after sealing"):
        run.verify()
    run.file("server.log").unlink()
    with pytest.raises(RecordsError, match=r"server\.log: is missing"):
        RunStore(tmp_path).sealed()
    (run.path / "manifest.json").write_text("{")
    with pytest.raises(RecordsError, match=r"manifest\.json: is not a manifest"):
        RunStore(tmp_path).sealed()


def test_a_run_moved_under_another_name_is_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    run.path.rename(run.path.with_name("7"))
    with pytest.raises(RecordsError, match="belongs to run e/c/0"):
        RunStore(tmp_path).sealed()


def test_sql_sees_all_sealed_runs_with_their_names(tmp_path: Path) -> None:
    # A records folder may hold characters that DuckDB would read as a pattern.
    root = tmp_path / "it's [1] *"
    write_run(root, "a", 0)
    write_run(root, "a", 1, reasons=("broken",))
    write_run(root, "b", 0)
    store = RunStore(root)
    rows = store.query(
        "select condition, replicate, is_valid, count(*) as n from requests group by all order by all"
    ).to_pylist()
    assert [tuple(row.values()) for row in rows] == [("a", 0, True, 2), ("a", 1, False, 2), ("b", 0, True, 2)]
    assert store.query("select n, b from steps where is_valid").num_rows == 2
    assert store.query("select body from scrapes limit 1").to_pylist() == [{"body": "x 1\n"}]
    assert store.query("select * from chunks").num_rows == 0
    assert store.query("select treatment from runs where not is_valid").to_pylist() == [{"treatment": "no-waits"}]


def test_valid_views_leave_invalid_runs_out_and_what_views_are_made_of_is_hidden(tmp_path: Path) -> None:
    write_run(tmp_path, "a", 0)
    write_run(tmp_path, "a", 1, reasons=("broken",))
    store = RunStore(tmp_path)
    assert store.query("select replicate from valid_runs").to_pylist() == [{"replicate": 0}]
    assert store.query("select distinct replicate from valid_requests").to_pylist() == [{"replicate": 0}]
    shown = store.query("show tables").column("name").to_pylist()
    assert sorted(shown) == sorted([*VIEWS, *(f"valid_{name}" for name in VIEWS)])


def test_every_view_exists_before_any_run_does(tmp_path: Path) -> None:
    store = RunStore(tmp_path / "none")
    keys = (f"select experiment, condition, replicate, is_valid from {view}" for view in VIEWS)
    assert store.query(" union all ".join(keys)).num_rows == 0


@pytest.mark.parametrize(
    "sql", ["selec 1", "select nothing from requests", "select 1; select 2", "", "select * from nope"]
)
def test_a_bad_query_is_a_bad_spec_in_one_line(tmp_path: Path, sql: str) -> None:
    with pytest.raises(SpecError) as error:
        RunStore(tmp_path).query(sql)
    assert "\n" not in str(error.value)


def test_a_connection_is_an_ordinary_duckdb_connection(tmp_path: Path) -> None:
    write_run(tmp_path)
    connection = RunStore(tmp_path).connect()
    assert isinstance(connection, duckdb.DuckDBPyConnection)
    assert connection.sql("select max(b) from steps").fetchall() == [(4,)]
    connection.close()


def test_a_manifest_survives_its_own_json() -> None:
    manifest = Manifest(
        experiment="e",
        condition="c",
        replicate=3,
        plan_hash="p",
        planned_requests=1,
        findings=(Finding(code="x", severity="warning", evidence="1 of 2"),),
        requested={"server": {"port": 0}},
    )
    read = Manifest.model_validate_json(manifest.to_json())
    assert read.model_copy(update={"seal": ""}) == manifest
    assert read.to_json() == manifest.to_json()


REFUSED = (
    "drop table runs",
    "create table mine (a int)",
    "insert into runs select * from runs",
    "delete from runs",
    "copy runs to '{0}/out.csv'",
    "attach '{0}/out.db'",
    "export database '{0}/out'",
    "install httpfs",
    "load httpfs",
    "set threads = 1",
    "pragma threads = 1",
    "call duckdb_settings()",
    "select 1; drop table runs",
    "select * from read_text('{0}/near.txt')",
    "select * from glob('{0}/*')",
    "select * from read_text('{0}/runs/**/manifest.json')",
    "select * from '{0}/near.csv'",
    "explain analyze copy runs to '{0}/out.csv'",
    "select * from read_parquet('https://127.0.0.1/x.parquet')",
    "select * from read_blob('/etc/hostname')",
    "explain analyze copy (select 1 as x) to '{0}/runs/e/c/0/requests.parquet' (format parquet, use_tmp_file false)",
    "explain (analyze) insert into internal.runs from runs",
    "explain create table mine (a int)",
    "select * from read_parquet('{0}/runs/e/c/0/requests.parquet')",
    "copy runs to '.tmp/x.csv'",
    "select * from read_text('.tmp/x.csv')",
    "attach '.tmp/x.db'",
    "select error('refused')",
)


@pytest.fixture(scope="module")
def beside_a_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the records of one run and with other files."""
    folder = tmp_path_factory.mktemp("near")
    write_run(folder / "runs")
    for name in ("near.txt", "near.csv"):
        (folder / name).write_text("a\nnear\n")
    return folder


@pytest.mark.parametrize("sql", REFUSED)
def test_a_query_only_reads_the_tables_of_its_runs(
    beside_a_run: Path, monkeypatch: pytest.MonkeyPatch, sql: str
) -> None:
    monkeypatch.chdir(beside_a_run)
    store = RunStore(beside_a_run / "runs")
    with pytest.raises(SpecError) as error:
        store.query(sql.format(beside_a_run))
    assert "\n" not in str(error.value)
    assert sorted(path.name for path in beside_a_run.iterdir()) == ["near.csv", "near.txt", "runs"]
    assert store.verify() == 1


def test_a_query_changes_only_its_copy_of_a_table(tmp_path: Path) -> None:
    write_run(tmp_path)
    store = RunStore(tmp_path)
    with suppress(SpecError):  # DuckDB before 2.0 refuses such a statement
        store.query("with gone as (delete from internal.requests returning *) from gone")
    assert store.verify() == 1
    assert store.query("from requests").num_rows == 2


def test_a_query_that_takes_too_long_is_stopped(tmp_path: Path) -> None:
    endless = "select sum(a.range * b.range) from range(10000000) a, range(10000000) b"
    with pytest.raises(SpecError, match=r"took longer than 0\.2 s and was stopped.*--timeout"):
        RunStore(tmp_path).query(endless, timeout_s=0.2)


def test_a_query_that_is_not_utf_8_is_refused_with_its_place(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="is not UTF-8 at character 9"):
        RunStore(tmp_path).query("select '\udcff'")


@pytest.mark.parametrize(
    "sql",
    [
        "from range(100000000)",
        "select list(range) from range(100000000)",
        # Long values that are fetched: DuckDB's own limit leaves them out.
        "select repeat('x', 25000000) from range(4)",
    ],
)
def test_a_query_that_needs_too_much_memory_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sql: str
) -> None:
    monkeypatch.setattr("harness.measure.records.sql.MEMORY_LIMIT_BYTES", 64 << 20)
    with pytest.raises(SpecError, match=r"needs more than 0\.0625 GiB of memory"):
        RunStore(tmp_path).query(sql)
    assert RunStore(tmp_path).query("select repeat('x', 1000) as v").num_rows == 1


@pytest.mark.parametrize(
    "sql",
    [
        "describe runs",
        "explain select * from steps",
        "explain (analyze, format json) select * from valid_latencies",
        "explain (select 1)",
        "from query('from ' || 'req' || 'uests')",
        "pivot steps on b in (2, 4) using count(*)",
        "with x as (from runs) from x",
    ],
)
def test_a_query_that_reads_in_other_words_is_answered(beside_a_run: Path, sql: str) -> None:
    assert RunStore(beside_a_run / "runs").query(sql).num_rows > 0
