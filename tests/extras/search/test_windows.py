"""Windows of longer lives are counted to the nanosecond, and a closed population is steady inside them."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from harness.clock import NS_PER_S
from harness.errors import PlanError
from harness.extras.search.run import search
from harness.extras.search.space import parse_space
from harness.extras.search.windows import users_of, window_figures, window_stats
from harness.model.engine import EngineConfig, load_cost_model
from harness.model.experiment import build_plan
from harness.model.plan.model import Plan, RequestPlan, SessionPlan
from harness.model.sim import plan_arrays, simulate
from harness.model.sim.draws import nominal
from harness.model.sim.kernel.arrays import PlanArrays
from harness.model.sim.simulate import run_batch
from harness.model.spec import WindowSpec, WorkloadSpec

COST = load_cost_model("paper")
EIGHT = EngineConfig(8, (1, 2, 4, 8), 8)


def closed(users: int, sessions_per_user: int, seed: int = 5) -> Plan:
    workload = WorkloadSpec(
        num_sessions=users * sessions_per_user, concurrency=users, requests_per_session=3, wait_cap_s=5.0
    )
    return build_plan(workload, seed, 0)


def test_a_window_over_the_whole_life_counts_everything_once() -> None:
    plan = closed(6, 4)
    arrays = plan_arrays([plan])
    result = simulate(plan, EIGHT)
    whole = window_stats(arrays, run_batch(arrays, EIGHT, COST, with_records=True), 0, result.end_ns + 1)
    assert whole.device_ns == result.device_ns
    assert whole.wait_session_ns == result.wait_session_ns
    assert whole.completed == plan.num_requests
    assert whole.evictions == result.num_evictions
    assert whole.cached_tokens == result.cached_tokens


def test_a_request_that_its_client_leaves_before_it_is_admitted_waits_for_no_prefill() -> None:
    hasty = RequestPlan(0, 1, 2, abort_after_ns=1)
    sessions = (
        SessionPlan(0, 0, None, None, (hasty, RequestPlan(0, 1, 2), hasty)),
        SessionPlan(1, 0, 0, None, (hasty,)),
    )
    plan = Plan("drawn", 0, 0, "as-drawn", 0, (1000, 150_000), sessions)
    arrays, one = plan_arrays([plan]), EngineConfig(4, (1, 2, 4), 5, rules="paper")
    outcome = run_batch(arrays, one, COST, with_records=True)
    assert outcome.requests["admitted_ns"].min() == -1
    assert window_stats(arrays, outcome, 0, 1 << 50).wait_session_ns == simulate(plan, one).wait_session_ns == 0


def test_windows_side_by_side_add_up_to_the_whole() -> None:
    arrays = plan_arrays([closed(6, 4)])
    outcome = run_batch(arrays, EIGHT, COST, with_records=True)
    edges = [0, 1_234_567_891, 5_000_000_000, 9_999_999_999, 1 << 50]
    parts = [window_stats(arrays, outcome, first, last) for first, last in pairwise(edges)]
    whole = window_stats(arrays, outcome, 0, 1 << 50)
    for name in ("device_ns", "wait_session_ns", "completed", "cached_tokens", "evictions"):
        assert sum(getattr(part, name) for part in parts) == getattr(whole, name)


def test_the_window_begins_when_every_user_has_finished_so_many_requests() -> None:
    plan = closed(5, 6)
    arrays = plan_arrays([plan])
    found = window_figures(nominal(arrays, COST), EIGHT, WindowSpec(after_requests=4, measure_s=3.0))
    user = users_of(arrays.sessions["after"])[arrays.requests["session"]]
    completed = run_batch(arrays, EIGHT, COST, with_records=True).requests["completed_ns"]
    finished = [int((completed[user == one] <= found.start_ns).sum()) for one in range(5)]
    assert min(finished) == 4
    assert found.end_ns - found.start_ns == 3 * NS_PER_S


def test_a_window_that_outlasts_a_user_is_refused() -> None:
    arrays = plan_arrays([closed(4, 2)])
    with pytest.raises(PlanError, match="already left"):
        window_figures(nominal(arrays, COST), EIGHT, WindowSpec(after_requests=1, measure_s=1000.0))
    with pytest.raises(PlanError, match="fewer than"):
        window_figures(nominal(arrays, COST), EIGHT, WindowSpec(after_requests=7, measure_s=1.0))


def device_s_per_request_of_halves(arrays: PlanArrays) -> list[float]:
    whole = window_figures(nominal(arrays, COST), EIGHT, WindowSpec(after_requests=6, measure_s=60))
    outcome = run_batch(arrays, EIGHT, COST, with_records=True)
    edges = np.linspace(whole.start_ns, whole.end_ns, 3).astype(np.int64).tolist()
    halves = [window_stats(arrays, outcome, *part) for part in pairwise(edges)]
    return [half.device_ns / NS_PER_S / half.completed for half in halves]


def test_a_closed_population_is_steady_after_its_first_requests() -> None:
    halves = np.array([device_s_per_request_of_halves(plan_arrays([closed(6, 25, seed)])) for seed in range(8)])
    first, second = halves.mean(axis=0)
    spread = halves.std(axis=0, ddof=1).max() / np.sqrt(len(halves))
    assert abs(first - second) < 3 * spread


def test_candidates_can_be_judged_by_their_steady_state(tmp_path: Path) -> None:
    spec = parse_space(
        {
            "name": "steady",
            "max_num_seqs": [8],
            "kv_slots": ["max_num_seqs", 16],
            "buckets": {"most": 3},
            "inputs": {
                "users": [6],
                "search_seeds": [1],
                "evaluation_seeds": [2],
                "replicates": 2,
                "sessions_per_user": 12,
                "workload": {"requests_per_session": 3, "wait_cap_s": 2.0},
            },
            "window": {"after_requests": 4, "measure_s": 15},
        },
        where="test",
    )
    result = search(spec, tmp_path)
    best = result.candidate(result.ranked[0])
    assert best.kv_slots == 16
    row = result.ledger.to_pylist()[result.ranked[0]]
    base = result.baseline
    base_per_request = base["search_device_ns"][0] / base["search_completed"][0]
    per_request = row["search_device_ns"][0] / row["search_completed"][0]
    assert result.scores.sum_seconds.min() == pytest.approx(per_request / base_per_request)
