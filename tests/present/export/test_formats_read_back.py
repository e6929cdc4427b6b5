"""Every format that is written and has a reader gives back what was written: plans, lengths, waits and figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.analysis.compare.measures import MEASURES
from harness.measure.records.run import SealedRun
from harness.model.experiment import build_plan
from harness.model.plan.files import read_plan, save_plan
from harness.model.plan.model import Plan
from harness.model.spec import WorkloadSpec
from harness.model.traces.importing import TRACE_FORMATS, import_trace
from harness.model.traces.recording import load_trace, read_trace, write_trace
from harness.plugins import part_at, plugged
from harness.present.export.formats import FORMATS, write_runs
from harness.present.export.traces import EXPORTS, export_trace
from tests.present.export.test_traces import simulated, without_index

# Files of these formats are no recordings, and their readers are tested elsewhere or there is none.
WITHOUT_A_READER_OF_RECORDINGS = {"csv", "parquet", "prometheus", "inference-perf"}
READ_AS_RESULTS = {"vllm-bench", "aiperf", "guidellm"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> SealedRun:
    """Sessions without forks, which every format can hold."""
    workload = {"num_sessions": 5, "requests_per_session": 3, "wait_cap_s": 3.0, "start_offset_s": 0.1234567}
    return simulated(tmp_path_factory.mktemp("run"), workload)


def plan_of(trace: Path) -> Plan:
    return build_plan(WorkloadSpec.model_validate({"source": "trace", "trace": str(trace)}), 1, 0)


Session = tuple[tuple[int, int, int], ...]
# What a format's stamps may take off a wait, ns: spans have whole microseconds at either end.
ROUNDED_NS = {"agentic-mooncake": 0, "csv": 0, "otel": 2_000}


def sessions_of(plan: Plan) -> list[Session]:
    """Of each session: prompt, answer and the wait that is waited after each request, ns."""
    return sorted(
        tuple(
            (one.prompt_tokens, one.generate_tokens, one.wait_after_ns if place + 1 < len(of.requests) else 0)
            for place, one in enumerate(of.requests)
        )
        for of in plan.sessions
    )


def assert_same(again: Plan, plan: Plan, rounded_ns: int) -> None:
    """The same lengths in the same order, and the same waits up to the stamps of a format."""
    found, planned = ([one for session in sessions_of(each) for one in session] for each in (again, plan))
    assert [one[:2] for one in found] == [one[:2] for one in planned]
    assert max(abs(one[2] - other[2]) for one, other in zip(found, planned, strict=True)) <= rounded_ns


def imported(path: Path) -> Path:
    import_trace([path], path.parent / "again.jsonl", name="again")
    return path.parent / "again.jsonl"


def test_every_format_that_is_written_is_in_this_test() -> None:
    assert set(EXPORTS) <= set(TRACE_FORMATS), "each trace that is written has a reader"
    assert set(FORMATS) - {"otel"} == WITHOUT_A_READER_OF_RECORDINGS | READ_AS_RESULTS


@pytest.mark.parametrize("form", sorted(EXPORTS))
def test_a_trace_that_is_written_gives_the_plan_back(run: SealedRun, form: str, tmp_path: Path) -> None:
    path = tmp_path / f"out.{'json' if form == 'otel' else 'csv' if form == 'csv' else 'jsonl'}"
    path.write_bytes(export_trace(run, form))
    again = imported(path)
    head = read_trace(again).head
    assert not head.dropped
    assert not head.broken
    assert_same(plan_of(again), run.plan, ROUNDED_NS[form])
    starts = [sorted(session.start_offset_ns for session in plan.sessions) for plan in (plan_of(again), run.plan)]
    assert max(abs(one - other) for one, other in zip(*starts, strict=True)) <= ROUNDED_NS[form]


def test_spans_of_records_export_give_the_requests_back(run: SealedRun, tmp_path: Path) -> None:
    (path,) = write_runs([run], FORMATS["otel"], tmp_path / "spans", may_replace=False)
    assert_same(plan_of(imported(path)), run.plan, ROUNDED_NS["otel"])


@pytest.mark.parametrize("name", ["coding-agent", "research-agent", "customer-support"])
def test_a_trace_of_the_middle_form_and_a_plan_are_read_back_equal(name: str, tmp_path: Path) -> None:
    whole = load_trace(name)
    written = write_trace(tmp_path / "again.jsonl", whole.head, whole.recordings)
    again = read_trace(written)
    assert (again.head, again.recordings) == (whole.head, whole.recordings)
    plan = plan_of(written)
    assert read_plan(save_plan(plan, tmp_path)) == plan
    assert without_index(plan) == without_index(build_plan(WorkloadSpec(source="trace", trace=name), 1, 0))


@pytest.mark.parametrize("tool", sorted(READ_AS_RESULTS))
def test_results_that_are_written_for_a_tool_are_read_back_as_the_same_figures(
    run: SealedRun, tool: str, tmp_path: Path
) -> None:
    write_runs([run], FORMATS[tool], tmp_path / tool, may_replace=False)
    sides = [part_at(place)([tmp_path / tool]) for place in plugged("result_files").values()]
    (side,) = [side for side in sides if side is not None]
    (figures,) = side.runs
    of_run = {one.column: one.of(run) for one in MEASURES.values() if one.column in figures}
    assert {"ttft_p50_ms", "e2e_p50_ms", "tokens_per_s"} <= set(of_run)
    for column, value in of_run.items():
        assert figures[column].amount == pytest.approx(value.amount, rel=1e-4)
