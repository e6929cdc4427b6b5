"""Several servers behind a router in one compiled loop: what a plan does on them. Integer ns, nothing is allocated.

Each server is stepped as ``sim.kernel`` steps one. At one instant clients leave, then steps end, then requests are
sent. Equal decode steps of a replica are taken at once, when they are over or when a request comes to it or leaves it.
"""

from __future__ import annotations

from typing import TypeAlias

from harness.compiled import by_kind, compiled, jit
from harness.compiled.records import Several
from harness.extras.replicas.routing import RoutedReplica, Router, reset_router, route
from harness.model.engine.paged_state import PagedState
from harness.model.engine.paged_steps import more_equal_steps, paged_has_work
from harness.model.engine.state import ROW_RUNNING, STEP_DECODE, STEP_IDLE, STEP_PREFILL, EngineState
from harness.model.engine.steps import FAR, IDLE_STEP_NS, finish_steps, reset, schedule
from harness.model.sim.kernel.arrays import CostArrays, PlanArrays, Scratch, SimOutcome
from harness.model.sim.kernel.arrivals import (
    AnyState,
    arrive,
    begin,
    clear,
    complete,
    heap_pop,
    leave,
    load_head_keys,
    next_abort_ns,
    next_to_leave,
    row_of,
)
from harness.model.sim.kernel.events import (
    decodes_until,
    note_losses,
    run_decode,
    run_prefill,
    steps_ahead,
    steps_so_far,
    take_costs,
)
from harness.model.sim.kernel.paged_costs import PagedCosts
from harness.model.sim.kernel.paged_events import (
    end_steps,
    find_returns,
    note_decision,
    note_evicted,
    paged_decodes_until,
    reset_drafting,
    run_decodes,
    run_mixed,
    schedule_paged,
)

AnyCosts: TypeAlias = CostArrays | PagedCosts


@jit
def next_of_replica(
    plans: PlanArrays, plan: int, scratch: Scratch, router: Router, state: AnyState, place: int
) -> tuple[int, int]:
    """When the first client leaves a request of a replica, and how many decode steps until one has enough tokens."""
    abort_ns, most = FAR, FAR
    for watched in range(scratch.num_watched[0]):
        session = int(scratch.sessions[watched].watched)
        if router.sessions[session].replica != place:
            continue
        abort_ns = min(abort_ns, int(scratch.sessions[session].abort_at_ns))
        row = row_of(plans, plan, scratch, session)
        tokens = plans.requests[plans.plans[plan].first_request + row].abort_tokens
        if tokens > 0 and state.rows[row].status == ROW_RUNNING:
            most = min(most, max(1, int(tokens - state.rows[row].output)))
    return abort_ns, most


@jit
def first_with_enough(
    plans: PlanArrays, plan: int, scratch: Scratch, router: Router, state: AnyState, place: int
) -> int:
    """The first session of a replica whose client has received the tokens after which it leaves; -1: none."""
    first = -1
    for watched in range(scratch.num_watched[0]):
        session = int(scratch.sessions[watched].watched)
        if router.sessions[session].replica != place or (0 <= first < session):
            continue
        row = row_of(plans, plan, scratch, session)
        if 0 < plans.requests[plans.plans[plan].first_request + row].abort_tokens <= state.rows[row].output:
            first = session
    return first


@jit
def first_of_replicas(router: Router, scratch: Scratch, expected: int) -> int:
    """The next instant at which something happens; FAR: nothing does."""
    at_ns = min(next_abort_ns(scratch), int(scratch.heap[0].at_ns)) if expected > 0 else next_abort_ns(scratch)
    for place in range(len(router.replicas)):
        at_ns = min(at_ns, int(router.replicas[place].end_ns))
    return int(at_ns)


@jit
def arriving_row(plans: PlanArrays, plan: int, scratch: Scratch, session: int) -> int:
    """The row of a session's next request."""
    first = plans.sessions[plans.plans[plan].first_session + session].first_request
    return int(first + scratch.sessions[session].next_request - plans.plans[plan].first_request)


@jit
def begin_slots(
    plans: PlanArrays,
    plan: int,
    scratch: Scratch,
    router: Router,
    place: int,
    state: EngineState,
    cost: CostArrays,
    outcome: SimOutcome,
    now_ns: int,
) -> bool:
    """An idle replica decides its next step, if it has work; False: its work can never be done."""
    server, replica = state.server[0], router.replicas[place]
    if server.num_running + server.num_waiting == 0:
        return True
    replica.loaded = load_head_keys(plans, plan, state, int(replica.loaded))
    kind = schedule(state)
    if server.num_evicted > 0 or server.num_preempted > 0:
        note_losses(plans, plan, state, outcome, now_ns)
    replica.start_ns, replica.taken, replica.most = now_ns, 1, 0
    if kind == STEP_PREFILL:
        replica.loaded = -1  # after a preemption it may return with more blocks
        replica.end_ns = now_ns + run_prefill(plans, plan, state, cost, outcome, now_ns)
    elif kind == STEP_DECODE:
        abort_ns, most = next_of_replica(plans, plan, scratch, router, state, place)
        most = min(most, steps_ahead(state, FAR))
        _, spent_ns = decodes_until(state, cost, steps_so_far(outcome, plan), now_ns, FAR, abort_ns, most)
        replica.most, replica.abort_ns, replica.end_ns = most, abort_ns, now_ns + spent_ns
    else:
        replica.end_ns = now_ns + IDLE_STEP_NS
        return bool(kind != STEP_IDLE or server.num_preempted > 0)
    return True


@jit
def begin_paged(
    plans: PlanArrays,
    plan: int,
    scratch: Scratch,
    router: Router,
    place: int,
    state: PagedState,
    cost: PagedCosts,
    outcome: SimOutcome,
    now_ns: int,
) -> bool:
    """As ``begin_slots``."""
    server, replica = state.server[0], router.replicas[place]
    if paged_has_work(state) == 0:
        return True
    server.now_ns = now_ns
    replica.loaded = schedule_paged(plans, plan, state, int(replica.loaded))
    if server.num_evicted > replica.num_evicted:
        note_evicted(plan, outcome, int(server.num_evicted - replica.num_evicted), now_ns)
        replica.num_evicted = server.num_evicted
    note_decision(plans, plan, state, outcome, now_ns)
    step = state.steps[server.current]
    replica.start_ns, replica.most, replica.end_ns = now_ns, 0, now_ns
    if step.num_chunk_tokens > 0:
        replica.end_ns = now_ns + run_mixed(plan, state, cost, outcome, now_ns)
    elif step.num_scheduled > 0:
        abort_ns, most = next_of_replica(plans, plan, scratch, router, state, place)
        most = min(most, 1 + more_equal_steps(state))
        _, spent_ns = paged_decodes_until(state, cost, steps_so_far(outcome, plan), now_ns, FAR, abort_ns, most)
        replica.most, replica.abort_ns, replica.end_ns = most, abort_ns, now_ns + spent_ns
    elif step.num_preempted == 0:
        return bool(server.num_running + server.num_waiting == 0)
    return True


@jit
def has_room_in_slots(state: EngineState) -> bool:
    """Whether a request that comes now could be admitted beside those that run."""
    server = state.server[0]
    return bool(server.num_waiting == 0 and server.num_running < server.active_limit)


@jit
def has_room_paged(state: PagedState) -> bool:
    """As ``has_room_in_slots``."""
    server = state.server[0]
    return bool(server.num_waiting == 0 and server.num_running < server.limit)


@jit
def finish_in_slots(
    plans: PlanArrays,
    plan: int,
    state: EngineState,
    scratch: Scratch,
    outcome: SimOutcome,
    replica: RoutedReplica,
    expected: int,
    now_ns: int,
) -> int:
    """The requests that end with the running steps of a replica; returns the new number of expected arrivals."""
    num_finished = finish_steps(state, int(replica.taken))
    replica.open -= num_finished
    for place in range(num_finished):
        expected = complete(plans, plan, scratch, outcome, expected, int(state.places[place].finished), now_ns)
    return expected


@jit
def finish_in_blocks(
    plans: PlanArrays,
    plan: int,
    state: PagedState,
    scratch: Scratch,
    outcome: SimOutcome,
    replica: RoutedReplica,
    expected: int,
    now_ns: int,
) -> int:
    """As ``finish_in_slots``."""
    expected = end_steps(plans, plan, state, scratch, outcome, expected, now_ns)
    replica.open -= state.server[0].num_finished
    return expected


@jit
def stuck_in_slots(state: EngineState) -> int:
    """The row of a request that can never be admitted."""
    return int(state.server[0].wait_head)


@jit
def stuck_paged(state: PagedState) -> int:
    """As ``stuck_in_slots``."""
    return int(max(state.server[0].skipped_head, state.server[0].wait_head))


@jit
def reset_slots(state: EngineState, _cost: CostArrays) -> None:
    """Make ``state`` a freshly started server."""
    reset(state)


reset_server = by_kind({EngineState: reset_slots, PagedState: reset_drafting})
begin_steps = by_kind({EngineState: begin_slots, PagedState: begin_paged})
run_equal_steps = by_kind({EngineState: run_decode, PagedState: run_decodes})
has_room = by_kind({EngineState: has_room_in_slots, PagedState: has_room_paged})
finish_requests = by_kind({EngineState: finish_in_slots, PagedState: finish_in_blocks})
stuck_row = by_kind({EngineState: stuck_in_slots, PagedState: stuck_paged})


@jit
def take_decodes(
    plan: int, state: AnyState, cost: AnyCosts, outcome: SimOutcome, replica: RoutedReplica, at_ns: int
) -> None:
    """The equal decode steps of a replica end with the first that ends at ``at_ns`` or later, if another could be
    admitted.
    """
    if replica.most == 0:
        return
    until_ns = at_ns
    if not has_room(state):
        until_ns = FAR
    start_ns, abort_ns = int(replica.start_ns), int(replica.abort_ns)
    taken, spent_ns = run_equal_steps(plan, state, cost, outcome, start_ns, until_ns, abort_ns, int(replica.most))
    replica.taken, replica.end_ns, replica.most = taken, start_ns + spent_ns, 0


@jit
def leave_replica(
    plans: PlanArrays,
    plan: int,
    scratch: Scratch,
    router: Router,
    servers: Several[AnyState],
    costs: Several[AnyCosts],
    outcomes: Several[SimOutcome],
    expected: int,
    session: int,
    at_ns: int,
) -> int:
    """The client leaves the current request of a session; returns the new number of expected arrivals."""
    place = int(router.sessions[session].replica)
    take_decodes(plan, servers[place], costs[place], outcomes[place], router.replicas[place], FAR)
    router.replicas[place].open -= 1
    return leave(plans, plan, servers[place], scratch, outcomes[place], expected, session, at_ns)


@jit
def end_replica(
    plans: PlanArrays,
    plan: int,
    scratch: Scratch,
    router: Router,
    place: int,
    state: AnyState,
    cost: AnyCosts,
    outcome: SimOutcome,
    expected: int,
    now_ns: int,
) -> int:
    """The running steps of a replica are over; returns the new number of expected arrivals."""
    replica = router.replicas[place]
    take_decodes(plan, state, cost, outcome, replica, FAR)
    replica.end_ns = FAR
    expected = finish_requests(plans, plan, state, scratch, outcome, replica, expected, now_ns)
    while True:
        session = first_with_enough(plans, plan, scratch, router, state, place)
        if session < 0:
            return expected
        replica.open -= 1
        expected = leave(plans, plan, state, scratch, outcome, expected, session, now_ns)


@jit
def run_plan(  # noqa: C901  # one compiled loop
    plans: PlanArrays,
    plan: int,
    scratch: Scratch,
    router: Router,
    sent: Several[PagedState],
    servers: Several[AnyState],
    costs: Several[AnyCosts],
    outcomes: Several[SimOutcome],
) -> None:
    """Simulate one plan on fresh replicas, from its first request to the last completion."""
    reset_router(router, sent)
    find_returns(plans, plan, scratch)
    totals = outcomes[0].totals[plan]
    expected = begin(plans, plan, scratch, outcomes[0], int(servers[0].server[1].limit))
    now_ns, began_ns = int(totals.end_ns), -1
    for place in range(len(router.replicas)):
        reset_server(servers[place], costs[place])
        if place > 0:
            clear(outcomes[place].totals[plan])
    while True:
        while expected > 0 and scratch.heap[0].at_ns <= now_ns:
            session = heap_pop(scratch.heap, expected)
            expected -= 1
            place = route(plans, plan, router, sent, session, arriving_row(plans, plan, scratch, session))
            # After steps of no length a request may come when the next steps of this instant have begun.
            until_ns = now_ns + (began_ns == now_ns)
            take_decodes(plan, servers[place], costs[place], outcomes[place], router.replicas[place], until_ns)
            arrive(plans, plan, scratch, servers[place], outcomes[place], session)
        for place in range(len(router.replicas)):
            if router.replicas[place].end_ns < FAR:
                continue
            state, cost, outcome = servers[place], costs[place], outcomes[place]
            if not begin_steps(plans, plan, scratch, router, place, state, cost, outcome, now_ns):
                row = stuck_row(state)
                totals.stuck_session = plans.requests[plans.plans[plan].first_request + row].session
                return
        began_ns = now_ns
        at_ns = first_of_replicas(router, scratch, expected)
        if at_ns == FAR:
            return
        now_ns = at_ns
        while next_abort_ns(scratch) <= now_ns:
            session = next_to_leave(scratch)
            totals.end_ns = now_ns
            expected = leave_replica(plans, plan, scratch, router, servers, costs, outcomes, expected, session, now_ns)
        for place in range(len(router.replicas)):
            if router.replicas[place].end_ns == now_ns:
                totals.end_ns = now_ns
                state, cost, outcome = servers[place], costs[place], outcomes[place]
                expected = end_replica(plans, plan, scratch, router, place, state, cost, outcome, expected, now_ns)


@compiled
def run_routed(
    plans: PlanArrays,
    scratch: Scratch,
    router: Router,
    sent: Several[PagedState],
    servers: Several[AnyState],
    costs: Several[AnyCosts],
    outcomes: Several[SimOutcome],
) -> None:
    """Simulate all plans, each on fresh replicas."""
    for plan in range(len(plans.plans)):
        for place in range(len(router.replicas)):
            take_costs(costs[place], plan)
        run_plan(plans, plan, scratch, router, sent, servers, costs, outcomes)
