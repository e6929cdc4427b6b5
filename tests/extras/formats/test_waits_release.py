"""The TraceLab importer: exact quantiles, nothing dropped silently, and foreign files refused."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path

import duckdb
import numpy as np
import pytest

from harness.errors import SpecError
from harness.extras.formats.waits import import_tracelab, summarise_tracelab
from harness.model.plan.waits import load_waits

Call = tuple[str, "float | None", "float | None"]
# Real rounds, not part of the project: beside the checkout or in it, where somebody put them.
SAMPLE_PLACES = [
    folder / "shared" / "tracelab" / "round_trace.sample.jsonl" for folder in Path(__file__).resolve().parents[3:5]
]
SAMPLE = next((path for path in SAMPLE_PLACES if path.exists()), None)


def round_of(*calls: Call) -> dict[str, object]:
    """A round as the release has it; the fields nobody reads are left out."""
    tools = [
        {"tool_index": index, "tool_name": name, "tool_internal_latency_ms": internal, "tool_wall_latency_ms": wall}
        for index, (name, internal, wall) in enumerate(calls)
    ]
    return {"provider": "claude", "round_index": 0, "tools": tools}


CALLS: list[Call] = [
    ("Bash", 10, 999),
    ("Bash", None, 30),
    ("Bash", 20, None),
    ("Bash", 0, 700),
    ("Bash", None, -5),
    ("Bash", None, None),
    ("Read", 2.5, 3),
    ("AskUserQuestion", None, 60_000),
    ("TaskOutput", 5, 6),
]


def write_jsonl(path: Path) -> None:
    lines = [json.dumps(round_of(*CALLS[:4])), json.dumps(round_of()), json.dumps(round_of(*CALLS[4:])), ""]
    path.write_text("\n".join(lines))


def write_gzip(path: Path) -> None:
    write_jsonl(path)
    path.write_bytes(gzip.compress(path.read_bytes()))


def write_duckdb(path: Path, tools_type: str, schema: str = "main") -> None:
    with duckdb.connect(str(path)) as connection:
        # The file's own name is a catalog, which may be called like a schema in it.
        schema = f'"{path.stem}".{schema}'
        connection.execute(f"CREATE SCHEMA IF NOT EXISTS {schema}")
        connection.execute("CREATE TABLE meta (version VARCHAR)")
        connection.execute(f'CREATE TABLE {schema}."round trace" (provider VARCHAR, tools {tools_type})')
        for calls in (CALLS[:4], [], CALLS[4:]):
            tools = json.dumps(round_of(*calls)["tools"])
            value = "?" if "STRUCT" not in tools_type else f"from_json(?, '{STRUCT_SHAPE}')"
            connection.execute(f"INSERT INTO {schema}.\"round trace\" VALUES ('claude', {value})", [tools])


STRUCT_SHAPE = (
    '[{"tool_index":"BIGINT","tool_name":"VARCHAR",'
    '"tool_internal_latency_ms":"DOUBLE","tool_wall_latency_ms":"DOUBLE"}]'
)
STRUCTS = "STRUCT(tool_index BIGINT, tool_name VARCHAR, tool_internal_latency_ms DOUBLE, tool_wall_latency_ms DOUBLE)[]"


def write_flat_duckdb(path: Path) -> None:
    with duckdb.connect(str(path)) as connection:
        connection.execute(
            "CREATE TABLE calls (tool_name VARCHAR, tool_internal_latency_ms INTEGER, tool_wall_latency_ms DOUBLE)"
        )
        whole = [
            (name, None if internal == 2.5 else internal, 2.5 if internal == 2.5 else wall)
            for name, internal, wall in CALLS
        ]
        connection.executemany("INSERT INTO calls VALUES (?, ?, ?)", whole)


WRITERS: dict[str, Callable[[Path], None]] = {
    "jsonl": write_jsonl,
    "gzip": write_gzip,
    "duckdb structs": lambda path: write_duckdb(path, STRUCTS),
    "duckdb other schema": lambda path: write_duckdb(path, STRUCTS, schema="release"),
    "duckdb json": lambda path: write_duckdb(path, "JSON"),
    "duckdb text": lambda path: write_duckdb(path, "VARCHAR"),
    "duckdb flat": write_flat_duckdb,
}


@pytest.mark.parametrize("form", WRITERS)
def test_every_form_of_a_release_gives_the_same_counts(form: str, tmp_path: Path) -> None:
    source = tmp_path / "release"
    WRITERS[form](source)
    summary = summarise_tracelab(source)
    assert summary.calls == len(CALLS)
    assert summary.excluded == {"AskUserQuestion": 1, "TaskOutput": 1}
    assert summary.non_positive == {"Bash": 2}
    assert summary.missing == {"Bash": 1}
    assert summary.from_none == 1
    assert summary.from_internal + summary.from_wall + summary.from_none == summary.calls
    assert [(tool.name, tool.calls, tool.p50_ms) for tool in summary.tools] == [("Bash", 3, 20), ("Read", 1, 2.5)]
    assert summary.rows == (9 if form == "duckdb flat" else 3)


@pytest.mark.parametrize("form", ["jsonl", "duckdb structs"])
def test_the_written_file_is_a_distribution_with_its_provenance(form: str, tmp_path: Path) -> None:
    source, output = tmp_path / "release", tmp_path / "waits" / "mine.toml"
    WRITERS[form](source)
    summary = import_tracelab(source, output, name="mine")
    waits = load_waits(str(output))
    assert (waits.name, waits.tools, waits.calls) == ("mine", ("Bash", "Read"), (3, 1))
    assert waits.distributions[waits.tools.index("Bash")].quantile_ms(0.9) == pytest.approx(28.0)
    text = output.read_text()
    for fact in ("SyFI Lab", "CC BY 4.0", summary.sha256, "left_out_zero_or_less = 2", "Bash = 1", "AskUserQuestion"):
        assert fact in text
    assert any("9 tool calls" in line for line in summary.lines())


def test_importing_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "release")
    outputs = [tmp_path / "a.toml", tmp_path / "b.toml"]
    for output in outputs:
        import_tracelab(tmp_path / "release", output, name="x")
    assert outputs[0].read_bytes() == outputs[1].read_bytes()


def test_quantiles_are_those_of_numpy(tmp_path: Path) -> None:
    rng = random.Random(3)
    calls = [(f"tool-{rng.randrange(5)}", None, rng.randint(1, 100_000)) for _ in range(20_000)]
    source = tmp_path / "large.jsonl"
    source.write_text("".join(json.dumps(round_of(*calls[i : i + 4])) + "\n" for i in range(0, len(calls), 4)))
    for tool in summarise_tracelab(source).tools:
        values = [wall for name, _, wall in calls if name == tool.name]
        assert tool.calls == len(values)
        assert [tool.p50_ms, tool.p90_ms, tool.p99_ms] == pytest.approx(np.percentile(values, [50, 90, 99]))


@pytest.mark.skipif(SAMPLE is None, reason="the TraceLab sample is not at hand")
def test_the_real_sample_is_read_whole() -> None:
    assert SAMPLE is not None
    summary = summarise_tracelab(SAMPLE)
    assert (summary.rows, summary.calls, summary.malformed) == (19, 19, 0)
    assert summary.used_calls + sum(summary.non_positive.values()) == 19
    assert {tool.name for tool in summary.tools} >= {"Bash", "exec_command", "write_stdin", "WebSearch"}


BAD_LINES = [
    "{",
    "[]",
    "7",
    '{"tools": 5}',
    '{"tools": [5]}',
    '{"tools": [{"tool_wall_latency_ms": 5}]}',
    '{"tools": [{"tool_name": "", "tool_wall_latency_ms": 5}]}',
    '{"tools": [{"tool_name": "a", "tool_wall_latency_ms": "5"}]}',
    '{"tools": [{"tool_name": "a", "tool_wall_latency_ms": true}]}',
    '{"tools": [{"tool_name": "a", "tool_wall_latency_ms": NaN}]}',
    '{"tools": [{"tool_name": "a", "tool_wall_latency_ms": 1e300}]}',
    '{"tools": [{"tool_name": "a", "tool_wall_latency_ms": 5}, {"tool_name": 3}]}',
    "[" * 100_000,
]


def test_malformed_lines_are_counted_and_named_and_count_nothing(tmp_path: Path) -> None:
    good = json.dumps(round_of(("Bash", None, 30)))
    source = tmp_path / "release.jsonl"
    source.write_bytes("\n".join([good, "", *BAD_LINES, good]).encode() + b'\n{"tools": "\xff"}\n')
    summary = summarise_tracelab(source)
    assert summary.calls == summary.rows == 2
    assert summary.malformed == len(BAD_LINES) + 1
    assert summary.malformed_lines == [*range(3, 3 + len(BAD_LINES)), 4 + len(BAD_LINES)]
    assert any("lines 3, 4, 5" in line for line in summary.lines())


def test_too_many_malformed_lines_are_refused(tmp_path: Path) -> None:
    source = tmp_path / "release.jsonl"
    source.write_text(json.dumps(round_of(("Bash", None, 30))) + "\n" + "x\n" * 4)
    assert summarise_tracelab(source, max_malformed=4).malformed == 4
    with pytest.raises(SpecError, match=r"4 of the first 5 lines .* \(lines 2, 3, 4, 5 \.\.\.\)"):
        summarise_tracelab(source, max_malformed=3)


def foreign_duckdb(path: Path) -> None:
    with duckdb.connect(str(path)) as connection:
        connection.execute("CREATE TABLE other (a INTEGER)")


def two_tables(path: Path) -> None:
    write_duckdb(path, STRUCTS)
    with duckdb.connect(str(path)) as connection:
        connection.execute('CREATE VIEW again AS SELECT * FROM "round trace"')


FOREIGN: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (lambda path: path.write_bytes(b""), "holds no tool call in 0 rows; looked for"),
    "other jsonl": (lambda path: path.write_text('{"a": 1}\n' * 20_000), "no tool call in 10000 rows; looked for"),
    "csv": (lambda path: path.write_text("a,b\n1,2\n" * 200), "is not a TraceLab release: 101 of the first 101 lines"),
    "parquet": (lambda path: path.write_bytes(b"PAR1xxxx"), "is a Parquet file"),
    "zstd": (lambda path: path.write_bytes(b"\x28\xb5\x2f\xfdxxxx"), "compressed with zstd"),
    "folder": (lambda path: path.mkdir(), "Is a directory"),
    "absent": (lambda _: None, "No such file"),
    "cut gzip": (lambda path: path.write_bytes(gzip.compress(b"{}\n" * 9)[:-9]), "cannot be read to its end"),
    "damaged gzip": (
        lambda path: path.write_bytes(gzip.compress(b"{}\n" * 9)[:12] + b"zzzz"),
        "cannot be read to its end",
    ),
    "damaged duckdb": (lambda path: path.write_bytes(b"xxxxxxxxDUCK" + b"\0" * 5000), "cannot be read as DuckDB"),
    "foreign duckdb": (foreign_duckdb, "no table with tool calls; looked for a `tools` column .* it has other"),
    "two tables": (two_tables, "several tables with tool calls: again, round trace"),
    "nothing usable": (
        lambda path: path.write_text(json.dumps(round_of(("TaskOutput", 1, 1), ("Bash", 0, 9)))),
        "holds 2 tool calls, none of which can be used: 1 wait for a person, 0 have no latency, 1 one of zero or less",
    ),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_a_foreign_or_unreadable_file_is_one_clear_line_and_writes_nothing(case: str, tmp_path: Path) -> None:
    source, output = tmp_path / "source", tmp_path / "out.toml"
    write, complaint = FOREIGN[case]
    write(source)
    with pytest.raises(SpecError, match=complaint) as caught:
        import_tracelab(source, output, name="x")
    assert "\n" not in str(caught.value)
    assert str(source) in str(caught.value)
    assert not output.exists()


def test_a_table_can_be_named_where_several_could_be_meant(tmp_path: Path) -> None:
    source = tmp_path / "release.duckdb"
    two_tables(source)
    assert summarise_tracelab(source, tables=("again",)).calls == len(CALLS)
    with pytest.raises(SpecError, match="has no table nowhere with tool calls"):
        summarise_tracelab(source, tables=("nowhere",))


def test_rows_of_broken_json_in_a_database_are_counted(tmp_path: Path) -> None:
    source = tmp_path / "release.duckdb"
    write_duckdb(source, "VARCHAR")
    with duckdb.connect(str(source)) as connection:
        connection.execute("INSERT INTO \"round trace\" VALUES ('x', '[{'), ('x', NULL), ('x', '[]'), ('x', 'null')")
        connection.execute("INSERT INTO \"round trace\" VALUES ('x', '{}'), ('x', '7'), ('x', '[7]')")
    summary = summarise_tracelab(source)
    assert (summary.calls, summary.malformed) == (len(CALLS), 4)


def test_a_name_of_any_letters_survives_the_file(tmp_path: Path) -> None:
    names = ['quote"back\\slash', "tab\tline\nbell\x07del\x7f", "ünï\U0001f600"]
    source, output = tmp_path / "source", tmp_path / "out.toml"
    source.write_text(json.dumps(round_of(*((name, None, 5) for name in names))))
    import_tracelab(source, output, name="x")
    assert set(load_waits(str(output)).tools) == set(names)


def test_an_output_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "release")
    (tmp_path / "file").write_text("")
    with pytest.raises(SpecError, match=r"cannot be written: .*file is no folder"):
        import_tracelab(tmp_path / "release", tmp_path / "file" / "out.toml", name="x")
