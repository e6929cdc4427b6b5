"""A file of steps of any stack gives the same rows; what it does not show is absent, and damage is counted."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from harness.cli.tree import app
from harness.errors import RecordsError
from harness.extras.other_stacks.steps import ForeignSteps, read_steps, step_tables
from harness.stacks.vllm.step_log import SCHEMA
from tests.support.step_files import SAMPLES, rbln_shape

TIMES = ("at_ns", "logger_ns")
FOREIGN = [name for name in SAMPLES if not name.startswith("vLLM")]


def records(file: ForeignSteps) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The row about a file, and those of its decode shapes."""
    (whole,), shapes = (table.records() for table in step_tables(file))
    return whole, shapes


@pytest.mark.parametrize("name", SAMPLES)
def test_every_stack_gives_the_same_columns(name: str) -> None:
    file = read_steps(SAMPLES[name])
    assert file.steps.schema == SCHEMA
    assert file.num_damaged == 0
    assert "decode" in file.steps["kind"].to_pylist()


@pytest.mark.parametrize("name", FOREIGN)
def test_times_that_a_stack_does_not_write_are_absent_and_not_zero(name: str) -> None:
    file = read_steps(SAMPLES[name])
    assert all(file.steps[column].null_count == file.steps.num_rows for column in TIMES)
    assert any("times" in note for note in file.notes)


def test_padding_and_h_of_a_step_log_of_vllm() -> None:
    whole, shapes = records(read_steps(SAMPLES["vLLM 0.30.0"]))
    names = ("n", "b", "steps", "steps_with_n", "steps_without_graph")
    assert [tuple(row[name] for name in names) for row in shapes] == [(3, 4, 2, 2, 0), (9, 9, 1, 1, 1)]
    assert whole["padding_p"] == pytest.approx(2 / 17)
    assert (whole["steps"], whole["decode_steps"], whole["other_steps"]) == (3, 3, 0)


def test_shapes_of_the_native_path_of_rbln_have_no_counts() -> None:
    file = read_steps(SAMPLES["vllm-rbln 0.12.0, native"])
    assert Counter(file.steps["kind"].to_pylist()) == {"dummy": 1, "prefill": 1, "decode": 2}
    whole, _ = records(file)
    counts = {name for name, value in whole.items() if value is not None}
    assert counts == {"decode_steps_without_b", "damaged_lines"}
    _, table = step_tables(file)
    assert table.rows == ((3, 4, None, None, None, None), (5, 8, None, None, None, None))


def test_a_changed_shape_line_of_rbln_is_damaged() -> None:
    torn = rbln_shape(3, 4).replace("query_len", "query")
    file = read_steps(f"{rbln_shape(3, 4)}\n{torn}\n{rbln_shape(5, 4)}\n".encode())
    assert [(row["n"], row["b"]) for row in records(file)[1]] == [(3, 4)]
    assert file.first_damaged.startswith("DEBUG")
    assert file.num_damaged == 2


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"hello\n", "no file of steps"),
        (b'{"batch_id": 1, "padded_total_num_scheduled_tokens": 16}\n', "tpu-inference"),
        (b'[{"pid": 7, "args": {"decode_bucket_batch_size": 4}},', "Gaudi"),
    ],
)
def test_another_file_is_refused_with_what_it_is_and_what_is_read(content: bytes, words: str, tmp_path: Path) -> None:
    with pytest.raises(RecordsError, match=words) as refused:
        read_steps(content)
    assert refused.value.hint
    absent = CliRunner().invoke(app, ["stack", "steps", str(tmp_path / "absent")])
    assert isinstance(absent.exception, RecordsError)


def test_the_command_prints_tables_and_json(tmp_path: Path) -> None:
    file = tmp_path / "core_steps.jsonl"
    file.write_bytes(SAMPLES["vLLM 0.30.0"] + b"torn")
    printed = CliRunner().invoke(app, ["stack", "steps", str(file)]).stdout
    assert "vLLM 0.30.0" in printed
    assert "first damaged line: 'torn'" in printed
    report = json.loads(CliRunner().invoke(app, ["stack", "steps", str(file), "--format", "json"]).stdout)
    assert report["padding_p"] == pytest.approx(2 / 17)
    assert (report["damaged_lines"], report["first_damaged"]) == (1, "torn")
    assert report["shapes"][0] == {
        "n": 3,
        "b": 4,
        "steps": 2,
        "share_of_decode_steps": pytest.approx(2 / 3),
        "steps_with_n": 2,
        "steps_without_graph": 0,
    }
