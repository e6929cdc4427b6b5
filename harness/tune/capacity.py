"""How many agents at a time a configuration serves within its targets: predicted, and measured as an interval.

Values only; nothing is simulated or read here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from harness.table import interval_text
from harness.tune.setups import Setup

PROPOSED = "proposed"
ALPHA = 0.025
"""Chance that a number of agents is wrongly said to hold, or to fail; targets of requests and of sessions share it."""
Verdict = Literal["holds", "fails", "open"]


def most_shown(num_runs: int, alpha: float) -> float:
    """The largest share that so many runs can show, each of which meets every target: a worse run may be among more."""
    return alpha ** (1 / num_runs)


class Share(NamedTuple):
    """A share with the interval over runs."""

    share: float
    low: float
    high: float


@dataclass(frozen=True)
class Point:
    """A number of agents at a time that was measured. requests, sessions: None where there is no such target."""

    agents: int
    verdict: Verdict
    requests: Share | None
    sessions: Share | None
    num_runs: int

    @property
    def most_shown(self) -> float:
        """The largest share that its runs can show."""
        return most_shown(self.num_runs, ALPHA / (2 - (None in (self.requests, self.sessions))))

    @property
    def words(self) -> str:
        """ "12 agents at a time: requests 97.1 % (94.0 to 98.6) within the targets, holds"."""
        return f"{self.agents} agents at a time: {self.share_words}"

    @property
    def share_words(self) -> str:
        """ "requests 97.1 % (94.0 to 98.6) within the targets, holds"."""
        parts = [
            f"{name} {100 * each.share:.1f} % ({interval_text(100 * each.low, 100 * each.high, 1)})"
            for name, each in (("requests", self.requests), ("sessions", self.sessions))
            if each is not None
        ]
        told = {"holds": "holds", "fails": "does not hold", "open": "not told"}[self.verdict]
        return f"{', '.join(parts)} within the targets, {told}"


@dataclass(frozen=True)
class Capacity:
    """The most agents at a time of a configuration: predicted, and measured between ``low`` and ``high`` - 1.

    low: 0: no number was shown to hold. high: the least that was shown to fail; None: none was.
    """

    name: str
    setup: Setup
    predicted: int
    points: tuple[Point, ...] = ()

    @property
    def low(self) -> int:
        return max((point.agents for point in self.points if point.verdict == "holds"), default=0)

    @property
    def high(self) -> int | None:
        return min((point.agents for point in self.points if point.verdict == "fails"), default=None)

    @property
    def has_boundary(self) -> bool:
        """Whether no number fails below one that holds."""
        return self.high is None or self.low < self.high

    @property
    def words(self) -> str:
        """ "12 to 14 agents at a time"; where a number fails below one that holds, both."""
        if self.high is None:
            return f"at least {self.low} agents at a time" if self.low else "an unknown number of agents at a time"
        if not self.low:
            return f"fewer than {self.high} agents at a time" if self.high > 1 else "not even one agent at a time"
        if not self.has_boundary:
            return f"no single boundary: {self.low} agents at a time hold and {self.high} do not"
        most = self.high - 1
        return f"{self.low} agents at a time" if self.low >= most else f"{self.low} to {most} agents at a time"
