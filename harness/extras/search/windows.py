"""Figures of a window of a simulated run: device time, completed requests and reuse between two instants.

A window begins when every user has finished a given number of requests, and lasts a given time. A step that straddles
an edge of the window counts by the part inside, to the ns.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from harness.clock import NS_PER_S
from harness.compiled.records import IntArray, Records
from harness.errors import PlanError
from harness.model.engine.config import EngineConfig
from harness.model.engine.state import STEP_PREFILL
from harness.model.plan.event_queue import UserTimelines, users_of
from harness.model.sim.draws import Draws, run_draws
from harness.model.sim.kernel import arrays as layout
from harness.model.spec import WindowSpec


class WindowFigures(NamedTuple):
    """Figures of [start_ns, end_ns). Times in ns.

    completed, latencies_ns: of the requests that completed inside. device_ns, wait_session_ns: the parts of steps
    inside. cached_tokens: of the re-arrivals admitted inside.
    """

    start_ns: int
    end_ns: int
    completed: int
    device_ns: int
    wait_session_ns: int
    cached_tokens: int
    evictions: int
    latencies_ns: IntArray


def window_figures(draws: Draws, config: EngineConfig, window: WindowSpec, number: int = 0) -> WindowFigures:
    """Simulate one plan and count what happens in its window; without ``measure_s`` until a user has no requests left.

    draws: of that plan alone. number: of the plan, for messages.
    Raises PlanError when a user never finishes ``after_requests`` requests, or runs out of requests inside the window.
    """
    alone, outcome = draws.arrays, run_draws(draws, config, with_records=True)
    user = users_of(alone.sessions["after"])[alone.requests["session"]]
    timelines = UserTimelines.of(user, outcome.requests["completed_ns"])
    full_until_ns = timelines.last_full_ns()
    start_ns, end_ns = window.bounds_ns(0, timelines.window_start(window.after_requests))
    if window.measure_s is None:
        end_ns = full_until_ns
    elif end_ns > full_until_ns:
        raise PlanError(
            f"the window ends {end_ns / NS_PER_S:.1f} s after the start, when a user has already left "
            f"({full_until_ns / NS_PER_S:.1f} s)",
            where=f"plan {number}",
            hint="Give each user more sessions, or a shorter window",
        )
    return window_stats(alone, outcome, start_ns, end_ns)


def window_stats(arrays: layout.PlanArrays, outcome: layout.SimOutcome, start_ns: int, end_ns: int) -> WindowFigures:
    """Count what a simulated plan did in [start_ns, end_ns)."""
    requests = outcome.requests
    steps = outcome.steps[: outcome.totals["num_step_records"][0]]
    # Most records of a long run lie outside; records at the edges may straddle them, or end before.
    first, over = np.searchsorted(steps["start_ns"], (start_ns, end_ns))
    steps = steps[max(int(first) - 1, 0) : int(over)]
    begin, inside = steps["start_ns"], steps["duration_ns"] * steps["count"]
    for edge in (0, -1)[: len(steps)]:
        until = min(int(begin[edge] + inside[edge]), end_ns)
        inside[edge] = max(0, until - max(int(begin[edge]), start_ns))
    is_prefill = steps["kind"] == STEP_PREFILL
    completed = requests["completed_ns"]
    done = (start_ns <= completed) & (completed < end_ns)
    number = np.arange(len(requests)) - arrays.sessions["first_request"][arrays.requests["session"]]
    admitted = requests["admitted_ns"]
    again = (number > 0) & (start_ns <= admitted) & (admitted < end_ns)
    evicted_at = outcome.evictions["at_ns"][: outcome.totals["num_eviction_records"][0]]
    return WindowFigures(
        start_ns=start_ns,
        end_ns=end_ns,
        completed=int(done.sum()),
        device_ns=int(inside.sum()),
        wait_session_ns=_waited(requests, begin[is_prefill], inside[is_prefill]),
        cached_tokens=int(requests["cached_tokens"][again].sum()),
        evictions=int(((start_ns <= evicted_at) & (evicted_at < end_ns)).sum()),
        latencies_ns=(completed - requests["arrival_ns"])[done],
    )


def _waited(requests: Records[layout.RequestResult], begin: IntArray, inside: IntArray) -> int:
    """W: time that admitted sessions waited for the prefills of others, in session ns.

    begin, inside: start of each prefill, and how much of it counts.
    """
    # A request whose client left early may never have been admitted.
    was_admitted = requests["admitted_ns"] >= 0
    admitted = np.sort(requests["admitted_ns"][was_admitted])
    completed = np.sort(requests["completed_ns"][was_admitted])
    others = np.searchsorted(admitted, begin, "left") - np.searchsorted(completed, begin, "right")
    return int((others * inside).sum())
