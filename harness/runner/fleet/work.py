"""What a fleet's driver and its workers say to each other, as values that pickle.

Nothing is performed or started here. Next: ``worker`` performs what ``local`` hands out.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from harness.errors import HarnessError
from harness.experiment import PlannedRun
from harness.prereg import Ticket
from harness.records import RunKey
from harness.runner.fleet.station import Station
from harness.runner.lane import Began, Made
from harness.runner.progress import ProgressEvent
from harness.spec import LimitsSpec


@dataclass(frozen=True, slots=True)
class Job:
    """What a worker is told once. argv: of the driver, as manifests show how a run came to be."""

    runs_root: Path
    spec_source: str
    ticket: Ticket | None
    station: Station
    argv: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Block:
    """The runs of one block that are not sealed yet, in their order. again: those that repeat an INVALID run."""

    number: int
    runs: tuple[PlannedRun, ...]
    again: frozenset[RunKey] = frozenset()


@dataclass(frozen=True, slots=True)
class Audit:
    """Measure this client's lateness against the null server, now, in the shape of a run."""

    run: PlannedRun


@dataclass(frozen=True, slots=True)
class Audited:
    """Wall ms: how late re-arrivals left (p99), and how far apart the first sends were."""

    rearrival_lag_p99_ms: float
    start_spread_ms: float

    def share_of(self, limits: LimitsSpec) -> float:
        """The larger share of its limit that was used up; above 1 a run would be INVALID."""
        return max(
            self.rearrival_lag_p99_ms / limits.rearrival_lag_p99_ms, self.start_spread_ms / limits.start_spread_ms
        )


@dataclass(frozen=True, slots=True)
class Wish:
    """What the person at the driver wants. is_now: abort the run; else: end after it."""

    is_now: bool


@dataclass(frozen=True, slots=True)
class Go:
    """All servers of the period are up: replay now."""


@dataclass(frozen=True, slots=True)
class Idle:
    """The block ended, or was cut short as wished; error: what went wrong."""

    error: HarnessError | None = None


Told: TypeAlias = Began | Made | Audited | Idle | ProgressEvent
