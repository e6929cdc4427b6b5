"""Who sends what when: the events of a client that is never late, and the users behind the sessions of a plan.

No clock, no waiting.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from harness.errors import PlanError
from harness.model.plan.model import Followers, Plan

IntArray = NDArray[np.int64]
LEAVES, SENDS = range(2)
# In the provenance of a plan whose first sessions begin in the middle: requests that only warm it up.
STEADY_START = "warm_up_requests"


class ClientEvent(NamedTuple):
    """What a client does with one request at an instant: LEAVES or SENDS. trigger_ns: end of what a send waited for."""

    at_ns: int
    what: int
    session: int
    request: int
    trigger_ns: int = 0


class VirtualClients:
    """The clients of a plan in virtual time, never late; at one instant they leave first, then send by session.

    A subclass is the server that they send to and leave.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan, self._followers = plan, Followers(plan)
        self.leaves_by_tokens = any(request.abort_after_tokens for request in plan.requests)
        self._open = set[tuple[int, int]]()
        self._due = [
            ClientEvent(session.start_offset_ns, SENDS, session.index, 0)
            for session in plan.sessions
            if session.after is None
        ]
        heapq.heapify(self._due)

    def send(self, event: ClientEvent) -> None:
        """A client sends a request."""
        raise NotImplementedError

    def leave(self, key: tuple[int, int], at_ns: int) -> None:
        """A client leaves the answer to a request."""
        raise NotImplementedError

    def num_tokens(self, key: tuple[int, int]) -> int:
        """Tokens that a request has received."""
        raise NotImplementedError

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

    def step_ended(self, finished: Iterable[tuple[int, int]], received: Iterable[tuple[int, int]], end_ns: int) -> None:
        """What follows a finished request becomes due. Clients that have received enough tokens leave."""
        for key in finished:
            self._over(key, end_ns)
        if not self.leaves_by_tokens:
            return
        for key in sorted(received):
            if 0 < self.plan.request(*key).abort_after_tokens <= self.num_tokens(key):
                self.leave(key, end_ns)
                self._over(key, end_ns)

    def _over(self, key: tuple[int, int], at_ns: int) -> None:
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


def users_of(after: IntArray) -> IntArray:
    """The user behind each session: a session that starts after another is the same user's next.

    after: the session that each one waits for; -1: none.
    """
    users = np.where(after >= 0, after, np.arange(len(after)))
    # Each pass doubles how far back it sees.
    while not np.array_equal(further := users[users], users):
        users = further
    return users


def whole_sessions(plan: Plan) -> IntArray:
    """The whole session that each session of a plan is a part of, by the lowest index in it; shape (sessions,).

    A recording is cut where it forks or joins. A part that continues a text, or that starts after an agent's wait, is
    one with all that it waits for; a session that only starts after another is the next one of that user.
    """
    whole = list(range(plan.num_sessions))

    def first_of(index: int) -> int:
        while whole[index] != index:
            whole[index] = index = whole[whole[index]]
        return index

    for session in plan.sessions:
        if session.continues is None and not session.is_start_waited:
            continue
        parts = {first_of(session.index), *map(first_of, session.predecessors)}
        if session.continues is not None:
            parts.add(first_of(session.continues))
        for part in parts:
            whole[part] = min(parts)
    return np.array([first_of(index) for index in range(plan.num_sessions)], dtype=np.int64)


def return_waits_ns(plan: Plan) -> list[int | None]:
    """How long the session of each request waits for its next one, in plan order; None: none continues its text.

    Of a part that others continue it is the time until the earliest of them starts, if no answer took any time.
    """
    starts_ns: list[int] = []
    ends_ns: list[int] = []
    returns_ns: dict[int, int] = {}
    for session in plan.sessions:
        begin_ns = max((ends_ns[before] for before in session.predecessors), default=0)
        starts_ns.append(begin_ns + session.start_offset_ns)
        ends_ns.append(starts_ns[-1] + sum(request.wait_after_ns for request in session.requests[:-1]))
        if (part := session.continues) is not None:
            returns_ns[part] = min(starts_ns[-1] - ends_ns[part], returns_ns.get(part, sys.maxsize))
    waits_ns: list[int | None] = []
    for session in plan.sessions:
        waits_ns += [request.wait_after_ns for request in session.requests[:-1]]
        waits_ns.append(returns_ns.get(session.index))
    return waits_ns


def begun_in_the_middle(plan: Plan, whole: IntArray) -> set[int]:
    """The whole sessions that a steady start does not send from their beginning on. whole: see ``whole_sessions``."""
    first = [session.index for session in plan.sessions if session.after is None]
    return set(whole[first].tolist()) if STEADY_START in plan.provenance else set()


class UserTimelines(NamedTuple):
    """When the requests of each user completed, one user after another, earliest first. Times in ns.

    completed: shape (requests,). users, first, num_requests: shape (users,): who, at which place of it, how many.
    """

    completed: IntArray
    users: IntArray
    first: IntArray
    num_requests: IntArray

    @classmethod
    def of(cls, user: IntArray, completed_ns: IntArray) -> UserTimelines:
        """user, completed_ns: of each request."""
        per_user = np.bincount(user)
        users = np.flatnonzero(per_user)
        count = per_user[users]
        return cls(completed_ns[np.lexsort((completed_ns, user))], users, count.cumsum() - count, count)

    def window_start(self, after_requests: int) -> int:
        """The instant from which every user has finished ``after_requests`` requests; PlanError when one never has."""
        if after_requests == 0:
            return 0
        if np.any(self.num_requests < after_requests):
            few = int(np.argmax(self.num_requests < after_requests))
            raise PlanError(
                f"it has {self.num_requests[few]} requests, fewer than the {after_requests} after which the window "
                "begins",
                where=f"user {self.users[few]}",
                hint="Give each user more sessions or requests",
            )
        return int(self.completed[self.first + after_requests - 1].max())

    def last_full_ns(self) -> int:
        """The instant at which the first user has nothing left to do: after it the population shrinks."""
        return int(self.completed[self.first + self.num_requests - 1].min())
