"""What clients do at an instant, and the users behind the sessions of a plan: who sends what, and returns when.

No clock, no waiting.
"""

from __future__ import annotations

import sys
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from harness.errors import PlanError
from harness.model.plan.model import Plan

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
