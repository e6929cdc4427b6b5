"""The driver of simulated runs: a whole plan on the emulator's core in virtual time, without sockets or waiting.

It is the EmulatorCore of the server; only the clock jumps, and clients take no time. The backend ``sim`` writes its
records with this driver.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from harness.emulator.core import EmulatorCore, EngineRequest, StepEnd, StepStart
from harness.emulator.model import ContextHash
from harness.engine import CostModel, EngineConfig, Scheduler, Step, load_cost_model
from harness.plan import Followers, Plan, TokenStreams, token_block_keys
from harness.spec import ServerSpec

LEAVES, SENDS = range(2)
NEVER_NS = 1 << 62


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


class VirtualDriver:
    """Plays a plan on a server's core in virtual time; the clock jumps from one event to the next.

    A subclass makes the requests and is told what happens. It may look at the server at ``next_look_ns``, and let equal
    decode steps be taken together where nobody acts and nothing is looked at meanwhile.
    """

    takes_equal_steps = False

    def __init__(self, plan: Plan, core: EmulatorCore) -> None:
        self.plan, self.core, self.agenda = plan, core, Agenda(plan)
        self.names: dict[int, tuple[int, int]] = {}
        self.next_look_ns = NEVER_NS
        self._handles: dict[tuple[int, int], int] = {}
        self._leaves_by_tokens = any(one.abort_after_tokens for session in plan.sessions for one in session.requests)

    def request_of(self, act: Act) -> EngineRequest:
        """The request that an act sends."""
        raise NotImplementedError

    def num_tokens(self, key: tuple[int, int]) -> int:
        """Tokens that a request has received."""
        raise NotImplementedError

    def started(self, start: StepStart, ends_ns: Sequence[int]) -> None:
        """A step began; ends_ns: its end, and those of the equal steps taken with it."""

    def ended(self, end: StepEnd) -> None:
        """A step is over; its tokens are received."""
        raise NotImplementedError

    def left(self, key: tuple[int, int], at_ns: int) -> None:
        """A client left a request."""

    def look(self) -> None:
        """Look at the server at ``next_look_ns`` and move that on."""

    def play(self) -> int:
        """Everything, from the common start to the last token; returns the instant of that."""
        now_ns, core = 0, self.core
        while self.agenda.next_ns is not None or core.num_unfinished or core.has_work:
            self._act_until(now_ns)
            start = core.start_step(now_ns)
            ends_ns = [self.agenda.next_ns or now_ns] if start is None else self._ends_ns(start)
            while self.next_look_ns < ends_ns[0]:
                self.look()
            if start is not None:
                self.started(start, ends_ns)
                self._act_until(ends_ns[-1], is_step_over=True)
                self._finish(core.end_step(ends_ns))
            now_ns = max(now_ns, ends_ns[-1])
        return now_ns

    def _ends_ns(self, start: StepStart) -> list[int]:
        """When the running step ends, and its equal followers as far as nobody acts and nothing is looked at."""
        ends_ns = self.core.equal_ends_ns() if self.takes_equal_steps else [start.end_ns]
        if len(ends_ns) == 1:
            return ends_ns
        next_ns = self.agenda.next_ns
        most = bisect_left(ends_ns, self.next_look_ns if next_ns is None else min(next_ns, self.next_look_ns))
        if self._leaves_by_tokens:
            # The step at whose end one of them has the tokens after which its client leaves is the last.
            for request in start.requests:
                key = self.names[request.handle]
                enough = self.plan.request(*key).abort_after_tokens
                most = min(most, enough - self.num_tokens(key)) if enough else most
        return ends_ns[: max(most, 1)]

    def _act_until(self, now_ns: int, *, is_step_over: bool = False) -> None:
        """Do what is due by now."""
        for act in self.agenda.acts(now_ns, is_step_over=is_step_over):
            key = (act.session, act.request)
            if act.what == LEAVES:
                self._leave(key, act.at_ns)
                continue
            request = self.request_of(act)
            self.names[request.handle], self._handles[key] = key, request.handle
            self.core.submit(request)

    def _finish(self, end: StepEnd) -> None:
        """What follows a finished request becomes due, and who has enough leaves."""
        end_ns = end.ends_ns[-1]
        self.ended(end)
        for request in end.finished:
            self.agenda.over(*self.names[request.handle], end_ns)
        if not self._leaves_by_tokens:
            return
        keys = (self.names[request.handle] for request in end.requests)
        for key in self.agenda.with_enough((*key, self.num_tokens(key)) for key in keys):
            self._leave(key, end_ns)
            self.agenda.over(*key, end_ns)

    def _leave(self, key: tuple[int, int], at_ns: int) -> None:
        self.core.abort(self._handles[key], at_ns)
        self.left(key, at_ns)


class _TokenDriver(VirtualDriver):
    """Draws every token, so that prompts hold the answers before them; keeps every step."""

    def __init__(self, plan: Plan, core: EmulatorCore) -> None:
        super().__init__(plan, core)
        self.steps: list[StepEnd] = []
        self._answers: dict[int, list[list[int]]] = {}
        self._streams = TokenStreams(plan)

    def request_of(self, act: Act) -> EngineRequest:
        prompt = self._streams.prompt_after(self._answers, act.session, act.request)
        self._answers.setdefault(act.session, []).append([])
        planned = self.plan.request(act.session, act.request)
        name = f"{act.session}-{act.request}"
        return EngineRequest(
            handle=self.core.new_handle(),
            engine_id=name,
            external_id=name,
            prompt=prompt,
            max_tokens=planned.generate_tokens,
            block_keys=token_block_keys(prompt),
            context=ContextHash.of(prompt, 0),
            planned_tokens=planned.generate_tokens,
            arrival_ns=act.at_ns,
        )

    def num_tokens(self, key: tuple[int, int]) -> int:
        return len(self._answers[key[0]][key[1]])

    def ended(self, end: StepEnd) -> None:
        for request in end.requests:
            session, index = self.names[request.handle]
            self._answers[session][index].append(request.draw_token())
        self.steps.append(end)


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
    driver = _TokenDriver(plan, EmulatorCore(NoisyScheduler(EngineConfig.from_server(server), costs, lasting_ns)))
    driver.play()
    return driver.steps
