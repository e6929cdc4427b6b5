"""How many devices this host can drive in time: every client at once against null servers, held to the run's limits.

Measured before the first block, on the cores that the fleet will use; each run is still judged by its own lateness.
Nothing is changed here. Next: ``local`` refuses a fleet that is too wide.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from harness.errors import ServerError, SpecError
from harness.experiment import PlannedRun
from harness.runner.fleet.work import Audit, Audited, Idle, Told
from harness.spec import LimitsSpec, Place

TRIES = 2


class Auditable(Protocol):
    """A worker that measures its client when asked."""

    place: Place

    def send(self, said: Audit, /) -> None: ...

    def received(self) -> Told | None: ...


def shared_cores(cores: Sequence[int], num_devices: int, num_processes: int) -> list[tuple[int, ...]]:
    """Cores of each device's client, none shared; none at all where fewer than one would stay for each server."""
    if num_devices < 2 or len(cores) < num_devices * (num_processes + 1):
        return [()] * num_devices
    return [tuple(cores[place * num_processes : (place + 1) * num_processes]) for place in range(num_devices)]


def require_drivable(workers: Sequence[Auditable], run: PlannedRun) -> None:
    """SpecError, with the number that it can, when this host does not drive so many devices in time."""
    fleet, limits = run.spec.fleet, run.spec.limits
    assert fleet is not None
    if len(workers) < 2 or fleet.overcommit:
        return
    worst = _lateness(workers, run, limits)
    if _is_in_time(worst, limits):
        return
    num_in_time = next(
        (n for n in range(len(workers) - 1, 1, -1) if _is_in_time(_lateness(workers[:n], run, limits), limits)), 1
    )
    raise SpecError(
        f"this host drives {num_in_time} of {len(workers)} devices in time: with all of them re-arrivals leave "
        f"{worst.rearrival_lag_p99_ms:.3g} ms late (p99, limit {limits.rearrival_lag_p99_ms:g}) and sessions start "
        f"within {worst.start_spread_ms:.3g} ms (limit {limits.start_spread_ms:g})",
        where="fleet.devices",
        hint=f"Use {num_in_time} devices or more cores, or say fleet.overcommit = true and let each run be judged",
    )


def _lateness(workers: Sequence[Auditable], run: PlannedRun, limits: LimitsSpec) -> Audited:
    """The worst of so many clients at once; of two tries the better one, since a host has other things to do too."""
    found = _audited_at_once(workers, run)
    if _is_in_time(found, limits):
        return found
    return min(found, *(_audited_at_once(workers, run) for _ in range(TRIES - 1)), key=lambda one: one.share_of(limits))


def _audited_at_once(workers: Sequence[Auditable], run: PlannedRun) -> Audited:
    for worker in workers:
        worker.send(Audit(run))
    answers = [worker.received() for worker in workers]
    for worker, answer in zip(workers, answers, strict=True):
        if isinstance(answer, Idle) and answer.error is not None:
            raise answer.error
        if not isinstance(answer, Audited):
            raise ServerError("its worker died at once", where=str(worker.place), hint="Look for what kills it")
    found = [answer for answer in answers if isinstance(answer, Audited)]
    return Audited(max(one.rearrival_lag_p99_ms for one in found), max(one.start_spread_ms for one in found))


def _is_in_time(found: Audited, limits: LimitsSpec) -> bool:
    return found.share_of(limits) <= 1
