"""The replay client's entry: a plan in, one row per planned request and one per chunk out.

What the server does wrong is a row with a status, never an exception and never a retry; the client's own lateness is in
the rows, and no statistic is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from harness.client.endpoint import Endpoint
from harness.client.meters import stall_facts, stamp_facts
from harness.client.script import ReplayEvent
from harness.client.single import ReplayResult, Target, replay_here
from harness.client.stall import StallMeter
from harness.clock import ScaledClock
from harness.spec import ClientSpec

if TYPE_CHECKING:
    from harness.plan import Plan

__all__ = ["ReplayEvent", "ReplayResult", "StopSignal", "replay"]


class StopSignal(Protocol):
    """Ends a replay early: a threading.Event, or an object with the same method."""

    def is_set(self) -> bool: ...


def replay(
    plan: Plan,
    *,
    host: str,
    port: int,
    model: str,
    options: ClientSpec,
    clock: ScaledClock,
    request_timeout_ns: int,
    on_event: Callable[[ReplayEvent], None] | None = None,
    stop: StopSignal | None = None,
    records: Path | None = None,
    endpoint: Endpoint | None = None,
) -> ReplayResult:
    """Replay every session of the plan against a server, all released at one instant, and return what happened.

    request_timeout_ns: clock ns one request may take from send to end. on_event: called per final row, from a thread of
    its own. stop: when set, what is in flight is given up ("connection") and what was not sent stays "not_sent".
    endpoint: where the server is reached, instead of plain HTTP at host and port.
    records: folder for the chunk rows of a long run; None: the system's temporary folder.
    Raises SpecError when this machine cannot run the client asked for, ServerError when the host's name cannot be
    resolved.
    """
    target = Target(endpoint or Endpoint(host, port), model, options, clock, request_timeout_ns, records)
    is_stopped = stop.is_set if stop is not None else _never
    with StallMeter(clock) as stalls:
        if options.processes > 1:
            from harness.client.processes import replay_in_processes

            result = replay_in_processes(plan, target, on_event=on_event, is_stopped=is_stopped)
        else:
            result = replay_here(plan, target, on_event=on_event, is_stopped=is_stopped)
    result.audit.update(stall_facts(stalls, result.requests))
    result.audit.update(stamp_facts(result.chunks, clock.scale))
    return result


def _never() -> bool:
    return False
