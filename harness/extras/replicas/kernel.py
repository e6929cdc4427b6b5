"""Several servers behind a router in one compiled loop: what a plan does on them. Integer ns, nothing is allocated.

Each server is stepped as ``sim.kernel`` steps one. At one instant clients leave, then steps end, then requests are
sent. Equal decode steps of a replica are taken at once, when they are over or when a request comes to it or leaves it.
"""

from __future__ import annotations

from harness.compiled import compiled, jit
from harness.compiled.records import Several
from harness.extras.replicas.routing import RoutedReplica, Router, reset_router, route
from harness.model.engine.paged_state import PagedState
from harness.model.engine.state import STEP_DECODE, STEP_IDLE, STEP_PREFILL
from harness.model.engine.steps import FAR, IDLE_STEP_NS
from harness.model.sim.kernel.arrays import Scratch
from harness.model.sim.kernel.arrivals import (
    AnyRun,
    arrive,
    begin,
    has_enough,
    heap_pop,
    leave,
    next_abort_ns,
    next_leaves,
    next_to_leave,
    row_of,
)
from harness.model.sim.kernel.events import STEP_STUCK, take_costs
from harness.model.sim.kernel.loop import (
    decide,
    decodes_until,
    end_steps,
    has_room,
    has_work,
    reset_server,
    run_equal_steps,
    run_prompts,
    steps_ahead,
    stuck_row,
)
from harness.model.sim.kernel.paged_events import find_returns


@jit
def first_of_replicas(router: Router, scratch: Scratch, expected: int) -> int:
    """The next instant at which something happens; FAR: nothing does."""
    at_ns = min(next_abort_ns(scratch), int(scratch.heap[0].at_ns)) if expected > 0 else next_abort_ns(scratch)
    for place in range(len(router.replicas)):
        at_ns = min(at_ns, int(router.replicas[place].end_ns))
    return int(at_ns)


@jit
def begin_steps(run: AnyRun, plan: int, router: Router, place: int, now_ns: int) -> bool:
    """An idle replica decides its next step, if it has work; False: its work can never be done."""
    replica = router.replicas[place]
    if has_work(run.state) == 0:
        return True
    loaded, kind = decide(run, plan, int(replica.loaded), now_ns)
    replica.loaded, replica.start_ns, replica.end_ns, replica.taken, replica.most = loaded, now_ns, now_ns, 1, 0
    if kind == STEP_PREFILL:
        replica.end_ns = now_ns + run_prompts(run, plan, now_ns)
    elif kind == STEP_DECODE:
        abort_ns, most = next_leaves(run, plan, place)
        most = min(most, steps_ahead(run.state, FAR))
        _, spent_ns = decodes_until(run, plan, now_ns, FAR, abort_ns, most)
        replica.most, replica.abort_ns, replica.end_ns = most, abort_ns, now_ns + spent_ns
    elif kind == STEP_IDLE:
        replica.end_ns = now_ns + IDLE_STEP_NS
    return bool(kind != STEP_STUCK)


@jit
def take_decodes(run: AnyRun, plan: int, replica: RoutedReplica, at_ns: int) -> None:
    """The equal decode steps of a replica end with the first that ends at ``at_ns`` or later, if another could be
    admitted.
    """
    if replica.most == 0:
        return
    until_ns = at_ns
    if not has_room(run.state):
        until_ns = FAR
    start_ns, abort_ns = int(replica.start_ns), int(replica.abort_ns)
    taken, spent_ns = run_equal_steps(run, plan, start_ns, until_ns, abort_ns, int(replica.most))
    replica.taken, replica.end_ns, replica.most = taken, start_ns + spent_ns, 0


@jit
def leave_replica(runs: Several[AnyRun], plan: int, router: Router, expected: int, session: int, at_ns: int) -> int:
    """The client leaves the current request of a session; returns the new number of expected arrivals."""
    place = int(runs[0].scratch.sessions[session].replica)
    take_decodes(runs[place], plan, router.replicas[place], FAR)
    router.replicas[place].open -= 1
    return leave(runs[place], plan, expected, session, at_ns)


@jit
def end_replica(run: AnyRun, plan: int, router: Router, place: int, expected: int, now_ns: int) -> int:
    """The running steps of a replica are over; returns the new number of expected arrivals."""
    replica = router.replicas[place]
    take_decodes(run, plan, replica, FAR)
    replica.end_ns = FAR
    expected = end_steps(run, plan, int(replica.taken), expected, now_ns)
    replica.open -= run.state.server[0].num_finished
    while True:
        session = has_enough(run, plan, place)
        if session < 0:
            return expected
        replica.open -= 1
        expected = leave(run, plan, expected, session, now_ns)


@jit
def run_plan(  # noqa: C901  # one compiled loop
    runs: Several[AnyRun], plan: int, router: Router, sent: Several[PagedState]
) -> None:
    """Simulate one plan on fresh replicas, from its first request to the last completion."""
    reset_router(router, sent)
    find_returns(runs[0], plan)
    plans, scratch, totals = runs[0].plans, runs[0].scratch, runs[0].outcome.totals[plan]
    expected = begin(runs[0], plan, int(runs[0].state.server[1].limit))
    now_ns, began_ns = int(totals.end_ns), -1
    for place in range(len(router.replicas)):
        reset_server(runs[place].state)
        if place > 0:
            runs[place].outcome.totals[plan] = scratch.no_totals[0]
    while True:
        while expected > 0 and scratch.heap[0].at_ns <= now_ns:
            session = heap_pop(scratch.heap, expected)
            expected -= 1
            place = route(plans, plan, router, sent, session, row_of(runs[0], plan, session))
            scratch.sessions[session].replica = place
            # After steps of no length a request may come when the next steps of this instant have begun.
            take_decodes(runs[place], plan, router.replicas[place], now_ns + (began_ns == now_ns))
            arrive(runs[place], plan, session)
        for place in range(len(router.replicas)):
            if router.replicas[place].end_ns < FAR:
                continue
            if not begin_steps(runs[place], plan, router, place, now_ns):
                row = stuck_row(runs[place].state)
                totals.stuck_session = plans.requests[plans.plans[plan].first_request + row].session
                return
        began_ns = now_ns
        at_ns = first_of_replicas(router, scratch, expected)
        if at_ns == FAR:
            return
        now_ns = at_ns
        while next_abort_ns(scratch) <= now_ns:
            totals.end_ns = now_ns
            expected = leave_replica(runs, plan, router, expected, next_to_leave(scratch), now_ns)
        for place in range(len(router.replicas)):
            if router.replicas[place].end_ns == now_ns:
                totals.end_ns = now_ns
                expected = end_replica(runs[place], plan, router, place, expected, now_ns)


@compiled
def run_routed(runs: Several[AnyRun], router: Router, sent: Several[PagedState]) -> None:
    """Simulate all plans, each on fresh replicas. runs: of each replica; plans, scratch and requests are the same."""
    for plan in range(len(runs[0].plans.plans)):
        for place in range(len(router.replicas)):
            take_costs(runs[place].cost, plan)
        run_plan(runs, plan, router, sent)
