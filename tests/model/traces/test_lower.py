"""From a trace to a plan: forks and joins as sessions, what does not fit left out first, sharing by name."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from harness.clock import NS_PER_S
from harness.model.plan.blocks import BlockKeys, token_block_keys
from harness.model.plan.model import Plan, WaitKind
from harness.model.plan.tokens import TokenStreams
from harness.model.traces.lower import Lowering, sessions_of
from harness.model.traces.recording import RecordedRequest, Recording, TraceHead, load_trace, write_trace


def ask(
    *after: int,
    base: int | None = None,
    wait_s: int = 0,
    kind: WaitKind = "none",
    prompt: int = 200,
    keep: int = 0,
    blocks: tuple[int, ...] = (),
) -> RecordedRequest:
    return RecordedRequest(base, after, wait_s * NS_PER_S, kind, prompt, keep, 10, blocks)


FORK = (
    ask(),
    ask(0, wait_s=1, kind="tool"),
    ask(1, base=1, keep=210, prompt=300),
    ask(0, wait_s=2, kind="tool"),
    ask(2, 3, base=0, keep=210, prompt=400, wait_s=3, kind="tool"),
    ask(4, base=4, keep=410, prompt=500, wait_s=30, kind="human"),
)


def plan_of(*recordings: Sequence[RecordedRequest], how: Lowering | None = None, block_tokens: int = 0) -> Plan:
    trees = [Recording(str(place), place * NS_PER_S, tuple(one)) for place, one in enumerate(recordings)]
    sessions, named_tokens, _ = sessions_of(trees, block_tokens, how or Lowering(), random.Random(1))
    return Plan("trace", 1, 0, "as-drawn", 0, (1000, 150_000), sessions, block_tokens=named_tokens)


def test_a_fork_and_its_join_become_sessions_that_wait_for_all_branches() -> None:
    plan = plan_of(FORK)
    root, left, right, joined = plan.sessions
    assert [len(session.requests) for session in plan.sessions] == [1, 2, 1, 2]
    assert (left.predecessors, right.predecessors, joined.predecessors) == ((0,), (0,), (1, 2))
    assert (root.continues, left.continues, joined.continues) == (None, None, 0)
    assert joined.start_offset_ns == 3 * NS_PER_S
    assert plan.waits_by_kind_ns() == {
        "tool": [NS_PER_S, 2 * NS_PER_S, 3 * NS_PER_S],
        "none": [0],
        "human": [30 * NS_PER_S],
    }


def test_without_waits_an_agent_goes_on_at_once_and_equal_waits_keep_the_total() -> None:
    plan = plan_of(FORK)
    assert plan.with_treatment("no-waits").total_wait_ns == 0
    assert plan.with_treatment("equal-waits").total_wait_ns == plan.total_wait_ns == 36 * NS_PER_S


def test_what_does_not_fit_goes_with_all_that_waits_for_it_and_is_counted() -> None:
    trees = [Recording("a", 0, FORK), Recording("b", 0, (ask(prompt=900),))]
    sessions, _, left = sessions_of(trees, 0, Lowering(max_context_tokens=308), random.Random(1))
    assert sum(len(session.requests) for session in sessions) == 3
    assert left.counts == {"requests above the context": 4, "recordings without a request that fits": 1}
    follower = [Recording("c", 0, (ask(prompt=900), ask(0)))]
    _, _, left = sessions_of(follower, 0, Lowering(max_context_tokens=308), random.Random(1))
    assert left.counts["requests after such a request"] == 1


def test_a_sample_is_drawn_from_the_recordings_that_fit() -> None:
    trees = [(ask(prompt=9000),)] * 6 + [(ask(),)] * 3
    assert plan_of(*trees, how=Lowering(max_context_tokens=8000, num_recordings=3)).num_sessions == 3
    nine = [Recording(str(place), 0, requests) for place, requests in enumerate(trees)]
    for num_drawn, num_left in ((0, 0), (1, 2), (2, 1), (3, 0), (4, 0)):
        how = Lowering(max_context_tokens=8000, num_recordings=num_drawn)
        assert sessions_of(nine, 0, how, random.Random(1))[2].counts["recordings not drawn"] == num_left


def test_a_closed_population_starts_the_next_recording_when_every_branch_of_one_has_ended() -> None:
    plan = plan_of((ask(), ask(0), ask(0)), (ask(),), how=Lowering(concurrency=1))
    assert plan.sessions[3].predecessors == (1, 2)


def test_recorded_arrivals_and_human_waits_follow_what_was_asked() -> None:
    how = Lowering(arrivals="recorded", human_waits="cap", human_wait_cap_ns=5 * NS_PER_S)
    plan = plan_of(FORK, FORK, how=how)
    assert plan.sessions[4].start_offset_ns == NS_PER_S
    assert plan.waits_by_kind_ns()["human"] == [5 * NS_PER_S] * 2
    assert plan_of(FORK, how=Lowering(human_waits="drop")).waits_by_kind_ns()["human"] == [0]


def test_shrinking_divides_every_length_and_keeps_a_stream_whole() -> None:
    plan = plan_of(FORK, how=Lowering(shrink=4))
    assert plan.sessions[3].requests[1].keep_tokens <= plan.sessions[3].requests[0].stream_tokens
    assert plan.sessions[0].requests[0].prompt_tokens == 50


def test_named_blocks_are_left_out_where_shrinking_would_break_them_and_only_there() -> None:
    recording = Recording("a", 0, (ask(prompt=600, blocks=(1, 2)),))
    for shrink, named_tokens, num_left in ((1, 256, 0), (2, 128, 0), (3, 0, 2)):
        _, tokens, left = sessions_of([recording], 256, Lowering(shrink=shrink), random.Random(1))
        assert (tokens, left.counts["named blocks"]) == (named_tokens, num_left)


def test_an_answer_that_the_client_leaves_shrinks_with_the_others_and_still_ends_early() -> None:
    for num_taken, shrink, tokens in ((7, 1, (10, 7)), (7, 4, (3, 2)), (7, 10, (2, 1)), (3, 4, (3, 1))):
        left = ask()._replace(abort_after_tokens=num_taken)
        (request,) = plan_of((left,), how=Lowering(shrink=shrink)).sessions[0].requests
        assert (request.generate_tokens, request.abort_after_tokens) == tokens


def test_prompts_with_equal_block_names_share_those_tokens_and_keys_and_no_others() -> None:
    names = (0, 1, 2, 3)
    plan = plan_of(
        (ask(prompt=300, blocks=names),), (ask(prompt=300, blocks=(0, 1, 2, 9)),), (ask(prompt=300),), block_tokens=64
    )
    streams, keys = TokenStreams(plan), BlockKeys(plan)
    first, second, third = (streams.prompt(session, 0, {}) for session in range(3))
    assert np.array_equal(first[:192], second[:192])
    assert not np.array_equal(first[192:256], second[192:256])
    assert not np.array_equal(first[:64], third[:64])
    for one, other in ((0, 1), (0, 2), (1, 2)):
        prompts = [streams.prompt(session, 0, {}) for session in (one, other)]
        by_tokens = token_block_keys(prompts[0]) == token_block_keys(prompts[1])
        assert list(keys.prompt(one, 0) == keys.prompt(other, 0)) == list(by_tokens)


def test_a_trace_that_was_written_anew_is_read_anew(tmp_path: Path) -> None:
    head = TraceHead("t", "made", "together", 0, {}, {}, ())
    for prompt in (200, 300):
        write_trace(tmp_path / "t.jsonl", head, [Recording("a", 0, (ask(prompt=prompt),))])
        (recording,) = load_trace(str(tmp_path / "t.jsonl")).recordings
        assert recording.requests[0].prompt_tokens == prompt


def names(plan: Plan) -> list[tuple[int, ...]]:
    return [session.blocks for session in plan.sessions]


def test_more_agents_than_recordings_share_what_several_recordings_name_and_nothing_else() -> None:
    """Two recordings begin with one system prompt, block 7; five agents have blocks of their own behind it."""
    one, other = ((ask(prompt=400, blocks=(7, own)), ask(0, base=0, keep=410, prompt=600, wait_s=8)) for own in (8, 9))
    plan = plan_of(one, other, how=Lowering(agents=5), block_tokens=128)
    assert [len(session.requests) for session in plan.sessions] == [2] * 5
    assert {first for first, _ in names(plan)} == {7}
    assert len({own for _, own in names(plan)}) == 5
    assert {8, 9} <= {own for _, own in names(plan)}, "whoever is first has the recording's own"
    keys = BlockKeys(plan)
    shared = [set(keys.prompt(place, 1).tolist()) for place in range(5)]
    assert all(len(a & b) == 1 for a in shared for b in shared if a is not b), "the system prompt's block alone"


def test_agents_begin_apart_within_the_mean_wait_and_differ_from_replicate_to_replicate() -> None:
    trees = [Recording("a", 0, (ask(), ask(0, wait_s=2), ask(1, wait_s=6)))]
    starts = []
    for seed in (1, 2):
        sessions, *_ = sessions_of(trees, 0, Lowering(agents=40), random.Random(seed))
        starts.append([session.start_offset_ns for session in sessions])
    for each in starts:
        assert min(each) == 0
        assert 3 * NS_PER_S < max(each) < 4 * NS_PER_S
    assert starts[0] != starts[1]


def test_fewer_agents_than_recordings_take_each_recording_once_at_most() -> None:
    plan = plan_of(*((ask(prompt=100 + place),) for place in range(9)), how=Lowering(agents=6))
    assert len({session.requests[0].prompt_tokens for session in plan.sessions}) == 6


def test_a_stretch_keeps_the_rate_and_lies_elsewhere_for_another_replicate() -> None:
    trees = [Recording(str(place), place * NS_PER_S, (ask(prompt=100 + place),)) for place in range(60)]
    how = Lowering(stretch_ns=10 * NS_PER_S, arrivals="recorded")
    firsts = set[int]()
    for seed in range(6):
        sessions, _, left = sessions_of(trees, 0, how, random.Random(seed))
        prompts = [session.requests[0].prompt_tokens for session in sessions]
        assert prompts == list(range(prompts[0], prompts[0] + len(prompts)))
        assert len(prompts) in (10, 11)
        assert left.counts["recordings outside the stretch"] == 60 - len(prompts)
        assert sessions[1].start_offset_ns == NS_PER_S
        firsts.add(prompts[0])
    assert len(firsts) > 2
    whole, *_ = sessions_of(trees, 0, Lowering(stretch_ns=60 * NS_PER_S), random.Random(1))
    assert len(whole) == 60
