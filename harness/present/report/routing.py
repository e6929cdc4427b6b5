"""What routing did to reuse and to the work of each replica, as the report draws it.

The figures are those of the plug-in for replicas; nothing is computed here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from harness.errors import HarnessError
from harness.measure.records.run import SealedRun
from harness.plugins import plugged, service

SERVICE = "routing of runs"


class Routing(NamedTuple):
    """One condition behind a router. home: share of its returning requests that came back to the replica of the turn
    before. kept, lost_by_routing, lost_by_eviction: shares of the tokens that they could reuse; they sum to 1, and are
    None where nothing could be reused. shares: of the requests, by replica."""

    name: str
    returns: int
    home: float | None
    kept: float | None
    lost_by_routing: float | None
    lost_by_eviction: float | None
    shares: tuple[float, ...]


def routing_of(runs: Iterable[SealedRun]) -> list[Routing]:
    """By condition, over the replicates that all have; empty without replicas, or where the records do not tell."""
    valid = [run for run in runs if run.is_valid]
    if not any(run.server.is_routed for run in valid) or SERVICE not in plugged("services"):
        return []
    try:
        return service(SERVICE, where="report")(valid)
    except HarnessError:
        return []
