"""A server with paged KV memory in the simulator: what it reuses, evicts and refuses."""

from __future__ import annotations

import pytest

from harness.errors import SpecError
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


def test_a_cost_model_of_rbln_is_refused() -> None:
    with pytest.raises(SpecError, match=r"cost model paper.*has no \[chunked_prefill\]"):
        simulate(one_user((0, 20, 6, 0)), server(cost_model="paper"))
