"""Virtual time: a whole plan on a server's engine loop, without sockets or waiting.

It is the EngineCore that an emulated server runs; only the clock jumps, and clients take no time. Simulated runs and
predictions for paged KV memory read its events.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from harness.model.engine import EngineConfig
from harness.model.engine.core import EngineCore, EngineRequest, StepEnd, StepStart
from harness.model.engine.retention import PIN_FACTOR
from harness.model.plan import BlockKeys, Plan
from harness.model.plan.event_queue import ClientEvent, VirtualClients

NEVER_NS = 1 << 62


class UnreadRequests:
    """The requests of a plan where nobody reads tokens: of a prompt only its length counts, and the keys of its blocks.

    prompt_keys: the block keys of the prompt of (session, request).
    """

    def __init__(self, plan: Plan, config: EngineConfig) -> None:
        is_paged = config.rule_set.is_paged
        keys = BlockKeys(plan, config.block_tokens) if is_paged else BlockKeys(plan)
        # Paged memory reuses blocks of answers too.
        self._plan, self.prompt_keys, self._keys = plan, keys.prompt, keys.stream if is_paged else keys.prompt
        self._last_turn = [len(session.requests) - 1 for session in plan.sessions]
        self._blank = np.zeros(max(request.prompt_tokens for request in plan.requests), dtype=np.int32)

    def request_of(self, event: ClientEvent, handle: int, external_id: str = "") -> EngineRequest:
        """The request that an event sends. handle: no other request of its core has it."""
        key = (event.session, event.request)
        planned = self._plan.request(*key)
        return EngineRequest(
            handle=handle,
            engine_id=f"{external_id}-0",
            external_id=external_id,
            prompt=self._blank[: planned.prompt_tokens],
            max_tokens=planned.generate_tokens,
            block_keys=self._keys(*key),
            planned_tokens=planned.generate_tokens,
            keep_ns=0 if event.request == self._last_turn[event.session] else PIN_FACTOR * planned.wait_after_ns,
            arrival_ns=event.at_ns,
        )


class VirtualDriver(VirtualClients):
    """Plays a plan on a server's core in virtual time; the clock jumps from one event to the next.

    A subclass makes the requests and handles the events. It may look at the server at ``next_look_ns``. Equal decode
    steps are taken together up to the next event of a client and the next look, where the subclass allows it.
    """

    takes_equal_steps = False

    def __init__(self, plan: Plan, core: EngineCore) -> None:
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
        if not (end.finished or self.leaves_by_tokens):
            return
        finished, received = (
            [self.names[request.handle] for request in requests] for requests in (end.finished, end.requests)
        )
        self.step_ended(finished, received, end.ends_ns[-1])
