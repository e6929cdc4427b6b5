"""The step logs of a run: its engine cores before its API server, every engine once, and what is missing by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa

from harness.analysis.logs.engine_steps import check_step_log, read_run_steps, step_spans
from harness.measure.records import layout
from harness.measure.records.manifest import Finding, ServerRecord
from harness.stacks.vllm.core_steps import COLUMNS
from harness.stacks.vllm.step_log import SCHEMA, StepLog
from tests.support.analysis_tables import manifest
from tests.support.step_files import VLLM_HEADER, lines, vllm_step


def core_file(*steps: int, engine: int = 0, **effective: object) -> bytes:
    """Steps of one request each, by their numbers."""
    header = {"vllm_core_steps": 1, "columns": list(COLUMNS), "engine": engine, "vllm": "0.32.0", "absent": []}
    rows: list[Any] = [{**header, "effective": effective}]
    for step in steps:
        values: dict[str, Any] = dict.fromkeys(COLUMNS) | {"step": step, "requests": [0], "tokens": 1, "observer_ns": 5}
        values |= {"schedule_ns": 100 * step + engine, "scheduled_ns": 100 * step + 9, "update_ns": 100 * step + 20}
        values |= {"end_ns": 100 * step + 30 + engine, "preempted": [], "finished": [], "generated_tokens": 1}
        values["admitted"] = [[0, f"r{engine}", 0, 1, 0, 1]] if step == steps[0] else []
        rows.append([values[name] for name in COLUMNS])
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def read(folder: Path, **files: bytes) -> tuple[StepLog, list[Finding]]:
    """The log of a run with these files, and what is found in it. Files: layout names, "_" for a dot."""
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_bytes(content)
    log, problem = read_run_steps(folder)
    assert log is not None, problem
    return log, list(check_step_log(manifest(), log, problem))


def test_an_engine_cores_own_stamps_come_before_those_of_the_api_server(tmp_path: Path) -> None:
    received = lines(VLLM_HEADER, vllm_step(1, 3, 4), vllm_step(2, 3, 4))
    log, _ = read(tmp_path, core_steps__jsonl=core_file(0, 1, 2), steps__jsonl=received)

    assert log.steps["at_ns"].to_pylist() == [30, 130, 230]
    assert log.engines == (0,)


def test_the_steps_of_two_engines_are_one_log_in_the_order_of_time(tmp_path: Path) -> None:
    files = {"core_steps__jsonl": core_file(0, 1), "core_steps__jsonl__1": core_file(0, 1, engine=1)}
    log, found = read(tmp_path, **files)

    assert log.steps["at_ns"].to_pylist() == [30, 31, 130, 131]
    assert log.num_declared_engines == 2
    assert "steps-missing" not in [finding.code for finding in found]


def test_the_log_of_an_engine_that_is_missing_is_named(tmp_path: Path) -> None:
    # As a dense model's engine core says it: alone, but in a process that stands beside others.
    _, found = read(tmp_path, core_steps__jsonl=core_file(0, 1, data_parallel_size=1, is_data_parallel=True))

    (missing,) = [finding for finding in found if finding.code == "steps-missing"]
    assert missing.severity == "invalid"
    assert "2 data-parallel engines" in missing.evidence
    assert "none of engine 1 (core_steps.jsonl.1)" in missing.evidence


def test_the_only_engine_of_a_server_misses_no_other(tmp_path: Path) -> None:
    log, found = read(tmp_path, core_steps__jsonl=core_file(0, 1, data_parallel_size=1, is_data_parallel=False))

    assert log.num_declared_engines == 1
    assert [finding.code for finding in found if finding.severity == "invalid"] == []


def test_the_header_of_the_api_server_tells_how_many_engines_there_are(tmp_path: Path) -> None:
    header = {**VLLM_HEADER, "effective": {"data_parallel_size": 2}}
    _, found = read(tmp_path, steps__jsonl=lines(header, vllm_step(1, 3, 4)))

    (missing,) = [finding for finding in found if finding.code == "steps-missing"]
    assert "(steps.jsonl.1)" in missing.evidence


def test_an_engine_behind_a_load_balancer_of_its_own_misses_no_other(tmp_path: Path) -> None:
    effective = {"data_parallel_size": 2, "data_parallel_external_lb": True, "is_data_parallel": True}
    _, found = read(tmp_path, core_steps__jsonl__1=core_file(0, 1, engine=1, **effective))

    assert "steps-missing" not in [finding.code for finding in found]


def test_lines_of_an_engine_core_that_are_missing_make_a_run_invalid(tmp_path: Path) -> None:
    _, found = read(tmp_path, core_steps__jsonl=core_file(0, 1, 5))

    (missing,) = [finding for finding in found if finding.code == "steps-missing"]
    assert (missing.severity, missing.evidence) == ("invalid", "3 steps are not in core_steps.jsonl")


def test_a_core_that_was_to_stamp_its_steps_and_did_not_is_told(tmp_path: Path) -> None:
    (tmp_path / layout.STEP_LOG).write_bytes(lines(VLLM_HEADER, vllm_step(1, 3, 4)))
    log, problem = read_run_steps(tmp_path)
    facts = {"launch": {"files": {"step_log": "steps.jsonl", "core_steps": "core_steps.jsonl"}}}
    told = manifest().model_copy(update={"server": ServerRecord(facts=facts)})

    assert [finding.severity for finding in check_step_log(told, log, problem) if finding.code == "core-steps-silent"]
    assert not [finding for finding in check_step_log(manifest(), log, problem) if finding.code == "core-steps-silent"]


def stepped(*lengths: tuple[str, int], ahead: bool) -> StepLog:
    """Steps of (kind, length) without a pause between them; decode steps have the size 8."""
    ends = [sum(length for _kind, length in lengths[: place + 1]) for place in range(len(lengths))]
    rows = [
        {
            **dict.fromkeys(SCHEMA.names),
            "at_ns": end,
            "began_ns": end - length,
            "running": 1,
            "kind": kind,
            "b": 8 if kind == "decode" else None,
        }
        for end, (kind, length) in zip(ends, lengths, strict=True)
    ]
    return StepLog("0.30.0", {"async_scheduling": ahead}, (), pa.Table.from_pylist(rows, schema=SCHEMA), 0, "")


def lengths_of(log: StepLog) -> list[int | None]:
    return [None if span is None else span[1] - span[0] for span in step_spans(log)]


def test_with_asynchronous_scheduling_a_launch_counts_in_its_own_step() -> None:
    steps = [("decode", 5), ("decode", 5), ("decode", 5), ("decode", 30), ("mixed", 4), ("decode", 5), ("decode", 6)]
    assert lengths_of(stepped(*steps, ahead=True)) == [5, 5, 5, 5, 29, 5, 6]
    assert lengths_of(stepped(*steps, ahead=False)) == [5, 5, 5, 30, 4, 5, 6]


def test_a_decode_step_of_a_size_that_never_ran_alone_stays_as_it_was_stamped() -> None:
    steps = [("prefill", 9), ("decode", 30), ("mixed", 4)]
    assert lengths_of(stepped(*steps, ahead=True)) == [9, 30, 4]
