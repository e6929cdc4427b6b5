"""A server with paged KV memory in the simulator: what it reuses, evicts and refuses."""

from __future__ import annotations

import pytest

from harness.errors import PlanError, SpecError
from harness.model.plan.model import Plan, RequestPlan, SessionPlan
from harness.model.sim import simulate
from harness.model.spec import ServerSpec


def server(**changed: object) -> ServerSpec:
    return ServerSpec.model_validate(
        {"rules": "vllm-paged", "cost_model": "emulated-gpu", "slot_tokens": 2048, **changed}
    )


def one_user(*requests: tuple[int, int, int, int]) -> Plan:
    """One session; requests as keep, new, generate, wait in ns."""
    return Plan(
        "drawn",
        1,
        0,
        "as-drawn",
        0,
        (1000, 2000),
        (SessionPlan(0, 0, None, None, tuple(RequestPlan(*one) for one in requests)),),
        {},
    )


def test_a_returning_session_reuses_prompt_and_answer_in_whole_blocks() -> None:
    result = simulate(one_user((0, 100, 60, 10**9), (160, 20, 5, 0)), server())

    # 159 tokens were computed: nine blocks of 16.
    assert result.requests["cached_tokens"].to_pylist() == [0, 144]


def test_evicted_blocks_are_counted_and_no_longer_reused() -> None:
    longest = (0, 2000, 40, 10**9)
    plan = Plan(
        "drawn", 1, 0, "as-drawn", 0, (1000, 2000),
        tuple(
            SessionPlan(place, place * 5 * 10**8, None, None, (RequestPlan(*longest), RequestPlan(1000, 10, 1, 0)))
            for place in range(2)
        ),
        {},
    )  # fmt: skip
    small, large = simulate(plan, server(num_gpu_blocks=140)), simulate(plan, server(num_gpu_blocks=600))

    assert large.num_evictions == 0
    assert small.num_evictions > 100
    assert small.cached_tokens < large.cached_tokens


def test_a_smaller_token_budget_takes_more_steps_for_a_prompt_and_lets_decodes_wait_less() -> None:
    plan = Plan(
        "drawn", 1, 0, "as-drawn", 0, (1000, 2000),
        tuple(SessionPlan(place, place * 10**7, None, None, (RequestPlan(0, 1500, 100, 0),)) for place in range(3)),
        {},
    )  # fmt: skip
    whole, parts = simulate(plan, server()), simulate(plan, server(max_num_batched_tokens=100))

    assert max(row["duration_ns"] for row in parts.steps.to_pylist()) < max(
        row["duration_ns"] for row in whole.steps.to_pylist()
    )
    assert whole.computed_tokens == parts.computed_tokens == 4500


def test_requests_that_do_not_fit_the_context_are_refused() -> None:
    with pytest.raises(PlanError, match="do not fit a slot of 2048"):
        simulate(one_user((0, 2000, 60, 0)), server())


def test_a_cost_model_of_rbln_is_refused() -> None:
    with pytest.raises(SpecError, match=r"cost model paper.*has no \[chunked_prefill\]"):
        simulate(one_user((0, 20, 6, 0)), server(cost_model="paper"))
