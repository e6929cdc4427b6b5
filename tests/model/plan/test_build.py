"""Plans: what is drawn, what a treatment changes, and what the hash covers."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.errors import PlanError, SpecError
from harness.model.experiment import build_plan
from harness.model.plan.build import check_fits, derive_seed, describe
from harness.model.plan.model import Plan, RequestPlan, SessionPlan
from harness.model.spec import FixedLength, LengthDistribution, LognormalLength, ServerSpec, UniformLength, WorkloadSpec


def drawn(num_sessions: int = 6, *, base_seed: int = 1, replicate: int = 0, **keys: object) -> Plan:
    return build_plan(WorkloadSpec.model_validate({"num_sessions": num_sessions, **keys}), base_seed, replicate)


def plan_of(*sessions: SessionPlan, **changes: object) -> Plan:
    plan = Plan("written", 1, 0, "as-drawn", 0, (1000, 150_000), sessions, {})
    return replace(plan, **changes) if changes else plan


def lone(*requests: RequestPlan, index: int = 0) -> SessionPlan:
    return SessionPlan(index, 0, None, None, requests)


def lengths_of(plan: Plan) -> list[list[tuple[int, int, int]]]:
    return [[(r.keep_tokens, r.new_tokens, r.generate_tokens) for r in s.requests] for s in plan.sessions]


def test_the_base_design_has_two_requests_and_the_rearrival_keeps_everything() -> None:
    plan = drawn(50)
    for session in plan.sessions:
        first, second = session.requests
        assert first.keep_tokens == 0
        assert 800 <= first.new_tokens <= 1600
        assert 32 <= first.generate_tokens <= 256
        assert second.keep_tokens == first.prompt_tokens + first.generate_tokens
        assert second.new_tokens == 8
        assert 32 <= second.generate_tokens <= 256
        assert 0 <= first.wait_after_ns <= 60_000_000_000
    assert plan.num_requests == 100
    assert plan.num_waits == 50


def test_the_same_seed_and_replicate_give_the_same_plan_and_others_do_not() -> None:
    assert drawn() == drawn()
    hashes = {drawn(base_seed=seed, replicate=replicate).hash for seed in (1, 2) for replicate in (0, 1)}
    assert len(hashes) == 4


def test_a_known_plan_keeps_its_hash_for_ever() -> None:
    """Draws and canonical form are part of the interface: a changed hash breaks every frozen experiment."""
    assert drawn(3).hash == "47ecbe5afabc244c008859b64c2d7e8f291a1ddea6dc7f737f4a480024d57e14"
    assert (
        build_plan(WorkloadSpec(source="paper", num_sessions=6), 20260943, 0).hash
        == "b4ed348d7893da5e473d0968f0173c7ccca4cdf2e785854caff056c44f4b0546"
    )


def test_waits_can_change_without_changing_lengths() -> None:
    plain, without = drawn(waits="tracelab-v0.0.2"), drawn(waits="none")
    assert lengths_of(plain) == lengths_of(without)
    assert without.total_wait_ns == 0 < plain.total_wait_ns


def test_length_laws_are_obeyed() -> None:
    plan = drawn(
        200,
        prompt_tokens={"distribution": "lognormal", "median": 1000, "sigma": 0.5, "low": 600, "high": 3000},
        generate_tokens={"distribution": "fixed", "value": 17},
        new_tokens={"distribution": "uniform", "low": 5, "high": 6},
        requests_per_session=4,
    )
    prompts = sorted(session.requests[0].new_tokens for session in plan.sessions)
    assert 600 <= prompts[0] < 900 < prompts[100] < 1100 < prompts[-1] <= 3000
    later = [request for session in plan.sessions for request in session.requests[1:]]
    assert {request.new_tokens for request in later} == {5, 6}
    assert {request.generate_tokens for request in later} == {17}


@given(
    seed=st.integers(0, 2**64 - 1),
    bounded=st.sampled_from(
        [
            (FixedLength(value=3), 3, 3),
            (UniformLength(low=2, high=9), 2, 9),
            (LognormalLength(median=5, sigma=30, low=1, high=70), 1, 70),
        ]
    ),
)
def test_every_length_lies_within_its_distribution(seed: int, bounded: tuple[LengthDistribution, int, int]) -> None:
    from harness.model.plan.build import draw_length

    distribution, low, high = bounded
    assert low <= draw_length(distribution, random.Random(seed)) <= high


def test_the_papers_sessions_are_drawn_as_published() -> None:
    """An independent reading of the published recipe: seed text, order of the draws, tool by running total."""
    from harness.model.plan.waits import load_waits

    waits = load_waits("tracelab-v0.0.2")
    for num_sessions, block in ((6, 0), (8, 1), (10, 2)):
        plan = build_plan(WorkloadSpec(source="paper", num_sessions=num_sessions), 20260910, block)
        for index, session in enumerate(plan.sessions):
            rng = random.Random(derive_seed(20260910, f"n{num_sessions}b{block}/s{index}"))
            prompt, answer = rng.randint(800, 1600), rng.randint(32, 256)
            threshold, total, tool = rng.random() * 739461, 0, -1
            while total < threshold:
                tool += 1
                total += waits.calls[tool]
            wait_ms = waits.distributions[tool].quantile_ms(min(max(rng.random(), 1e-6), 1 - 1e-9))
            first = RequestPlan(0, prompt, answer, min(round(wait_ms * 1e6), 60_000_000_000))
            assert session.requests == (first, RequestPlan(prompt + answer, 8, rng.randint(32, 256), 0))


def test_a_seed_is_eight_bytes_of_a_sha256() -> None:
    # printf 20260910:n6b0/s0 | sha256sum
    assert derive_seed(20260910, "n6b0/s0") == int("1c5f94d355ee12e1", 16)
    assert derive_seed(0, "\ud800") != derive_seed(0, "\ud801"), "a recording may name a session so"


def test_a_sequential_plan_is_a_chain_whose_last_link_returns_to_the_target() -> None:
    plan = build_plan(WorkloadSpec.model_validate({"source": "sequential", "num_background": 3}), 5, 0)
    assert [session.after for session in plan.sessions] == [None, 0, 1, 2, 3]
    assert [session.continues for session in plan.sessions] == [None, None, None, None, 0]
    assert all(session.requests == (RequestPlan(0, 2000, 8, 0),) for session in plan.sessions[:-1])
    assert plan.sessions[-1].requests == (RequestPlan(2000, 8, 8, 0),)
    at_once = build_plan(WorkloadSpec.model_validate({"source": "sequential"}), 5, 0)
    assert [(session.after, session.continues) for session in at_once.sessions] == [(None, None), (0, 0)]


def test_sessions_start_staggered_and_a_closed_population_hands_its_places_on() -> None:
    plan = drawn(7, start_offset_s=0.5, concurrency=3)
    assert [session.after for session in plan.sessions] == [None, None, None, 0, 1, 2, 3]
    assert [session.start_offset_ns for session in plan.sessions] == [0, 500_000_000, 1_000_000_000, 0, 0, 0, 0]


def test_removed_waits_leave_everything_else() -> None:
    plan = drawn()
    treated = plan.with_treatment("no-waits")
    assert treated.total_wait_ns == 0
    assert treated.drawn_hash == plan.hash == plan.drawn_hash
    assert treated.hash != plan.hash
    assert lengths_of(treated) == lengths_of(plan)


@given(st.lists(st.lists(st.integers(0, 10**11), min_size=1, max_size=5), min_size=1, max_size=6))
def test_equal_waits_preserve_the_waited_total_to_the_nanosecond(waits_ns: list[list[int]]) -> None:
    sessions = []
    for index, session_waits in enumerate(waits_ns):
        requests = [RequestPlan(10 * k, 5, 5, wait_ns) for k, wait_ns in enumerate(session_waits)]
        sessions.append(lone(*requests, index=index))
    plan = plan_of(*sessions)
    treated = plan.with_treatment("equal-waits")
    waited = list(treated.waited_ns())
    assert treated.total_wait_ns == plan.total_wait_ns
    assert not waited or max(waited) - min(waited) <= 1
    lasts = [session.requests[-1].wait_after_ns for session in treated.sessions]
    assert lasts == [session_waits[-1] for session_waits in waits_ns]


def test_a_treated_plan_is_not_treated_again() -> None:
    treated = drawn().with_treatment("no-waits")
    assert treated.with_treatment("no-waits") is treated
    with pytest.raises(PlanError, match="Derive it from the plan as drawn"):
        treated.with_treatment("equal-waits")


def test_the_share_of_capped_waits_is_kept_with_the_plan() -> None:
    plan = drawn(2000, wait_cap_s=1.0)
    capped = sum(wait_ns == 1_000_000_000 for wait_ns in plan.waited_ns())
    assert plan.provenance["waits_capped"] == capped
    assert plan.provenance["waits_waited"] == 2000
    assert 0.25 < capped / 2000 < 0.34


@pytest.mark.parametrize(
    ("sessions", "complaint"),
    [
        ((), "no session"),
        ((lone(),), "no request"),
        ((lone(RequestPlan(0, 5, 5, -1)),), "wait is negative"),
        ((lone(RequestPlan(0, 0, 5, 0)),), "prompt and a generation"),
        ((lone(RequestPlan(0, 5, 0, 0)),), "prompt and a generation"),
        ((lone(RequestPlan(0, 5, 5, 0), RequestPlan(11, 5, 5, 0)),), "keeps 11 tokens of a stream that has 10"),
        ((lone(RequestPlan(1, 5, 5, 0)),), "keeps 1 tokens of a stream that has 0"),
        ((lone(RequestPlan(0, 5, 5, 0), index=1),), "its index is 1"),
        ((SessionPlan(0, 0, 0, None, (RequestPlan(0, 5, 5, 0),)),), "starts after session 0"),
        ((SessionPlan(0, -1, None, None, (RequestPlan(0, 5, 5, 0),)),), "start_offset_ns is negative"),
        (
            (lone(RequestPlan(0, 5, 5, 0)), SessionPlan(1, 0, None, 0, (RequestPlan(0, 5, 5, 0),))),
            "need not be finished",
        ),
    ],
)
def test_a_plan_that_contradicts_itself_is_refused(sessions: tuple[SessionPlan, ...], complaint: str) -> None:
    with pytest.raises(PlanError, match=complaint) as caught:
        plan_of(*sessions)
    assert "\n" not in str(caught.value)


def test_a_request_that_fills_its_slot_fits_and_one_token_more_does_not() -> None:
    server = ServerSpec(slot_tokens=1024)
    check_fits(plan_of(lone(RequestPlan(0, 1000, 24, 0))), server)
    check_fits(plan_of(lone(RequestPlan(0, 1023, 1, 0))), server)
    with pytest.raises(SpecError, match=r"session 0, request 1: a prompt of 1005 tokens and 20 generated ones .* 1024"):
        check_fits(plan_of(lone(RequestPlan(0, 990, 10, 0), RequestPlan(1000, 5, 20, 0))), server)


@pytest.mark.parametrize(
    ("keys", "complaint"),
    [
        ({"num_sessions": 0}, "num_sessions: must be greater than or equal to 1"),
        (
            {"num_sessions": 2, "prompt_tokens": {"distribution": "uniform", "low": 9, "high": 8}},
            "high .8. is below low .9.",
        ),
        (
            {"num_sessions": 2, "prompt_tokens": {"distribution": "fixed", "value": 0}},
            "value: .*greater than or equal to 1",
        ),
        ({"num_sessions": 2, "prompt_tokens": {"distribution": "cauchy"}}, "prompt_tokens: "),
        ({"num_sessions": 2, "num_background": 3}, "num_background belongs to source 'sequential'"),
        ({"num_sessions": 2, "source": "paper", "wait_cap_s": 30}, "source 'paper' fixes wait_cap_s"),
        ({"num_sessions": 2, "source": "sequential", "num_background": 3}, "num_background . 2 = 5"),
        ({"source": "sequential", "waits": "tracelab-v0.0.2"}, "without waits"),
        ({"num_sessions": 2, "shared_prefix_tokens": 800}, "leaves no token beside shared_prefix_tokens"),
        ({"num_sessions": 2, "token_id_range": [5, 6]}, "at least 256 ids"),
        ({"num_sessions": 2, "wait_cap_s": -1}, "wait_cap_s: must be greater than 0"),
        ({"num_sessions": 2, "n": 3}, "n: unknown key"),
    ],
)
def test_a_wrong_workload_is_refused_in_one_line(keys: dict[str, object], complaint: str) -> None:
    from harness.model.spec import parse_experiment

    table = {"name": "x", "base_seed": 1, "condition": [{"name": "a"}], "workload": keys}
    with pytest.raises(SpecError, match=complaint) as caught:
        parse_experiment(table, where="x.toml")
    assert "\n" not in str(caught.value)


def test_an_unknown_wait_distribution_names_those_there_are() -> None:
    with pytest.raises(SpecError, match=r"unknown wait distribution 'tracelab'.*none, tracelab-v0\.0\.2"):
        drawn(waits="tracelab")


def test_negative_seeds_are_refused() -> None:
    with pytest.raises(SpecError, match="must not be negative"):
        drawn(base_seed=-1)


@settings(max_examples=20)
@given(num_sessions=st.integers(1, 9), requests=st.integers(1, 4), seed=st.integers(0, 2**63))
def test_describing_a_plan_gives_plain_values(num_sessions: int, requests: int, seed: int) -> None:
    plan = drawn(num_sessions, base_seed=seed, requests_per_session=requests)
    summary = describe(plan)
    assert summary["hash"] == plan.hash
    assert summary["requests"] == num_sessions * requests
    assert all(isinstance(value, str | int | float) for value in summary.values())
