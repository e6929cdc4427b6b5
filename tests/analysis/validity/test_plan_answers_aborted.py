"""Runs whose plan has the client leave answers: VALID when it did, and every figure says what it leaves out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.analysis import run_figures
from harness.analysis.logs.derive import rebuild
from harness.analysis.validity.plan_answers import check_aborts
from harness.errors import SpecError
from harness.extras.perfetto.trace import write_perfetto
from harness.measure.records.run import SealedRun
from harness.model.experiment import resolve
from harness.model.sim import simulate
from harness.model.traces.recording import RecordedRequest, Recording, TraceHead, write_trace
from harness.present.report import write_report
from harness.runner import run_experiment
from tests.support.experiments import small_experiment

SECOND_NS = 1_000_000_000


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Three users: one leaves after two seconds, one after 40 tokens, one stays although it might have left."""
    ask = RecordedRequest(None, (), 0, "none", 600, 0, 6000)
    again = RecordedRequest(0, (0,), SECOND_NS, "human", 640, 600, 20)
    users = [
        (ask._replace(abort_after_ns=2 * SECOND_NS), again),
        (ask._replace(abort_after_tokens=40), again._replace(keep_tokens=640, prompt_tokens=700)),
        (ask._replace(generate_tokens=4, abort_after_ns=500 * SECOND_NS),),
    ]
    head = TraceHead("leavers", "made", "together", 0, {}, {}, ())
    return write_trace(tmp_path / "leavers.jsonl", head, (Recording(str(n), 0, own) for n, own in enumerate(users)))


def experiment(trace: Path, **changes: Any) -> Any:
    return small_experiment(workload={"source": "trace", "trace": str(trace)}, **changes)


def codes(run: SealedRun) -> set[str]:
    return {finding.code for finding in run.manifest.findings}


def assert_left_as_planned(run: SealedRun) -> None:
    assert run.is_valid, run.invalid_reasons
    statuses = {(row["session"], row["request"]): row["status"] for row in run.table("requests").to_pylist()}
    assert statuses == {(0, 0): "aborted", (0, 1): "ok", (1, 0): "aborted", (1, 1): "ok", (2, 0): "ok"}
    assert "left-as-planned" in codes(run)
    figures = run_figures(run)
    assert (figures.num_failed, figures.num_aborted) == (0, 2)
    assert [again.cached_tokens for again in figures.reuse.rearrivals] == [512, 512]
    assert figures.ceilings.beyond == 0, "what a left prompt had filled is no false sharing"


def test_a_simulated_run_is_valid_and_its_channels_are_the_simulators(tmp_path: Path, trace: Path) -> None:
    spec = experiment(trace, backend="sim")
    run = run_experiment(spec, runs_root=tmp_path / "runs").runs[0]
    assert_left_as_planned(run)
    assert codes(run) == {"left-as-planned"}
    rebuild(run)
    (planned, _) = resolve(spec)
    expected, figures = simulate(planned.plan, planned.server), run_figures(run)
    assert (figures.a.decode_ns, figures.a.prefill_ns) == (expected.decode_ns, expected.prefill_ns)
    assert run.table("requests").column("done_ns").to_pylist() == expected.requests.column("completed_ns").to_pylist()
    assert b"request 0, left by the client" in write_perfetto([run], tmp_path / "trace.json").read_bytes()
    assert "2 left as planned" in write_report([run], tmp_path / "report.html").read_text()


def test_an_answer_that_was_left_unplanned_or_not_left_makes_a_run_invalid(tmp_path: Path, trace: Path) -> None:
    run = run_experiment(experiment(trace, backend="sim"), runs_root=tmp_path / "runs").runs[0]
    requests = run.table("requests")
    swapped = ["ok" if status == "aborted" else "aborted" for status in requests.column("status").to_pylist()]
    changed = requests.set_column(requests.schema.get_field_index("status"), requests.schema.field("status"), [swapped])
    codes = {one.code for one in check_aborts(changed, run.plan, scale=1.0, limit_ms=10.0)}
    assert {"abort-unplanned", "abort-missed"} <= codes


def test_a_whole_answer_cannot_be_left_after_some_tokens(trace: Path) -> None:
    with pytest.raises(SpecError, match=r"client\.stream"):
        resolve(experiment(trace, client={"stream": False}))


@pytest.mark.live
def test_a_run_on_the_emulator_that_went_as_planned_is_valid(tmp_path: Path, trace: Path) -> None:
    # The answers would take a minute of model time, 12 s of wall time: no client leaves as late.
    spec = experiment(trace, condition=[{"name": "base"}], time_scale=5.0)
    assert_left_as_planned(run_experiment(spec, runs_root=tmp_path / "runs").runs[0])
