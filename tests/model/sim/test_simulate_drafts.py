"""Speculative decoding in the simulator: what requests accept, how long steps take, and on which graphs they run."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from harness.errors import SpecError
from harness.model.engine.config import EngineConfig
from harness.model.engine.cost import CostModel, load_cost_model
from harness.model.experiment import build_plan
from harness.model.plan.model import Plan, RequestPlan, SessionPlan
from harness.model.sim import simulate
from harness.model.sim.plans import plan_arrays
from harness.model.sim.simulate import run_batch
from harness.model.spec import ServerSpec, WorkloadSpec
from tests.support.paged_in_steps import LONGEST, drawn_plan, drawn_server, has_own_prompts
from tests.support.virtual_emulator import assert_same_run, run_virtually

US = 10**9
COSTS = CostModel(
    "known", "this test", {1: 10 * US, 64: 73 * US}, chunk_step_fs=5 * US, chunk_token_fs=US, draft_pass_ns=700
)
"""A decode step of n tokens takes 9 + n us, a pass of the drafter 0.7 us."""
FLAT = replace(COSTS, f_fs={1: 10 * US}, _filled_fs={})
"""Steps of every size take as long: only those of one size stand in one row."""


def server(drafts: int, *rates: float, method: str = "eagle3", **changed: Any) -> ServerSpec:
    return ServerSpec.model_validate(
        {
            "rules": "vllm-paged",
            "cost_model": "emulated-gpu",
            "slot_tokens": 2048,
            "num_speculative_tokens": drafts,
            "speculative_method": method,
            "synthetic_acceptance_rates": rates,
            **changed,
        }
    )


def one_request(prompt: int, generate: int) -> Plan:
    session = SessionPlan(0, 0, None, None, (RequestPlan(0, prompt, generate, 0),))
    return Plan("drawn", 1, 0, "as-drawn", 0, (1000, 2000), (session,), {})


def drawn_drafts(chosen: random.Random, server: ServerSpec) -> dict[str, Any]:
    """Keys of that server's speculative decoding: few and many drafts, rates between certain and hopeless."""
    num_drafts = chosen.choice((1, 2, 3, 5))
    rates = sorted((chosen.choice((0.0, 1.0, chosen.random())) for _ in range(num_drafts)), reverse=True)
    longest = LONGEST if server.max_num_batched_tokens is None else server.max_num_batched_tokens
    return {
        "num_speculative_tokens": num_drafts,
        "speculative_method": chosen.choice(("ngram", "eagle3")),
        "synthetic_acceptance_rates": tuple(rates),
        "decode_buckets": tuple(size * (1 + num_drafts) for size in server.decode_buckets),
        # vLLM never admits a request that it pads above the threshold of long prompts.
        "long_prefill_tokens": server.long_prefill_tokens and max(server.long_prefill_tokens, 1 + num_drafts),
        # vLLM never admits a request whose padding is above the budget.
        "max_num_batched_tokens": max(longest, 2 * (1 + num_drafts), 8 * (1 + num_drafts)),
    }


def test_the_compiled_loop_draws_what_the_emulators_loop_draws_to_the_nanosecond() -> None:
    seen = Counter[str]()
    for seed in range(40):
        chosen = random.Random(f"drafts {seed}")
        plan, spec = drawn_plan(chosen), drawn_server(chosen)
        if has_own_prompts(plan):
            costs = FLAT if seed % 2 == 0 else None
            seen += assert_same_run(plan, spec.model_copy(update=drawn_drafts(chosen, spec)), costs)
    assert min(seen["asynchronous steps"], seen["preemptions"], seen["clients that leave"]) > 20


@pytest.mark.parametrize(("rates", "each"), [((1.0, 1.0, 1.0), 4), ((0.0, 0.0, 0.0), 1), ((1.0, 0.0, 0.0), 2)])
@pytest.mark.parametrize("is_async", [False, True])
def test_certain_rates_give_as_many_tokens_in_every_step(rates: tuple[float, ...], each: int, is_async: bool) -> None:
    spec = server(3, *rates, async_scheduling=is_async, max_num_seqs=1)
    ends = [end for end in run_virtually(one_request(40, 21), spec) if end.requests]

    assert [end.num_tokens for end in ends] == [(1,), *[(each,)] * (20 // each)]


def test_positions_are_accepted_at_their_rates() -> None:
    rates = (0.8, 0.55, 0.3, 0.1)
    plan = build_plan(WorkloadSpec(num_sessions=8, requests_per_session=4), 7, 0)
    accepted = [
        part.accepted
        for end in run_virtually(plan, server(4, *rates, slot_tokens=8192))
        for part in end.parts
        if part.drafts == 4
    ]

    assert len(accepted) > 1000
    for place, rate in enumerate(rates):
        share = sum(number > place for number in accepted) / len(accepted)
        assert share == pytest.approx(rate, abs=4 * (0.25 / len(accepted)) ** 0.5)


def test_a_step_costs_its_tokens_padded_to_a_graph_and_the_drafters_passes() -> None:
    sizes: dict[str, Any] = {"max_num_seqs": 1, "decode_buckets": (1, 5, 8)}
    for spec, size, passes in (
        (server(3, 1, 1, 1, **sizes), 4, 3),
        (server(3, 1, 1, 1, method="ngram", **sizes), 4, 1),
        (server(4, 1, 1, 1, 1, **sizes), 5, 4),
    ):
        steps = simulate(one_request(1, 9), spec, COSTS).steps.to_pylist()
        assert [(row["kind"], row["b"], row["duration_ns"]) for row in steps[:2]] == [
            ("prefill", None, 6_000 + 700 * passes),
            ("decode", size, 9_000 + 1_000 * size + 700 * passes),
        ]


def test_a_batch_above_the_largest_graph_runs_eagerly_at_its_own_size() -> None:
    sessions = tuple(SessionPlan(place, 0, None, None, (RequestPlan(0, 20, 60, 0),)) for place in range(6))
    plan = Plan("drawn", 1, 0, "as-drawn", 0, (1000, 2000), sessions, {})
    costs = replace(COSTS, eager_ns=500_000)
    rates, sizes = (0.9,) * 6, (1, 2, 4, 8, 16, 24, 32, 40)
    for decode_buckets, has_graph in ((sizes, False), ((*sizes, 42), True)):
        spec = server(6, *rates, max_num_seqs=6, decode_buckets=decode_buckets)
        steps = [row for row in simulate(plan, spec, costs).steps.to_pylist() if row["n"] == 6 and row["b"]]
        assert {(row["b"], row["duration_ns"] > 500_000) for row in steps} == {(42, not has_graph)}


def test_no_drafts_are_the_server_without_any() -> None:
    plan = build_plan(WorkloadSpec(num_sessions=3), 3, 0)
    none, plain = server(0, 0.5), ServerSpec(rules="vllm-paged", cost_model="emulated-gpu", slot_tokens=2048)
    assert EngineConfig.from_server(none) == EngineConfig.from_server(plain)
    assert simulate(plan, none.model_copy(update={"slot_tokens": 8192})).steps.num_rows > 10


def test_draws_of_a_plan_accept_differently() -> None:
    plan, spec = one_request(40, 500), server(3, 0.7, 0.5, 0.3)
    arrays, config, costs = plan_arrays([plan]), EngineConfig.from_server(spec), load_cost_model("emulated-gpu")
    ends = {int(run_batch(arrays, config, costs, [seed]).totals["end_ns"][0]) for seed in range(8)}
    assert len(ends) > 4


def test_what_drafts_need_is_refused_in_one_line() -> None:
    with pytest.raises(SpecError, match=r"cost model known: has no \[drafts\], which these rules need"):
        simulate(one_request(20, 9), server(3, 1, 1, 1), replace(COSTS, draft_pass_ns=None))
    with pytest.raises(SpecError, match="vLLM would not start with these captured sizes: no size is left"):
        simulate(one_request(20, 9), server(3, 1, 1, 1, method="ngram", rules="vllm-paged-0.30", decode_buckets=(1, 2)))
    with pytest.raises(SpecError, match=r"drafts by 'medusa' in vLLM 0\.33\.0, whose rules are not known"):
        EngineConfig.from_server(server(3, 1, 1, 1, method="medusa"))
    refused: tuple[tuple[dict[str, Any], str], ...] = (
        ({"synthetic_acceptance_rates": (0.5, 0.6, 0.1)}, "must fall from the first on"),
        ({"synthetic_acceptance_rates": (0.5,)}, "as many synthetic_acceptance_rates"),
        ({"speculative_method": None}, "3 drafts need .*speculative_method"),
        ({"rules": "vendor-0.12.0", "max_num_seqs": 8}, "rules 'vendor-0.12.0' know no drafts: vllm-rbln's compiled"),
    )
    for wrong, message in refused:
        with pytest.raises(ValueError, match=message):
            server(3, 0.5, 0.4, 0.3, **wrong)
