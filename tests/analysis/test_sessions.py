"""A session's active time: held to the rows of requests, with parts, waits, failures, windows and targets."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.analysis.compare.across import Side, compare_all
from harness.analysis.compare.measures import MEASURES
from harness.analysis.sessions import SessionOutcome, session_percentiles, session_times
from harness.analysis.stats import NoInterval
from harness.analysis.summary import summarise
from harness.measure.records.run import SealedRun
from harness.measure.records.store import RunStore
from harness.model.plan.event_queue import whole_sessions
from harness.model.spec import ExperimentSpec
from harness.model.traces.recording import RecordedRequest, Recording, TraceHead, write_trace
from harness.runner import run_experiment
from tests.analysis.conftest import Simulated
from tests.support.command_line import harness
from tests.support.experiments import small_experiment
from tests.support.replays import fork_and_join, plan_of, session

SECOND = 1_000_000_000
BASE = [{"name": "base"}]
WAITING = {"num_sessions": 6, "requests_per_session": 4, "wait_cap_s": 5.0}


def turn(row: dict[str, Any]) -> int:
    return int(row["request"])


def end(row: dict[str, Any]) -> tuple[int, int, int]:
    return row["done_ns"], row["session"], row["request"]


def by_hand(run: SealedRun) -> dict[int, int]:
    """Active times of unbranched sessions by definition: last token less first send less the sum of their waits."""
    rows = run.table("requests").to_pylist()
    tokens = {
        (chunk["session"], chunk["request"]): chunk["received_ns"] if chunk["kernel_ns"] is None else chunk["kernel_ns"]
        for chunk in run.table("chunks").sort_by("chunk").to_pylist()
        if chunk["num_tokens"]
    }
    times: dict[int, int] = {}
    for index in {row["session"] for row in rows}:
        mine = sorted((row for row in rows if row["session"] == index), key=turn)
        waited_ns = sum(row["due_ns"] - row["trigger_ns"] for row in mine[1:])
        last_ns = tokens.get((index, mine[-1]["request"]), mine[-1]["done_ns"])
        times[index] = last_ns - mine[0]["sent_ns"] - waited_ns
    return times


def found(run: SealedRun) -> dict[int, int]:
    times = session_times(run)
    assert set(times.outcome.tolist()) == {SessionOutcome.FINISHED}
    return dict(zip(times.session.tolist(), times.own_ns.tolist(), strict=True))


@pytest.mark.parametrize(
    "changes",
    [{}, {"client": {"stream": False}, "condition": BASE}, {"time_scale": 50.0, "condition": BASE, "replicates": 1}],
)
def test_simulated_own_times_are_those_of_the_rows(simulated: Simulated, changes: dict[str, Any]) -> None:
    for run in simulated(workload=WAITING, **changes):
        assert found(run) == by_hand(run)
        assert len(found(run)) == 6


def test_emulated_own_times_are_those_of_the_rows_and_count_what_the_client_was_late(tmp_path: Path) -> None:
    spec = small_experiment(workload={"num_sessions": 3, "wait_cap_s": 1.0}, condition=[{"name": "base"}])
    (run,) = run_experiment(spec, runs_root=tmp_path).runs
    assert found(run) == by_hand(run)
    assert session_times(run).wait_ns.sum() == run.plan.total_wait_ns


def test_sql_and_python_say_the_same_of_sessions(simulated: Simulated) -> None:
    runs = simulated(workload=WAITING)
    times = session_times(next(run for run in runs if run.label == "base/1"))
    store = RunStore(runs[0].path.parents[2])
    rows = store.query(
        "select * from valid_sessions where condition = 'base' and replicate = 1 order by first_ns, session"
    )
    for name in ("session", "num_requests", "first_ns", "last_ns", "wait_ns", "own_ns"):
        assert rows.column(name).to_pylist() == getattr(times, name).tolist()
    assert rows.column("outcome").to_pylist() == ["finished"] * 6
    connection = store.connect()
    assert connection.sql("select count(*) from sessions").fetchall() == [(6 * len(runs),)]
    connection.close()


@st.composite
def trees(draw: st.DrawFn) -> list[Recording]:
    """Recordings that fork, join, wait and are left by their clients; each request waits for an earlier one."""
    made: list[Recording] = []
    for number in range(draw(st.integers(1, 4))):
        requests: list[RecordedRequest] = []
        for place in range(draw(st.integers(1, 6))):
            after = tuple(sorted(draw(st.sets(st.integers(0, place - 1), min_size=1, max_size=3)))) if place else ()
            base = draw(st.sampled_from([None, *after]))
            keep = 0 if base is None else requests[base].stream_tokens
            wait_ns, new = draw(st.integers(0, 3 * SECOND)), draw(st.integers(1, 600))
            left = draw(st.sampled_from([0, 0, 0, 3]))
            requests.append(
                RecordedRequest(base, after, wait_ns, "tool", keep + new, keep, 40, abort_after_tokens=left)
            )
        made.append(Recording(f"r{number}", draw(st.integers(0, 5 * SECOND)), tuple(requests)))
    return made


def replayed(
    recordings: list[Recording], folder: Path, window: dict[str, float] | None = None, **workload: object
) -> SealedRun:
    head = TraceHead("tree", "made", "recorded", 0, {}, {}, ())
    trace = write_trace(folder / "tree.jsonl", head, recordings)
    table = {
        "name": "trees",
        "backend": "sim",
        "replicates": 1,
        "workload": {"source": "trace", "trace": str(trace), **workload},
        "window": window or {},
        "condition": [{"name": "base"}],
    }
    return run_experiment(ExperimentSpec.model_validate(table), runs_root=folder).runs[0]


def swept(rows: list[dict[str, Any]], last_ns: int) -> int:
    """Time from the first send to ``last_ns`` in which any of these requests was due and not yet over."""
    first_ns = min(row["sent_ns"] for row in rows)
    events = sorted((at_ns, change) for row in rows for at_ns, change in ((row["due_ns"], 1), (row["done_ns"], -1)))
    busy_ns = num_open = 0
    since_ns = first_ns
    for at_ns, change in events:
        busy_ns += (at_ns - since_ns) if num_open else 0
        num_open, since_ns = num_open + change, at_ns
    return busy_ns - (since_ns - last_ns)


@settings(max_examples=8)
@given(recordings=trees())
def test_own_times_of_any_trees_are_the_time_in_which_a_request_was_due(
    tmp_path_factory: pytest.TempPathFactory, recordings: list[Recording]
) -> None:
    run = replayed(recordings, tmp_path_factory.mktemp("tree"))
    times = session_times(run)
    # A recording is one session, whatever parts its forks and joins cut it into.
    assert sorted(times.num_requests.tolist()) == sorted(len(one.requests) for one in recordings)
    of = whole_sessions(run.plan)
    rows, own_ns = run.table("requests").to_pylist(), iter(times.own_ns.tolist())
    for place, index in enumerate(times.session.tolist()):
        mine = [row for row in rows if of[row["session"]] == index]
        last = max(mine, key=end)
        assert times.outcome[place] == (SessionOutcome.LEFT if last["status"] == "aborted" else SessionOutcome.FINISHED)
        if last["status"] == "ok":
            assert next(own_ns) == swept(mine, int(times.last_ns[place]))
    told = RunStore(run.path.parents[2]).query(
        "select own_ns, wait_ns, outcome from sessions order by first_ns, session"
    )
    assert [value for value in told.column("own_ns").to_pylist() if value is not None] == times.own_ns.tolist()
    assert told.column("wait_ns").to_pylist() == times.wait_ns.tolist()


def test_a_part_that_continues_or_waited_is_the_same_session_and_a_next_one_is_not() -> None:
    assert whole_sessions(fork_and_join(1000)).tolist() == [0, 0, 0, 0, 0]
    users = plan_of(session(0), session(1), session(2, after=0), session(3, after=1))
    assert whole_sessions(users).tolist() == [0, 1, 2, 3]
    chained = plan_of(session(0), session(1), session(2, after=1, continues=1, keep_first=60))
    assert whole_sessions(chained).tolist() == [0, 1, 1]


def ask(*after: int, wait_s: float = 0, left: int = 0) -> RecordedRequest:
    return RecordedRequest(None, after, int(wait_s * SECOND), "tool", 300, 0, 30, abort_after_tokens=left)


def test_a_session_whose_last_answer_is_left_has_no_time_and_one_that_goes_on_has(tmp_path: Path) -> None:
    left = Recording("left", 0, (ask(), ask(0, wait_s=1, left=5)))
    goes_on = Recording("goes-on", 0, (ask(left=5), ask(0, wait_s=1)))
    run = replayed([left, goes_on], tmp_path)
    assert sorted(session_times(run).outcome.tolist()) == [SessionOutcome.FINISHED, SessionOutcome.LEFT]
    (figures,) = summarise([run.with_targets(session_s=1e6)]).sessions
    assert (figures.num_finished, figures.num_others, figures.share_within) == (1, 1, 0.5)


def test_sessions_that_begin_in_the_window_count_whole_and_those_begun_in_the_middle_do_not(tmp_path: Path) -> None:
    two = [Recording(f"r{start}", start * SECOND, (ask(), ask(0, wait_s=20))) for start in (0, 8)]
    windowed = session_times(replayed(two, tmp_path / "window", {"warmup_s": 5, "measure_s": 10}))
    assert len(windowed.own_ns) == 1
    assert windowed.last_ns[0] - windowed.first_ns[0] > 20 * SECOND, "it ended after the window"
    steady = session_times(replayed(two * 3, tmp_path / "steady", start="steady", concurrency=2))
    assert len(steady.session) == 4, "the first two of six began in the middle"
    rows = RunStore(tmp_path / "steady").query("select count(*) as n from sessions where not is_whole").to_pylist()
    assert rows == [{"n": 2}]


def test_percentiles_have_intervals_over_six_runs_and_the_target_counts_sessions_per_hour(simulated: Simulated) -> None:
    runs = simulated(replicates=6, workload=WAITING | {"num_sessions": 4}, slo={"session_s": 7.5}, condition=BASE)
    base = next(one for one in summarise(runs).sessions if one.condition == "base")
    assert base.num_finished == 24
    interval = base.percentiles[0].interval
    assert interval.low < base.percentiles[0].value < interval.high
    assert summarise(runs[:4]).sessions[0].percentiles[0].why is not None, "four runs"
    times = [found(run) for run in runs if run.condition == "base"]
    within = sum(value <= 7.5 * SECOND for of_run in times for value in of_run.values())
    assert base.share_within == within / 24
    assert base.within_per_h.interval is not None
    rows = runs[0].table("requests").to_pylist()
    span_ns = session_times(runs[0]).last_ns.max() - min(row["sent_ns"] for row in rows)
    within = sum(value <= 7.5 * SECOND for value in times[0].values())
    assert MEASURES["session_goodput"].of(runs[0]) == (within, span_ns / (3600 * SECOND))


def test_measures_of_sessions_stand_in_table_compare_gate_history_export_query_and_report(
    simulated: Simulated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (first, *_) = simulated(workload=WAITING, slo={"session_s": 9.0})
    for name in ("runs", "again"):
        shutil.copytree(first.path.parents[2], tmp_path / name)
    columns = ("session_p50_s", "session_p90_s", "session_p99_s", "session_goodput_per_h")
    table = harness("table", "small", "--format", "json").stdout
    assert all(f'"{name}"' in table for name in columns)
    assert "Sessions" in harness("table", "small").stdout
    assert "sessions_within_target_per_h" in harness("table", "small", "--serving", "--format", "csv").stdout
    compared = harness("compare", "runs/small", "--format", "csv").stdout
    assert all(name in compared for name in columns)
    assert "too few sessions (1000 are needed)" in compared
    gate = ("gate", "again/small", "--against", "runs/small", "--figure", "session_p50")
    judged = harness(*gate, "--fail-above", "session_p50=1.05", "--fail-above", "session_goodput=1.05").stdout
    assert "session_goodput [per h]" in judged
    harness("gate", "small", "--save-baseline", "saved")
    loaded = harness("gate", "again/small", "--against", "saved", "--fail-above", "session_p50=1.05").stdout
    assert "session_p50 [s]" in loaded
    assert "sessions" in (tmp_path / "saved" / "figures.csv").read_text().splitlines()[0]
    followed = harness("history", "runs", "again", "--figure", "session_goodput", "--format", "csv").stdout
    assert "session_goodput" in followed
    harness("records", "export", "small", "--format", "csv", "-o", "out")
    assert "session" in (tmp_path / "out" / "serving.csv").read_text()
    assert len((tmp_path / "out" / "sessions.csv").read_text().splitlines()) == 1 + 6 * 6
    harness("report", "small", "-o", "page.html")
    assert "Within: finished within 9 s of active time" in (tmp_path / "page.html").read_text()


def test_a_target_that_no_session_meets_is_compared_as_none_of_so_many(simulated: Simulated) -> None:
    runs = simulated(replicates=4, workload=WAITING, slo={"session_s": 0.001})
    names = list(dict.fromkeys(run.condition for run in runs))
    base, other = (Side(name, tuple(run for run in runs if run.condition == name)) for name in names)
    (none,) = (row for row in compare_all([(other, base)]).records() if row["measure"] == "session_goodput_per_h")
    assert (none["mean"], none["baseline_mean"], none["ratio"]) == (0, 0, None)
    assert none["verdict"] == "no ratio: 0 of 24 and 0 of 24 sessions within [slo] session_s"


def test_a_target_on_the_command_stands_for_that_of_the_experiment(
    simulated: Simulated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(simulated(workload=WAITING)[0].path.parents[2], tmp_path / "runs")
    without = harness("compare", "runs/small", "--format", "csv").stdout
    assert "session_p50_s" in without
    assert "session_goodput" not in without
    assert (
        "session_goodput_per_h" in harness("compare", "runs/small", "--session-target", "60", "--format", "csv").stdout
    )
    assert "finished within 60 s" in " ".join(harness("table", "small", "--session-target", "60").stdout.split())
    refused = harness("gate", "small", "--save-baseline", "saved", "--session-target", "60")
    assert refused.returncode == 2
    assert "[slo] session_s" in refused.stderr
    harness("gate", "small", "--save-baseline", "saved")
    gate = ("gate", "small", "--against", "saved", "--fail-above", "session_goodput=1.1", "--session-target", "60")
    assert "other targets" in harness(*gate).stdout or "not observed" in harness(*gate).stdout


def test_with_open_arrivals_an_interval_needs_a_hundred_sessions_beyond() -> None:
    shared = np.random.default_rng(1).exponential(5e9, (6, 40))
    few, many = list(shared[:, :20]), [np.tile(run, 20) for run in shared]
    assert session_percentiles(few, "runs", False)[0].interval is not None
    assert session_percentiles(few, "runs", True)[0].why is NoInterval.RARE, "60 are beyond p50"
    assert session_percentiles(many, "runs", True)[0].interval is not None
