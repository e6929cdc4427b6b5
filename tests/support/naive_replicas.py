"""Drawn plans on drawn servers: the compiled simulator held to the engine loop in Python, to the ns.

The loop schedules paged memory by the naive second opinion, and routes by the policies of a live router. What it did is
read into the simulator's tables.

``python -m tests.support.naive_replicas STEPS [FIRST_SEED]`` compares at least so many steps of each; exit status 0
means no difference.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count, product
from typing import NamedTuple

import numpy as np

from harness.analysis.reuse import INNER_BLOCKS, ReuseRule
from harness.compiled.records import IntArray, records_from
from harness.extras.replicas.figures import ReplicaFigures, Served, figures_of
from harness.extras.replicas.policies import POLICIES, Policy, policy_named
from harness.extras.replicas.predicted import NO_RECORDS, DrawsOnReplicas
from harness.extras.replicas.simulated import ReplicaRun
from harness.measure.records.schema import values_of
from harness.model.engine import DECODE, PREFILL, CostModel, EngineConfig, Step
from harness.model.engine.core import EngineCore, EngineRequest, StepEnd, StepStart
from harness.model.engine.paged import PagedScheduler
from harness.model.engine.scheduler import CALLERS
from harness.model.engine.steps import FAR
from harness.model.plan.event_queue import ClientEvent
from harness.model.plan.model import Plan
from harness.model.sim.draws import Draws, noise_table
from harness.model.sim.driver import Key
from harness.model.sim.kernel import arrays as layout
from harness.model.sim.plans import check_slots, plan_arrays
from harness.model.sim.simulate import run_batch
from harness.model.spec import ServerSpec
from harness.model.spec.server import RETENTION_KEYS
from harness.stacks.rbln.rules.kv_rules import PAGED
from tests.support.naive_paged import NaivePagedScheduler
from tests.support.paged_in_steps import LONGEST, drawn_costs, drawn_plan, drawn_server

NOT_YET = -1
_BY_REQUEST = CALLERS.index("request")


class NaiveReplicas(ReplicaRun):
    """A plan on replicas that schedule paged memory by the second opinion, and an account of what they did.

    Times in ns. requests: those that were sent. decode_ns, prefill_ns, batches: of each replica, the last its decode
    steps by (n, b). others: all other steps, as they were decided. wait_ns: time that prefills kept running requests
    waiting, once for each (W). evicted_ns: when a slot or block with content was used again.
    """

    def __init__(self, plan: Plan, server: ServerSpec, costs: CostModel, router: Policy) -> None:
        super().__init__(plan, server, costs, router)
        self.costs, self.config = costs, EngineConfig.from_server(server)
        # The second opinion knows no drafts.
        if self.config.rule_set.is_paged and not self.config.drafts.num_drafts:
            self.cores = [EngineCore(NaivePagedScheduler(self.config, costs)) for _ in self.cores]
        self.requests: dict[Key, EngineRequest] = {}
        self.requests_table = self.rows.requests_table
        self.decode_ns, self.prefill_ns = ([0 for _ in self.cores] for _ in range(2))
        self.batches = [Counter[tuple[int, int]]() for _ in self.cores]
        self.others: list[Step] = []
        self.evicted_ns: list[int] = []
        self.wait_ns = 0

    def request_of(self, event: ClientEvent) -> EngineRequest:
        made = self.requests[event.session, event.request] = super().request_of(event)
        return made

    def started(self, server: int, start: StepStart, /) -> None:
        step, is_paged, schedulers = start.step, self.config.rule_set.is_paged, [core.scheduler for core in self.cores]
        in_blocks = sum(each.num_evicted for each in schedulers if isinstance(each, PagedScheduler))
        num_evicted = in_blocks - len(self.evicted_ns) if is_paged else len(step.evicted_slots)
        self.evicted_ns += [start.start_ns] * num_evicted
        if step.kind != DECODE:
            self.others.append(step)
            self.prefill_ns[server] += step.duration_ns
            num_decoding = sum(step.tokens) - step.computed_tokens
            beside_ns = self.costs.chunked_step_ns(0, 0, 0, step.computed_tokens, step.attended_tokens)
            if not is_paged:
                # A prefill is of one request, and the others are ready to decode.
                num_decoding = schedulers[server].num_running - 1 if step.kind == PREFILL else 0
                beside_ns = step.duration_ns
            self.wait_ns += num_decoding * beside_ns

    def ended(self, server: int, end: StepEnd, /) -> None:
        super().ended(server, end)
        step = end.start.step
        if step.kind == DECODE:
            self.decode_ns[server] += end.ends_ns[-1] - end.start.start_ns
            self.batches[server][step.num_seqs, step.bucket] += len(end.ends_ns)

    @property
    def figures(self) -> ReplicaFigures:
        """The figures by this account."""
        device_ns = [decode + prefill for decode, prefill in zip(self.decode_ns, self.prefill_ns, strict=True)]
        first_token_ns = {key: sent.first_token_ns for key, sent in self.requests.items() if sent.first_token_ns >= 0}
        is_paged = self.config.rule_set.is_paged
        rule = ReuseRule(self.config.block_tokens, keeps_generated=True) if is_paged else INNER_BLOCKS
        table = self.requests_table()
        return figures_of(Served(self.plan, table, rule, self.served_by, device_ns, self.batches, first_token_ns))


def play_replicas(plan: Plan, server: ServerSpec, costs: CostModel, router: Policy) -> NaiveReplicas:
    """A plan on as many fresh replicas of ``server`` as the router has. Raises PlanError as the simulator does."""
    check_slots(plan_arrays([plan]), EngineConfig.from_server(server))
    run = NaiveReplicas(plan, server, costs, router)
    run.play()
    return run


def replicas_naively(case: Case) -> layout.SimOutcome:
    """What ``DrawsOnReplicas`` gives: sums over all replicas, and the requests of each plan, in order."""
    played = [_played(case, place) for place in range(len(case.plans))]
    return layout.SimOutcome(
        requests=records_from(layout.RequestResult, [row for run in played for row in _requests(run)]),
        histogram=np.array([_histogram(run) for run in played], dtype=np.int64),
        totals=records_from(layout.PlanTotals, [_totals(run) for run in played]),
        steps=records_from(layout.StepRecord, []),
        # A block belongs to no request.
        evictions=records_from(
            layout.EvictionRecord, [(at_ns, -1, _BY_REQUEST, -1, -1) for at_ns in played[-1].evicted_ns]
        ),
    )


def _noisy(noise: IntArray, seed: int) -> Callable[[int], int] | None:
    """How long a step of so many ns lasts: longer by one of these millionths, drawn by a hash of the step's number.

    The same as ``events.noisy_ns``, for steps that follow each other.
    """
    if len(noise) == 1:
        return None
    millionths, numbers = noise.tolist(), count(seed)

    def lasting_ns(duration_ns: int) -> int:
        millionth = millionths[layout.noise_place(next(numbers), len(millionths))]
        return duration_ns + duration_ns * millionth // 1_000_000

    return lasting_ns


def _played(case: Case, place: int) -> NaiveReplicas:
    server, draws = case.server, case.draws
    router = policy_named(server.routing.policy, server.num_replicas)
    run = NaiveReplicas(case.plans[place], server.replica, draws.models[place], router)
    # Each replica has noise of its own, which is drawn by the number of the step, one by one.
    for replica, core in enumerate(run.cores):
        core.lasting_ns = _noisy(draws.noise, draws.noise_seeds[place] + replica)
    run.takes_equal_steps = len(draws.noise) == 1
    run.play()
    return run


def _result_row(request: EngineRequest | None, over_ns: int, left_after: int) -> tuple[int, ...]:
    """The fields of ``RequestResult``, in its order. left_after: tokens that a client had when it left."""
    if request is None:
        return (0, NOT_YET, NOT_YET, NOT_YET, NOT_YET, 0, 0, NOT_YET)
    times_ns = (request.arrival_ns, request.scheduled_ns, request.first_token_ns, over_ns)
    # With paged memory a hash that is found is a block that is there; of slots no figure asks for it.
    return (request.cached_tokens, *times_ns, request.cached_tokens, request.num_preemptions, left_after)


def _requests(run: NaiveReplicas) -> list[tuple[int, ...]]:
    rows: list[tuple[int, ...]] = []
    for session, request, done_ns, status in values_of(run.requests_table(), "session", "request", "done_ns", "status"):
        sent = run.requests.get((session, request))
        left_after = NOT_YET if sent is None or status == "ok" else sent.num_generated
        over_ns = NOT_YET if done_ns is None else done_ns
        rows.append(_result_row(sent, over_ns, left_after))
    return rows


def _histogram(run: NaiveReplicas) -> list[int]:
    """Decode steps of all replicas by n."""
    counts = [0] * (run.config.max_num_seqs + 1)
    for batches in run.batches:
        for (num_seqs, _bucket), times in batches.items():
            counts[num_seqs] += times
    return counts


def _totals(run: NaiveReplicas) -> tuple[int, ...]:
    """The fields of ``PlanTotals``, in its order."""
    others = [step for step in run.others if step.num_seqs]
    return (
        sum(run.decode_ns),
        sum(run.prefill_ns),
        run.wait_ns,
        run.end_ns,
        sum(batches.total() for batches in run.batches),
        len(others),
        len(run.evicted_ns),
        sum(step.computed_tokens for step in others),
        # With slots a prompt that is computed again reuses again.
        sum(each.cached_tokens for each in (run.requests.values() if run.config.rule_set.is_paged else others)),
        sum(request.num_preemptions for request in run.requests.values()),
        0,
        0,
        NOT_YET,
    )


class Case(NamedTuple):
    """Drawn plans on drawn replicas. draws: of the plans, in their order."""

    server: ServerSpec
    plans: list[Plan]
    draws: Draws

    @property
    def config(self) -> EngineConfig:
        return EngineConfig.from_server(self.server.replica)

    def simulated(self) -> Iterator[layout.SimOutcome]:
        """What the compiled simulator makes of it; of a server alone with equal steps taken at once, and one by one."""
        if self.server.router is not None:
            yield DrawsOnReplicas(self.server)(self.draws, self.config)
            return
        arrays, models, seeds, noise = self.draws
        for most in (FAR, 1):
            yield run_batch(arrays, self.config, models, seeds, noise, with_records=True, max_steps=most)

    def counted(self) -> Counter[str]:
        """What happened."""
        outcome, server = next(self.simulated()), self.server
        names = ("decode_steps", "prefills", "preemptions", "evictions")
        seen = Counter({name: int(outcome.totals[name].sum()) for name in names})
        seen["steps"] = seen["decode_steps"] + seen["prefills"]
        seen["left"] = int((outcome.requests["aborted_tokens"] >= 0).sum())
        kinds = {"asynchronous": server.async_scheduling, "pins": server.keep_kv_s, "second": server.offload_blocks}
        return seen + Counter([name for name, is_so in kinds.items() if is_so] + [server.routing.policy, "cases"])


def drawn_case(seed: int) -> Case:
    """The case of a seed: both kinds of memory, all policies, clients that leave, steps with and without noise.

    Not the rules of the paper: the engine loop knows a session by its first whole block, the simulator by its number.
    """
    chosen = random.Random(f"replicas {seed}")
    is_paged, limit = chosen.random() < 0.5, chosen.choice((1, 2, 3, 6, 8))
    memory: dict[str, object] = (
        {
            "rules": chosen.choice((PAGED, "vllm-paged-0.30")),
            "cost_model": "emulated-gpu",
            "num_gpu_blocks": 1 + chosen.choice((32, 33, 40, 64, 300)),
            "async_scheduling": chosen.random() < 0.5,
            "keep_kv_s": chosen.choice((None, None, 0.001)),
            "offload_blocks": chosen.choice((None, None, 40)),
        }
        if is_paged
        else {
            "rules": chosen.choice(("vendor-0.11.1", "vendor-0.12.0", "upstream-lru")),
            "kv_slots": limit + chosen.choice((0, 0, 1, 3)),
        }
    )
    if not chosen.random() < 0.85:
        memory = {"prefix_caching": False, **{key: memory[key] for key in memory if key not in RETENTION_KEYS}}
    server = ServerSpec.model_validate(
        {
            "replicas": chosen.choice((1, 2, 2, 3)),
            "router": {"policy": chosen.choice(list(POLICIES))},
            "max_num_seqs": limit,
            "decode_buckets": sorted({1, limit}),
            "slot_tokens": LONGEST,
            **memory,
        }
    )
    return _case_on(chosen, server, (1, 2))


def _case_on(chosen: random.Random, server: ServerSpec, num_plans: tuple[int, ...]) -> Case:
    costs, plans = drawn_costs(chosen), [drawn_plan(chosen) for _ in range(chosen.choice(num_plans))]
    models = [costs.scaled(chosen.uniform(0.5, 2), 1) for _ in plans]
    seeds = [chosen.randrange(1 << 32) for _ in plans]
    return Case(server, plans, Draws(plan_arrays(plans), models, seeds, noise_table(chosen.choice((0, 0.01)))))


def drawn_alone(seed: int) -> Case:
    """A server with paged memory and no router."""
    chosen = random.Random(f"alone {seed}")
    return _case_on(chosen, drawn_server(chosen, retains=True), (1, 1, 1, 2, 3))


def differences(case: Case) -> Iterator[str]:
    """Where the two do not agree: table by table, the first differing row.

    The engine loop does not say of which tokens of a slot a hash was found.
    """
    naive = replicas_naively(case)
    for ours in case.simulated():
        for name in ("requests", "histogram", "totals", *(("evictions",) if case.server.router is None else ())):
            tables = [getattr(outcome, name) for outcome in (ours, naive)]
            for table, unsaid in product(
                tables, {"requests": ("hash_hit_tokens",), "totals": NO_RECORDS}.get(name, ())
            ):
                table[unsaid][:] = 0
            for place, (mine, wanted) in enumerate(zip(*(table.tolist() for table in tables), strict=True)):
                if mine != wanted:
                    yield f"{name} {place}: {mine} for {wanted}"
                    break


def main(num_steps: str = "100000", first_seed: str = "0") -> int:
    """Compare at least so many steps of each; 1 when anything differs."""
    for drawn in (drawn_alone, drawn_case):
        seen, seed = Counter[str](), int(first_seed)
        while seen["steps"] < int(num_steps):
            case = drawn(seed)
            seed += 1
            for difference in differences(case):
                print(f"{drawn.__name__} {seed - 1}: {difference}", flush=True)
                return 1
            seen += case.counted()
        print(f"{drawn.__name__} {first_seed} to {seed - 1}:", dict(seen), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
