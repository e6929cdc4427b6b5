"""Several servers behind a router in one virtual time: what a plan does on k replicas, and who serves what."""

from __future__ import annotations

from harness.extras.replicas.policies import BLOCK_TOKENS, Policy, RoutedRequest
from harness.model.engine import CostModel, EngineConfig
from harness.model.engine.core import EngineCore, EngineRequest, StepEnd
from harness.model.engine.paged import scheduler_of
from harness.model.plan.blocks import BlockKeys
from harness.model.plan.event_queue import ClientEvent, whole_sessions
from harness.model.plan.model import Plan
from harness.model.sim.driver import Key, UnreadRequests, VirtualDriver
from harness.model.sim.plans import check_times, plan_arrays
from harness.model.spec import ServerSpec


class ReplicaRun(VirtualDriver):
    """One plan on freshly started replicas behind a router.

    served_by: the replica of each request, in the order of the decisions. requests: those that were sent.
    """

    takes_equal_steps = True

    def __init__(self, plan: Plan, server: ServerSpec, costs: CostModel, router: Policy) -> None:
        config = EngineConfig.from_server(server)
        check_times(plan_arrays([plan]), config, [costs])
        super().__init__(
            plan, [EngineCore(scheduler_of(config, costs, draw_seed=place)) for place in range(len(router.open))]
        )
        self.router = router
        self.served_by: dict[Key, int] = {}
        self.requests: dict[Key, EngineRequest] = {}
        self._unread = UnreadRequests(plan, config)
        self._whole_sessions = whole_sessions(plan).tolist()
        self._prompt_keys = BlockKeys(plan, BLOCK_TOKENS).prompt

    def server_of(self, event: ClientEvent) -> int:
        key = (event.session, event.request)
        keys = self._prompt_keys(*key).tolist() if self.router.reads_prompts else ()
        self.served_by[key] = self.router.route(RoutedRequest(str(self._whole_sessions[event.session]), keys))
        return self.served_by[key]

    def request_of(self, event: ClientEvent) -> EngineRequest:
        key = (event.session, event.request)
        self.requests[key] = self._unread.request_of(event, len(self.names))
        return self.requests[key]

    def left(self, key: Key, at_ns: int) -> None:  # noqa: ARG002 - a router counts, and reads no time
        self.router.finished(self.served_by[key])

    def num_tokens(self, key: Key) -> int:
        return self.requests[key].num_generated

    def ended(self, server: int, end: StepEnd, /) -> None:
        for request, num_tokens in zip(end.requests, end.num_tokens, strict=True):
            # Nobody reads the answer, so no token is drawn.
            request.num_generated += num_tokens
        for _ in end.finished:
            self.router.finished(server)
