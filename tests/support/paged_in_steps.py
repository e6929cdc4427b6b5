"""The compiled simulator of paged rules held to the naive scheduler: drawn plans on drawn servers, to the ns.

``python -m tests.support.paged_in_steps STEPS [FIRST_SEED]`` compares at least so many steps; exit status 0 means no
difference.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from harness.model.engine.config import EngineConfig
from harness.model.engine.cost import CostModel
from harness.model.engine.paged import PagedScheduler
from harness.model.engine.steps import FAR
from harness.model.plan.model import Plan, RequestPlan, SessionPlan
from harness.model.sim.draws import noise_table
from harness.model.sim.plans import plan_arrays
from harness.model.sim.simulate import run_paged
from harness.stacks.rbln.rules.kv_rules import PAGED
from tests.support.naive_paged import NaivePagedScheduler
from tests.support.naive_paged_run import run_naively

US = 10**9
LONGEST = 512
NAMED_TOKENS = 48


class Case(NamedTuple):
    """Plans on a server, each at its own costs."""

    plans: list[Plan]
    config: EngineConfig
    models: list[CostModel]
    seeds: list[int]
    noise: Any

    def arguments(self) -> tuple[Any, ...]:
        """What both simulators take."""
        return plan_arrays(self.plans), self.config, self.models, self.seeds, self.noise


def drawn_case(seed: int) -> Case:
    """The case of a seed."""
    chosen = random.Random(f"paged in steps {seed}")
    num_plans = chosen.choice((1, 1, 1, 2, 3))
    model, plans = drawn_costs(chosen), [drawn_plan(chosen) for _ in range(num_plans)]
    models = [model] + [model.scaled(chosen.uniform(0.5, 2), chosen.uniform(0.5, 2)) for _ in range(num_plans - 1)]
    noise = noise_table(chosen.choice((0, 0, 0.01)))
    return Case(plans, drawn_config(chosen), models, [chosen.randrange(1 << 32) for _ in plans], noise)


def drawn_config(chosen: random.Random) -> EngineConfig:
    """Memory from one longest request up, token budgets from a decode step up."""
    limit, block = chosen.choice((1, 2, 3, 6, 8, 12)), chosen.choice((8, 16, 32))
    longest = LONGEST // block
    return EngineConfig(
        limit,
        chosen.choice(((), (1,), (1, 2, 4), (1, 2, 3, 4, 5, 6), (8,), (1, 2, 4, 8, 16, 64))),
        0,
        LONGEST,
        block,
        prefix_caching=chosen.random() < 0.85,
        rules=chosen.choice((PAGED, "vllm-paged-0.30")),
        num_gpu_blocks=1 + chosen.choice((longest, longest, longest + 1, longest + 5, 2 * longest, 9 * longest)),
        max_num_batched_tokens=max(limit, chosen.choice((limit, limit + 1, 16, 40, 100, 300, 2048))),
        long_prefill_tokens=chosen.choice((0, 0, 0, 1, 7, 16, 50)),
        async_scheduling=chosen.random() < 0.5,
        keep_kv_ns=chosen.choice((0, 0, 30_000, 400_000, 10**9)),
        offload_blocks=chosen.choice((0, 0, 1, 7, 2 * longest)),
        offload_block_ns=chosen.choice((0, 3_000)),
    )


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


def differences(case: Case, *most_steps: int) -> Iterator[str]:
    """Where the two simulators do not agree: table by table, the first differing row.

    most_steps: of equal decode steps taken at once; several are compared one after the other.
    """
    naive = [table.tolist() for table in run_naively(*case.arguments())]
    for max_steps in most_steps or (FAR,):
        ours = run_paged(*case.arguments(), with_records=True, max_steps=max_steps)
        for name, table, wanted in zip(ours._fields, ours, naive, strict=True):
            mine = table.tolist()
            if mine != wanted:
                place = next((at for at, pair in enumerate(zip(mine, wanted, strict=False)) if pair[0] != pair[1]), -1)
                rows = f"{mine[place]} for {wanted[place]}" if place >= 0 else f"{len(mine)} rows for {len(wanted)}"
                yield f"{name} {place}, {max_steps} steps at once: {rows}"


class Differ(Exception):  # noqa: N818
    """What the two schedulers do not agree on."""


class TwoSchedulers:
    """The compiled scheduler and the naive one, which are asked the same."""

    def __init__(self, chosen: random.Random) -> None:
        config, costs = drawn_config(chosen).paged, drawn_costs(chosen)
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


def counted(case: Case) -> Counter[str]:
    """What happened in a case: steps, preemptions, evictions, clients that left, tokens reused."""
    outcome = run_paged(*case.arguments())
    return Counter(
        {
            "steps": int(outcome.totals["decode_steps"].sum() + outcome.totals["prefills"].sum()),
            "preemptions": int(outcome.totals["preemptions"].sum()),
            "evictions": int(outcome.totals["evictions"].sum()),
            "left": int((outcome.requests["aborted_tokens"] >= 0).sum()),
            "cached_tokens": int(outcome.totals["cached_tokens"].sum()),
            "asynchronous": int(case.config.async_scheduling),
            "pinning": int(case.config.keep_kv_ns > 0),
            "with second memory": int(case.config.offload_blocks > 0),
            "cases": 1,
        }
    )


def main(num_steps: str = "1000000", first_seed: str = "0") -> int:
    """Compare at least so many steps; 1 when anything differs."""
    seen, seed = Counter[str](), int(first_seed)
    while seen["steps"] < int(num_steps):
        case = drawn_case(seed)
        for difference in differences(case, FAR, 1):
            print(f"seed {seed}: {difference}", flush=True)
            return 1
        seen += counted(case)
        seed += 1
    print(dict(seen))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
