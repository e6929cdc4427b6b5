"""How many devices this host can drive in time: every client at once against null servers, held to the run's limits.

Measured before the first block, on the cores that the fleet will use. Each run is still judged by its own lateness.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from harness.errors import SpecError
from harness.runner.fleet.process import Audited
from harness.spec import FleetSpec, LimitsSpec

TRIES = 2

Measure = Callable[[int], Sequence[Audited]]
"""The lateness of so many clients that replay at once, each of its own."""


def shared_cores(cores: Sequence[int], num_devices: int, num_processes: int) -> list[tuple[int, ...]]:
    """Cores of each device's client, none shared; none at all where fewer than one would stay for each server."""
    if num_devices < 2 or len(cores) < num_devices * (num_processes + 1):
        return [()] * num_devices
    return [tuple(cores[place * num_processes : (place + 1) * num_processes]) for place in range(num_devices)]


def require_drivable(num_devices: int, fleet: FleetSpec, limits: LimitsSpec, measure: Measure) -> None:
    """SpecError, with the number that it can, when this host does not drive so many devices in time."""
    if num_devices < 2 or fleet.overcommit:
        return
    worst = _lateness(num_devices, limits, measure)
    if worst.share_of(limits) <= 1:
        return
    fewer = range(num_devices - 1, 1, -1)
    num_in_time = next((n for n in fewer if _lateness(n, limits, measure).share_of(limits) <= 1), 1)
    raise SpecError(
        f"this host drives {num_in_time} of {num_devices} devices in time: with all of them re-arrivals leave "
        f"{worst.rearrival_lag_p99_ms:.3g} ms late (p99, limit {limits.rearrival_lag_p99_ms:g}) and sessions start "
        f"within {worst.start_spread_ms:.3g} ms (limit {limits.start_spread_ms:g})",
        where="fleet.devices",
        hint=f"Use {num_in_time} devices or more cores, or say fleet.overcommit = true and let each run be judged",
    )


def _lateness(num_clients: int, limits: LimitsSpec, measure: Measure) -> Audited:
    """The worst of so many clients at once, in the better of two tries: a host has other things to do too."""
    tries: list[Audited] = []
    while len(tries) < TRIES and not any(one.share_of(limits) <= 1 for one in tries):
        clients = measure(num_clients)
        tries.append(
            Audited(
                max(client.rearrival_lag_p99_ms for client in clients),
                max(client.start_spread_ms for client in clients),
            )
        )
    return min(tries, key=lambda one: one.share_of(limits))
