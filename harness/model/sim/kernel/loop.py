"""The simulator's inner loop: plans as arrays in, times and counts as arrays out; compiled, integer nanoseconds.

It moves virtual time from one decision of the engine to the next and takes equal decode steps together. It allocates
nothing, so one call can run many plans. Slots and paged KV memory differ in their steps alone: ``by_kind`` names both.
"""

from __future__ import annotations

from harness.compiled import by_kind, compiled, jit
from harness.model.engine.paged_state import PagedState
from harness.model.engine.paged_steps import paged_has_work
from harness.model.engine.state import STEP_DECODE, STEP_IDLE, STEP_PREFILL, EngineState
from harness.model.engine.steps import FAR, IDLE_STEP_NS
from harness.model.sim.kernel import events, paged_events
from harness.model.sim.kernel.arrivals import (
    AnyRun,
    PagedRun,
    SlotRun,
    arrive,
    begin,
    complete,
    heap_pop,
    leave_by,
    leave_with_enough,
    next_leaves,
)
from harness.model.sim.kernel.events import STEP_STUCK, take_costs
from harness.model.sim.kernel.paged_events import find_returns

reset_server = by_kind({SlotRun: events.reset_slots, PagedRun: paged_events.reset_drafting})
has_work = by_kind({EngineState: events.has_work_in_slots, PagedState: paged_has_work})
has_room = by_kind({EngineState: events.has_room_in_slots, PagedState: paged_events.has_room_paged})
stuck_row = by_kind({EngineState: events.stuck_in_slots, PagedState: paged_events.stuck_paged})
decide = by_kind({SlotRun: events.decide_in_slots, PagedRun: paged_events.decide_in_blocks})
run_prompts = by_kind({SlotRun: events.run_prefill, PagedRun: paged_events.run_mixed})
steps_ahead = by_kind({EngineState: events.slot_steps_ahead, PagedState: paged_events.paged_steps_ahead})
decodes_until = by_kind({SlotRun: events.slot_decodes_until, PagedRun: paged_events.paged_decodes_until})
run_equal_steps = by_kind({SlotRun: events.run_decode, PagedRun: paged_events.run_decodes})
finish = by_kind({SlotRun: events.finish_in_slots, PagedRun: paged_events.finish_in_blocks})


@jit
def run_to_next(run: AnyRun, plan: int, expected: int, now_ns: int, max_steps: int) -> tuple[int, int]:
    """``run_equal_steps`` up to the next arrival that could be admitted and the next client that leaves."""
    until_ns, abort_ns, most = FAR, FAR, steps_ahead(run.state, max_steps)
    if run.plans.plans[plan].num_abortable > 0:
        abort_ns, to_enough = next_leaves(run, plan, 0)
        most = min(most, to_enough)
    if expected > 0 and has_room(run.state):
        until_ns = int(run.scratch.heap[0].at_ns)
    return run_equal_steps(run, plan, now_ns, until_ns, abort_ns, most)


@jit
def end_steps(run: AnyRun, plan: int, taken: int, expected: int, now_ns: int) -> int:
    """The running steps are over; returns the new number of expected arrivals."""
    finish(run, plan, taken, now_ns)
    for place in range(run.state.server[0].num_finished):
        expected = complete(run, plan, expected, int(run.state.places[place].finished), now_ns)
    return expected


@jit
def run_plan(run: AnyRun, plan: int, max_steps: int) -> None:  # noqa: C901  # one compiled loop
    """Simulate one plan from a fresh server to its last completion.

    Its totals name the session whose request can never be admitted, or -1.
    """
    reset_server(run)
    find_returns(run, plan)
    totals, loaded = run.outcome.totals[plan], -1
    expected = begin(run, plan, int(run.state.server[0].limit))
    has_aborts = run.plans.plans[plan].num_abortable > 0
    # Read instead of written as 0: numba would compile every function that takes it a second time for the constant.
    now_ns = int(totals.end_ns)
    while True:
        while expected > 0 and run.scratch.heap[0].at_ns <= now_ns:
            session = heap_pop(run.scratch.heap, expected)
            expected -= 1
            arrive(run, plan, session)
        if has_work(run.state) == 0:
            if expected == 0:
                break
            now_ns = int(run.scratch.heap[0].at_ns)
            continue
        loaded, kind = decide(run, plan, loaded, now_ns)
        taken, spent_ns = 1, 0
        if kind == STEP_PREFILL:
            spent_ns = run_prompts(run, plan, now_ns)
        elif kind == STEP_DECODE:
            taken, spent_ns = run_to_next(run, plan, expected, now_ns, max_steps)
        elif kind == STEP_IDLE:
            spent_ns = IDLE_STEP_NS
        elif kind == STEP_STUCK:
            row = stuck_row(run.state)
            totals.stuck_session = run.plans.requests[run.plans.plans[plan].first_request + row].session
            break
        now_ns += spent_ns
        if has_aborts:
            expected = leave_by(run, plan, expected, now_ns)
        expected = end_steps(run, plan, taken, expected, now_ns)
        if has_aborts:
            expected = leave_with_enough(run, plan, expected, now_ns)
    totals.end_ns = now_ns


@compiled
def run_plans(run: SlotRun, first_plan: int, last_plan: int, max_steps: int) -> None:
    """Simulate plans [first_plan, last_plan), each on a fresh server with slots."""
    for plan in range(first_plan, last_plan):
        take_costs(run.cost, plan - first_plan)
        run_plan(run, plan, max_steps)


@compiled
def run_paged_plans(run: PagedRun, first_plan: int, last_plan: int, max_steps: int) -> None:
    """As ``run_plans``, with paged KV memory."""
    for plan in range(first_plan, last_plan):
        take_costs(run.cost, plan - first_plan)
        run_plan(run, plan, max_steps)
