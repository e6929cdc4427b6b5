"""Virtual time: a whole plan on the engine loop of a server, or of several behind a router, without sockets or waiting.

It is the EngineCore that an emulated server runs; only the clock jumps, and clients take no time. Simulated runs read
its events. Predictions are compiled: ``sim.kernel``.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Iterable, Sequence

import numpy as np

from harness.errors import PlanError
from harness.model.engine import EngineConfig
from harness.model.engine.blocks import PIN_FACTOR
from harness.model.engine.core import EngineCore, EngineRequest, StepEnd, StepStart
from harness.model.plan.blocks import BlockKeys
from harness.model.plan.event_queue import LEAVES, SENDS, ClientEvent, return_waits_ns
from harness.model.plan.model import Followers, Plan

NEVER_NS = 1 << 62
Key = tuple[int, int]
"""A request of a plan: (session, request)."""


def keep_times_ns(plan: Plan) -> dict[Key, int]:
    """How long the KV of each request is asked to be kept: its wait, times ``PIN_FACTOR``."""
    keys = ((session.index, place) for session in plan.sessions for place in range(len(session.requests)))
    return {key: PIN_FACTOR * (wait or 0) for key, wait in zip(keys, return_waits_ns(plan), strict=True)}


class UnreadRequests:
    """The requests of a plan where nobody reads tokens: of a prompt only its length counts, and the keys of its
    blocks."""

    def __init__(self, plan: Plan, config: EngineConfig) -> None:
        is_paged = config.rule_set.is_paged
        keys = BlockKeys(plan, config.block_tokens, config.drafts.key_lookahead) if is_paged else BlockKeys(plan)
        # Paged memory reuses blocks of answers too.
        self._plan, self._keys = plan, keys.stream if is_paged else keys.prompt
        self._keep_ns = keep_times_ns(plan)
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
            keep_ns=self._keep_ns[key],
            arrival_ns=event.at_ns,
        )


class VirtualDriver:
    """Plays a plan on the cores of servers in virtual time; the clock jumps from one event to the next.

    Clients are never late; at one instant they leave first, then send by session.

    A subclass chooses the server of a request, makes the requests, each with a handle of its own, and handles the
    events. It may look at the servers at ``next_look_ns``. With ``takes_equal_steps`` a run of equal decode steps is
    taken at once; it ends before the next look, or with the step during which a request arrives.

    names: (session, request) by handle. end_ns: when the last step ended, or the last client left.
    """

    takes_equal_steps = False

    def __init__(self, plan: Plan, cores: Sequence[EngineCore]) -> None:
        self.plan, self._followers = plan, Followers(plan)
        self.leaves_by_tokens = any(request.abort_after_tokens for request in plan.requests)
        # Requests that have not ended.
        self._open = set[Key]()
        self._due = [
            ClientEvent(session.start_offset_ns, SENDS, session.index, 0)
            for session in plan.sessions
            if session.after is None
        ]
        heapq.heapify(self._due)
        self.cores = cores
        self.names: dict[int, Key] = {}
        self.next_look_ns = NEVER_NS
        self.end_ns = 0
        self._may_leave = any(request.is_abortable for request in plan.requests)
        # Server and handle of each request that was sent.
        self._sent: dict[Key, tuple[int, int]] = {}
        # Of the running step of each server, and of the equal steps taken with it; empty while it is idle.
        self._ends_ns: list[Sequence[int]] = [() for _ in cores]
        # When steps last began.
        self._began_ns = -1

    def server_of(self, event: ClientEvent) -> int:  # noqa: ARG002 - one server takes all
        """The server that an event sends to, as its place in the order of the cores."""
        return 0

    def request_of(self, event: ClientEvent) -> EngineRequest:
        """The request that an event sends."""
        raise NotImplementedError

    def num_tokens(self, key: Key) -> int:
        """Tokens that a request has received."""
        raise NotImplementedError

    def started(self, server: int, start: StepStart, /) -> None:
        """A step of a server began."""

    def ended(self, server: int, end: StepEnd, /) -> None:
        """A step of a server is over; its tokens are received."""
        raise NotImplementedError

    def left(self, key: Key, at_ns: int) -> None:
        """A client left a request."""

    def look(self) -> None:
        """Look at the servers at ``next_look_ns`` and move that on."""

    def play(self) -> int:
        """Everything, from the common start to the last token or the last client that leaves; returns that instant.

        At one instant clients leave, then steps end, then requests are sent. Raises PlanError for a request that no
        server can ever admit.
        """
        now_ns = 0
        while True:
            self.act_until(now_ns)
            for server, core in enumerate(self.cores):
                if core.running_step is None and (start := core.start_step(now_ns)) is not None:
                    self._ends_ns[server] = self._ends_of(core, start)
                    self.started(server, start)
            self._began_ns = now_ns
            due = [ends_ns[-1] for ends_ns in self._ends_ns if ends_ns]
            if (next_ns := self.next_event_ns) is not None:
                due.append(next_ns)
            if not due:
                break
            now_ns = min(due)
            while self.next_look_ns < now_ns:
                self.look()
            # Clients that leave during a step get none of its tokens.
            self.act_until(now_ns, is_step_over=True)
            for server, ends_ns in enumerate(self._ends_ns):
                if ends_ns and ends_ns[-1] == now_ns:
                    self._finish(server)
        if any(core.num_unfinished for core in self.cores):
            hint = "Give more kv_slots or shorter prompts"
            raise PlanError("a request can never be admitted: the KV memory is too small for it", hint=hint)
        return self.end_ns

    def _ends_of(self, core: EngineCore, start: StepStart) -> list[int]:
        """When the running step ends, and each equal step that is taken with it."""
        ends_ns = core.equal_ends_ns() if self.takes_equal_steps else [start.end_ns]
        if len(ends_ns) == 1:
            return ends_ns
        next_ns, until_ns = self.next_event_ns, self.next_look_ns
        if self._may_leave and next_ns is not None:
            # Who leaves has the tokens of every step before.
            until_ns = min(until_ns, next_ns)
        most = bisect_left(ends_ns, until_ns)
        if self.leaves_by_tokens:
            # The step at whose end one of them has the tokens after which its client leaves is the last.
            for request in start.requests:
                key = self.names[request.handle]
                enough = self.plan.request(*key).abort_after_tokens
                most = min(most, enough - self.num_tokens(key)) if enough else most
        return ends_ns[: max(most, 1)]

    def send(self, event: ClientEvent) -> None:
        key, server = (event.session, event.request), self.server_of(event)
        request = self.request_of(event)
        self.names[request.handle], self._sent[key] = key, (server, request.handle)
        self.cores[server].submit(request)
        if len(ends_ns := self._ends_ns[server]) > 1:
            # The step that runs when a request arrives is the last of those taken at once. After steps of no length it
            # may arrive when the next steps of this instant have begun.
            self._ends_ns[server] = ends_ns[: bisect_left(ends_ns, event.at_ns + (event.at_ns == self._began_ns)) + 1]

    def leave(self, key: Key, at_ns: int) -> None:
        server, handle = self._sent[key]
        self.cores[server].abort(handle, at_ns)
        self.end_ns = max(self.end_ns, at_ns)
        self.left(key, at_ns)

    def _finish(self, server: int) -> None:
        end = self.cores[server].end_step(self._ends_ns[server])
        self._ends_ns[server], self.end_ns = (), end.ends_ns[-1]
        self.ended(server, end)
        if not (end.finished or self.leaves_by_tokens):
            return
        finished, received = (
            [self.names[request.handle] for request in requests] for requests in (end.finished, end.requests)
        )
        self.step_ended(finished, received, self.end_ns)

    @property
    def next_event_ns(self) -> int | None:
        """When the next event is due; None: nothing is left to do but to wait for answers."""
        while self._due and self._due[0].what == LEAVES and self._due[0][2:4] not in self._open:
            heapq.heappop(self._due)  # the answer ended before its client would have left
        return self._due[0].at_ns if self._due else None

    def act_until(self, now_ns: int, *, is_step_over: bool = False) -> None:
        """Do everything that is due by now, in order; what is sent at the very end of a step comes after it."""
        last = (now_ns, SENDS) if is_step_over else (now_ns, SENDS + 1)
        while self.next_event_ns is not None and self._due[0][:2] < last:
            event = heapq.heappop(self._due)
            at_ns, what, *_ = event
            key = (event.session, event.request)
            if what == LEAVES:
                self._over(key, at_ns)
                self.leave(key, at_ns)
                continue
            self._open.add(key)
            if after_ns := self.plan.request(*key).abort_after_ns:
                heapq.heappush(self._due, ClientEvent(at_ns + after_ns, LEAVES, *key))
            self.send(event)

    def step_ended(self, finished: Iterable[Key], received: Iterable[Key], end_ns: int) -> None:
        """What follows a finished request becomes due. Clients that have received enough tokens leave."""
        for key in finished:
            self._over(key, end_ns)
        if not self.leaves_by_tokens:
            return
        for key in sorted(received):
            # One step may give a last token and, before it, those after which the client would have left.
            if key in self._open and 0 < self.plan.request(*key).abort_after_tokens <= self.num_tokens(key):
                self.leave(key, end_ns)
                self._over(key, end_ns)

    def _over(self, key: Key, at_ns: int) -> None:
        """A request has ended, or was left: what follows it becomes due."""
        self._open.discard(key)
        session, request = key
        requests = self.plan.sessions[session].requests
        if request + 1 < len(requests):
            following = [(session, request + 1, requests[request].wait_after_ns)]
        else:
            ready = self._followers.completed(session)
            following = [(follower, 0, self.plan.sessions[follower].start_offset_ns) for follower in ready]
        for next_session, next_request, wait_ns in following:
            heapq.heappush(self._due, ClientEvent(at_ns + wait_ns, SENDS, next_session, next_request, at_ns))
