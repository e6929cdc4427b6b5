"""The replay client's entry: a plan in, one row per planned request and one per chunk out.

What the server does wrong is a row with a status, never an exception and never a retry; the client's own lateness is in
the rows, and no statistic is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from harness.client.meters import pause_facts, stall_facts, stamp_facts
from harness.client.script import ReplayEvent
from harness.client.single import ReplayResult, Target, replay_here
from harness.client.stall import StallMeter

if TYPE_CHECKING:
    from harness.plan import Plan

__all__ = ["ReplayEvent", "ReplayResult", "StopSignal", "Target", "replay"]


class StopSignal(Protocol):
    """Ends a replay early: a threading.Event, or an object with the same method."""

    def is_set(self) -> bool: ...


def replay(
    plan: Plan,
    target: Target,
    *,
    on_event: Callable[[ReplayEvent], None] | None = None,
    stop: StopSignal | None = None,
) -> ReplayResult:
    """Replay every session of the plan against a server, all released at one instant, and return what happened.

    on_event: called for each final row, by another thread. stop: once it is set, requests in flight are given up
    ("connection") and the others stay "not_sent".
    Raises SpecError when this machine cannot run the client asked for, ServerError when the host's name cannot be
    resolved.
    """
    is_stopped = stop.is_set if stop is not None else lambda: False
    with StallMeter(target.clock) as stalls:
        if target.options.processes > 1:
            from harness.client.processes import replay_in_processes

            result = replay_in_processes(plan, target, on_event=on_event, is_stopped=is_stopped)
        else:
            result = replay_here(plan, target, on_event=on_event, is_stopped=is_stopped)
    result.audit.update(stall_facts(stalls, result.requests))
    result.audit.update(stamp_facts(result.chunks, target.clock.scale))
    result.audit.update(pause_facts(result.audit["client_pauses_ns"], result.requests, target.clock.scale))
    return result
