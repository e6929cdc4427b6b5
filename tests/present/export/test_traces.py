"""A sealed run as a trace that others replay, and read back: the same plan, and the same requests in time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.clock import NS_PER_US
from harness.errors import SpecError
from harness.measure.records.run import SealedRun
from harness.model.experiment import build_plan
from harness.model.plan.model import Plan
from harness.model.spec import ExperimentSpec, WorkloadSpec
from harness.model.traces.importing import import_trace
from harness.model.traces.recording import RecordedRequest, Recording, TraceFile, TraceHead, read_trace, write_trace
from harness.present.export.traces import export_trace
from harness.runner import run_experiment


def simulated(folder: Path, workload: dict[str, Any]) -> SealedRun:
    spec = {"name": "x", "backend": "sim", "base_seed": 1, "replicates": 1, "baseline": "a", "workload": workload}
    table = ExperimentSpec.model_validate({**spec, "condition": [{"name": "a"}]})
    (run,) = run_experiment(table, runs_root=folder / "runs").require_valid().runs
    return run


def read_back(run: SealedRun, form: str, folder: Path) -> TraceFile:
    path = folder / f"out.{'json' if form == 'otel' else 'csv' if form == 'csv' else 'jsonl'}"
    path.write_bytes(export_trace(run, form))
    import_trace([path], folder / "again.jsonl", name="again")
    return read_trace(folder / "again.jsonl")


def without_index(plan: Plan) -> set[tuple[object, ...]]:
    """Sessions as values that do not depend on how they are numbered."""
    return {
        (one.start_offset_ns, one.start_kind, len(one.predecessors), one.continues is None, one.requests)
        for one in plan.sessions
    }


@pytest.mark.parametrize("name", ["coding-agent", "research-agent"])
def test_agentic_mooncake_read_back_is_the_same_plan(tmp_path: Path, name: str) -> None:
    run = simulated(tmp_path, {"source": "trace", "trace": name, "num_sessions": 4})
    read_back(run, "agentic-mooncake", tmp_path)
    again = WorkloadSpec.model_validate({"source": "trace", "trace": str(tmp_path / "again.jsonl")})
    assert without_index(build_plan(again, 1, 0)) == without_index(run.plan)


def test_answers_that_the_client_leaves_are_read_back_too(tmp_path: Path) -> None:
    ask = RecordedRequest(None, (), 0, "none", 600, 0, 300, abort_after_ns=1_250_000_000)
    then = RecordedRequest(0, (0,), 7_000_000, "human", 640, 600, 20, abort_after_tokens=7)
    last = RecordedRequest(1, (1,), 0, "none", 700, 647, 20)
    head = TraceHead("leaver", "made", "together", 0, {}, {}, ())
    trace = write_trace(tmp_path / "leaver.jsonl", head, [Recording("a", 0, (ask, then, last))])
    run = simulated(tmp_path, {"source": "trace", "trace": str(trace)})
    read_back(run, "agentic-mooncake", tmp_path)
    again = WorkloadSpec.model_validate({"source": "trace", "trace": str(tmp_path / "again.jsonl")})
    assert without_index(build_plan(again, 1, 0)) == without_index(run.plan)
    spans = json.loads(export_trace(run, "otel"))["spans"]
    tokens = [span["attributes"]["gen_ai.usage.output_tokens"] for span in spans if span["name"] == "chat"]
    assert 7 < tokens[0] < 300
    assert tokens[1:] == [7, 20]
    with pytest.raises(SpecError, match="leaves answers"):
        export_trace(run, "csv")


def test_spans_hold_chats_tools_and_steps_and_read_back_as_the_requests_that_were_sent(tmp_path: Path) -> None:
    run = simulated(tmp_path, {"source": "trace", "trace": "research-agent", "num_sessions": 2})
    spans = json.loads(export_trace(run, "otel"))["spans"]
    steps = [event["attributes"] for event in spans[0]["events"]]
    assert [(step["rbln.n"], step["rbln.b"]) for step in steps] == [
        (row["n"], row["b"]) for row in run.table("steps").to_pylist()
    ]
    assert {span["name"] for span in spans[1:]} == {"chat", "execute_tool"}
    trace = read_back(run, "otel", tmp_path)
    assert trace.num_requests == run.plan.num_requests
    assert len(trace.recordings) == 2
    assert any(len(one.after) > 1 for recording in trace.recordings for one in recording.requests)
    first = min(row["sent_ns"] for row in run.table("requests").to_pylist())
    starts = sorted((row["sent_ns"] - first) // NS_PER_US for row in run.table("requests").to_pylist())
    assert starts[0] == 0
    assert max(recording.start_ns // NS_PER_US for recording in trace.recordings) <= starts[-1]


def test_columns_hold_sessions_that_wait_for_nobody_and_refuse_others(tmp_path: Path) -> None:
    run = simulated(tmp_path, {"num_sessions": 3})
    trace = read_back(run, "csv", tmp_path)
    lengths = sorted((one.prompt_tokens, one.generate_tokens) for each in trace.recordings for one in each.requests)
    planned = (request for session in run.plan.sessions for request in session.requests)
    assert lengths == sorted((one.prompt_tokens, one.generate_tokens) for one in planned)
    joined = simulated(tmp_path / "joined", {"source": "trace", "trace": "research-agent", "num_sessions": 1})
    with pytest.raises(SpecError, match="wait for one another"):
        export_trace(joined, "csv")
