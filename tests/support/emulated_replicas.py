"""The emulator's loop with every token, and a second opinion on memory and routing, held to the compiled simulator.

Drawn plans on drawn replicas, in virtual time. Every prompt and answer is made of tokens, as a live emulator has them;
the router reads the body that a client would send. The second opinion schedules and routes by naive lists.

``python -m tests.support.emulated_replicas [REQUESTS] [FIRST_SEED]`` goes on until so many requests met a server that
keeps KV, and so many a prefix-aware router; exit status 0 means no difference.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import replace

from harness.extras.replicas.plans import plans_of
from harness.extras.replicas.policies import POLICIES, Policy, RoutedRequest
from harness.extras.replicas.router import keys_of
from harness.model.engine import CostModel, EngineConfig
from harness.model.engine.core import EngineCore, EngineRequest, StepEnd
from harness.model.plan.event_queue import ClientEvent
from harness.model.plan.model import Plan
from harness.model.sim.driver import Key
from harness.model.spec import ServerSpec
from tests.support.counted_replicas import CountedReplicas
from tests.support.emulated_paged import has_own_prompts
from tests.support.naive_paged import NaivePagedScheduler
from tests.support.naive_replicas import Case, differences, drawn_case
from tests.support.naive_router import NaiveRouter
from tests.support.virtual_emulator import TokenRequests


class EmulatedReplicas(CountedReplicas):
    """Draws every token; the router reads bodies."""

    takes_equal_steps = False

    def __init__(self, plan: Plan, server: ServerSpec, costs: CostModel, router: Policy) -> None:
        super().__init__(plan, server, costs, router)
        # A plan that comes from the simulator's tables has no ids of its own.
        told_apart = replace(plan, token_id_range=(1000, 150_000))
        self._tokens = TokenRequests(told_apart, EngineConfig.from_server(server))

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


class _NaivePolicy(Policy):
    """The second opinion on routing, asked as a policy is."""

    def __init__(self, policy: str, num_replicas: int) -> None:
        super().__init__(num_replicas)
        self.reads_prompts = POLICIES[policy].reads_prompts
        self._naive = NaiveRouter(policy, num_replicas)

    def _choose(self, asked: RoutedRequest) -> int:
        return self._naive.ask(asked.session, list(asked.keys))

    def finished(self, replica: int) -> None:
        super().finished(replica)
        self._naive.open[replica] -= 1


class NaiveReplicas(CountedReplicas):
    """Schedules paged memory and routes by second opinions."""

    def __init__(self, plan: Plan, server: ServerSpec, costs: CostModel, router: Policy) -> None:
        super().__init__(plan, server, costs, _NaivePolicy(router.name, len(router.open)))
        config = EngineConfig.from_server(server)
        if config.rule_set.is_paged:
            for replica in self.replicas:
                replica.core = EngineCore(NaivePagedScheduler(config.paged, costs))
            self.cores = [replica.core for replica in self.replicas]


def kinds_of(case: Case) -> list[str]:
    """What a case has that is counted."""
    server, has_kept = case.server, bool(case.server.keep_kv_s or case.server.offload_blocks)
    kinds = {"pins": bool(server.keep_kv_s), "second memory": bool(server.offload_blocks), "retention": has_kept}
    return [server.routing.policy, *(name for name, is_so in kinds.items() if is_so)]


def is_counted(case: Case) -> bool:
    """Whether its server keeps KV, or a router reads its prompts."""
    return not {"retention", "prefix-aware"}.isdisjoint(kinds_of(case))


def main(num_requests: str = "100000", first_seed: str = "0") -> int:
    """Compare until so many requests met each; 1 when anything differs."""
    seen, seed = Counter[str](), int(first_seed)
    while min(seen["retention"], seen["prefix-aware"]) < int(num_requests):
        case = drawn_case(seed)
        seed += 1
        if not (is_counted(case) and all(map(has_own_prompts, plans_of(case.draws.arrays)))):
            continue
        for made in (EmulatedReplicas, NaiveReplicas):
            for difference in differences(case, made):
                print(f"seed {seed - 1}, {made.__name__}: {difference}", flush=True)
                return 1
        requests = len(case.draws.arrays.requests)
        seen.update(dict.fromkeys(kinds_of(case), requests))
        seen["requests"] += requests
    print(f"seeds {first_seed} to {seed - 1}", dict(seen))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
