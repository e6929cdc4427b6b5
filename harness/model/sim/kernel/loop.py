"""The simulator's inner loop: plans as arrays in, times and counts as arrays out; compiled, integer nanoseconds.

It moves virtual time from one decision of the engine to the next and takes equal decode steps together. It allocates
nothing, so one call can run many plans. Slots and paged KV memory differ in their steps alone: ``by_kind`` names both.
"""

from __future__ import annotations

from harness.compiled import always_inline, by_kind, compiled, jit
from harness.model.engine.paged_state import PagedState
from harness.model.engine.paged_steps import paged_has_work, reset_paged
from harness.model.engine.state import STEP_DECODE, STEP_IDLE, STEP_PREFILL, EngineState
from harness.model.engine.steps import FAR, IDLE_STEP_NS, reset
from harness.model.sim.kernel import events, paged_events
from harness.model.sim.kernel.arrivals import (
    AnyRun,
    AnyState,
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
from harness.model.sim.kernel.events import STEP_STUCK, noisy_ns, record_decode, steps_so_far, take_costs
from harness.model.sim.kernel.paged_events import find_returns

reset_server = by_kind({EngineState: reset, PagedState: reset_paged})
has_work = by_kind({EngineState: events.has_work_in_slots, PagedState: paged_has_work})
stuck_row = by_kind({EngineState: events.stuck_in_slots, PagedState: paged_events.stuck_paged})
decide = by_kind({SlotRun: events.decide_in_slots, PagedRun: paged_events.decide_in_blocks})
run_prompts = by_kind({SlotRun: events.run_prefill, PagedRun: paged_events.run_mixed})
steps_ahead = by_kind({EngineState: events.slot_steps_ahead, PagedState: paged_events.paged_steps_ahead})
decode_batch = by_kind({SlotRun: events.slot_batch, PagedRun: paged_events.paged_batch})
decode_ns = by_kind({SlotRun: events.slot_decode_ns, PagedRun: paged_events.paged_decode_ns})
finish = by_kind({SlotRun: events.finish_in_slots, PagedRun: paged_events.finish_in_blocks})


@jit
def has_room(state: AnyState) -> bool:
    """Whether a request that comes now could be admitted beside those that run."""
    server = state.server[0]
    return bool(server.num_waiting == 0 and server.num_running < server.active_limit)


@always_inline
def decodes_until(run: AnyRun, plan: int, now_ns: int, until_ns: int, abort_ns: int, most: int) -> tuple[int, int]:
    """How many decode steps are taken from the one that begins on, at most ``most``, and their time.

    Further steps start before ``until_ns`` and end before ``abort_ns``.
    """
    if len(run.cost.noise) == 1:
        each_ns = decode_ns(run, 0)
        # Costs are linear in the context: where the first and the last step are equal, all are.
        if 0 < each_ns == decode_ns(run, most - 1):
            taken = most
            # Usually no request arrives meanwhile, and the division would cost as much as all the rest.
            if now_ns + (taken - 1) * each_ns >= until_ns:
                taken = max(1, (until_ns - now_ns - 1) // each_ns + 1)
            if abort_ns < FAR:
                taken = max(1, min(taken, (abort_ns - now_ns - 1) // each_ns))
            return taken, taken * each_ns
    number = steps_so_far(run.outcome, plan)
    taken, spent_ns = 0, 0
    while taken < most and (taken == 0 or now_ns + spent_ns < until_ns):
        each_ns = noisy_ns(run.cost, number + taken, decode_ns(run, taken))
        if taken > 0 and now_ns + spent_ns + each_ns >= abort_ns:
            break
        spent_ns += each_ns
        taken += 1
    return taken, spent_ns


@jit
def record_decodes(run: AnyRun, plan: int, now_ns: int, taken: int) -> None:
    """Record so many decode steps from the one that begins on."""
    number, (count, bucket) = steps_so_far(run.outcome, plan), decode_batch(run)
    for place in range(taken):
        each_ns = noisy_ns(run.cost, number + place, decode_ns(run, place))
        record_decode(run.outcome, plan, now_ns, count, bucket, each_ns)
        now_ns += each_ns


@always_inline
def run_equal_steps(run: AnyRun, plan: int, now_ns: int, until_ns: int, abort_ns: int, most: int) -> tuple[int, int]:
    """Take the decode step that begins, and the equal steps after it; see ``decodes_until``."""
    taken, spent_ns = decodes_until(run, plan, now_ns, until_ns, abort_ns, most)
    if len(run.outcome.steps) > 0:
        record_decodes(run, plan, now_ns, taken)
    count, _ = decode_batch(run)
    run.outcome.totals[plan].decode_steps += taken
    run.outcome.totals[plan].decode_ns += spent_ns
    run.outcome.histogram[plan, count] += taken
    return taken, spent_ns


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
    reset_server(run.state)
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
