"""Serving figures: from stamps to percentiles, rates, goodput and what bounds a typical run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from harness.analysis.serving import Latencies, Percentile, Rate, latencies, percentiles_of, with_bounds
from harness.analysis.stats import NoInterval
from harness.analysis.summary import summarise
from harness.errors import SpecError
from harness.extras.peers.vllm_bench import result_file
from harness.measure.records.store import RunStore
from harness.model.sim import simulate
from harness.model.spec import parse_experiment
from harness.present.export.measured import measured
from harness.present.report import serving_tables
from harness.present.report.answers import bound_words
from harness.runner import run_experiment
from tests.analysis.conftest import Simulated
from tests.measure.server.test_clean_start import null_experiment
from tests.support.experiments import small_experiment
from tests.support.plain_server import PlainServer, plain_server

SLOW = {"num_sessions": 6, "wait_cap_s": 2.0}
BASE = [{"name": "base"}]


def test_times_to_the_first_token_and_between_tokens_are_the_simulators(simulated: Simulated) -> None:
    run = simulated(workload=SLOW)[0]
    told = simulate(run.plan, run.server, run.cost_model).requests
    found = latencies(run)
    first, done = (told.column(name).to_numpy() for name in ("first_token_ns", "completed_ns"))
    due = run.table("requests").column("due_ns").to_numpy()
    assert found.ttft_ns.tolist() == (first - due).tolist()
    assert found.e2e_ns.tolist() == (done - due).tolist()
    tokens = run.table("requests").column("completion_tokens").to_numpy()
    assert found.tpot_ns == pytest.approx((done - first) / (tokens - 1))
    assert len(found.itl_ns) == int((tokens - 1).sum())
    assert np.all(found.queue_ns <= found.ttft_ns)


def test_sql_and_python_say_the_same(simulated: Simulated) -> None:
    runs = simulated(workload=SLOW)
    rows = RunStore(runs[0].path.parents[2]).query(
        "select ttft_ns, tpot_ns, e2e_ns, queue_ns, prefix from valid_latencies where condition = 'base' "
        "and replicate = 1 order by session, request"
    )
    found = latencies(next(run for run in runs if run.label == "base/1"))
    for name in ("ttft_ns", "tpot_ns", "e2e_ns", "queue_ns"):
        assert rows.column(name).to_numpy() == pytest.approx(getattr(found, name))
    assert rows.column("prefix").to_pylist() == found.prefix.tolist()


def test_figures_are_grouped_by_turn_and_prefix_with_intervals_over_runs(simulated: Simulated) -> None:
    serving = summarise(simulated(workload=SLOW, replicates=6)).serving_of("base")
    assert {"all", "first", "turn 0", "turn 1"} <= set(serving.groups)
    everything, again = serving.of("ttft"), serving.of("ttft", "turn 1")
    assert everything.num_values == 72
    assert again.num_values == 36
    assert everything.at(0.5).interval.num_units == 6
    assert everything.at(0.9).why is NoInterval.VALUES


def test_goodput_counts_what_keeps_the_limits_and_the_window_leaves_the_start_out(simulated: Simulated) -> None:
    all_of_them = {"ttft_ms": 1e6, "tpot_ms": 1e6, "itl_ms": 1e6, "e2e_ms": 1e6}
    generous, strict, late = (
        summarise(simulated(workload=SLOW, condition=BASE, **changes)).serving[0]
        for changes in ({"slo": all_of_them}, {"slo": {"ttft_ms": 1e-3}}, {"window": {"warmup_s": 0.001}})
    )
    assert generous.goodput_per_s == generous.requests_per_s
    assert strict.good_share == 0
    assert strict.goodput_per_s == Rate(0.0, None, none_of=strict.num_requests, num_runs=strict.num_runs)
    assert strict.goodput_per_s.most_share == pytest.approx(1 - 0.05 ** (1 / strict.num_runs))
    assert late.num_requests == generous.num_requests / 2
    assert late.goodput_per_s is None


def test_rates_are_in_the_rows_for_programs_and_none_of_so_many_is_said(simulated: Simulated) -> None:
    summary = summarise(simulated(workload=SLOW, condition=BASE, slo={"ttft_ms": 1e-3}))
    rows = {row["metric"]: row for row in summary.serving_to_arrow().to_pylist() if row["group"] == "all"}
    assert rows["tokens_per_s"]["mean"] > 0
    assert rows["requests_per_s"]["mean_low"] < rows["requests_per_s"]["mean"] < rows["requests_per_s"]["mean_high"]
    assert (rows["goodput_per_s"]["mean"], rows["goodput_per_s"]["mean_low"]) == (0, None)
    num_requests, num_runs = rows["goodput_per_s"]["none_of"], summary.serving[0].num_runs
    most = 100 * (1 - 0.05 ** (1 / num_runs))
    (table, *_) = serving_tables(summary)
    assert f"goodput 0 of {num_requests} (< {most:.2g} % of the requests, each run one draw)" in table.name


def test_means_and_rates_of_tokens_are_those_of_vllm_bench_serve(simulated: Simulated) -> None:
    run = simulated(workload=SLOW, condition=BASE, replicates=1)[0]
    bench, summary = result_file(measured(run)), summarise([run])
    rows = {row["metric"]: row for row in summary.serving_to_arrow().to_pylist() if row["group"] == "all"}
    of_bench = {"ttft": "ttft", "tpot": "tpot", "itl": "itl", "e2e": "e2el"}
    means = {name: rows[name]["mean"] for name in of_bench}
    assert means == pytest.approx({name: bench[f"mean_{theirs}_ms"] for name, theirs in of_bench.items()})
    assert rows["input_tokens_per_s"]["mean"] == pytest.approx(bench["total_input_tokens"] / bench["duration"])
    assert rows["total_tokens_per_s"]["mean"] == pytest.approx(bench["total_token_throughput"])
    (table, *_) = serving_tables(summary)
    assert f"{bench['total_token_throughput']:,.1f} in all" in table.name
    assert f"{bench['mean_ttft_ms']:,.1f}" == table.rows[0][table.columns.index("mean")]


def test_a_percentile_lies_where_it_can_be() -> None:
    late = Percentile(0.5, 273.1, None, None, None)
    low, high = np.full(3, 294.65), np.full(3, 310.0)
    moved = with_bounds(late, low, high)
    assert (moved.value, moved.at_least, moved.at_most) == (294.65, 294.65, 310.0)
    within = with_bounds(Percentile(0.5, 294.65, None, None, None), low, high)
    assert (within.at_least, within.at_most) == (None, 310.0), "only one that was moved is a bound"
    assert "\u2265" in bound_words(replace(moved, value=294.65e6, at_least=294.65e6, at_most=None))


def test_a_window_can_begin_when_every_user_has_finished_a_request(simulated: Simulated) -> None:
    (run, *_) = simulated(workload=SLOW, condition=BASE, replicates=1, window={"after_requests": 1})
    requests = run.table("requests").to_pydict()
    first_done = max(
        min(done for done, owner in zip(requests["done_ns"], requests["session"], strict=True) if owner == session)
        for session in set(requests["session"])
    )
    due_later = sum(due >= first_done for due in requests["due_ns"])
    assert 0 < due_later < len(requests["due_ns"])
    assert len(latencies(run).session) == due_later
    (never, *_) = simulated(workload=SLOW, condition=BASE, replicates=1, window={"after_requests": 1000})
    assert len(latencies(never).session) == 0


LATENCY_OF_TARGET: dict[str, Callable[[Latencies, int], float]] = {
    "ttft_ms": lambda one, row: one.ttft_ns[row],
    "tpot_ms": lambda one, row: one.itl_ns[one.itl_row == row].mean(),
    "itl_ms": lambda one, row: one.itl_ns[one.itl_row == row].max(),
    "itl_percentile": lambda one, row: float(np.percentile(one.itl_ns[one.itl_row == row], 90)),
    "e2e_ms": lambda one, row: one.e2e_ns[row],
}


@pytest.mark.parametrize("slo", LATENCY_OF_TARGET)
def test_each_target_limits_the_latency_that_it_names(simulated: Simulated, slo: str) -> None:
    observed = [latencies(run) for run in simulated(workload=SLOW) if run.condition == "base"]
    values = [LATENCY_OF_TARGET[slo](one, row) / 1e6 for one in observed for row in range(len(one.turn))]
    limit = float(np.mean(values))
    targets = {"itl_ms": limit, "itl_percentile": 90} if slo == "itl_percentile" else {slo: limit}
    found = summarise(simulated(workload=SLOW, condition=BASE, slo=targets)).serving_of("base")
    assert found.good_share == pytest.approx(np.mean([value <= limit for value in values]))
    assert 0 < found.good_share < 1


def test_a_percentile_of_gaps_without_a_limit_is_refused() -> None:
    with pytest.raises(SpecError, match="itl_percentile limits nothing without itl_ms"):
        parse_experiment({**small_experiment().model_dump(mode="json"), "slo": {"itl_percentile": 99}}, where="x.toml")


def test_without_streaming_nothing_is_said_of_tokens(simulated: Simulated) -> None:
    serving = summarise(simulated(workload=SLOW, condition=BASE, client={"stream": False})).serving[0]
    assert serving.of("ttft") is None
    assert serving.of("itl") is None
    assert serving.of("e2e") is not None


def test_rare_queues_have_no_interval_where_arrivals_are_open() -> None:
    rng = np.random.default_rng(5)
    even = [rng.exponential(size=40) for _ in range(104)]
    # One run in eight holds a long queue.
    rare = [*even[:91], *(run + 10 for run in even[91:])]
    shown = {
        place: [one.interval is not None for one in percentiles_of(runs, "runs", True, 800)]
        for place, runs in enumerate((even, rare))
    }
    assert shown == {0: [True, True, False], 1: [True, False, False]}
    assert percentiles_of(rare, "runs", True, 800)[1].why is NoInterval.RARE


@pytest.mark.parametrize("is_open", [False, True])
def test_a_dozen_runs_may_hold_none_of_the_runs_that_are_one_in_ten(is_open: bool) -> None:
    rng = np.random.default_rng(5)
    runs = [rng.exponential(size=40) for _ in range(100)]
    shown = {
        count: [one.interval is not None for one in percentiles_of(runs[:count], "runs", is_open, 5000)]
        for count in (6, 12, 99, 100)
    }
    no_p90 = [True, False, False]
    assert shown == {6: no_p90, 12: no_p90, 99: no_p90, 100: [True, True, False]}
    # Gaps between tokens follow the steps of the server.
    assert percentiles_of(runs[:6], "runs", is_open, None)[1].interval is not None


def test_rare_runs_and_sessions_have_no_interval_where_arrivals_are_closed() -> None:
    rng = np.random.default_rng(5)
    even = [rng.exponential(size=40) for _ in range(104)]
    rare = [*even[:91], *(run + 10 for run in even[91:])]
    shown = {
        place: [one.interval is not None for one in percentiles_of(runs, "runs", False, num_sessions)]
        for place, (runs, num_sessions) in enumerate(((even, 104), (rare, 104), (even[:6], 18)))
    }
    # Of 18 sessions those that are one in two may be missing.
    assert shown == {0: [True, True, False], 1: [True, False, False], 2: [False, False, False]}


def test_sessions_that_start_one_by_one_are_open_arrivals(simulated: Simulated) -> None:
    apart = {**SLOW, "start_offset_s": 0.5}
    in_turns = {**SLOW, "concurrency": 2}
    runs = [simulated(workload=one, condition=BASE, replicates=1)[0] for one in (SLOW, apart, in_turns)]
    assert [latencies(run).has_open_arrivals for run in runs] == [False, True, False]


def test_a_run_with_too_few_requests_for_its_own_percentile_leaves_the_typical_run_without_a_bound() -> None:
    runs = [np.arange(100, dtype=np.float64) + k for k in range(7)]
    assert percentiles_of(runs, "runs", False, None)[2].typical_bound == max(np.quantile(run, 0.99) for run in runs)
    assert percentiles_of([*runs, np.arange(99, dtype=np.float64)], "runs", False, None)[2].typical_bound is None


@pytest.mark.live
def test_chunks_that_were_read_together_have_no_gaps_of_0(tmp_path: Path) -> None:
    with plain_server(PlainServer(has_metrics=True, gives_token_ids=True)) as server:
        run_experiment(null_experiment(server.url, 1), runs_root=tmp_path).require_valid()
    for run in RunStore(tmp_path).sealed("null"):
        assert np.all(latencies(run).itl_ns > 0), "the server sends each answer as one piece"
