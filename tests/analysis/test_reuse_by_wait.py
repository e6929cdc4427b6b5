"""Reuse by the wait before a return: known answers, whole shares, and intervals over runs."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.analysis.figures import ReuseFigures, RunFigures, run_figures
from harness.analysis.reuse import Rearrival, rearrivals
from harness.analysis.reuse_by_wait import EDGES_S, ReuseShare, reuse_by_wait, reuse_by_wait_rows
from harness.analysis.stats import Interval, NoInterval, share_interval
from harness.analysis.summary import summarise
from tests.analysis.conftest import Simulated
from tests.support.analysis_tables import request_row, requests_table
from tests.support.command_line import harness
from tests.support.report_runs import seal_demo

SECOND = 1_000_000_000
RETURNING = {"num_sessions": 6, "requests_per_session": 4, "wait_cap_s": 20.0}


def returned(session: int, wait_s: float, cached: int | None, reusable: int = 1280) -> Rearrival:
    return Rearrival(session, 1, 1300, 10, 1400, reusable, reusable, cached, round(wait_s * SECOND))


@pytest.fixture(scope="module")
def a_run(tmp_path_factory: pytest.TempPathFactory) -> RunFigures:
    return run_figures(seal_demo(tmp_path_factory.mktemp("one"), num_replicates=1)[0])


def runs_with(run: RunFigures, *by_run: list[Rearrival]) -> list[RunFigures]:
    """Runs like ``run``, one for each list of returns."""
    return [
        replace(run, replicate=place, unit=place, reuse=ReuseFigures(tuple(each))) for place, each in enumerate(by_run)
    ]


def test_the_wait_of_a_return_is_from_the_end_before_it_to_its_send() -> None:
    requests = requests_table(
        request_row(0, 0, done_ns=2 * SECOND),
        request_row(0, 1, due_ns=4 * SECOND, sent_ns=5 * SECOND, done_ns=6 * SECOND),
    )
    assert [each.wait_ns for each in rearrivals(requests)] == [3 * SECOND]


def test_returns_are_counted_in_the_bin_of_their_wait(a_run: RunFigures) -> None:
    first = [returned(0, 0.1, 1280), returned(1, 1.0, 640), returned(2, 2.99, 0), returned(3, 3.0, 2000)]
    found = reuse_by_wait("base", runs_with(a_run, first, [returned(0, 900, 0)]))
    rows = reuse_by_wait_rows([found])
    assert [(row["wait_low_s"], row["wait_high_s"], row["num_returns"], row["num_reused"]) for row in rows] == [
        (0, 0.3, 1, 1),
        (1, 3, 2, 1),
        (3, 10, 1, 1),
        (300, None, 1, 0),
    ]
    # 640 of 2 x 1280; what was reused beyond the turn before is not kept of it.
    assert [row["kept_share"] for row in rows] == [1, 0.25, 1, 0]
    assert [each.range_text for each in found.bins] == ["0\u20130.3", "1\u20133", "3\u201310", "300+"]
    assert {row["reused_share_no_interval"] for row in rows} == {"too few runs"}


def test_reuse_that_is_not_stated_is_unknown_in_its_bin_alone(a_run: RunFigures) -> None:
    found = reuse_by_wait("base", runs_with(a_run, [returned(0, 0.1, None), returned(1, 0.1, 128), returned(2, 5, 0)]))
    unknown, known = found.bins
    assert (unknown.num_returns, unknown.reused, unknown.kept) == (2, None, None)
    assert known.reused == ReuseShare(0, 1, None, NoInterval.RUNS)
    assert reuse_by_wait_rows([found])[0]["num_reused"] is None


def test_prompts_too_short_to_share_a_block_have_no_share_of_tokens(a_run: RunFigures) -> None:
    found = reuse_by_wait("base", runs_with(a_run, [returned(0, 1, 0, reusable=0)]))
    assert found.bins[0].kept is None
    assert found.bins[0].reused == ReuseShare(0, 1, None, NoInterval.RUNS)


def test_a_condition_without_returns_has_no_bins(a_run: RunFigures) -> None:
    assert reuse_by_wait("base", runs_with(a_run, [])) is None


WAIT_AND_CACHED = st.tuples(st.floats(0, 2000), st.integers(0, 2000))


@given(st.lists(st.lists(WAIT_AND_CACHED, max_size=12), min_size=1, max_size=8))
def test_bins_make_up_the_whole_and_intervals_hold_their_share(
    a_run: RunFigures, drawn: list[list[tuple[float, int]]]
) -> None:
    by_run = [[returned(place, *pair) for place, pair in enumerate(pairs)] for pairs in drawn]
    everything = [each for group in by_run for each in group]
    found = reuse_by_wait("base", runs_with(a_run, *by_run))
    bins = found.bins if found else ()
    assert sum(each.num_returns for each in bins) == len(everything)
    assert sum(each.num_returns * each.reused.value for each in bins if each.reused) == pytest.approx(
        sum(bool(each.is_reused) for each in everything)
    )
    assert sum(each.kept.part for each in bins if each.kept) == sum(
        min(each.cached_tokens or 0, 1280) for each in everything
    )
    assert [each.low_s for each in bins] == sorted({each.low_s for each in bins} & set(EDGES_S))
    for each in bins:
        assert each.low_s <= each.median_wait_s
        for share in (each.reused, each.kept):
            assert (share.interval is None) == (share.why is not None)
            if share.interval is not None:
                assert 0 <= share.interval.low <= share.value <= share.interval.high <= 1
                assert share.interval.width > 0


@pytest.mark.parametrize(("share", "num_runs"), [(0.5, 6), (0.8, 6), (0.2, 12), (0.9, 12)])
def test_an_interval_of_a_share_holds_the_truth_as_often_as_it_says(share: float, num_runs: int) -> None:
    rng, outcomes = np.random.default_rng(20261125), list[bool]()
    for _ in range(600):
        levels = rng.beta(share * 9, (1 - share) * 9, size=num_runs)
        sizes = rng.integers(8, 23, size=num_runs)
        parts = [(rng.random(size) < level).astype(float) for size, level in zip(sizes, levels, strict=True)]
        found = share_interval(parts, [np.ones(size) for size in sizes])
        outcomes.append(isinstance(found, Interval) and found.contains(share))
    assert 0.92 <= np.mean(outcomes) <= 0.985


def test_a_share_of_all_of_none_or_of_few_has_no_interval() -> None:
    ones = [np.ones(5)] * 6
    few = [np.array([1.0, 1, 1, 1, 0]) if place < 2 else np.ones(5) for place in range(6)]
    assert share_interval(ones, ones) is NoInterval.SPREAD
    assert share_interval([0 * each for each in ones], ones) is NoInterval.SPREAD
    assert share_interval(few, ones) is NoInterval.EACH
    assert share_interval(few[:5], ones[:5]) is NoInterval.RUNS


@pytest.mark.parametrize(
    "server",
    [
        {"kv_slots": 6},
        {
            "rules": "vllm-paged",
            "num_gpu_blocks": 320,
            "block_size": 16,
            "slot_tokens": 4096,
            "cost_model": "emulated-gpu",
        },
    ],
    ids=["slots", "paged"],
)
def test_the_table_and_python_show_what_the_simulator_reused(simulated: Simulated, server: dict[str, object]) -> None:
    conditions = [{"name": "base"}, {"name": "cold", "server": {"prefix_caching": False}}]
    changes = {"condition": conditions} if "rules" in server else {}
    runs = simulated(workload=RETURNING, replicates=2, server=server, **changes)
    where = ("--reuse-by-wait", "--runs", str(runs[0].path.parents[2]))
    summary = summarise(runs)
    rows = json.loads(harness("table", "small", *where, "--format", "json").stdout)
    assert rows == summary.reuse_by_wait_to_arrow().to_pylist()
    for condition in summary.conditions:
        mine = [row for row in rows if row["condition"] == condition.name]
        assert len(mine) >= 3
        assert sum(row["num_returns"] for row in mine) == condition.reuse.num_rearrivals == 2 * 6 * 3
        assert sum(row["num_reused"] for row in mine) == condition.reuse.num_reused
        assert {row["backend"] for row in mine} == {"sim"}
    told = harness("table", "small", *where, "--format", "csv").stdout
    assert len(list(csv.DictReader(io.StringIO(told)))) == len(rows)
    text = harness("table", "small", *where).stdout
    assert "Reuse by wait" in text
    assert "Predicted" in text
    assert f"{rows[0]['num_returns']}" in text


def test_only_replicates_that_all_conditions_have_are_counted(simulated: Simulated) -> None:
    runs = [run for run in simulated(workload=RETURNING, replicates=2) if run.label != "more/1"]
    rows = summarise(runs).reuse_by_wait_to_arrow().to_pylist()
    assert sum(row["num_returns"] for row in rows if row["condition"] == "base") == 6 * 3


def test_the_table_says_that_no_session_returns_and_refuses_two_tables_at_once(simulated: Simulated) -> None:
    (run, *_) = simulated(replicates=1, workload={**RETURNING, "requests_per_session": 1})
    where = ("--reuse-by-wait", "--runs", str(run.path.parents[2]))
    assert "No session returns" in harness("table", "small", *where).stdout
    assert json.loads(harness("table", "small", *where, "--format", "json").stdout) == []
    refused = harness("table", "small", *where, "--serving")
    assert refused.returncode == 2
    assert "--serving, --reuse-by-wait and --predicted are a table each" in refused.stderr
