"""The emulator's loop on a virtual clock: a whole plan, without sockets and without waiting.

It is the same EmulatorCore that the server runs; only the clock jumps. A client here answers in no time.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from harness.clock import VirtualClock
from harness.emulator.core import EmulatorCore, EngineRequest, StepEnd
from harness.emulator.tokens import ContextHash
from harness.engine import CostModel, EngineConfig, Scheduler, Step, load_cost_model
from harness.plan import Followers, Plan, TokenStreams, token_block_keys
from harness.spec import ServerSpec

LEAVES, SENDS = range(2)


class Act(NamedTuple):
    """What a client does with one request at an instant: LEAVES or SENDS. trigger_ns: end of what a send waited for."""

    at_ns: int
    what: int
    session: int
    request: int
    trigger_ns: int = 0


class Agenda:
    """When a client that is never late does what a plan says; at one instant it leaves first, then sends by session."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self._followers = plan, Followers(plan)
        self._open = set[tuple[int, int]]()
        self._due = [Act(one.start_offset_ns, SENDS, one.index, 0) for one in plan.sessions if one.after is None]
        heapq.heapify(self._due)

    @property
    def next_ns(self) -> int | None:
        """When the next act is due; None: nothing is left to do but to wait for answers."""
        return self._due[0].at_ns if self._due else None

    def acts(self, until_ns: int, *, is_step_over: bool = False) -> Iterator[Act]:
        """Everything that is due by then, in order; what is sent at the very end of a step comes after it."""
        last = (until_ns, SENDS) if is_step_over else (until_ns, SENDS + 1)
        while self._due and self._due[0][:2] < last:
            act = heapq.heappop(self._due)
            at_ns, what, *key, _ = act
            if what == SENDS:
                self._open.add((act.session, act.request))
                if after_ns := self._plan.request(*key).abort_after_ns:
                    heapq.heappush(self._due, Act(at_ns + after_ns, LEAVES, act.session, act.request))
            elif (act.session, act.request) in self._open:
                self.over(act.session, act.request, at_ns)
            else:
                continue  # its answer has ended
            yield act

    def over(self, session: int, request: int, at_ns: int) -> None:
        """A request has ended, or was left: what follows it becomes due."""
        self._open.discard((session, request))
        requests = self._plan.sessions[session].requests
        if request + 1 < len(requests):
            following = [(session, request + 1, requests[request].wait_after_ns)]
        else:
            ready = self._followers.completed(session)
            following = [(follower, 0, self._plan.sessions[follower].start_offset_ns) for follower in ready]
        for next_session, next_request, wait_ns in following:
            heapq.heappush(self._due, Act(at_ns + wait_ns, SENDS, next_session, next_request, at_ns))

    def with_enough(self, received: Iterable[tuple[int, int, int]]) -> list[tuple[int, int]]:
        """Those of (session, request, tokens so far) whose client leaves with that many, in order."""
        plan = self._plan
        return sorted(
            (session, one) for session, one, num in received if num == plan.request(session, one).abort_after_tokens
        )


@dataclass
class VirtualClient:
    """Sends what a plan says when the plan says it, reads each answer at the instant it is complete, and leaves those
    that the plan has it leave.
    """

    plan: Plan
    core: EmulatorCore
    names: dict[int, tuple[int, int]] = field(default_factory=dict)
    answers: dict[int, list[list[int]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.agenda, self._streams = Agenda(self.plan), TokenStreams(self.plan)
        self._handles: dict[tuple[int, int], int] = {}

    def act_until(self, now_ns: int, *, is_step_over: bool = False) -> None:
        """Do what is due by now."""
        for act in self.agenda.acts(now_ns, is_step_over=is_step_over):
            key = (act.session, act.request)
            if act.what == LEAVES:
                self.core.abort(self._handles[key], act.at_ns)
                continue
            request = self._request(*key)
            request.arrival_ns = act.at_ns
            self.names[request.handle] = key
            self._handles[key] = request.handle
            self.answers.setdefault(act.session, []).append([])
            self.core.submit(request)

    def receive(self, end: StepEnd) -> None:
        """Keep the tokens of a step; what follows a finished request becomes due, and who has enough leaves."""
        received: list[tuple[int, int, int]] = []
        for request in end.requests:
            session, index = self.names[request.handle]
            self.answers[session][index].append(request.draw_token())
            received.append((session, index, len(self.answers[session][index])))
        for request in end.finished:
            self.agenda.over(*self.names[request.handle], end.start.end_ns)
        for key in self.agenda.with_enough(received):
            self.core.abort(self._handles[key], end.start.end_ns)
            self.agenda.over(*key, end.start.end_ns)

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


class NoisyScheduler(Scheduler):
    """A scheduler whose steps last as long as ``lasting_ns`` makes of what the cost model says."""

    def __init__(self, config: EngineConfig, cost_model: CostModel, lasting_ns: Callable[[int], int]) -> None:
        super().__init__(config, cost_model)
        self._lasting_ns = lasting_ns

    def schedule(self) -> Step:
        step = super().schedule()
        return step._replace(duration_ns=self._lasting_ns(step.duration_ns)) if step.requests else step


def run_virtually(
    plan: Plan,
    server: ServerSpec,
    cost_model: CostModel | None = None,
    lasting_ns: Callable[[int], int] = lambda step_ns: step_ns,
) -> list[StepEnd]:
    """Every step of a plan on a fresh server, idle steps included; times are ns after the common start.

    lasting_ns: how long a step of so many ns really lasts.
    """
    costs = load_cost_model(server.cost_model) if cost_model is None else cost_model
    core = EmulatorCore(NoisyScheduler(EngineConfig.from_server(server), costs, lasting_ns))
    client, clock = VirtualClient(plan, core), VirtualClock()
    steps: list[StepEnd] = []
    while client.agenda.next_ns is not None or core.num_unfinished or core.has_work:
        client.act_until(clock.now_ns())
        start = core.start_step(clock.now_ns())
        if start is None:
            clock.sleep_until_ns(client.agenda.next_ns or clock.now_ns())
            continue
        clock.sleep_until_ns(start.end_ns)
        client.act_until(start.end_ns, is_step_over=True)
        end = core.end_step()
        client.receive(end)
        steps.append(end)
    return steps
