"""The driver of simulated runs: a whole plan on the emulator's core in virtual time, without sockets or waiting.

It is the EmulatorCore of the server; only the clock jumps, and clients take no time. The backend ``sim`` writes its
records with this driver.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

from harness.measure.emulator.core import EmulatorCore, EngineRequest, StepEnd, StepStart, keyed_answer
from harness.measure.emulator.model import ContextHash
from harness.model.engine import CostModel, EngineConfig, load_cost_model
from harness.model.engine.paged import scheduler_of
from harness.model.plan import Plan, TokenStreams
from harness.model.plan.event_queue import ClientEvent, VirtualClients
from harness.model.spec import ServerSpec

NEVER_NS = 1 << 62


class VirtualDriver(VirtualClients):
    """Plays a plan on a server's core in virtual time; the clock jumps from one event to the next.

    A subclass makes the requests and handles the events. It may look at the server at ``next_look_ns``. Equal decode
    steps are taken together up to the next event of a client and the next look, where the subclass allows it.
    """

    takes_equal_steps = False

    def __init__(self, plan: Plan, core: EmulatorCore) -> None:
        super().__init__(plan)
        self.core = core
        self.names: dict[int, tuple[int, int]] = {}
        self.next_look_ns = NEVER_NS
        self._handles: dict[tuple[int, int], int] = {}

    def request_of(self, event: ClientEvent) -> EngineRequest:
        """The request that an event sends."""
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
        while self.client_events.next_ns is not None or core.num_unfinished or core.has_work:
            self.act_until(now_ns)
            start = core.start_step(now_ns)
            ends_ns = [self.client_events.next_ns or now_ns] if start is None else self._ends_ns(start)
            while self.next_look_ns < ends_ns[0]:
                self.look()
            if start is not None:
                self.started(start, ends_ns)
                self.act_until(ends_ns[-1], is_step_over=True)
                self._finish(core.end_step(ends_ns))
            now_ns = max(now_ns, ends_ns[-1])
        return now_ns

    def _ends_ns(self, start: StepStart) -> list[int]:
        """When the running step ends, and its equal followers up to the next event of a client and the next look."""
        ends_ns = self.core.equal_ends_ns() if self.takes_equal_steps else [start.end_ns]
        if len(ends_ns) == 1:
            return ends_ns
        next_ns = self.client_events.next_ns
        most = bisect_left(ends_ns, self.next_look_ns if next_ns is None else min(next_ns, self.next_look_ns))
        if self.leaves_by_tokens:
            # The step at whose end one of them has the tokens after which its client leaves is the last.
            for request in start.requests:
                key = self.names[request.handle]
                enough = self.plan.request(*key).abort_after_tokens
                most = min(most, enough - self.num_tokens(key)) if enough else most
        return ends_ns[: max(most, 1)]

    def send(self, event: ClientEvent) -> None:
        request, key = self.request_of(event), (event.session, event.request)
        self.names[request.handle], self._handles[key] = key, request.handle
        self.core.submit(request)

    def leave(self, key: tuple[int, int], at_ns: int) -> None:
        self.core.abort(self._handles[key], at_ns)
        self.left(key, at_ns)

    def _finish(self, end: StepEnd) -> None:
        self.ended(end)
        finished, received = (
            [self.names[request.handle] for request in requests] for requests in (end.finished, end.requests)
        )
        self.step_ended(finished, received, end.ends_ns[-1])


class _TokenDriver(VirtualDriver):
    """Draws every token, so that prompts hold the answers before them; keeps every step."""

    def __init__(self, plan: Plan, core: EmulatorCore, config: EngineConfig) -> None:
        super().__init__(plan, core)
        self._config = config
        self.steps: list[StepEnd] = []
        self._answers: dict[int, list[list[int]]] = {}
        self._streams = TokenStreams(plan)

    def request_of(self, event: ClientEvent) -> EngineRequest:
        prompt = self._streams.prompt(event.session, event.request, self._answers)
        self._answers.setdefault(event.session, []).append([])
        planned = self.plan.request(event.session, event.request)
        name = f"{event.session}-{event.request}"
        context = ContextHash.of(prompt, 0)
        keys, answer = keyed_answer(self._config, prompt, context, planned.generate_tokens, ())
        return EngineRequest(
            handle=self.core.new_handle(),
            engine_id=name,
            external_id=name,
            prompt=prompt,
            max_tokens=planned.generate_tokens,
            block_keys=keys,
            context=context,
            planned_tokens=planned.generate_tokens,
            answer=answer,
            arrival_ns=event.at_ns,
        )

    def num_tokens(self, key: tuple[int, int]) -> int:
        return len(self._answers[key[0]][key[1]])

    def ended(self, end: StepEnd) -> None:
        for request in end.requests:
            session, index = self.names[request.handle]
            self._answers[session][index].append(request.draw_token())
        self.steps.append(end)


def run_virtually(
    plan: Plan,
    server: ServerSpec,
    cost_model: CostModel | None = None,
    lasting_ns: Callable[[int], int] | None = None,
) -> list[StepEnd]:
    """Every step of a plan on a fresh server, idle steps included; times are ns after the common start.

    lasting_ns: how long a step of so many ns really lasts; default: as long.
    """
    costs = load_cost_model(server.cost_model) if cost_model is None else cost_model
    config = EngineConfig.from_server(server)
    driver = _TokenDriver(plan, EmulatorCore(scheduler_of(config, costs), lasting_ns=lasting_ns), config)
    driver.play()
    return driver.steps
