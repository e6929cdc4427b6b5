"""The client leaves: its request is dropped at the end of the step that runs, before the tokens of that step.

As vLLM does (``EngineCore.step``: aborts that came meanwhile, then ``update_from_output``); the engine alone decides
what becomes of the memory.
"""

from __future__ import annotations

from harness.compiled import jit
from harness.engine.state import EngineState
from harness.engine.steps import FAR, abort
from harness.sim.kernel.arrays import Outcome, PlanArrays, Scratch
from harness.sim.kernel.arrivals import arrive, complete, heap_pop
from harness.sim.kernel.watching import has_enough, next_to_leave, row_of


@jit
def next_abort_ns(scratch: Scratch) -> int:
    """The first planned instant at which the client leaves; FAR for none."""
    session = next_to_leave(scratch)
    return FAR if session < 0 else int(scratch.sessions[session].abort_at_ns)


@jit
def leave(
    plans: PlanArrays,
    plan: int,
    state: EngineState,
    scratch: Scratch,
    outcome: Outcome,
    expected: int,
    session: int,
    at_ns: int,
) -> int:
    """The client leaves the request that a session has under way; the new number of expected arrivals."""
    row = row_of(plans, plan, scratch, session)
    result = outcome.requests[plans.plans[plan].first_request + row]
    if result.first_token_ns >= at_ns and plans.requests[plans.plans[plan].first_request + row].abort_ns > 0:
        result.first_token_ns = -1  # its prefill ends without a token for it
    result.aborted_tokens = state.rows[row].output
    abort(state, row)
    return complete(plans, plan, scratch, outcome, expected, row, at_ns)


@jit
def leave_by(
    plans: PlanArrays,
    plan: int,
    state: EngineState,
    scratch: Scratch,
    outcome: Outcome,
    expected: int,
    end_ns: int,
) -> int:
    """Everything that happens while a step runs that ends at ``end_ns``: arrivals before it, and clients that leave by
    then; at one instant those who leave come first.
    """
    while True:
        arrival_ns = FAR
        if expected > 0:
            arrival_ns = int(scratch.heap[0].at_ns)
        session = next_to_leave(scratch)
        abort_ns = FAR if session < 0 else int(scratch.sessions[session].abort_at_ns)
        if abort_ns <= min(arrival_ns, end_ns):
            expected = leave(plans, plan, state, scratch, outcome, expected, session, abort_ns)
        elif arrival_ns < end_ns:
            session = heap_pop(scratch.heap, expected)
            expected -= 1
            arrive(plans, plan, scratch, state, outcome, session)
        else:
            return expected


@jit
def leave_with_enough(
    plans: PlanArrays,
    plan: int,
    state: EngineState,
    scratch: Scratch,
    outcome: Outcome,
    expected: int,
    now_ns: int,
) -> int:
    """Those who have the tokens after which they leave do so, in the order of their sessions."""
    while True:
        session = has_enough(plans, plan, scratch, state)
        if session < 0:
            return expected
        expected = leave(plans, plan, state, scratch, outcome, expected, session, now_ns)
