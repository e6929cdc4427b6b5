"""Which of several replicas serves a request: the routing policies, as pure decisions. No clock, no sockets.

The simulator and the emulator's router take the same objects, so that equal arrivals give equal decisions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from harness.errors import unknown_name

NO_SESSION = ""
BLOCK_TOKENS = 128
"""Tokens of a block by which a prefix-aware router compares prompts, whatever blocks the servers have."""
KEPT_BLOCKS = 65_536
"""Blocks of prompts that a prefix-aware router remembers of each replica; the least recently sent go first."""
MOST_LEAD = 4
"""Open requests that a prefix-aware choice may have more than the least loaded replica."""


class RoutedRequest(NamedTuple):
    """What a router reads of a request.

    session: whose request it is, as a header names it; "" where none does. keys: of the prompt's whole blocks, of
    ``BLOCK_TOKENS`` each, each key of all that comes before it too.
    """

    session: str = NO_SESSION
    keys: Sequence[int] = ()


class Policy(ABC):
    """Chooses a replica for each request. Call ``finished`` when one is over."""

    name = ""
    meaning = ""
    reads_prompts = False
    """Whether it decides by the keys of the prompt."""

    def __init__(self, num_replicas: int) -> None:
        if num_replicas < 1:
            raise ValueError(f"{num_replicas} replicas")
        self.open = [0] * num_replicas
        self._last = num_replicas - 1

    def route(self, asked: RoutedRequest) -> int:
        """The replica for a request, from 0; it counts as open there until ``finished``."""
        replica = self._choose(asked)
        self.open[replica] += 1
        self._last = replica
        return replica

    def finished(self, replica: int) -> None:
        """A request of this replica is over, whatever its outcome."""
        self.open[replica] -= 1

    @abstractmethod
    def _choose(self, asked: RoutedRequest) -> int: ...

    def _next(self) -> int:
        return (self._last + 1) % len(self.open)

    def _first_by(self, rank: Callable[[int], Any]) -> int:
        """The replica of the lowest rank; among equals the next after the last choice."""
        num, first = len(self.open), self._next()
        return min(((first + place) % num for place in range(num)), key=rank)

    def _least_open(self) -> int:
        """The replica with the fewest open requests."""
        return self._first_by(self.open.__getitem__)


class RoundRobin(Policy):
    """Each request goes to the next replica."""

    name, meaning = "round-robin", "each request to the next replica"

    def _choose(self, asked: RoutedRequest) -> int:
        del asked
        return self._next()


class LeastRequests(Policy):
    """Each request goes where the fewest are open."""

    name, meaning = "least-requests", "to the replica with the fewest open requests"

    def _choose(self, asked: RoutedRequest) -> int:
        del asked
        return self._least_open()


class SessionAffinity(Policy):
    """All requests of a session go to one replica: where the fewest were open when its first one came."""

    name, meaning = "session-affinity", "every request of a session to the replica of its first"

    def __init__(self, num_replicas: int) -> None:
        super().__init__(num_replicas)
        self._home: dict[str, int] = {}

    def _choose(self, asked: RoutedRequest) -> int:
        if asked.session == NO_SESSION:
            return self._least_open()
        return self._home.setdefault(asked.session, self._least_open())


class PrefixAware(Policy):
    """Where most of the prompt was sent before, unless that replica has ``MOST_LEAD`` open requests more than another.

    The router remembers what it sent, not what a replica still holds: it does not see evictions.

    matched: leading blocks of the last prompt that each replica was sent before.
    """

    name, meaning = "prefix-aware", "to the replica that was sent most of the prompt before"
    reads_prompts = True

    def __init__(self, num_replicas: int) -> None:
        super().__init__(num_replicas)
        self._sent = [OrderedDict[int, None]() for _ in range(num_replicas)]
        self.matched = [0] * num_replicas

    def _choose(self, asked: RoutedRequest) -> int:
        matched = self.matched = [self._matched(sent, asked.keys) for sent in self._sent]
        least = self._least_open()
        best = self._first_by(lambda place: (-matched[place], self.open[place]))
        is_used = matched[best] > 0 and self.open[best] - self.open[least] <= MOST_LEAD
        chosen = best if is_used else least
        self._note(self._sent[chosen], asked.keys)
        return chosen

    @staticmethod
    def _matched(sent: OrderedDict[int, None], keys: Sequence[int]) -> int:
        """Leading blocks of the prompt that were sent there."""
        return next((place for place, key in enumerate(keys) if key not in sent), len(keys))

    @staticmethod
    def _note(sent: OrderedDict[int, None], keys: Sequence[int]) -> None:
        for key in keys:
            sent[key] = None
            sent.move_to_end(key)
        while len(sent) > KEPT_BLOCKS:
            sent.popitem(last=False)


POLICIES: dict[str, type[Policy]] = {
    policy.name: policy for policy in (RoundRobin, LeastRequests, SessionAffinity, PrefixAware)
}


def policy_named(name: str, num_replicas: int) -> Policy:
    """A policy by its name; SpecError that lists the names."""
    if name not in POLICIES:
        raise unknown_name("routing policy", name, POLICIES)
    return POLICIES[name](num_replicas)
