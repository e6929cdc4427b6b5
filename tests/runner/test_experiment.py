from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from harness.analysis import run_figures
from harness.analysis.figures import lateness
from harness.analysis.validity import invariants
from harness.analysis.validity.evidence import Evidence
from harness.errors import RecordsError, SpecError
from harness.measure.records import layout
from harness.measure.records.findings import finding
from harness.measure.records.manifest import Finding
from harness.measure.records.run import SealedRun
from harness.measure.records.store import RunStore
from harness.present.report import write_report
from harness.runner import StopFlag, run_experiment
from harness.runner.experiment import ExperimentOutcome
from harness.runner.progress import (
    BlockLooked,
    ExperimentStarted,
    ProgressEvent,
    RequestFinished,
    RunSealed,
    RunStarted,
    ServerReady,
)
from tests.support.experiments import UNHURRIED, small_experiment

pytestmark = pytest.mark.live


class Performed(NamedTuple):
    """``small_experiment()`` as it was performed once, for all tests that only look at it."""

    root: Path
    outcome: ExperimentOutcome
    events: list[ProgressEvent]


@pytest.fixture(scope="module")
def performed(tmp_path_factory: pytest.TempPathFactory) -> Performed:
    root, events = tmp_path_factory.mktemp("performed"), list[ProgressEvent]()
    return Performed(root, run_experiment(small_experiment(), runs_root=root, on_progress=events.append), events)


def device_ns(run: SealedRun) -> int:
    """The emulator's own sum of step times, from its trace."""
    records = [json.loads(line) for line in run.file("device_trace.jsonl").read_text().splitlines()]
    return sum(record["duration_ns"] for record in records if record.get("kind") in ("PREFILL", "DECODE"))


def test_channel_a_equals_the_emulators_own_step_times_and_channel_b_lies_above(performed: Performed):
    assert performed.outcome.is_complete
    for run in performed.outcome.runs:
        figures = run_figures(run)
        truth_ns = device_ns(run)
        assert truth_ns > 0
        assert abs(figures.a.total_ns - truth_ns) <= 0.001 * truth_ns
        assert figures.b_ns >= figures.a.total_ns


def test_the_progress_events_tell_the_whole_story_in_order(performed: Performed):
    kinds = [type(event) for event in performed.events]
    one_run = [RunStarted, ServerReady, *[RequestFinished] * 6, RunSealed]
    assert kinds == [ExperimentStarted, *one_run, *one_run]
    finished = [event.num_finished for event in performed.events if isinstance(event, RequestFinished)]
    assert finished == [1, 2, 3, 4, 5, 6] * 2


def test_those_who_watch_are_told_of_the_lateness_that_is_reported(performed: Performed):
    for run in performed.outcome.runs:
        last = json.loads(run.file(layout.SCRAPES).read_text(encoding="utf-8").splitlines()[-1])
        late = lateness(run.table("requests"), run.manifest.clock.scale)
        assert last["rearrival_p99_ms"] == pytest.approx(late.rearrival_p99_ms, abs=1e-5)
        assert last["start_spread_ms"] == pytest.approx(late.start_spread_ms, abs=1e-5)


def test_resume_performs_only_what_is_missing(tmp_path: Path):
    spec = small_experiment(backend="sim", replicates=3, condition=[{"name": "only"}])
    stop = StopFlag()

    def stop_after_the_first_run(event: object) -> None:
        if isinstance(event, RunSealed):
            stop.request()

    first = run_experiment(spec, runs_root=tmp_path, on_progress=stop_after_the_first_run, stop=stop)
    assert (first.num_performed, len(first.runs), first.is_complete) == (1, 1, False)
    sealed_before = first.runs[0].file("manifest.json").stat().st_mtime_ns
    second = run_experiment(spec, runs_root=tmp_path, resume=True)
    assert (second.num_performed, len(second.runs), second.is_complete) == (2, 3, True)
    assert first.runs[0].file("manifest.json").stat().st_mtime_ns == sealed_before


def test_an_aborted_run_leaves_nothing_that_looks_whole(tmp_path: Path):
    stop = StopFlag()

    def abort_at_the_first_answer(event: object) -> None:
        if isinstance(event, RequestFinished):
            stop.abort()

    outcome = run_experiment(small_experiment(), runs_root=tmp_path, on_progress=abort_at_the_first_answer, stop=stop)
    assert outcome.was_interrupted
    assert len(outcome.missing) == outcome.num_planned - len(outcome.runs) > 0
    assert outcome.runs == ()
    assert RunStore(tmp_path).sealed() == []


def test_sealed_runs_are_not_silently_mixed_with_new_ones(performed: Performed):
    with pytest.raises(SpecError, match="--resume"):
        run_experiment(small_experiment(), runs_root=performed.root)
    with pytest.raises(SpecError, match="another plan"):
        run_experiment(small_experiment(base_seed=8), runs_root=performed.root, resume=True)
    with pytest.raises(SpecError, match="another order"):
        run_experiment(small_experiment(order="abba"), runs_root=performed.root, resume=True)


def test_a_run_over_its_lateness_limit_is_named_invalid_and_kept_when_it_is_repeated(tmp_path: Path):
    spec = small_experiment(condition=[{"name": "only"}], limits={**UNHURRIED, "rearrival_lag_p99_ms": 1e-6})
    outcome = run_experiment(spec, runs_root=tmp_path)
    [run] = outcome.invalid_runs
    assert any("re-arrival" in reason for reason in run.invalid_reasons)
    again = run_experiment(
        small_experiment(condition=[{"name": "only"}]), runs_root=tmp_path, resume=True, retry_invalid=True
    )
    store = RunStore(tmp_path)
    (repeated,) = store.sealed()
    assert (again.num_performed, repeated.is_valid) == (1, True)
    assert [(one.folder, one.invalid_reasons) for one in repeated.manifest.earlier_tries] == [
        ("0.retried-1", run.invalid_reasons)
    ]
    assert store.verify() == 2
    assert store.query("select num_earlier_tries as n from valid_runs").to_pylist() == [{"n": 1}]
    page = write_report([repeated], tmp_path / "page.html").read_text(encoding="utf-8")
    assert "try 1 was INVALID" in page
    assert "1 repeated" in page
    shutil.rmtree(tmp_path / "small" / "only" / "0.retried-1")
    with pytest.raises(RecordsError, match=re.escape("0.retried-1")):
        store.verify()


def test_under_a_rule_an_invalid_run_is_repeated_before_the_rule_looks_and_not_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def late(_run: Evidence) -> Iterator[Finding]:
        yield finding("rearrival-late", "as on a busy machine")

    monkeypatch.setattr(invariants, "CHECKS", (late,))
    stop = {"margin": 0.05, "budget": 2, "looks": [2]}
    spec = small_experiment(backend="sim", stop=stop)
    events: list[ProgressEvent] = []
    outcome = run_experiment(spec, runs_root=tmp_path, until_decided=True, on_progress=events.append)
    looked = [event for event in events if isinstance(event, BlockLooked)]
    assert outcome.is_decided
    assert [one.status.num_blocks for one in looked] == [1, 2]
    assert [len(run.manifest.earlier_tries) for run in outcome.runs] == [2, 2, 2, 2]


def test_a_runs_folder_that_is_removed_meanwhile_is_an_error(tmp_path: Path):
    def on_progress(event: ProgressEvent) -> None:
        if isinstance(event, RunSealed):
            shutil.rmtree(tmp_path / "runs")

    with pytest.raises(RecordsError, match="runs were sealed and are gone"):
        run_experiment(
            small_experiment(backend="sim", time_scale=1.0), runs_root=tmp_path / "runs", on_progress=on_progress
        )
