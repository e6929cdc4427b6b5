"""A file of steps of any stack gives the same rows; what it does not show is absent, and damage is counted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from step_files import SAMPLES, rbln_shape
from typer.testing import CliRunner

from harness.cli.tree import app
from harness.errors import RecordsError
from harness.extras.other_stacks.steps import ForeignSteps, load_steps, padding_of, read_steps, step_tables
from harness.stacks.vllm.step_log import SCHEMA

TIMES = ("at_ns", "logger_ns")
FOREIGN = [name for name in SAMPLES if not name.startswith("vLLM")]


def shapes(file: ForeignSteps) -> dict[tuple[int, int | None], int]:
    return padding_of(file).steps_by_shape


@pytest.mark.parametrize("name", SAMPLES)
def test_every_stack_gives_the_same_columns(name: str) -> None:
    file = read_steps(SAMPLES[name])
    assert file.steps.schema == SCHEMA
    assert not file.damaged
    assert "decode" in file.num_by_kind


@pytest.mark.parametrize("name", FOREIGN)
def test_times_that_a_stack_does_not_write_are_absent_and_not_zero(name: str) -> None:
    file = read_steps(SAMPLES[name])
    assert all(file.steps[column].null_count == file.steps.num_rows for column in TIMES)
    assert any("times" in note for note in file.notes)


def test_padding_and_h_of_a_step_log_of_vllm() -> None:
    padding = padding_of(read_steps(SAMPLES["vLLM 0.30.0"]))
    assert padding.steps_by_shape == {(3, 4): 2, (9, 9): 1}
    assert padding.h == {3: 2, 9: 1}
    assert padding.p == pytest.approx(2 / 17)
    assert padding.eager_by_shape == {(3, 4): 0, (9, 9): 1}


def test_shapes_of_the_native_path_of_rbln_have_no_counts() -> None:
    file = read_steps(SAMPLES["vllm-rbln 0.12.0, native"])
    assert not file.has_each_step
    assert file.num_by_kind == {"dummy": 1, "prefill": 1, "decode": 2}
    padding = padding_of(file)
    assert set(padding.steps_by_shape) == {(3, 4), (5, 8)}
    assert padding.p is None
    _, table = step_tables(file)
    assert table.rows == ((3, 4, None, None, None, None), (5, 8, None, None, None, None))


def test_a_changed_shape_line_of_rbln_is_damaged() -> None:
    torn = rbln_shape(3, 4).replace("query_len", "query")
    file = read_steps(f"{rbln_shape(3, 4)}\n{torn}\n{rbln_shape(5, 4)}\n".encode())
    assert shapes(file) == {(3, 4): 1}
    assert file.first_damaged.startswith("DEBUG")
    assert len(file.damaged) == 2


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
    with pytest.raises(RecordsError, match="cannot be read"):
        load_steps(tmp_path / "absent")


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
