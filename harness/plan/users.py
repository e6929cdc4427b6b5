"""The users behind the sessions of a plan, and when each of them had finished how many requests."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from harness.compiled.records import IntArray
from harness.errors import PlanError


def users_of(after: IntArray) -> IntArray:
    """The user behind each session: a session that starts after another is the same user's next.

    after: the session that each one waits for; -1: none.
    """
    users = np.where(after >= 0, after, np.arange(len(after)))
    # Each pass doubles how far back it sees.
    while not np.array_equal(further := users[users], users):
        users = further
    return users


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
