"""The compiled loop of paged rules takes the steps of the engine loop in Python, to the nanosecond."""

from __future__ import annotations

from collections import Counter

import pytest

from harness.errors import SpecError
from harness.model.engine.cost import CostModel
from harness.model.sim.plans import one_plan
from harness.model.sim.simulate import run_batch
from tests.support.naive_replicas import differences, drawn_alone
from tests.support.paged_in_steps import has_own_prompts
from tests.support.virtual_emulator import assert_same_run


def test_drawn_plans_on_drawn_servers_take_the_same_steps_as_in_python() -> None:
    """Equal steps taken at once, and step by step; and with every token, as a live emulator has it."""
    seen = Counter[str]()
    for seed in range(14):
        case = drawn_alone(seed)
        assert list(differences(case)) == [], f"seed {seed}"
        seen += case.counted()
        (plan, *_), (costs, *_) = case.plans, case.draws.models
        if has_own_prompts(plan):
            assert_same_run(plan, case.server, costs)
            seen += Counter({"with tokens": 1, "tokens and pins": case.server.keep_kv_s is not None})
            seen["tokens and second"] += case.server.offload_blocks is not None

    assert seen["steps"] > 10_000
    assert min(seen["preemptions"], seen["evictions"], seen["left"]) > 50
    assert min(seen["asynchronous"], seen["pins"], seen["second"]) > 4
    assert seen["asynchronous"] < seen["cases"]
    assert min(seen["with tokens"], seen["tokens and pins"], seen["tokens and second"]) > 2

    case = next(case for case in map(drawn_alone, range(100)) if len(case.draws.models) == 3)
    arrays, models, seeds, noise = case.draws
    together = run_batch(arrays, case.config, models, seeds, noise).totals.tolist()
    alone = [
        run_batch(one_plan(arrays, place), case.config, [model], [seed], noise).totals.tolist()[0]
        for place, (model, seed) in enumerate(zip(models, seeds, strict=True))
    ]

    assert together == alone


def test_costs_of_prompts_of_a_million_tokens_do_not_overflow() -> None:
    case = drawn_alone(0)
    dear = CostModel("dear", "this test", {1: 10**15}, chunk_step_fs=10**15, chunk_token_fs=10**12, attended_fs=10**11)

    assert list(differences(case._replace(draws=case.draws._replace(models=[dear] * len(case.draws.models))))) == []


def test_a_cost_model_without_parts_of_prompts_is_refused_by_name() -> None:
    case = drawn_alone(0)
    with pytest.raises(SpecError, match=r"cost model of RBLN.*has no \[chunked_prefill\]"):
        run_batch(case.draws.arrays, case.config, [CostModel("of RBLN", "none", {1: 1})] * len(case.draws.models))
