"""Drawn plans on drawn servers: the compiled simulator held to the engine loop in Python, to the ns.

The loop schedules paged memory by the naive second opinion (``NaiveReplicas``), or draws every token as a live emulator
has it, while its router reads bodies (``EmulatedReplicas``). Both route by the policies of a live router. What the loop
did is read into the simulator's tables.

``python -m tests.support.naive_replicas STEPS [FIRST_SEED]`` compares at least so many steps of each; exit status 0
means no difference.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count, product
from typing import NamedTuple

import numpy as np

from harness.compiled.records import IntArray, records_from
from harness.extras.replicas.policies import POLICIES, Policy, RoutedRequest, policy_named
from harness.extras.replicas.predicted import NO_RECORDS, DrawsOnReplicas
from harness.extras.replicas.router import keys_of
from harness.measure.records.schema import values_of
from harness.model.engine import CostModel, EngineConfig
from harness.model.engine.core import EngineCore, EngineRequest, StepEnd, StepStart
from harness.model.engine.scheduler import CALLERS
from harness.model.engine.steps import FAR
from harness.model.plan.event_queue import ClientEvent
from harness.model.plan.model import Plan
from harness.model.sim.draws import Draws, noise_table
from harness.model.sim.driver import Key
from harness.model.sim.kernel import arrays as layout
from harness.model.sim.plans import plan_arrays
from harness.model.sim.simulate import run_batch
from harness.model.spec import ServerSpec
from harness.model.spec.server import RETENTION_KEYS
from harness.stacks.rbln.rules.kv_rules import PAGED
from tests.support.counted_replicas import CountedReplicas
from tests.support.naive_paged import NaivePagedScheduler
from tests.support.paged_in_steps import LONGEST, drawn_costs, drawn_plan, drawn_server, has_own_prompts
from tests.support.virtual_emulator import TokenRequests

NOT_YET = -1
_BY_REQUEST = CALLERS.index("request")


class EmulatedReplicas(CountedReplicas):
    """Draws every token; the router reads bodies."""

    takes_equal_steps = False

    def __init__(self, plan: Plan, server: ServerSpec, costs: CostModel, router: Policy) -> None:
        super().__init__(plan, server, costs, router)
        self._tokens = TokenRequests(plan, EngineConfig.from_server(server))

    def server_of(self, event: ClientEvent) -> int:
        body = json.dumps({"prompt": [int(token) for token in self._tokens.prompt(event)]}).encode()
        keys = keys_of(body) if self.router.reads_prompts else ()
        key = (event.session, event.request)
        self.served_by[key] = self.router.route(RoutedRequest(str(self._whole_sessions[event.session]), keys))
        return self.served_by[key]

    def request_of(self, event: ClientEvent) -> EngineRequest:
        super().request_of(event)
        made = self._tokens.request_of(event, len(self.names))
        self.requests[event.session, event.request] = made
        return made

    def num_tokens(self, key: Key) -> int:
        return self._tokens.num_tokens(key)

    def ended(self, server: int, end: StepEnd, /) -> None:
        for request, num_tokens in zip(end.requests, end.num_tokens, strict=True):
            self._tokens.draw_tokens(self.names[request.handle], request, num_tokens)
            # The loop below counts the tokens that were drawn.
            request.num_generated -= num_tokens
        super().ended(server, end)


class NaiveReplicas(CountedReplicas):
    """Schedules paged memory by a second opinion; the router decides as the one that runs before servers."""

    def __init__(self, plan: Plan, server: ServerSpec, costs: CostModel, router: Policy) -> None:
        super().__init__(plan, server, costs, router)
        config = EngineConfig.from_server(server)
        if config.rule_set.is_paged:
            for replica in self.replicas:
                replica.core = EngineCore(NaivePagedScheduler(config.paged, costs))
            self.cores = [replica.core for replica in self.replicas]
        self.evicted_ns: list[int] = []

    def started(self, server: int, start: StepStart, /) -> None:
        super().started(server, start)
        num_evicted = sum(replica.num_evicted for replica in self.replicas)
        self.evicted_ns += [start.start_ns] * (num_evicted - len(self.evicted_ns))


def replicas_naively(case: Case, made: type[CountedReplicas] = NaiveReplicas) -> layout.SimOutcome:
    """What ``DrawsOnReplicas`` gives: sums over all replicas, and the requests of each plan, in order."""
    played, config = [_played(case, place, made) for place in range(len(case.plans))], case.config
    return layout.SimOutcome(
        requests=records_from(layout.RequestResult, [row for run in played for row in _requests(run)]),
        histogram=np.array([_histogram(run, config) for run in played], dtype=np.int64),
        totals=records_from(layout.PlanTotals, [_totals(run, config) for run in played]),
        steps=records_from(layout.StepRecord, []),
        # A block belongs to no request.
        evictions=records_from(
            layout.EvictionRecord, [(at_ns, -1, _BY_REQUEST, -1, -1) for at_ns in getattr(played[-1], "evicted_ns", ())]
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


def _played(case: Case, place: int, made: type[CountedReplicas]) -> CountedReplicas:
    server, draws = case.server, case.draws
    router = policy_named(server.routing.policy, server.num_replicas)
    run = made(case.plans[place], server.replica, draws.models[place], router)
    # Each replica has noise of its own, which is drawn by the number of the step, one by one.
    for replica, core in enumerate(run.cores):
        core.lasting_ns = _noisy(draws.noise, draws.noise_seeds[place] + replica)
    run.takes_equal_steps = made.takes_equal_steps and len(draws.noise) == 1
    run.play()
    return run


def _result_row(request: EngineRequest | None, over_ns: int, left_after: int) -> tuple[int, ...]:
    """The fields of ``RequestResult``, in its order. left_after: tokens that a client had when it left."""
    if request is None:
        return (0, NOT_YET, NOT_YET, NOT_YET, NOT_YET, 0, 0, NOT_YET)
    times_ns = (request.arrival_ns, request.scheduled_ns, request.first_token_ns, over_ns)
    # With paged memory a hash that is found is a block that is there; of slots no figure asks for it.
    return (request.cached_tokens, *times_ns, request.cached_tokens, request.num_preemptions, left_after)


def _requests(run: CountedReplicas) -> list[tuple[int, ...]]:
    rows: list[tuple[int, ...]] = []
    for session, request, done_ns, status in values_of(run.requests_table(), "session", "request", "done_ns", "status"):
        sent = run.requests.get((session, request))
        left_after = NOT_YET if sent is None or status == "ok" else sent.num_generated
        over_ns = NOT_YET if done_ns is None else done_ns
        rows.append(_result_row(sent, over_ns, left_after))
    return rows


def _histogram(run: CountedReplicas, config: EngineConfig) -> list[int]:
    """Decode steps of all replicas by n."""
    counts = [0] * (config.max_num_seqs + 1)
    for replica in run.replicas:
        for (num_seqs, _bucket), times in replica.batches.items():
            counts[num_seqs] += times
    return counts


def _totals(run: CountedReplicas, config: EngineConfig) -> tuple[int, ...]:
    """The fields of ``PlanTotals``, in its order."""
    replicas = run.replicas
    others = [step for replica in replicas for step in replica.others if step.num_seqs]
    return (
        sum(replica.decode_ns for replica in replicas),
        sum(replica.prefill_ns for replica in replicas),
        sum(replica.wait_ns for replica in replicas),
        run.end_ns,
        sum(replica.batches.total() for replica in replicas),
        len(others),
        sum(replica.num_evicted for replica in replicas),
        sum(step.computed_tokens for step in others),
        # With slots a prompt that is computed again reuses again.
        sum(each.cached_tokens for each in (run.requests.values() if config.rule_set.is_paged else others)),
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


def differences(case: Case, made: type[CountedReplicas] = NaiveReplicas) -> Iterator[str]:
    """Where the two do not agree: table by table, the first differing row. made: the loop that is compared.

    The engine loop does not say of which tokens of a slot a hash was found.
    """
    naive = replicas_naively(case, made)
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
    for drawn, made in ((drawn_alone, NaiveReplicas), (drawn_case, NaiveReplicas), (drawn_case, EmulatedReplicas)):
        seen, seed = Counter[str](), int(first_seed)
        while seen["steps"] < int(num_steps):
            case = drawn(seed)
            seed += 1
            if made is EmulatedReplicas and not all(map(has_own_prompts, case.plans)):
                continue
            for difference in differences(case, made):
                print(f"{drawn.__name__} {seed - 1}, {made.__name__}: {difference}", flush=True)
                return 1
            seen += case.counted()
        print(f"{drawn.__name__} {first_seed} to {seed - 1}, {made.__name__}:", dict(seen), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
