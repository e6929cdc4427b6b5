"""Bounds of latencies whose tokens were read late: they hold what the chunks can have been, and nothing else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from harness.analysis.compare.measures import MEASURES, bound_over, value_over
from harness.analysis.serving import TokenChunks, late_reads, latencies, metric_bounds, serving_figures, serving_rows
from harness.clock import NS_PER_MS
from harness.measure.records.schema import CHUNKS, with_newer_columns
from harness.measure.records.store import RunStore
from harness.runner import run_experiment
from tests.analysis.conftest import Simulated
from tests.measure.server.test_clean_start import null_experiment
from tests.support.plain_server import PlainServer, plain_server


def chunks_of(*rows: tuple[int, int, int, int]) -> TokenChunks:
    """row, at, tokens, earliest of each chunk."""
    return TokenChunks(*(np.array(column, dtype=np.int64) for column in zip(*rows, strict=True)))


def test_a_time_can_be_what_its_chunks_allow() -> None:
    # Request 0: the first two chunks in one read, between 60 and 100; then exact ones. Request 1: exact.
    exact = [(1, 50, 1, 50), (1, 70, 2, 70)]
    chunks = chunks_of((0, 100, 1, 60), (0, 100, 1, 60), (0, 130, 1, 130), (0, 160, 1, 160), *exact)
    late = late_reads(chunks, np.array([10, 20]), np.array([4, 3]))
    assert late.ttft_at_least_ns.tolist() == pytest.approx([50, np.nan], nan_ok=True)
    assert late.tpot_at_least_ns.tolist() == pytest.approx([np.nan, np.nan], nan_ok=True)
    assert late.tpot_at_most_ns.tolist() == pytest.approx([100 / 3, np.nan], nan_ok=True)
    assert late.itl_row.tolist() == [0, 0, 0, 1, 1]
    assert late.itl_at_least_ns.tolist() == [0, 30, 30, 10, 10]
    assert late.itl_at_most_ns.tolist() == [40, 70, 30, 10, 10]
    assert late_reads(chunks_of(*exact), np.array([10, 20]), np.array([4, 3])) is None


def test_a_last_chunk_that_came_late_bounds_tpot_from_below() -> None:
    late = late_reads(chunks_of((0, 50, 1, 50), (0, 90, 2, 70)), np.array([0]), np.array([3]))
    assert (late.tpot_at_least_ns.tolist(), np.isnan(late.tpot_at_most_ns).all()) == ([10.0], True)


def test_a_table_of_an_earlier_release_has_no_bounds() -> None:
    now = pa.Table.from_pylist([dict.fromkeys(CHUNKS.names, 1) | {"is_coalesced": True}], CHUNKS)
    read = with_newer_columns("chunks", now.drop_columns(["earliest_ns"]))
    assert read.schema == CHUNKS
    assert read["earliest_ns"].to_pylist() == [None]


@pytest.mark.live
def test_answers_that_come_in_one_piece_carry_their_bounds_everywhere(tmp_path: Path) -> None:
    with plain_server(PlainServer(has_metrics=True, gives_token_ids=True)) as server:
        run_experiment(null_experiment(server.url, 1), runs_root=tmp_path).require_valid()
    run = next(iter(RunStore(tmp_path).sealed("null")))
    observed = latencies(run)
    least, most = metric_bounds(observed, "ttft")
    assert np.all(least <= most)
    assert np.any(least < most)
    rows = RunStore(tmp_path).query(
        f"select ttft_ns, ttft_at_least_ns, tpot_at_least_ns, tpot_at_most_ns from latencies "
        f"where condition = '{run.condition}' order by session, request"
    )
    for name in ("ttft_at_least_ns", "tpot_at_least_ns", "tpot_at_most_ns"):
        in_sql = rows[name].to_numpy(zero_copy_only=False).astype(np.float64)
        assert in_sql == pytest.approx(getattr(observed.late, name), nan_ok=True)
    rows = serving_rows([serving_figures(run.condition, [run])])
    (shown,) = [row for row in rows if (row["metric"], row["group"]) == ("ttft", "all")]
    assert shown["p50_at_most"] is None
    assert shown["mean_at_least"] == pytest.approx(least.mean() / NS_PER_MS)
    assert shown["mean_at_least"] < shown["mean"] == pytest.approx(most.mean() / NS_PER_MS)
    median_ms, bound_ms = value_over(MEASURES["ttft_p50"], [run]), bound_over(MEASURES["ttft_p50"], [run], "at_least")
    assert bound_ms == pytest.approx(shown["p50_at_least"])
    assert bound_ms < median_ms


def test_a_simulated_run_has_no_bounds(simulated: Simulated) -> None:
    run = simulated(workload={"num_sessions": 6, "wait_cap_s": 2.0})[0]
    assert latencies(run).late is None
    assert {bound_over(measure, [run], end) for measure in MEASURES.values() for end in measure.ends} == {None}
