# pyright: basic
"""Ten mistakes planted in the naive scheduler of paged KV memory, one at a time: does the comparison see each?

Nothing of vLLM is imported: the other side is the compiled scheduler, which ``make differential`` holds to vLLM's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from harness.model.engine.config import NGRAM_METHODS
from tests.differential.compare import Sides, play
from tests.differential.paged_side import COSTS, PagedEngine, PagedGeometry, draw_paged_history
from tests.support.naive_paged import NaivePagedScheduler

Plant = Callable[[Any], None]
"""Changes a naive scheduler. Its parts are private: a mistake is made inside."""


def nothing(scheduler: Any) -> None:
    """No mistake."""
    del scheduler


def free_in_order_of_the_text(scheduler: Any) -> None:
    """The beginning of a text is used again first."""
    free = scheduler.pool.free
    scheduler.pool.free = lambda blocks: free(tuple(blocks)[::-1])


def use_empty_blocks_last(scheduler: Any) -> None:
    """Free blocks without content go behind the others."""
    pool, free = scheduler.pool, scheduler.pool.free

    def free_all(blocks: Iterable[int]) -> None:
        freed = tuple(blocks)
        free(freed)
        for block in freed:
            if block in pool._free and pool._keys[block] is None:
                pool._free.move_to_end(block)

    pool.free = free_all


def match_the_last_registered(scheduler: Any) -> None:
    """Of several blocks with the same content the last one is matched."""
    pool = scheduler.pool

    def match(keys: Iterable[int]) -> list[int]:
        matched: list[int] = []
        for key in keys:
            if key not in pool._by_key:
                break
            matched.append(next(reversed(pool._by_key[key])))
        return matched

    pool.match = match


def match_one_block_less(scheduler: Any) -> None:
    """The last block that could be reused is computed again."""
    match = scheduler.pool.match
    scheduler.pool.match = lambda keys: match(keys)[:-1]


def register_prompts_alone(scheduler: Any) -> None:
    """Blocks of answers cannot be matched."""
    register = scheduler._register
    scheduler._register = lambda request, num_tokens: register(request, min(num_tokens, request.num_prompt_tokens))


def requeue_at_the_tail(scheduler: Any) -> None:
    """Who was preempted waits behind all others."""
    preempt = scheduler._preempt

    def preempt_to_the_tail(request: Any) -> None:
        preempt(request)
        scheduler._waiting.rotate(-1)

    scheduler._preempt = preempt_to_the_tail


def count_lookups_together(scheduler: Any) -> None:
    """Look-ups after a preemption are not told apart."""
    count_lookup = scheduler._count_lookup

    def count(request: Any, cached_tokens: int) -> None:
        request.was_preempted = False
        count_lookup(request, cached_tokens)

    scheduler._count_lookup = count


def keep_a_block_back(scheduler: Any) -> None:
    """A request is admitted only if a block stays free."""
    fits, pool = scheduler._fits, scheduler.pool
    scheduler._fits = lambda request, matched: fits(request, matched) and pool.num_free > 1 + len(matched)


def spend_a_token_less(scheduler: Any) -> None:
    """A step computes one token less than its budget."""
    config = scheduler.config
    scheduler.config = replace(
        config, max_num_batched_tokens=max(config.max_num_seqs, config.max_num_batched_tokens - 1)
    )


def cut_prompts_later(scheduler: Any) -> None:
    """The threshold of long prompts is one token too high."""
    config = scheduler.config
    if config.long_prefill_tokens:
        scheduler.config = replace(config, long_prefill_tokens=config.long_prefill_tokens + 1)


PLANTED: tuple[Plant, ...] = (
    free_in_order_of_the_text,
    use_empty_blocks_last,
    match_the_last_registered,
    match_one_block_less,
    register_prompts_alone,
    requeue_at_the_tail,
    count_lookups_together,
    keep_a_block_back,
    spend_a_token_less,
    cut_prompts_later,
)


def server_with(**changes: int) -> Plant:
    """Scalars of a server that are off by so much."""

    def plant(engine: Any) -> None:
        for name, change in changes.items():
            engine.scheduler._state.server[name][:] += change

    return plant


def server_without(flag: str) -> Plant:
    """A flag of a server that says the opposite."""

    def plant(engine: Any) -> None:
        scalars = engine.scheduler._state.server
        scalars[flag][:] = 1 - scalars[flag]

    return plant


def accept_one_less(engine: Any) -> None:
    """A draft that was accepted counts as rejected."""
    accepted = engine._accepted
    engine._accepted = lambda step: {name: max(0, count - 1) for name, count in accepted(step).items()}


def forget_what_was_accepted(engine: Any) -> None:
    """Every draft counts as rejected."""
    engine._accepted = lambda _step: {}


def draft_all(engine: Any) -> None:
    """A look-up of text that finds less than was asked for is taken for a whole one."""
    engine._draft = lambda _step: None


PLANTED_WITH_DRAFTS: dict[str, Plant] = {
    "no room for drafts": lambda engine: engine.scheduler._state.server["lookahead_tokens"].fill(0),
    "room for a token more": server_with(lookahead_tokens=1),
    "the last match dropped or not": server_without("drops_last_match"),
    "accepted drafts matched too early": server_without("registers_drafts"),
    "what lies behind the end counted as not computed": server_without("trims_computed"),
    "a draft more": server_with(num_drafts=1),
    "a token of the budget more": server_with(max_step_tokens=1),
    "one accepted less": accept_one_less,
    "nothing accepted": forget_what_was_accepted,
    "always as many drafts": draft_all,
}
"""Mistakes in the compiled engine of a server that drafts; the other side is the same engine without."""


def first_difference_with_drafts(plant: Plant, num_histories: int, num_steps: int) -> tuple[int, list[str]]:
    """As ``first_difference``, over the servers that draft."""

    def newest(geometry: PagedGeometry) -> PagedEngine:
        """By the newest rules that are known of its method."""
        return PagedEngine(geometry, release="0.33.0" if geometry.draft_method in NGRAM_METHODS else "0.30.0")

    def planted(geometry: PagedGeometry) -> PagedEngine:
        engine = newest(geometry)
        plant(engine)
        return engine

    draw = partial(draw_paged_history, with_drafts=True)
    for seed in range(num_histories):
        history = draw(seed, num_steps)
        geometry = history.geometry
        if isinstance(geometry, PagedGeometry) and geometry.num_drafts:
            outcome = play(history, Sides(draw, newest, planted))
            if outcome.differences:
                return seed, outcome.differences
    return -1, []


class NaiveEngine(PagedEngine):
    """A server of a history that steps the naive scheduler, with a mistake."""

    def __init__(self, geometry: PagedGeometry, plant: Plant) -> None:
        super().__init__(geometry)
        self.scheduler = NaivePagedScheduler(self.scheduler.config, COSTS)
        plant(self.scheduler)


def first_difference(plant: Plant, num_histories: int, num_steps: int) -> tuple[int, list[str]]:
    """The first seed whose history shows the mistake, and what differs; -1: none of these histories does."""
    sides = Sides(draw_paged_history, PagedEngine, lambda geometry: NaiveEngine(geometry, plant))
    for seed in range(num_histories):
        outcome = play(draw_paged_history(seed, num_steps), sides)
        if outcome.differences:
            return seed, outcome.differences
    return -1, []
