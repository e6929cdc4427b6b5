"""Runs as a Perfetto trace: every request, step and wait is a slice of its track."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from harness.errors import SpecError
from harness.extras.perfetto.trace import write_perfetto
from harness.runner import run_experiment
from tests.support.command_line import harness
from tests.support.experiments import small_experiment
from tests.support.report_runs import Shape, seal_demo, seal_run


def test_the_trace_holds_every_request_and_the_steps(tmp_path: Path) -> None:
    run = seal_run(tmp_path)
    trace = json.loads(write_perfetto([run], tmp_path / "trace.json").read_text())
    events = trace["traceEvents"]
    requests = [event for event in events if event["ph"] == "X" and event["name"].startswith("request")]
    assert len(requests) == run.table("requests").num_rows
    assert {event["tid"] for event in requests} == set(range(1, 7))
    assert all(event["dur"] > 0 for event in requests)
    counters = [event for event in events if event["ph"] == "C"]
    assert max(event["args"]["n"] + event["args"]["padding"] for event in counters) == 8
    assert [event["ts"] for event in counters] == sorted(event["ts"] for event in counters)
    assert trace["otherData"]["demo/base-waits/0"]["time_scale"] == 4.0


def test_a_folder_that_is_not_there_is_made_and_one_that_cannot_be_is_a_line(tmp_path: Path) -> None:
    run = seal_run(tmp_path)
    assert write_perfetto([run], tmp_path / "new" / "trace.json").is_file()
    with pytest.raises(SpecError, match=r"^/proc/trace\.json: cannot be written"):
        write_perfetto([run], Path("/proc/trace.json"))


def test_runs_are_named_as_for_every_other_export(tmp_path: Path) -> None:
    runs = seal_demo(tmp_path / "runs", num_replicates=2)
    assert {run.experiment for run in runs} == {"demo"}
    for words, held in (
        (["demo/base-waits/0"], ["base-waits/0"]),
        (["demo", "base-waits/0", "bucket6-waits/1"], ["base-waits/0", "bucket6-waits/1"]),
        (["demo/base-waits/1", "demo/bucket6-waits/0"], ["base-waits/1", "bucket6-waits/0"]),
        (["demo/base-waits"], ["base-waits/0", "base-waits/1"]),
    ):
        done = harness("trace", "perfetto", *words, "-o", "t.json", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert set(json.loads((tmp_path / "t.json").read_text())["otherData"]) == {f"demo/{run}" for run in held}
    refused = harness("trace", "perfetto", "demo/base-waits/7", "-o", "t.json", cwd=tmp_path)
    assert refused.returncode == 2
    assert "no sealed run 'base-waits/7'. Runs: base-nowaits/0, " in " ".join(refused.stderr.split())
    several = harness("trace", "export", "demo/base-waits", "-o", "e.jsonl", cwd=tmp_path)
    assert "2 runs, and a trace is of one. Name one of base-waits/0, base-waits/1" in " ".join(several.stderr.split())


def test_every_step_is_a_slice_that_names_its_requests_and_shares_it_among_them(tmp_path: Path) -> None:
    runs = run_experiment(small_experiment(backend="sim"), runs_root=tmp_path).runs
    events = json.loads(write_perfetto(runs, tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {1, 2, 3, 4}
    squeezed = write_perfetto(runs, tmp_path / "trace.json.gz").read_bytes()
    assert json.loads(gzip.decompress(squeezed))["traceEvents"] == events
    steps = [event for event in events if event["ph"] == "X" and (event["pid"], event["tid"]) == (2, 1)]
    assert len(steps) == runs[0].table("steps").num_rows
    assert all(len(step["args"]["requests"].split()) == step["args"]["n"] for step in steps)
    requests = [event for event in events if event["pid"] == 1 and event["name"].startswith("request ")]
    shared_ms = sum(event["args"]["share_of_its_steps_ms"] for event in requests)
    assert shared_ms == pytest.approx(sum(step["dur"] for step in steps) / 1000, rel=1e-3)
    named = [event["name"] for event in events if event["pid"] == 2 and event["ph"] == "X"]
    assert sum(name.startswith("prefill of s") for name in named) == len(requests)
    assert sum(event["name"] == "tool wait" for event in events if event["pid"] == 1) == len(requests) - 3


def test_a_session_that_does_not_wait_has_no_slice_of_a_wait(tmp_path: Path) -> None:
    """A viewer would draw a slice of no length inside the request that begins with it."""
    run = seal_run(tmp_path, Shape(waits=False))
    events = json.loads(write_perfetto([run], tmp_path / "trace.json").read_text())["traceEvents"]
    assert "request 1" in {event["name"] for event in events}
    assert "tool wait" not in {event["name"] for event in events}


def test_a_trace_without_steps_still_holds_the_requests(tmp_path: Path) -> None:
    run = seal_run(tmp_path, Shape(has_steps=False, has_chunks=False))
    events = json.loads(write_perfetto([run], tmp_path / "trace.json").read_text())["traceEvents"]
    assert not [event for event in events if event["ph"] == "C"]
    assert sum(event["name"].startswith("request ") for event in events) == run.table("requests").num_rows
