"""A file of steps of any stack gives the same rows; what it does not show is absent, and damage is counted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from step_files import SAMPLES, gaudi_counter, gaudi_file, lines, rbln_shape, tpu_batch
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


def test_only_pure_decode_steps_of_tpu_inference_count_as_decode_steps() -> None:
    file = read_steps(SAMPLES["tpu-inference 0.32.0"])
    assert file.num_by_kind == {"prefill": 1, "decode": 2, "mixed": 1}
    padding = padding_of(file)
    assert padding.steps_by_shape == {(3, 16): 2}
    assert padding.p == pytest.approx(13 / 16)
    assert padding.eager_by_shape is None


def test_a_speculative_step_of_tpu_inference_is_no_decode_step() -> None:
    file = read_steps(lines(tpu_batch(1, 0, 12, 3, 16)))
    assert file.num_by_kind == {"speculative": 1}
    assert not shapes(file)


@pytest.mark.parametrize(
    "damage",
    [
        b'{"batch_id": 5, "total_num_sch',
        lines(tpu_batch(2, 0, 3, 3, 16)).strip(),
        lines(tpu_batch(9, 0, 32, 32, 16)).strip(),
        lines(tpu_batch(9, 0, 3, 3, 16) | {"num_reqs": True}).strip(),
        lines(tpu_batch(9, 0, 3, 3, 16) | {"num_reqs": 10**30}).strip(),
        lines(tpu_batch(9, 0, 3, 5, 16)).strip(),
        b"\xff\xfe",
        b"",
    ],
)
def test_a_damaged_batch_is_counted_with_the_first_of_them_and_left_out(damage: bytes) -> None:
    file = read_steps(SAMPLES["tpu-inference 0.32.0"] + damage + b"\n[]\n")
    assert len(file.damaged) == 2
    assert file.first_damaged == damage[:120].decode("utf-8", "replace")
    assert shapes(file) == {(3, 16): 2}


def test_batches_that_are_not_in_the_file_are_noted() -> None:
    file = read_steps(lines(tpu_batch(1, 0, 3, 3, 16), tpu_batch(5, 0, 3, 3, 16)))
    assert file.notes[0].startswith("3 batches are missing")


def test_a_profiler_file_of_gaudi_is_read_while_its_array_is_still_open() -> None:
    file = read_steps(SAMPLES["Gaudi, from documents"])
    assert shapes(file) == {(3, 4): 1, (5, 8): 1}
    assert file.num_by_kind == {"prefill": 1, "decode": 2}
    assert "documents" in file.source
    closed = SAMPLES["Gaudi, from documents"].rstrip(b",") + b"]\n"
    assert shapes(read_steps(closed)) == shapes(file)


def test_a_bucket_of_gaudi_smaller_than_its_batch_and_a_torn_event_are_damaged() -> None:
    good = gaudi_counter(decode_bucket_batch_size=4, decode_batch_size=3)
    bad = gaudi_counter(decode_bucket_batch_size=2, decode_batch_size=3)
    file = read_steps(gaudi_file(good, bad, good)[:-40])
    assert shapes(file) == {(3, 4): 1}
    assert len(file.damaged) == 2


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


def test_another_file_is_refused_with_the_files_that_are_known(tmp_path: Path) -> None:
    with pytest.raises(RecordsError, match="no file of steps") as refused:
        read_steps(b"hello\n")
    assert "all_batches_stats" in str(refused.value.hint)
    with pytest.raises(RecordsError, match="cannot be read"):
        load_steps(tmp_path / "absent")


def test_the_command_prints_tables_and_json(tmp_path: Path) -> None:
    file = tmp_path / "all_batches_stats_x.jsonl"
    file.write_bytes(SAMPLES["tpu-inference 0.32.0"] + b"torn")
    printed = CliRunner().invoke(app, ["stack", "steps", str(file)]).stdout
    assert "tpu-inference" in printed
    assert "first damaged line: 'torn'" in printed
    report = json.loads(CliRunner().invoke(app, ["stack", "steps", str(file), "--format", "json"]).stdout)
    assert report["padding_p"] == pytest.approx(13 / 16)
    assert (report["damaged_lines"], report["first_damaged"]) == (1, "torn")
    assert report["shapes"] == [
        {
            "n": 3,
            "b": 16,
            "steps": 2,
            "share_of_decode_steps": 1.0,
            "steps_with_n": 2,
            "steps_without_graph": None,
        }
    ]
