"""Pins with a time limit and a second memory: known answers. Drawn ones are held to a naive scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from harness.model.engine import CostModel, Step
from harness.model.engine.config import EngineConfig
from harness.model.engine.paged import PagedScheduler
from harness.stacks.rbln.rules.kv_rules import PAGED

US = 10**9
COSTS = CostModel("known", "this test", {1: 10 * US, 8: 40 * US}, chunk_step_fs=5 * US, chunk_token_fs=US)
PROMPT_TOKENS, BLOCK_TOKENS = 100, 16


def server(**changes: Any) -> PagedScheduler:
    """Memory for two short requests at once."""
    sizes: dict[str, Any] = {"num_gpu_blocks": 20, "block_tokens": BLOCK_TOKENS, "slot_tokens": 256}
    return PagedScheduler(EngineConfig(4, (1, 2, 4), rules=PAGED, **{**sizes, **changes}), COSTS)


def keys(name: int) -> list[int]:
    return [1000 * name + place for place in range(16)]


def serve(
    scheduler: PagedScheduler,
    handle: int,
    name: int,
    at_ns: int = 0,
    keep_ns: int = 0,
    prompt_tokens: int = PROMPT_TOKENS,
) -> list[Step]:
    """One request from its arrival to its end, in steps without duration."""
    scheduler.tell_time(at_ns)
    scheduler.submit(handle, prompt_tokens, 2, keys(name))
    if keep_ns:
        scheduler.keep(handle, keep_ns)
    steps: list[Step] = []
    while scheduler.has_work:
        steps.append(scheduler.schedule())
        scheduler.finish_step()
    return steps


def found(steps: Sequence[Step]) -> int:
    return sum(admission.cached_tokens for step in steps for admission in step.admissions)


def test_a_pinned_session_finds_its_kv_after_others_that_never_return() -> None:
    for keep_ns, cached in ((0, 0), (10_000, 96)):
        scheduler = server(keep_kv_ns=10**9)
        serve(scheduler, 0, name=0, keep_ns=keep_ns)
        for other in range(1, 5):
            serve(scheduler, other, name=other, at_ns=other * 1000)
        assert found(serve(scheduler, 9, name=0, at_ns=9000)) == cached


def test_a_pin_ends_with_its_time_and_its_blocks_are_the_first_to_go() -> None:
    scheduler = server(keep_kv_ns=10**9)
    serve(scheduler, 0, name=0, keep_ns=1500)
    serve(scheduler, 1, name=1, at_ns=1000)
    # Memory has room for two and a part: by last use the second would go only after the first.
    serve(scheduler, 2, name=2, at_ns=2000)
    assert found(serve(scheduler, 3, name=1, at_ns=3000)) == 96
    assert found(serve(scheduler, 4, name=0, at_ns=4000)) < 96


def test_the_request_that_ends_last_decides_about_a_block_that_several_share() -> None:
    for keep_ns, is_kept in ((0, False), (10**6, True)):
        scheduler = server(keep_kv_ns=10**9)
        serve(scheduler, 0, name=0, keep_ns=10**6)
        serve(scheduler, 1, name=0, at_ns=10, keep_ns=keep_ns)
        for other in range(1, 5):
            serve(scheduler, other + 1, name=other, at_ns=other * 1000)
        assert (found(serve(scheduler, 9, name=0, at_ns=9000)) > 0) is is_kept


def test_what_was_overwritten_is_loaded_from_the_second_memory_and_the_step_waits() -> None:
    plain = server()
    scheduler = server(offload_blocks=100, offload_block_ns=7000)
    for each in (plain, scheduler):
        for name in range(5):
            serve(each, name, name=name)
    lost, loaded = serve(plain, 9, name=0), serve(scheduler, 9, name=0)
    assert (found(lost), found(loaded)) == (0, 96)
    assert (loaded[0].external_queries, loaded[0].external_hits) == (PROMPT_TOKENS, 96)
    computed = COSTS.chunked_step_ns(0, 0, 0, PROMPT_TOKENS - 96, loaded[0].attended_tokens)
    assert loaded[0].duration_ns == computed + 6 * 7000


@given(
    names=st.lists(st.integers(0, 5), min_size=1, max_size=25),
    keep=st.lists(st.sampled_from([0, 500, 50_000]), min_size=25, max_size=25),
    offload_blocks=st.sampled_from([0, 5, 40]),
)
def test_every_block_is_free_again_and_nothing_is_found_that_was_not_computed(
    names: list[int], keep: list[int], offload_blocks: int
) -> None:
    scheduler = server(keep_kv_ns=10**6, offload_blocks=offload_blocks)
    seen: set[int] = set()
    for number, name in enumerate(names):
        cached = found(serve(scheduler, number, name=name, at_ns=number * 1000, keep_ns=keep[number]))
        assert cached <= (96 if name in seen else 0)
        seen.add(name)
        order = scheduler.free_order
        assert scheduler.free_blocks == scheduler.num_blocks == len(order) == len(set(order))
