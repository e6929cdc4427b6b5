"""vLLM's scheduler with paged KV memory: known answers.

What vLLM itself decides is compared step by step in ``tests/differential``.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import PlanError, SpecError
from harness.model.engine import DECODE, PREFILL, CostModel, Step
from harness.model.engine.config import EngineConfig
from harness.model.engine.paged import PagedScheduler
from harness.stacks.rbln.rules.kv_rules import PAGED
from tests.support.paged_in_steps import scheduler_differences

US = 10**9
COSTS = CostModel("known", "this test", {1: 10 * US, 8: 40 * US}, chunk_step_fs=5 * US, chunk_token_fs=US)
"""Decode steps of 10 to 40 us; a part of a prompt costs 5 us a step and 1 us a token."""


def test_drawn_operations_get_the_same_from_the_naive_scheduler() -> None:
    for seed in range(10):
        assert list(scheduler_differences(seed)) == [], f"seed {seed}"


def server(
    *,
    blocks: int = 100,
    seqs: int = 4,
    budget: int = 64,
    longest: int = 256,
    threshold: int = 0,
    ahead: bool = False,
    caps_lone: bool = False,
) -> PagedScheduler:
    config = EngineConfig(
        max_num_seqs=seqs,
        decode_buckets=(1, 2, 4),
        num_gpu_blocks=blocks,
        block_tokens=16,
        max_num_batched_tokens=budget,
        slot_tokens=longest,
        long_prefill_tokens=threshold,
        async_scheduling=ahead,
        rules="vllm-paged-0.30" if caps_lone else PAGED,
    )
    return PagedScheduler(config, COSTS)


def keys(name: int, count: int = 16) -> list[int]:
    """Keys of a text that shares nothing with another name's."""
    return [1000 * name + place for place in range(count)]


def steps_until_idle(scheduler: PagedScheduler) -> list[Step]:
    steps: list[Step] = []
    while scheduler.has_work:
        steps.append(scheduler.schedule())
        scheduler.finish_step()
    return steps


def test_a_prompt_longer_than_the_token_budget_is_computed_in_parts_and_then_decodes() -> None:
    scheduler = server(budget=64)
    scheduler.submit(0, 100, 3, keys(0))

    steps = steps_until_idle(scheduler)

    assert [(step.kind, step.tokens, step.unfinished) for step in steps] == [
        (PREFILL, (64,), (0,)),
        (PREFILL, (36,), ()),
        (DECODE, (1,), ()),
        (DECODE, (1,), ()),
    ]
    assert [step.duration_ns for step in steps] == [69_000, 41_000, 10_000, 10_000]


@given(
    prompts=st.lists(st.tuples(st.integers(1, 120), st.integers(1, 6), st.integers(0, 3)), min_size=1, max_size=8),
    threshold=st.integers(1, 40),
    caps_lone=st.booleans(),
)
def test_what_a_step_computes_of_a_prompt_follows_from_who_is_there(
    prompts: list[tuple[int, int, int]], threshold: int, caps_lone: bool
) -> None:
    """In plain words: with others, or in 0.30 always, at most the threshold; else all that the budget holds."""
    scheduler = server(threshold=threshold, caps_lone=caps_lone, blocks=200)
    left = {request: prompt for request, (prompt, _, _) in enumerate(prompts)}

    def step_once() -> None:
        is_capped = caps_lone or scheduler.num_running + scheduler.num_waiting > 1
        step = scheduler.schedule()
        for request, tokens in zip(step.requests, step.tokens, strict=True):
            if is_capped:
                assert tokens <= threshold
            elif left[request]:
                assert tokens == min(left[request], 64)
            left[request] = max(left[request] - tokens, 0)
        scheduler.finish_step()

    for request, (prompt, answer, steps_before) in enumerate(prompts):
        for _ in range(steps_before):
            step_once()
        scheduler.submit(request, prompt, answer, keys(request))
    while scheduler.has_work:
        step_once()
    assert not any(left.values())


def test_a_session_that_returns_reuses_its_full_blocks_and_computes_at_least_the_last_token() -> None:
    scheduler = server()
    scheduler.submit(0, 32, 1, keys(7))
    steps_until_idle(scheduler)

    # The same 32 tokens: both blocks are known, but the last must be computed for its next token.
    scheduler.submit(1, 32, 1, keys(7))
    (again,) = steps_until_idle(scheduler)
    scheduler.submit(2, 40, 1, keys(7))
    (longer,) = steps_until_idle(scheduler)

    assert [admission.cached_tokens for admission in again.admissions] == [16]
    assert [admission.cached_tokens for admission in longer.admissions] == [32]
    assert vars(scheduler.prefix_counts) == {"queries": 104, "hits": 48, "preempted_queries": 0, "preempted_hits": 0}


def test_the_last_admitted_gives_way_when_blocks_run_out_and_resumes_with_what_is_still_cached() -> None:
    scheduler = server(blocks=1 + 6, longest=96, budget=96)
    scheduler.submit(0, 47, 40, keys(0))
    scheduler.submit(1, 47, 40, keys(1))
    steps: list[Step] = []
    while not any(step.preempted for step in steps):
        steps.append(scheduler.schedule())
        scheduler.finish_step()

    assert steps[-1].preempted == (1,)
    assert steps[-1].requests == (0,)
    assert scheduler.waiting == (1,)
    rest = steps_until_idle(scheduler)
    resumed = next(step for step in rest if step.admissions)
    assert resumed.admissions[0].request == 1
    assert resumed.admissions[0].cached_tokens + resumed.admissions[0].computed_tokens == 49
    assert scheduler.prefix_counts.preempted_queries == 49


@pytest.mark.parametrize(
    ("tokens", "graph"),
    [
        ((1,), ("FULL", 1)),
        ((1, 1, 1), ("FULL", 4)),
        ((3,), ("PIECEWISE", 4)),
        ((1,) * 5, ("NONE", 5)),
        ((), ("NONE", 0)),
    ],
)
def test_a_step_is_padded_to_the_next_captured_size_and_above_the_largest_runs_without_a_graph(
    tokens: tuple[int, ...], graph: tuple[str, int]
) -> None:
    assert server(seqs=8).config.graph_of(tokens) == graph


def test_a_size_captured_above_the_most_requests_is_not_a_whole_graph() -> None:
    config = EngineConfig(3, (1, 2, 4), rules=PAGED)

    assert config.graph_of((1, 1, 1)) == ("PIECEWISE", 4)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_gpu_blocks": 16}, r"do not hold one request of 256 tokens.*Give at least 17 blocks"),
        ({"max_num_batched_tokens": 3}, r"max_num_batched_tokens \(3\) is below max_num_seqs \(4\)"),
        ({"decode_buckets": (2, 1)}, r"not ascending"),
    ],
)
def test_a_server_that_vllm_would_refuse_is_refused(changed: dict[str, object], message: str) -> None:
    sound = {"max_num_seqs": 4, "decode_buckets": (1, 2), "num_gpu_blocks": 17, "slot_tokens": 256}
    sound |= {"rules": PAGED, "block_tokens": 16}
    EngineConfig(**sound)
    with pytest.raises(SpecError, match=message):
        EngineConfig(**{**sound, **changed})


def test_a_decode_step_above_the_largest_captured_size_costs_the_extra_of_a_step_without_a_graph() -> None:
    config = EngineConfig(2, (1,), slot_tokens=256, block_tokens=16, rules=PAGED, max_num_batched_tokens=64)

    def durations(costs: CostModel) -> dict[tuple[str, int], int]:
        scheduler = PagedScheduler(config, costs)
        scheduler.submit(0, 16, 3, keys(0))
        scheduler.submit(1, 16, 2, keys(1))
        return {(step.kind, step.num_seqs): step.duration_ns for step in steps_until_idle(scheduler)}

    plain, priced = durations(COSTS), durations(replace(COSTS, eager_ns=7))
    assert priced == {**plain, (DECODE, 2): plain[DECODE, 2] + 7}


def test_a_request_that_fits_no_context_or_lacks_block_keys_is_refused() -> None:
    with pytest.raises(PlanError, match="do not fit 256 tokens"):
        server().submit(0, 256, 1, keys(0))
    with pytest.raises(PlanError, match="1 block keys for 41 tokens, 2 needed"):
        server().submit(0, 40, 1, [1])


def test_with_asynchronous_scheduling_an_arrival_waits_for_the_step_that_is_already_decided() -> None:
    scheduler = server(ahead=True)
    scheduler.submit(0, 16, 5, keys(0))
    first = scheduler.schedule()
    scheduler.submit(1, 16, 5, keys(1))
    scheduler.finish_step()

    steps = [first, *steps_until_idle(scheduler)]

    assert [step.requests for step in steps] == [(0,), (0,), (0, 1), (0, 1), (0, 1), (1,), (1,)]


def test_a_step_of_prompts_beyond_the_captured_sizes_pays_for_its_launch() -> None:
    costs = replace(COSTS, chunk_eager_ns=7000, _filled_fs={})
    config = EngineConfig(4, (1, 2, 4), slot_tokens=256, block_tokens=16, rules=PAGED)
    for num_tokens, extra_ns in ((4, 0), (5, 7000)):
        scheduler = PagedScheduler(config, costs)
        scheduler.submit(0, num_tokens, 2, keys(0))
        first, *decodes = steps_until_idle(scheduler)
        assert first.duration_ns == COSTS.chunked_step_ns(0, 0, 0, num_tokens, first.attended_tokens) + extra_ns
        assert [step.duration_ns for step in decodes] == [COSTS.decode_step_ns(1, 1, num_tokens + 1)]
    without_graphs = PagedScheduler(replace(config, decode_buckets=()), costs)
    without_graphs.submit(0, 64, 1, keys(0))
    (alone,) = steps_until_idle(without_graphs)
    assert alone.duration_ns == COSTS.chunked_step_ns(0, 0, 0, 64, alone.attended_tokens)
