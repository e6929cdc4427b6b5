"""A replay in this thread, of the whole plan or of the sessions of one client process.

Garbage collection is off meanwhile, and other threads get short turns. No statistic is computed.
"""

from __future__ import annotations

import contextlib
import gc
import os
import queue
import sys
import threading
from collections.abc import Callable, Collection, Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.clock import NS_PER_MS, NS_PER_US, monotonic_ns
from harness.errors import SpecError
from harness.measure.client.host import SHORT_SLICE_NS, CpuMeter, SchedulerSlice, preferred, real_time
from harness.measure.client.replay_state import ReplayEvent, ReplayState
from harness.measure.client.target import ReplayResult, Target
from harness.model.plan.tokens import AS_PLANNED

if TYPE_CHECKING:
    from harness.model.plan.model import Plan

# Other threads of this process give the interpreter back within this time; Python's default is 5 ms.
SWITCH_INTERVAL_S = 50e-6
MAX_OFFSET_SAMPLES = 200
START_LEAD_NS = 5 * NS_PER_MS
# As records name it, in which there were others.
CLIENT = "epoll"


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
    options = target.options
    if not sys.platform.startswith("linux"):
        raise SpecError("the client needs Linux (epoll, timerfd)", where="replay", hint="Run it on a Linux host")
    # Imported here: what it needs is not there on other systems.
    from harness.measure.client.loop import EpollReplay

    state = ReplayState(plan, target, keeps_events=on_event is not None, only=None if share is None else share.sessions)
    state.prefetch_all()
    with (
        _delivery(state, on_event) as deliver,
        _undisturbed(),
        # Before the slice, which is for other policies alone.
        real_time(options.realtime) as is_real_time,
        preferred(options.realtime and not is_real_time) as nice,
        SchedulerSlice() as turns,
    ):
        cpu = CpuMeter()
        slice_ns = turns.ask(SHORT_SLICE_NS)
        loop = EpollReplay(state, target, is_stopped=is_stopped, on_slack=deliver)
        start_ns = loop.run(turns, _start_soon if share is None else share.choose_start)
        offsets = loop.offsets
        facts = {
            "spin_us": options.spin_us,
            "spun_wall_ns": loop.spun_ns,
            "num_wakeups": loop.num_wakeups,
            # From the common start until every row had its final status.
            "replay_wall_ns": loop.ended_ns - start_ns,
            "num_reconnects": loop.num_reconnects,
            "clock_offset_samples_ns": offsets.some(MAX_OFFSET_SAMPLES),
            "clock_steps": offsets.steps(),
        }
        facts |= state.chunks.together_facts(offsets)
        requests = state.rows_table()
        usage = cpu.read()
    sent_and_due = zip(requests["sent_ns"].to_pylist(), requests["due_ns"].to_pylist(), strict=True)
    facts = {
        "client": CLIENT,
        "stream": state.stream,
        **({} if state.needs_token_ids else {"text_sizes": target.text_sizes.to_json()}),
        **({"prompt_ids": target.prompt_ids.to_json()} if target.prompt_ids != AS_PLANNED else {}),
        **facts,
        "num_spilled_chunks": state.chunks.num_spilled,
        "num_early_sends": sum(sent_ns is not None and sent_ns < due_ns for sent_ns, due_ns in sent_and_due),
        "run_nonce": state.nonce,
        "tolerated": dict(state.tolerated),
        "replicas": state.replicas,
        "client_pauses_ns": state.pauses_ns,
        **usage,
        "is_real_time": is_real_time,
        "nice": nice,
        **({"cores": sorted(os.sched_getaffinity(0))} if options.own_core else {}),
        "scheduler_slice_us": None if slice_ns is None else slice_ns / NS_PER_US,
    }
    chunks = state.chunks.stream(state.rows, state.clock, offsets)
    return ReplayResult(requests, chunks, state.clock.from_monotonic_ns(start_ns), facts)


def _start_soon() -> int:
    return monotonic_ns() + START_LEAD_NS


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
def _delivery(state: ReplayState, on_event: Callable[[ReplayEvent], None] | None) -> Generator[Callable[[], None]]:
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
        for event in state.finished_events:
            events.put(event)
        state.finished_events.clear()

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
