"""The emulator's loop on a virtual clock: a whole plan, without sockets and without waiting.

It is the same EmulatorCore that the server runs; only the clock jumps. A client here answers in no time.
Next: its steps are compared with ``harness.sim`` one by one.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from harness.clock import VirtualClock
from harness.emulator.core import EmulatorCore, EngineRequest, StepEnd
from harness.emulator.tokens import ContextHash
from harness.engine import CostModel, EngineConfig, Scheduler, load_cost_model
from harness.plan import Followers, Plan, TokenStreams, token_block_keys
from harness.spec import ServerSpec


@dataclass
class VirtualClient:
    """Sends what a plan says when the plan says it; reads each answer at the instant it is complete."""

    plan: Plan
    core: EmulatorCore
    due: list[tuple[int, int, int]] = field(default_factory=list)
    names: dict[int, tuple[int, int]] = field(default_factory=dict)
    answers: dict[int, list[list[int]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._streams, self._followers = TokenStreams(self.plan), Followers(self.plan)
        for session in self.plan.sessions:
            if session.after is None:
                self.due.append((session.start_offset_ns, session.index, 0))
        heapq.heapify(self.due)

    def send_due(self, now_ns: int) -> None:
        """Submit every request that is due at ``now_ns``, in order of instant, then session."""
        while self.due and self.due[0][0] <= now_ns:
            due_ns, session, index = heapq.heappop(self.due)
            request = self._request(session, index)
            request.arrival_ns = due_ns
            self.names[request.handle] = (session, index)
            self.answers.setdefault(session, []).append([])
            self.core.submit(request)

    def receive(self, end: StepEnd) -> None:
        """Keep the tokens of a step; what follows a finished request becomes due."""
        for request in end.requests:
            session, index = self.names[request.handle]
            self.answers[session][index].append(request.draw_token())
        for request in end.finished:
            self._plan_next(*self.names.pop(request.handle), end.start.end_ns)

    def _request(self, session: int, index: int) -> EngineRequest:
        prompt = self._streams.prompt_after(self.answers, session, index)
        planned = self.plan.sessions[session].requests[index]
        name = f"{session}-{index}"
        return EngineRequest(
            handle=self.core.new_handle(),
            engine_id=name,
            external_id=name,
            prompt=prompt,
            max_tokens=planned.generate_tokens,
            block_keys=token_block_keys(prompt),
            context=ContextHash.of(prompt, 0),
            planned_tokens=planned.generate_tokens,
        )

    def _plan_next(self, session: int, index: int, done_ns: int) -> None:
        requests = self.plan.sessions[session].requests
        if index + 1 < len(requests):
            heapq.heappush(self.due, (done_ns + requests[index].wait_after_ns, session, index + 1))
            return
        for follower in self._followers.completed(session):
            heapq.heappush(self.due, (done_ns + self.plan.sessions[follower].start_offset_ns, follower, 0))


def run_virtually(plan: Plan, server: ServerSpec, cost_model: CostModel | None = None) -> list[StepEnd]:
    """Every step of a plan on a fresh server, idle steps included; times are ns after the common start."""
    costs = load_cost_model(server.cost_model) if cost_model is None else cost_model
    core = EmulatorCore(Scheduler(EngineConfig.from_server(server), costs))
    client, clock = VirtualClient(plan, core), VirtualClock()
    steps: list[StepEnd] = []
    while client.due or core.num_unfinished or core.has_work:
        client.send_due(clock.now_ns())
        start = core.start_step(clock.now_ns())
        if start is None:
            clock.sleep_until_ns(client.due[0][0])
            continue
        clock.sleep_until_ns(start.end_ns)
        end = core.end_step()
        client.receive(end)
        steps.append(end)
    return steps
