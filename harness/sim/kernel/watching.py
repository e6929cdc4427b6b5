"""Requests under way that the client may leave: which, when, and how many steps may pass before one is left.

A plan without planned aborts never gets further than the first line of each function. Nothing is aborted here.
"""

from __future__ import annotations

from harness.compiled import jit
from harness.engine.state import ROW_RUNNING, EngineState
from harness.engine.steps import FAR
from harness.sim.kernel.arrays import PlanArrays, Scratch


@jit
def watch(plans: PlanArrays, scratch: Scratch, session: int, request: int) -> None:
    """A request has arrived; remember it if the client may leave it. ``request`` is its index in all plans."""
    own = plans.requests[request]
    if own.abort_ns == 0 and own.abort_tokens == 0:
        return
    place = scratch.num_watched[0]
    scratch.num_watched[0] = place + 1
    scratch.sessions[place].watched = session
    scratch.sessions[session].abort_at_ns = FAR
    if own.abort_ns > 0:
        scratch.sessions[session].abort_at_ns = scratch.sessions[session].arrival_ns + own.abort_ns


@jit
def unwatch(plans: PlanArrays, scratch: Scratch, session: int, request: int) -> None:
    """A request is over."""
    own = plans.requests[request]
    if own.abort_ns == 0 and own.abort_tokens == 0:
        return
    place = 0
    while scratch.sessions[place].watched != session:
        place += 1
    last = scratch.num_watched[0] - 1
    scratch.num_watched[0] = last
    scratch.sessions[place].watched = scratch.sessions[last].watched


@jit
def next_to_leave(scratch: Scratch) -> int:
    """The session that the client leaves first, by (instant, session); -1 when it leaves none at a planned instant."""
    found = -1
    for place in range(scratch.num_watched[0]):
        session = int(scratch.sessions[place].watched)
        at_ns = scratch.sessions[session].abort_at_ns
        if at_ns == FAR:
            continue
        first_ns = FAR if found < 0 else scratch.sessions[found].abort_at_ns
        if at_ns < first_ns or (at_ns == first_ns and session < found):
            found = session
    return found


@jit
def row_of(plans: PlanArrays, plan: int, scratch: Scratch, session: int) -> int:
    """The engine's row of the request that a session has under way."""
    own = plans.sessions[plans.plans[plan].first_session + session]
    return int(own.first_request - plans.plans[plan].first_request + scratch.sessions[session].next_request)


@jit
def has_enough(plans: PlanArrays, plan: int, scratch: Scratch, state: EngineState) -> int:
    """The first session whose client has received the tokens after which it leaves; -1: none."""
    found = -1
    for place in range(scratch.num_watched[0]):
        session = int(scratch.sessions[place].watched)
        row = row_of(plans, plan, scratch, session)
        tokens = plans.requests[plans.plans[plan].first_request + row].abort_tokens
        if 0 < tokens <= state.rows[row].output and (found < 0 or session < found):
            found = session
    return found


@jit
def steps_to_enough(plans: PlanArrays, plan: int, scratch: Scratch, state: EngineState) -> int:
    """How many decode steps may be taken until some client has the tokens after which it leaves."""
    most = FAR
    for place in range(scratch.num_watched[0]):
        row = row_of(plans, plan, scratch, int(scratch.sessions[place].watched))
        tokens = plans.requests[plans.plans[plan].first_request + row].abort_tokens
        if tokens > 0 and state.rows[row].status == ROW_RUNNING:
            most = min(most, tokens - state.rows[row].output)
    return max(most, 1)
