"""Drawn plans, drawn servers with paged KV memory, and the compiled scheduler held to the naive one on such."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from harness.model.engine.config import EngineConfig
from harness.model.engine.cost import CostModel
from harness.model.engine.paged import PagedScheduler
from harness.model.plan.model import Plan, RequestPlan, SessionPlan
from harness.model.spec import ServerSpec
from harness.stacks.rbln.rules.kv_rules import PAGED
from tests.support.naive_paged import NaivePagedScheduler

US = 10**9
LONGEST = 512
NAMED_TOKENS = 48


def drawn_server(chosen: random.Random, *, retains: bool = False) -> ServerSpec:
    """Memory from one longest request up, token budgets from a decode step up. retains: some pin or load KV."""
    limit, block = chosen.choice((1, 2, 3, 6, 8, 12)), chosen.choice((8, 16, 32))
    longest = LONGEST // block
    keys: dict[str, Any] = {
        "rules": chosen.choice((PAGED, "vllm-paged-0.30")),
        "cost_model": "emulated-gpu",
        "slot_tokens": LONGEST,
        "block_size": block,
        "max_num_seqs": limit,
        "decode_buckets": chosen.choice(((1,), (1, 2, 4), (1, 2, 3, 4, 5, 6), (8,), (1, 2, 4, 8, 16, 64))),
        "num_gpu_blocks": 1 + chosen.choice((longest, longest, longest + 1, longest + 5, 2 * longest, 9 * longest)),
        "max_num_batched_tokens": max(limit, chosen.choice((limit, limit + 1, 16, 40, 100, 300, 2048))),
        "long_prefill_tokens": chosen.choice((0, 0, 0, 1, 7, 16, 50)),
        "prefix_caching": chosen.random() < 0.85,
        "async_scheduling": chosen.random() < 0.5,
    }
    if retains and keys["prefix_caching"]:
        keys["keep_kv_s"] = chosen.choice((None, None, 0.00003, 0.0004, 1.0))
        keys["offload_blocks"] = chosen.choice((None, None, 1, 7, 2 * longest))
        keys["offload_block_us"] = keys["offload_blocks"] and chosen.choice((None, 3.0))
    return ServerSpec.model_validate(keys)


def drawn_costs(chosen: random.Random) -> CostModel:
    """Costs in which every coefficient may matter, and steps often end at the same instant."""
    context_fs = chosen.choice((0, 0, 1_500, 12_345_678, 7 * US))
    return CostModel(
        "drawn",
        "this test",
        {1: 10 * US, 4: 13 * US, 8: 40 * US},
        alpha_fs=chosen.choice((0, 333)),
        beta_fs=chosen.choice((0, US // 3)),
        context_fs=context_fs,
        chunk_step_fs=chosen.choice((0, 5 * US, 5 * US + 7)),
        chunk_token_fs=chosen.choice((US, US // 7)),
        attended_fs=chosen.choice((0, 0, 3_141_592)),
        eager_ns=chosen.choice((0, 17_000)),
        chunk_eager_ns=chosen.choice((0, 23_000)),
    )


def drawn_plan(chosen: random.Random) -> Plan:
    """Sessions that fork, share their beginning or named blocks, and whose clients may leave."""
    shared, names = chosen.choice(((0, False), (0, False), (40, False), (0, True), (64, False)))
    may_leave = chosen.random() < 0.4
    # In a crowd many sessions start by themselves, and memory is short.
    is_crowd = chosen.random() < 0.3
    sessions: list[SessionPlan] = []
    for index in range(chosen.randint(15, 40) if is_crowd else chosen.randint(1, 14)):
        before = [] if is_crowd and chosen.random() < 0.8 else sessions
        session = _drawn_session(chosen, before, has_names=names, may_leave=may_leave)
        sessions.append(replace(session, index=index))
    return Plan(
        "drawn", 1, 0, "as-drawn", shared, (1000, 150_000), tuple(sessions), block_tokens=NAMED_TOKENS if names else 0
    )


def _drawn_session(
    chosen: random.Random, before: list[SessionPlan], *, has_names: bool, may_leave: bool
) -> SessionPlan:
    after = chosen.choice([None, None, *range(len(before))])
    continues = after if after is not None and chosen.random() < 0.6 else None
    also = [place for place in range(len(before)) if place != after and chosen.random() < 0.2] if after else []
    stream = 0 if continues is None else before[continues].requests[-1].stream_tokens
    names: tuple[int, ...] = ()
    requests: list[RequestPlan] = []
    for place in range(chosen.randint(1, 5)):
        generate = chosen.choice((1, 2, chosen.randint(1, 60), chosen.randint(1, 150), chosen.randint(100, 300)))
        keep = min(chosen.choice((0, stream // 2, stream, stream, stream)), LONGEST - generate - 1)
        most = LONGEST - generate - keep
        new = min(most, max(1, chosen.choice((1, 5, chosen.randint(1, 64), chosen.randint(1, 300)))))
        if place == 0 and keep == 0 and continues is None and has_names:
            names = tuple(chosen.randrange(2) for _ in range(min(3, new // NAMED_TOKENS)))
        after_ns, after_tokens = 0, 0
        if may_leave and chosen.random() < 0.4:
            after_ns = chosen.choice((0, 1, 20_000, 45_000, chosen.randrange(1, 2_000_000)))
            after_tokens = chosen.randint(1, generate - 1) if after_ns == 0 and generate > 1 else 0
        wait_ns = chosen.choice((0, 1_000, 100_000, chosen.randrange(3_000_000)))
        requests.append(
            RequestPlan(keep, new, generate, wait_ns, abort_after_ns=after_ns, abort_after_tokens=after_tokens)
        )
        stream = requests[-1].stream_tokens
    start_ns = chosen.choice((0, 0, 10_000, 300_000, chosen.randrange(2_000_000)))
    return SessionPlan(len(before), start_ns, after, continues, tuple(requests), also_after=tuple(also), blocks=names)


def has_own_prompts(plan: Plan) -> bool:
    """Whether no two sessions can ask the same: equal prompts have equal answers, which a plan does not know."""
    return all(
        request.prompt_tokens > max(plan.shared_prefix_tokens, plan.block_tokens * len(session.blocks))
        for session in plan.sessions
        for request in session.requests
    )


class Differ(Exception):  # noqa: N818
    """What the two schedulers do not agree on."""


class TwoSchedulers:
    """The compiled scheduler and the naive one, which are asked the same."""

    def __init__(self, chosen: random.Random) -> None:
        config, costs = EngineConfig.from_server(drawn_server(chosen, retains=True)), drawn_costs(chosen)
        config = replace(config, decode_buckets=chosen.choice((config.decode_buckets, ())))
        self.sides: tuple[PagedScheduler, ...] = (PagedScheduler(config, costs), NaivePagedScheduler(config, costs))
        self.chosen, self.now_ns = chosen, 0

    def ask(self, question: Callable[[PagedScheduler], object]) -> None:
        """Both give the same answer, else Differ."""
        mine, wanted = map(question, self.sides)
        if mine != wanted:
            raise Differ(f"{mine} for {wanted}")

    def step(self) -> None:
        """Time goes by, requests come and go, a step is decided and is over."""
        self.now_ns += self.chosen.choice((0, 1_000, 50_000))
        for side in self.sides:
            side.tell_time(self.now_ns)
        for _ in range(self.chosen.choice((0, 0, 1, 3))):
            self._act()
        self.ask(lambda side: side.schedule())
        self.ask(_seen)
        if self.chosen.random() < 0.2:
            self._act()
        self.ask(lambda side: side.finish_step())
        self.ask(_seen)

    def _act(self) -> None:
        what, handle = self.chosen.choice(("submit", "submit", "abort", "reset", "")), self.chosen.randrange(20)
        if what == "submit" and handle not in alive(self.sides[0]):
            self._submit(handle)
        elif what == "abort":
            for side in self.sides:
                side.abort(handle)
        elif what == "reset" and self.chosen.random() < 0.1:
            self.ask(lambda side: side.reset_prefix_cache())

    def _submit(self, handle: int) -> None:
        chosen = self.chosen
        prompt, most = chosen.randint(1, 200), chosen.choice((1, 2, 40, chosen.randint(1, 300)))
        stop = chosen.choice((most, chosen.randint(1, most)))
        text, keep_ns = chosen.randrange(4), chosen.choice((0, 5_000, 10**6))
        keys = [1000 * text + place + (handle + self.now_ns) * (place > 5) * 10**6 for place in range(64)]
        for side in self.sides:
            side.submit(handle, prompt, most, keys, stop)
            side.keep(handle, keep_ns)


def scheduler_differences(seed: int, num_steps: int = 150) -> Iterator[str]:
    """Where the compiled scheduler and the naive one do not agree, over drawn operations: the first difference.

    Requests stop before their limit, are dropped at any time, and use the handles of others again; contents are
    forgotten; time goes by. Compared: every step with its blocks, who ended, queues, free blocks in order, counts.
    """
    both = TwoSchedulers(random.Random(f"schedulers {seed}"))
    try:
        for _ in range(num_steps):
            both.step()
    except Differ as difference:
        yield str(difference)


def alive(scheduler: PagedScheduler) -> set[int]:
    """Handles of the requests that wait or run."""
    return {*scheduler.running, *scheduler.waiting}


def _seen(side: PagedScheduler) -> object:
    """Everything that a scheduler shows."""
    of_requests = [(handle, side.output_tokens(handle), side.inner_blocks(handle)) for handle in sorted(alive(side))]
    lists = (side.running, side.waiting, side.free_order, side.free_blocks, side.second_order)
    return of_requests, lists, side.has_work, side.num_evicted, vars(side.prefix_counts).copy()
