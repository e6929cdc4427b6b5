"""Prompts: exact in length, unique by construction, and their block keys say which ones begin alike."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.errors import PlanError
from harness.model.experiment import build_plan
from harness.model.plan.blocks import BlockKeys, token_block_keys
from harness.model.plan.model import Plan, RequestPlan, SessionPlan
from harness.model.plan.tokens import PromptIds, TokenArray, TokenStreams, mix64
from harness.model.spec import WorkloadSpec


def plan_of(*sessions: SessionPlan, shared_prefix_tokens: int = 0, low: int = 1000, high: int = 150_000) -> Plan:
    return Plan("written", 1, 0, "as-drawn", shared_prefix_tokens, (low, high), sessions, {})


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Any plan: truncations, re-sent prompts, continued sessions, shared prefixes, narrow id ranges."""
    sessions: list[SessionPlan] = []
    stream_tokens: list[int] = []
    for index in range(draw(st.integers(1, 4))):
        after = draw(st.none() | st.integers(0, index - 1)) if index else None
        continues = after if after is not None and draw(st.booleans()) else None
        length = 0 if continues is None else stream_tokens[continues]
        requests: list[RequestPlan] = []
        for _ in range(draw(st.integers(1, 4))):
            keep_tokens = draw(st.just(length) | st.integers(0, length))
            # Never one or two new tokens: those may be the same as others by chance.
            new_tokens = draw(st.integers(4, 400) | st.just(0 if keep_tokens else 4))
            requests.append(RequestPlan(keep_tokens, new_tokens, draw(st.integers(1, 300)), 0))
            length = requests[-1].stream_tokens
        stream_tokens.append(length)
        sessions.append(SessionPlan(index, 0, after, continues, tuple(requests)))
    return plan_of(
        *sessions,
        shared_prefix_tokens=draw(st.sampled_from([0, 100, 128, 300])),
        high=draw(st.sampled_from([1256, 150_000])),
    )


def all_prompts(plan: Plan) -> dict[tuple[int, int], TokenArray]:
    """Every prompt, with generated ids that no other request generates."""
    streams = TokenStreams(plan)
    prompts: dict[tuple[int, int], TokenArray] = {}
    generated: dict[int, list[list[int]]] = {}
    for session in plan.sessions:
        generated[session.index] = []
        for position, request in enumerate(session.requests):
            prompts[session.index, position] = streams.prompt(session.index, position, generated)
            first = 10_000_000 + session.index * 1_000_000 + position * 1000
            generated[session.index].append(list(range(first, first + request.generate_tokens)))
    return prompts


@settings(max_examples=20)
@given(plans())
def test_a_prompt_is_the_kept_part_of_the_stream_and_its_fresh_ids(plan: Plan) -> None:
    """An independent reading: carry the whole stream of every session along and cut it."""
    streams, prompts = TokenStreams(plan), all_prompts(plan)
    low, high = plan.token_id_range
    ends: list[list[int]] = []
    for session in plan.sessions:
        stream = [] if session.continues is None else list(ends[session.continues])
        for position, request in enumerate(session.requests):
            fresh, prompt = streams.fresh_tokens(session.index, position), prompts[session.index, position]
            assert (len(fresh), len(prompt)) == (request.new_tokens, request.prompt_tokens)
            assert not len(fresh) or (low <= fresh.min() and fresh.max() < high)
            stream = stream[: request.keep_tokens] + fresh.tolist()
            assert prompt.dtype == np.int32
            assert prompt.tolist() == stream
            first = 10_000_000 + session.index * 1_000_000 + position * 1000
            stream += range(first, first + request.generate_tokens)
        ends.append(stream)


@settings(max_examples=20)
@given(plans())
def test_two_requests_share_a_block_key_exactly_when_they_begin_alike(plan: Plan) -> None:
    prompts = all_prompts(plan)
    of_plan = BlockKeys(plan)
    keys = {name: of_plan.prompt(*name) for name in prompts}
    by_tokens = {name: token_block_keys(prompt) for name, prompt in prompts.items()}
    for name, prompt in prompts.items():
        assert len(keys[name]) == len(prompt) // 128
    for one, other in combinations(prompts, 2):
        for block in range(min(len(keys[one]), len(keys[other]))):
            end = (block + 1) * 128
            is_alike = np.array_equal(prompts[one][:end], prompts[other][:end])
            assert (keys[one][block] == keys[other][block]) == is_alike
        # Keys of real tokens agree with the keys by construction.
        same_tokens = np.intersect1d(by_tokens[one], by_tokens[other]).size
        assert same_tokens == np.intersect1d(keys[one], keys[other]).size


@settings(max_examples=20)
@given(plans(), st.sampled_from([16, 128]))
def test_generated_blocks_continue_the_keys_of_the_prompt(plan: Plan, block_tokens: int) -> None:
    keys = BlockKeys(plan, block_tokens)
    for session in plan.sessions:
        for position, request in enumerate(session.requests):
            whole = keys.stream(session.index, position)
            prompt = keys.prompt(session.index, position)
            assert len(whole) == request.stream_tokens // block_tokens
            assert whole[: len(prompt)].tolist() == prompt.tolist()
            if position + 1 < len(session.requests):
                later = keys.prompt(session.index, position + 1)
                kept_blocks = session.requests[position + 1].keep_tokens // block_tokens
                assert later[:kept_blocks].tolist() == whole[:kept_blocks].tolist()


@settings(max_examples=20)
@given(st.integers(2, 40), st.sampled_from([2, 300, 149_000]), st.integers(0, 2**32), st.sampled_from([0, 200, 256]))
def test_no_two_sessions_share_a_block_of_their_own_tokens(
    num_sessions: int, num_ids: int, seed: int, shared_prefix_tokens: int
) -> None:
    """Even with two ids to choose from: the session's number is written into every aligned block."""
    sessions = tuple(SessionPlan(i, 0, None, None, (RequestPlan(0, 640, 8, 0),)) for i in range(num_sessions))
    plan = Plan("written", seed, 0, "as-drawn", shared_prefix_tokens, (7, 7 + num_ids), sessions, {})
    streams = TokenStreams(plan)
    blocks = [streams.fresh_tokens(session, 0).reshape(5, 128).tobytes() for session in range(num_sessions)]
    first_own = -(-shared_prefix_tokens // 128)
    own = [content[block * 512 : (block + 1) * 512] for content in blocks for block in range(first_own, 5)]
    by_session = [set(own[i : i + 5 - first_own]) for i in range(0, len(own), 5 - first_own)]
    assert len(set().union(*by_session)) == sum(len(session_blocks) for session_blocks in by_session)
    assert len({content[: shared_prefix_tokens * 4] for content in blocks}) == 1


def test_treatments_send_the_same_tokens_and_replicates_do_not() -> None:
    workload = WorkloadSpec(num_sessions=2)
    plan = build_plan(workload, 1, 0)
    tokens = TokenStreams(plan).fresh_tokens(1, 0)
    assert np.array_equal(tokens, TokenStreams(plan.with_treatment("no-waits")).fresh_tokens(1, 0))
    other = TokenStreams(build_plan(workload, 1, 1)).fresh_tokens(1, 0)
    assert np.mean(other[:800] == tokens[:800]) < 0.1


def test_the_tokens_of_a_known_plan_never_change() -> None:
    tokens = TokenStreams(plan_of(SessionPlan(0, 0, None, None, (RequestPlan(0, 40, 8, 0),)))).fresh_tokens(0, 0)
    assert tokens[:4].tolist() == [5412, 66458, 13772, 51713]
    # First outputs of splitmix64 seeded with 0 (the reference implementation).
    assert [mix64(0), mix64(0x9E3779B97F4A7C15)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]


def test_returned_ids_that_are_too_few_are_refused() -> None:
    plan = build_plan(WorkloadSpec(num_sessions=1), 1, 0)
    answer_tokens = plan.request(0, 0).generate_tokens
    streams = TokenStreams(plan)
    assert len(streams.prompt(0, 1, {0: [[5] * answer_tokens]})) == plan.request(0, 1).prompt_tokens
    with pytest.raises(PlanError, match=f"keeps {answer_tokens} tokens generated .* returned {answer_tokens - 1}"):
        streams.prompt(0, 1, {0: [[5] * (answer_tokens - 1)]})
    with pytest.raises(PlanError, match="returned 0"):
        streams.prompt(0, 1, {})


def test_text_prompts_have_a_word_per_token_and_carry_the_answer() -> None:
    plan = build_plan(WorkloadSpec(num_sessions=3, prompt_form="text"), 1, 0)
    streams = TokenStreams(plan)
    first = streams.text_prompt(0, 0, {})
    assert len(first.split()) == plan.request(0, 0).prompt_tokens
    second = streams.text_prompt(0, 1, {0: [" the answer"]})
    assert second.startswith(f"{first} the answer ")
    assert len(second.split()) == len(first.split()) + 2 + 8
    assert len({streams.fresh_text(session, 0)[:200] for session in range(3)}) == 3


def test_a_truncated_text_prompt_cuts_the_answer_in_proportion() -> None:
    requests = (RequestPlan(0, 20, 10, 0), RequestPlan(25, 3, 5, 0), RequestPlan(7, 1, 1, 0))
    streams = TokenStreams(plan_of(SessionPlan(0, 0, None, None, requests)))
    first = streams.fresh_text(0, 0)
    answers = {0: ["0123456789", "unused"]}
    assert streams.text_prompt(0, 1, answers) == first + "01234" + streams.fresh_text(0, 1)
    kept_words = "".join(f" {word}" for word in first.split()[:7])
    assert streams.text_prompt(0, 2, answers) == kept_words + streams.fresh_text(0, 2)


def test_a_chat_is_the_plans_words_and_the_answers_in_turns() -> None:
    requests = (RequestPlan(0, 20, 10, 0), RequestPlan(30, 3, 5, 0), RequestPlan(38, 2, 1, 0))
    streams = TokenStreams(plan_of(SessionPlan(0, 0, None, None, requests)))
    user = [{"role": "user", "content": streams.fresh_text(0, request)} for request in range(3)]
    answers = [{"role": "assistant", "content": text} for text in (" first", " second")]
    assert streams.chat_messages(0, 0, {}) == user[:1]
    generated = {0: [" first", " second"]}
    assert streams.chat_messages(0, 2, generated) == [user[0], answers[0], user[1], answers[1], user[2]]


def test_a_chat_that_keeps_no_answer_has_one_message_of_the_user() -> None:
    requests = (RequestPlan(0, 20, 10, 0), RequestPlan(7, 2, 5, 0))
    streams = TokenStreams(plan_of(SessionPlan(0, 0, None, None, requests)))
    kept = "".join(f" {word}" for word in streams.fresh_text(0, 0).split()[:7])
    assert streams.chat_messages(0, 1, {0: ["unused"]}) == [
        {"role": "user", "content": kept + streams.fresh_text(0, 1)}
    ]


def test_keys_of_real_tokens_are_chained_and_count_only_full_blocks() -> None:
    tokens = np.arange(300, dtype=np.int32)
    keys = token_block_keys(tokens)
    assert len(keys) == 2
    assert len(token_block_keys(tokens[:127])) == 0
    changed = tokens.copy()
    changed[0] += 1
    assert not set(token_block_keys(changed).tolist()) & set(keys.tolist())
    swapped = tokens.copy()
    swapped[[130, 131]] = swapped[[131, 130]]
    assert [a == b for a, b in zip(token_block_keys(swapped).tolist(), keys.tolist(), strict=True)] == [True, False]


def test_a_run_of_its_own_has_other_ids_of_the_same_lengths_and_sharing() -> None:
    plan = build_plan(WorkloadSpec(num_sessions=3, shared_prefix_tokens=128), 3, 1)
    planned, own = TokenStreams(plan), TokenStreams(plan, ids=PromptIds(seed=7, token_id_range=(300, 2000)))
    one, other = own.fresh_tokens(0, 0), own.fresh_tokens(1, 0)
    assert len(one) == len(planned.fresh_tokens(0, 0))
    assert one[:128].tolist() == other[:128].tolist()
    assert one[128:200].tolist() != other[128:200].tolist()
    assert one[:16].tolist() != planned.fresh_tokens(0, 0)[:16].tolist()
    assert one.min() >= 300
    assert one.max() < 2000
    assert one.tolist() == TokenStreams(plan, ids=PromptIds(7, (300, 2000))).fresh_tokens(0, 0).tolist()
