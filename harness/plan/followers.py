"""Which sessions may start when another completes: one counter for every driver of a plan.

It knows nothing of time: who asks adds the waits.
"""

from __future__ import annotations

from harness.plan.model import Plan


class Followers:
    """A session starts when the last of its predecessors has completed; each session completes once."""

    def __init__(self, plan: Plan) -> None:
        self._num_missing = [len(set(session.predecessors)) for session in plan.sessions]
        self._followers: list[list[int]] = [[] for _ in plan.sessions]
        for session in plan.sessions:
            for before in set(session.predecessors):
                self._followers[before].append(session.index)

    def completed(self, session: int) -> list[int]:
        """Sessions that nothing holds back any more once ``session`` has completed, in plan order."""
        ready: list[int] = []
        for follower in self._followers[session]:
            self._num_missing[follower] -= 1
            if self._num_missing[follower] == 0:
                ready.append(follower)
        return ready
