"""The compiled loop of paged rules takes the steps of the engine loop in Python, to the nanosecond."""

from __future__ import annotations

from collections import Counter

import pytest

from harness.errors import SpecError
from harness.model.engine.cost import CostModel
from harness.model.engine.steps import FAR
from harness.model.sim.plans import plan_arrays
from harness.model.sim.simulate import run_paged
from tests.support.paged_in_steps import counted, differences, drawn_case

SEEDS = range(14)


def test_drawn_plans_on_drawn_servers_take_the_same_steps_as_in_python() -> None:
    """Equal steps taken at once, and step by step."""
    for seed in SEEDS:
        assert list(differences(drawn_case(seed), FAR, 1)) == [], f"seed {seed}"


def test_the_drawn_servers_preempt_evict_pin_load_and_lose_clients() -> None:
    seen = sum((counted(drawn_case(seed)) for seed in SEEDS), Counter[str]())

    assert seen["steps"] > 10_000
    assert min(seen["preemptions"], seen["evictions"], seen["left"]) > 50
    assert min(seen["asynchronous"], seen["pinning"], seen["with second memory"]) > 5
    assert seen["asynchronous"] < seen["cases"]


def test_plans_of_one_call_take_the_time_that_each_takes_alone() -> None:
    case = next(case for case in map(drawn_case, range(100)) if len(case.plans) == 3)
    together = run_paged(*case.arguments()).totals.tolist()
    alone = [
        run_paged(plan_arrays([plan]), case.config, [model], [seed], case.noise).totals.tolist()[0]
        for plan, model, seed in zip(case.plans, case.models, case.seeds, strict=True)
    ]

    assert together == alone


def test_costs_of_prompts_of_a_million_tokens_do_not_overflow() -> None:
    case = drawn_case(0)
    dear = CostModel("dear", "this test", {1: 10**15}, chunk_step_fs=10**15, chunk_token_fs=10**12, attended_fs=10**11)
    config, plans = case.config, case.plans[:1]

    assert list(differences(case._replace(plans=plans, models=[dear], config=config, seeds=[0]))) == []


def test_a_cost_model_without_parts_of_prompts_is_refused_by_name() -> None:
    case = drawn_case(0)
    with pytest.raises(SpecError, match=r"cost model of RBLN.*has no \[chunked_prefill\]"):
        run_paged(plan_arrays(case.plans), case.config, [CostModel("of RBLN", "none", {1: 1})] * len(case.plans))
