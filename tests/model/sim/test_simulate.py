"""The simulator gives what a step-by-step walk gives, and the paper's own predictions to the digit printed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.compiled.records import record_as_dict
from harness.errors import PlanError
from harness.model.engine import EngineConfig, load_cost_model
from harness.model.experiment import build_plan
from harness.model.plan.model import Plan, RequestPlan, SessionPlan
from harness.model.sim import SimResult, plan_arrays, simulate
from harness.model.sim.simulate import run_batch
from harness.model.spec import ServerSpec, UniformLength, WorkloadSpec
from harness.stacks.rbln.rules.kv_rules import RULE_SETS
from tests.support.naive import naive_run

BASELINE = ServerSpec(rules="paper")
MORE_SLOTS = ServerSpec(rules="paper", max_num_seqs=16, decode_buckets=(1, 2, 4, 8, 16))
SELECTED = ServerSpec(rules="paper", max_num_seqs=16, decode_buckets=(1, 4, 6, 8, 10, 16))


def plan_of(sessions: list[SessionPlan], shared_prefix_tokens: int = 0) -> Plan:
    return Plan("drawn", 0, 0, "as-drawn", shared_prefix_tokens, (0, 1000), tuple(sessions))


def decode_tokens(plan: Plan) -> int:
    """Decode work of a plan: the prefill gives the first token of each request."""
    return sum(request.generate_tokens - 1 for session in plan.sessions for request in session.requests)


def paper_plan(num_sessions: int, seed: int, block: int) -> Plan:
    return build_plan(WorkloadSpec(source="paper", num_sessions=num_sessions), seed, block)


def paper_ratio(server: ServerSpec, num_sessions: int, seed: int, rules: str) -> float:
    """Summed device seconds of three blocks over the baseline's."""
    plans = [paper_plan(num_sessions, seed, block) for block in range(3)]
    changed = sum(simulate(plan, server.model_copy(update={"rules": rules})).device_ns for plan in plans)
    baseline = sum(simulate(plan, BASELINE.model_copy(update={"rules": rules})).device_ns for plan in plans)
    return changed / baseline


@pytest.mark.parametrize(
    ("num_sessions", "seed", "more_slots", "selected"),
    [
        (6, 20261000, 0.9610, 0.9466),
        (8, 20261000, 0.9101, 0.8971),
        (10, 20261000, 0.9213, 0.8899),
        (6, 20261100, 0.9874, 0.9713),
    ],
)
def test_the_papers_predictions(num_sessions: int, seed: int, more_slots: float, selected: float) -> None:
    assert round(paper_ratio(MORE_SLOTS, num_sessions, seed, "paper"), 4) == more_slots
    assert round(paper_ratio(SELECTED, num_sessions, seed, "paper"), 4) == selected


@pytest.mark.parametrize(
    ("num_sessions", "seed", "more_slots", "selected"),
    [
        (6, 20261000, 0.9576, 0.9432),
        (8, 20261000, 0.8845, 0.8718),
        (10, 20261000, 0.9037, 0.8729),
        (6, 20261100, 0.9874, 0.9713),
    ],
)
def test_the_papers_predictions_with_a_dummy_slot(
    num_sessions: int, seed: int, more_slots: float, selected: float
) -> None:
    assert round(paper_ratio(MORE_SLOTS, num_sessions, seed, "paper+dummy"), 4) == more_slots
    assert round(paper_ratio(SELECTED, num_sessions, seed, "paper+dummy"), 4) == selected


def summed_ratio(server: ServerSpec, seeds: tuple[int, ...], counts: tuple[int, ...]) -> float:
    """The search's score: summed device seconds over all seeds, counts and blocks, over the baseline's."""
    arrays = plan_arrays([paper_plan(n, seed, block) for seed in seeds for n in counts for block in range(3)])
    cost = load_cost_model("paper")
    changed, baseline = (
        totals["decode_ns"].sum() + totals["prefill_ns"].sum()
        for totals in (run_batch(arrays, EngineConfig.from_server(spec), cost).totals for spec in (server, BASELINE))
    )
    return float(changed / baseline)


SEARCH_SEEDS = (20260910, 20260921, 20260932)
EVALUATION_SEEDS = (20260943, 20260954, 20260965)


def test_the_papers_search_figures() -> None:
    assert round(summed_ratio(SELECTED, SEARCH_SEEDS, (6, 8, 10)), 6) == 0.920931
    assert round(summed_ratio(SELECTED, EVALUATION_SEEDS, (6, 8, 10)), 6) == 0.906644
    assert round(summed_ratio(MORE_SLOTS, EVALUATION_SEEDS, (6, 8, 10)), 4) == 0.9279
    finer = ServerSpec(rules="paper", decode_buckets=(1, 4, 6, 8))
    assert round(summed_ratio(finer, EVALUATION_SEEDS, (6, 8, 10)), 4) == 0.9929


def test_the_papers_selection_without_ten_sessions() -> None:
    server = ServerSpec(rules="paper", max_num_seqs=16, decode_buckets=(1, 4, 5, 6, 8, 16))
    assert round(summed_ratio(server, SEARCH_SEEDS, (6, 8)), 4) == 0.9362
    assert round(summed_ratio(server, EVALUATION_SEEDS, (6, 8)), 4) == 0.9237


def test_many_plans_at_once_give_what_each_gives_alone() -> None:
    plans_ = [paper_plan(n, 5, block) for n in (1, 6, 10) for block in range(2)]
    for server in (BASELINE, ServerSpec(), ServerSpec(kv_slots=4)):
        totals = run_batch(plan_arrays(plans_), EngineConfig.from_server(server), load_cost_model("paper")).totals
        for place, plan in enumerate(plans_):
            alone, total = simulate(plan, server), record_as_dict(totals, place)
            assert (total["decode_ns"], total["prefill_ns"]) == (alone.decode_ns, alone.prefill_ns)
            assert total["evictions"] == alone.num_evictions


def everything(result: SimResult) -> tuple[object, ...]:
    return (
        result.requests.to_pylist(),
        result.steps.to_pylist(),
        result.evictions.to_pylist(),
        result.decode_histogram,
        result.decode_ns,
        result.prefill_ns,
        result.wait_session_ns,
        result.end_ns,
    )


def single_steps(result: SimResult) -> list[tuple[int, str, int, int]]:
    return [
        (row["start_ns"] + index * row["duration_ns"], row["kind"], row["n"], row["duration_ns"])
        for row in result.steps.to_pylist()
        for index in range(row["count"])
    ]


def check_against_naive(plan: Plan, config: EngineConfig, cost_name: str) -> None:
    cost = load_cost_model(cost_name)
    result, naive = simulate(plan, config, cost), naive_run(plan, config, cost)
    rows = {
        (row["session"], row["request"]): [
            row[name] for name in ("cached_tokens", "arrival_ns", "admitted_ns", "first_token_ns", "completed_ns")
        ]
        for row in result.requests.to_pylist()
    }
    assert rows == naive.requests
    assert single_steps(result) == naive.steps
    assert [(row["at_ns"], row["slot"], row["caller"]) for row in result.evictions.to_pylist()] == naive.evictions
    assert (result.decode_ns, result.prefill_ns) == (naive.decode_ns, naive.prefill_ns)
    assert result.wait_session_ns == naive.wait_session_ns


@st.composite
def plans(draw: st.DrawFn, longest_stream: int = 2000) -> Plan:
    """Sessions of a few requests: extended, truncated, chained, continued, with and without waits."""
    sessions: list[SessionPlan] = []
    ends: list[int] = []
    shared = draw(st.sampled_from([0, 0, 300]))
    for index in range(draw(st.integers(1, 7))):
        after = draw(st.sampled_from([None, *range(index)])) if index else None
        continues = after if after is not None and draw(st.booleans()) else None
        stream = 0 if continues is None else ends[continues]
        requests: list[RequestPlan] = []
        for _ in range(draw(st.integers(1, 4))):
            keep = stream if draw(st.integers(0, 3)) else draw(st.integers(0, stream))
            new, generate = draw(st.integers(1, 500)), draw(st.integers(1, 200))
            if keep + new + generate > longest_stream:
                keep = 0
            wait_ns = draw(st.sampled_from([0, 1_000_000, 50_000_000, 12_345_678_901]))
            requests.append(RequestPlan(keep, new, generate, wait_ns))
            stream = keep + new + generate
        ends.append(stream)
        offset_ns = draw(st.sampled_from([0, 0, 7_000_000, 900_000_000]))
        sessions.append(SessionPlan(index, offset_ns, after, continues, tuple(requests)))
    return plan_of(sessions, shared)


VENDOR_RULES = [name for name, rules in RULE_SETS.items() if rules.has_inner_blocks]
ACTIVE = [name for name, rules in RULE_SETS.items() if rules.has_active_limit]


@settings(max_examples=20)
@given(
    plan=plans(),
    limit=st.integers(1, 5),
    slots=st.integers(2, 7),
    rules=st.sampled_from(VENDOR_RULES),
    cost_name=st.sampled_from(["paper", "context-1-2-4-8"]),
)
def test_the_simulator_walks_as_the_naive_one(plan: Plan, limit: int, slots: int, rules: str, cost_name: str) -> None:
    check_against_naive(plan, EngineConfig(limit, (limit,), slots, slot_tokens=2048, rules=rules), cost_name)


@settings(max_examples=12)
@given(plan=plans(), limit=st.integers(1, 5), slots=st.integers(2, 7), rules=st.sampled_from(ACTIVE), data=st.data())
def test_the_simulator_walks_as_the_naive_one_with_fewer_active_than_compiled(
    plan: Plan, limit: int, slots: int, rules: str, data: st.DataObject
) -> None:
    active = data.draw(st.integers(1, limit))
    config = EngineConfig(limit, (limit,), slots, slot_tokens=2048, rules=rules, max_active_seqs=active)
    check_against_naive(plan, config, "paper")


@settings(max_examples=12)
@given(plan=plans(), limit=st.integers(1, 5), slots=st.integers(9, 24), rules=st.sampled_from(VENDOR_RULES))
def test_the_simulator_walks_as_the_naive_one_over_partitions(plan: Plan, limit: int, slots: int, rules: str) -> None:
    config = EngineConfig(limit, (limit,), slots, slot_tokens=2048, partition_tokens=256, rules=rules)
    check_against_naive(plan, config, "paper")


@settings(max_examples=12)
@given(
    plan=plans(),
    limit=st.integers(1, 5),
    slots=st.integers(2, 7),
    rules=st.sampled_from([name for name, rules in RULE_SETS.items() if not rules.is_paged]),
    cost_name=st.sampled_from(["paper", "context-1-2-4-8"]),
    most=st.integers(1, 9),
)
def test_skipping_equal_steps_changes_nothing(
    plan: Plan, limit: int, slots: int, rules: str, cost_name: str, most: int
) -> None:
    config = EngineConfig(limit, (limit,), slots, slot_tokens=2048, rules=rules)
    cost = load_cost_model(cost_name)
    skipped = simulate(plan, config, cost)
    assert everything(simulate(plan, config, cost, max_steps_per_advance=1)) == everything(skipped)
    assert everything(simulate(plan, config, cost, max_steps_per_advance=most)) == everything(skipped)


def test_decode_work_is_conserved() -> None:
    plan = paper_plan(10, 20261000, 0)
    for server in (BASELINE, SELECTED, ServerSpec()):
        result = simulate(plan, server)
        assert sum(n * steps for n, steps in enumerate(result.decode_histogram)) == decode_tokens(plan)
        assert result.computed_tokens + result.cached_tokens == sum(result.requests["prompt_tokens"].to_pylist())
        assert result.device_ns == sum(row["count"] * row["duration_ns"] for row in result.steps.to_pylist())


def test_without_waits_both_grids_give_the_same_histogram() -> None:
    plan = paper_plan(6, 20261000, 0).with_treatment("no-waits")
    histograms = {
        simulate(plan, ServerSpec(decode_buckets=buckets)).decode_histogram
        for buckets in ((1, 2, 4, 8), (1, 2, 4, 6, 8))
    }
    assert len(histograms) == 1


def test_w_counts_those_who_were_ready_to_decode() -> None:
    first = SessionPlan(0, 0, None, None, (RequestPlan(0, 100, 400, 0),))
    second = SessionPlan(1, 1_000_000_000, None, None, (RequestPlan(0, 100, 10, 0),))
    result = simulate(plan_of([first, second]), ServerSpec())
    assert result.wait_session_ns == load_cost_model("paper").prefill_ns(100)


def test_an_active_limit_lowers_the_batch_and_nothing_else() -> None:
    plan = paper_plan(10, 20261000, 0)
    compiled = simulate(plan, ServerSpec(rules="vendor-0.12.1"))
    limited = simulate(plan, ServerSpec(rules="vendor-0.12.1", max_active_seqs=5))
    assert max(n for n, steps in enumerate(compiled.decode_histogram) if steps) == 8
    assert max(n for n, steps in enumerate(limited.decode_histogram) if steps) == 5
    assert sum(n * steps for n, steps in enumerate(limited.decode_histogram)) == decode_tokens(plan)


def test_interpolated_buckets_are_named() -> None:
    assert simulate(paper_plan(6, 1, 0), SELECTED).interpolated_buckets == (6, 10, 16)


def test_simultaneous_arrivals_go_by_session() -> None:
    sessions = [SessionPlan(index, 0, None, None, (RequestPlan(0, 50 + index, 5, 0),)) for index in range(4)]
    admitted = simulate(plan_of(sessions), ServerSpec()).requests["admitted_ns"].to_pylist()
    assert admitted == sorted(admitted)


def test_a_request_that_can_never_be_admitted_is_an_error() -> None:
    plan = plan_of([SessionPlan(0, 0, None, None, (RequestPlan(0, 1500, 5, 0),))])
    config = EngineConfig(4, (4,), 3, slot_tokens=2048, partition_tokens=512)
    with pytest.raises(PlanError, match="never be admitted"):
        simulate(plan, config)


def test_a_request_too_long_for_its_slot_is_named() -> None:
    plan = plan_of([SessionPlan(0, 0, None, None, (RequestPlan(0, 8000, 300, 0),))])
    with pytest.raises(PlanError, match="session 0, request 0"):
        simulate(plan, ServerSpec())


def test_the_repaired_index_saves_reuse_of_long_prompts_only() -> None:
    def reused(low: int, high: int, rules: str) -> int:
        workload = WorkloadSpec(num_sessions=8, requests_per_session=3, prompt_tokens=UniformLength(low=low, high=high))
        config = EngineConfig(8, (1, 2, 4, 8), 12, rules=rules)
        return sum(simulate(build_plan(workload, 7, block), config).cached_tokens for block in range(12))

    assert reused(800, 1600, "vendor-0.11.1") == reused(800, 1600, "vendor-0.11.2")
    assert reused(5000, 7000, "vendor-0.11.1") < reused(5000, 7000, "vendor-0.11.2")
