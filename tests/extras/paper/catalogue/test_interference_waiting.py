"""Cumulative waiting W: what an observer or streams saw, and what the cost model says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from shutil import copytree

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from harness.analysis.compare.answer import ExperimentRuns
from harness.errors import RecordsError, SpecError
from harness.extras.paper.catalogue.interference import INTERFERENCE, measured_waiting, waiting_table
from harness.extras.paper.catalogue.reuse import exceptions_table
from harness.extras.paper.rules.interference import injection_of
from harness.measure.records import layout, schema
from harness.measure.records.run import SealedRun
from harness.model.spec import parse_experiment
from harness.runner import run_experiment
from harness.stacks.vllm.core_steps import COLUMNS
from tests.support.report_runs import as_sealed

EXPERIMENT = {
    "name": "crowd",
    "backend": "sim",
    "base_seed": 3,
    "replicates": 1,
    "workload": {"num_sessions": 3, "wait_cap_s": 1.0, "generate_tokens": {"distribution": "fixed", "value": 12}},
    "condition": [{"name": "base"}],
}


def crowd(root: Path, *, is_streaming: bool) -> SealedRun:
    spec = parse_experiment({**EXPERIMENT, "client": {"stream": is_streaming}}, where="crowd")
    [run] = run_experiment(spec, runs_root=root).runs
    return run


def observed(run: SealedRun, folder: Path, *steps: tuple[str, int, int, int]) -> SealedRun:
    """The run with an observer's file of (kind, schedule_ns, end_ns, running) beside it."""
    lines: list[object] = [{"vllm_core_steps": 1, "columns": COLUMNS, "engine": 0, "effective": {}, "absent": []}]
    for k, (kind, start, end, running) in enumerate(steps):
        is_prefill = kind == "prefill"
        values = {"step": k, "schedule_ns": start, "scheduled_ns": start, "update_ns": end, "end_ns": end}
        values |= {"requests": [k if is_prefill else k - 1], "tokens": 20 if is_prefill else 1, "running": running}
        values |= {"admitted": [[k, f"r{k}", None, 20, 0, 20]] if is_prefill else [], "preempted": [], "finished": []}
        lines.append([values.get(name, 0 if name == "observer_ns" else None) for name in COLUMNS])
    folder.mkdir()
    (folder / layout.OBSERVER).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return as_sealed(run, folder)


def test_runs_without_background_sessions_have_no_injection(tmp_path: Path) -> None:
    run = crowd(tmp_path, is_streaming=True)
    with pytest.raises(SpecError, match="has no group 'background'"):
        injection_of(run, INTERFERENCE)


def test_without_streams_and_observer_nothing_is_measured(tmp_path: Path) -> None:
    run = crowd(tmp_path, is_streaming=False)
    assert measured_waiting(run) is None
    assert waiting_table(ExperimentRuns([run])).rows == ()


def test_an_observer_gives_duration_times_the_sessions_held_back(tmp_path: Path) -> None:
    run = crowd(tmp_path, is_streaming=False)
    # Alone: nobody waits. Then two others wait 300 ns, and a decode step holds nobody back.
    seen = observed(run, tmp_path / "seen", ("prefill", 0, 500, 1), ("prefill", 600, 900, 3), ("decode", 900, 910, 3))
    assert measured_waiting(seen) == (600, "observer")


def test_a_file_of_the_observer_before_and_one_that_lacks_steps_are_no_silent_absence(tmp_path: Path) -> None:
    run = crowd(tmp_path, is_streaming=False)
    seen = observed(run, tmp_path / "seen", ("prefill", 0, 500, 1), ("prefill", 600, 900, 3))
    file = seen.path / layout.OBSERVER
    header, _first, second = file.read_bytes().splitlines(keepends=True)
    for content, says in ((header + second, "lacks steps"), (b'{"observer_format":1}\n', "Commit 8443c613 reads it")):
        file.write_bytes(content)
        with pytest.raises(RecordsError, match=says):
            measured_waiting(as_sealed(run, seen.path))


def test_an_observers_instants_are_scaled_to_the_runs_clock(tmp_path: Path) -> None:
    run = crowd(tmp_path, is_streaming=False)
    clock = run.manifest.clock.model_copy(update={"scale": 4.0})
    scaled = replace(run, manifest=run.manifest.model_copy(update={"clock": clock}))
    assert measured_waiting(observed(scaled, tmp_path / "seen", ("prefill", 0, 100, 2))) == (400, "observer")


def test_a_reuse_that_is_neither_nothing_nor_formula_c_is_listed(tmp_path: Path) -> None:
    run = crowd(tmp_path, is_streaming=False)
    assert exceptions_table(ExperimentRuns([run])).rows == ()
    requests = run.table("requests").to_pylist()
    again = next(row for row in requests if row["request"] == 1)
    again["cached_tokens"] = 128
    folder = tmp_path / "copy"
    copytree(run.path, folder)
    pq.write_table(pa.Table.from_pylist(requests, schema=schema.REQUESTS), folder / "requests.parquet")
    [row] = exceptions_table(ExperimentRuns([as_sealed(run, folder)])).records()
    assert (row["session"], row["cached_tokens"]) == (again["session"], 128)
    assert row["formula_C"] not in (0, 128)
