"""The replay: a plan in, one row per planned request and one per chunk out.

What the server does wrong is a row with a status, never an exception and never a retry. The client's own lateness is
in the rows; no statistic is computed. Garbage collection is off during a replay.
"""

from __future__ import annotations

import contextlib
import gc
import queue
import sys
import threading
from collections.abc import Callable, Collection, Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from harness.client.host import (
    SHORT_SLICE_NS,
    CpuMeter,
    SchedulerSlice,
    StallMeter,
    pause_facts,
    stall_facts,
    stamp_facts,
)
from harness.client.script import ReplayEvent, Script
from harness.client.target import ReplayResult, Target
from harness.clock import NS_PER_MS, NS_PER_US, monotonic_ns
from harness.errors import SpecError

if TYPE_CHECKING:
    from harness.plan import Plan

__all__ = ["ReplayEvent", "ReplayResult", "Share", "StopSignal", "Target", "replay", "replay_here"]

# Other threads of this process give the interpreter back within this time; Python's default is 5 ms.
SWITCH_INTERVAL_S = 50e-6
MAX_OFFSET_SAMPLES = 200
START_LEAD_NS = 5 * NS_PER_MS


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
            # It imports this module.
            from harness.client.processes import replay_in_processes

            result = replay_in_processes(plan, target, on_event=on_event, is_stopped=is_stopped)
        else:
            result = replay_here(plan, target, on_event=on_event, is_stopped=is_stopped)
    result.audit.update(stall_facts(stalls, result.requests))
    result.audit.update(stamp_facts(result.chunks, target.clock.scale))
    result.audit.update(pause_facts(result.audit["client_pauses_ns"], result.requests, target.clock.scale))
    return result


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a replay that one of several processes performs.

    sessions: those it replays, with rows for them alone. choose_start: called when all is ready; returns the common
    start in CLOCK_MONOTONIC ns.
    """

    sessions: Collection[int]
    choose_start: Callable[[], int]


def replay_here(
    plan: Plan,
    target: Target,
    *,
    on_event: Callable[[ReplayEvent], None] | None,
    is_stopped: Callable[[], bool],
    share: Share | None = None,
) -> ReplayResult:
    """Replay in this thread: the whole plan, or the share of this process."""
    is_epoll = target.options.name == "epoll"
    if is_epoll and not sys.platform.startswith("linux"):
        raise SpecError(
            "client 'epoll' needs Linux", where="client.name", hint="Choose client 'aiohttp', which runs everywhere"
        )
    if is_epoll and target.endpoint.is_https:
        raise SpecError(
            "client 'epoll' speaks no https", where="client.name", hint='Set client.name = "aiohttp" for this server'
        )
    script = Script(plan, target, keeps_events=on_event is not None, only=None if share is None else share.sessions)
    script.prefetch_all()
    with _delivery(script, on_event) as deliver, _undisturbed(), SchedulerSlice() as turns:
        cpu = CpuMeter()
        slice_ns = turns.ask(SHORT_SLICE_NS)
        if is_epoll:
            from harness.client.loop import EpollReplay

            loop = EpollReplay(script, target, is_stopped=is_stopped, on_slack=deliver)
            choose_start = (lambda: monotonic_ns() + START_LEAD_NS) if share is None else share.choose_start
            start_ns = loop.run(turns, choose_start)
            offsets = loop.offsets
            facts = {
                "spin_us": target.options.spin_us,
                "spun_wall_ns": loop.spun_ns,
                "num_wakeups": loop.num_wakeups,
                # From the common start until every row had its final status.
                "replay_wall_ns": loop.ended_ns - start_ns,
                "num_reconnects": loop.num_reconnects,
                "clock_offset_samples_ns": offsets.some(MAX_OFFSET_SAMPLES),
                "clock_steps": offsets.steps(),
            }
        else:
            from harness.client.portable import PortableReplay

            start_ns = PortableReplay(script, target, is_stopped=is_stopped, on_slack=deliver).run()
            offsets, facts = None, {}
        requests = script.rows_table()
        usage = cpu.read()
    sent_and_due = zip(requests["sent_ns"].to_pylist(), requests["due_ns"].to_pylist(), strict=True)
    facts = {
        "client": target.options.name,
        "stream": script.stream,
        **facts,
        "num_spilled_chunks": script.chunks.num_spilled,
        "num_early_sends": sum(sent_ns is not None and sent_ns < due_ns for sent_ns, due_ns in sent_and_due),
        "run_nonce": script.nonce,
        "client_pauses_ns": script.pauses_ns,
        **usage,
        "scheduler_slice_us": None if slice_ns is None else slice_ns / NS_PER_US,
    }
    chunks = script.chunks.stream(script.rows, script.clock, offsets)
    return ReplayResult(requests, chunks, script.clock.from_monotonic_ns(start_ns), facts)


@contextlib.contextmanager
def _undisturbed() -> Generator[None]:
    """No garbage collection, and short turns for other threads; both are restored after the block."""
    was_enabled, interval_s = gc.isenabled(), sys.getswitchinterval()
    gc.collect()
    gc.disable()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        yield
    finally:
        sys.setswitchinterval(interval_s)
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def _delivery(script: Script, on_event: Callable[[ReplayEvent], None] | None) -> Generator[Callable[[], None]]:
    """A function that hands new final rows to another thread, which calls ``on_event``.

    An exception of ``on_event`` ends the delivery, not the replay, and is raised after it.
    """
    if on_event is None:
        yield lambda: None
        return
    events: queue.SimpleQueue[ReplayEvent | None] = queue.SimpleQueue()
    failures: list[Exception] = []

    def call() -> None:
        while (event := events.get()) is not None:
            try:
                on_event(event)
            except Exception as error:
                failures.append(error)
                return

    def deliver() -> None:
        for event in script.finished_events:
            events.put(event)
        script.finished_events.clear()

    thread = threading.Thread(target=call, name="replay-events", daemon=True)
    thread.start()
    try:
        yield deliver
        deliver()
    finally:
        events.put(None)
        thread.join()
    if failures:
        raise failures[0]
