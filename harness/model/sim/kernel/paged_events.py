"""The inner loop of a simulated server with paged KV memory: plans in, times and counts out; compiled, integer ns.

It plays a plan as ``events`` does on a server with slots: the same clients, the same records. It allocates nothing.
"""

from __future__ import annotations

from harness.compiled import compiled, jit
from harness.model.engine.paged_state import PagedState
from harness.model.engine.paged_steps import (
    decide_running,
    decide_waiting,
    finish_paged,
    more_equal_steps,
    next_ahead,
    paged_has_work,
    reset_paged,
    skip_steps,
    take_ahead,
)
from harness.model.engine.state import CALLER_REQUEST, ROW_GONE, STEP_DECODE, STEP_PREFILL
from harness.model.engine.steps import FAR
from harness.model.sim.kernel.arrays import PlanArrays, Scratch, SimOutcome
from harness.model.sim.kernel.arrivals import (
    arrive,
    begin,
    complete,
    heap_pop,
    leave_by,
    leave_with_enough,
    load_keys,
    next_abort_ns,
    steps_to_enough,
)
from harness.model.sim.kernel.events import noisy_ns, record_eviction, record_step, steps_so_far, take_costs
from harness.model.sim.kernel.paged_costs import PagedCosts, batch_place, chunk_ns, paged_step_ns

STEP_MIXED = 3
"""Decodes and parts of prompts in one step."""


@jit
def find_returns(plans: PlanArrays, plan: int, scratch: Scratch) -> None:
    """How long the text of each session waits at its end, as ``return_waits_ns`` has it; where a server keeps KV."""
    own, followers, returns = plans.plans[plan], plans.followers, scratch.returns
    if len(returns) == 0:
        return
    for session in range(own.num_sessions):
        returns[session].start_ns = 0
        returns[session].return_ns = FAR
    for session in range(own.num_sessions):
        planned = plans.sessions[own.first_session + session]
        start_ns = returns[session].start_ns + planned.start_ns
        end_ns = start_ns
        for request in range(planned.first_request, planned.first_request + planned.num_requests - 1):
            end_ns += plans.requests[request].wait_ns
        returns[session].end_ns = end_ns
        for edge in range(planned.first_follower, planned.first_follower + planned.num_followers):
            follower = followers[edge]
            returns[follower].start_ns = max(returns[follower].start_ns, end_ns)
        if planned.continues >= 0:
            part = returns[planned.continues]
            part.return_ns = min(part.return_ns, start_ns - part.end_ns)


@jit
def decide_paged(plans: PlanArrays, plan: int, state: PagedState, which: int, num_preempted: int, loaded: int) -> int:
    """Decide a step. loaded: the row whose keys ``state.prefix`` holds; returns whose it holds now."""
    row = decide_running(state, which, num_preempted)
    while row >= 0:
        if row != loaded and state.server[0].is_caching:
            num_tokens, ahead = state.rows[row].prompt + state.rows[row].end_output, state.server[0].key_lookahead
            load_keys(plans, plan, state, row, int(num_tokens), int(ahead))
            loaded = row
        row = decide_waiting(state, which, row)
    return loaded


@jit
def schedule_paged(plans: PlanArrays, plan: int, state: PagedState, loaded: int) -> int:
    """The next step runs; with asynchronous scheduling the step after it is decided now. loaded: as above."""
    num_preempted = take_ahead(state)
    if num_preempted >= 0:
        loaded = decide_paged(plans, plan, state, int(state.server[0].current), num_preempted, loaded)
    ahead = next_ahead(state)
    if ahead >= 0:
        loaded = decide_paged(plans, plan, state, ahead, 0, loaded)
    return loaded


@jit
def note_decision(plans: PlanArrays, plan: int, state: PagedState, outcome: SimOutcome, now_ns: int) -> None:
    """Note whom the step that begins now admits, and who was preempted for it, unless they are gone since."""
    server, totals = state.server[0], outcome.totals[plan]
    step, first_part = state.steps[server.current], 2 * server.limit * server.current
    first_request = plans.plans[plan].first_request
    for place in range(step.num_admitted):
        row = state.parts[first_part + place].admitted
        result = outcome.requests[first_request + row]
        if result.admitted_ns < 0 and state.rows[row].status != ROW_GONE:
            cached_tokens = state.parts[first_part + place].cached_tokens
            result.admitted_ns = now_ns
            result.cached_tokens = cached_tokens
            # With paged memory a hash that is found is a block that is there.
            result.hash_hit_tokens = cached_tokens
            totals.cached_tokens += cached_tokens
    for place in range(step.num_preempted):
        row = state.parts[first_part + place].preempted
        if state.rows[row].status != ROW_GONE:
            outcome.requests[first_request + row].preemptions += 1
            totals.preemptions += 1


@jit
def note_evicted(plan: int, outcome: SimOutcome, count: int, now_ns: int) -> None:
    """Record blocks with content that the step used again; a block belongs to no request."""
    outcome.totals[plan].evictions += count
    for _ in range(count):
        record_eviction(outcome, plan, now_ns, -1, CALLER_REQUEST, -1, -1)


@jit
def run_mixed(plan: int, state: PagedState, cost: PagedCosts, outcome: SimOutcome, now_ns: int) -> int:
    """Record the running step, which computes parts of prompts; returns its duration."""
    step, totals = state.steps[state.server[0].current], outcome.totals[plan]
    each_ns = noisy_ns(cost, steps_so_far(outcome, plan), paged_step_ns(cost, step, int(step.context_tokens)))
    kind, computed = STEP_PREFILL, int(step.num_chunk_tokens)
    if step.num_decodes > 0:
        kind = STEP_MIXED
    record_step(outcome, plan, now_ns, kind, int(step.num_scheduled), 0, computed, -1, -1, each_ns)
    totals.prefills += 1
    totals.prefill_ns += each_ns
    totals.computed_tokens += computed
    totals.wait_ns += step.num_decodes * chunk_ns(cost, step, 0)
    return each_ns


@jit
def paged_decodes_until(
    state: PagedState, cost: PagedCosts, number: int, now_ns: int, until_ns: int, abort_ns: int, most: int
) -> tuple[int, int]:
    """How many decode steps are taken from the running one on, at most ``most``, and their time.

    number: of the first, which its noise is drawn by. Further steps start before ``until_ns`` and end before
    ``abort_ns``.
    """
    step = state.steps[state.server[0].current]
    count, context_tokens = int(step.num_decodes), int(step.context_tokens)
    taken, spent_ns = 0, 0
    while taken < most and (taken == 0 or now_ns + spent_ns < until_ns):
        each_ns = noisy_ns(cost, number + taken, paged_step_ns(cost, step, context_tokens + taken * count))
        if taken > 0 and now_ns + spent_ns + each_ns >= abort_ns:
            break
        spent_ns += each_ns
        taken += 1
    return taken, spent_ns


@jit
def record_paged_decodes(
    plan: int, state: PagedState, cost: PagedCosts, outcome: SimOutcome, now_ns: int, taken: int
) -> None:
    """Record so many decode steps from the running one on."""
    step, number = state.steps[state.server[0].current], steps_so_far(outcome, plan)
    count, context_tokens = int(step.num_decodes), int(step.context_tokens)
    for place in range(taken):
        each_ns = noisy_ns(cost, number + place, paged_step_ns(cost, step, context_tokens + place * count))
        bucket = int(cost.batch[batch_place(cost, step)].bucket)
        record_step(outcome, plan, now_ns, STEP_DECODE, count, bucket, -1, -1, -1, each_ns)
        now_ns += each_ns


@jit
def run_decodes(
    plan: int,
    state: PagedState,
    cost: PagedCosts,
    outcome: SimOutcome,
    now_ns: int,
    until_ns: int,
    abort_ns: int,
    most: int,
) -> tuple[int, int]:
    """Take the running decode step, and the equal steps after it, see ``paged_decodes_until``."""
    number = steps_so_far(outcome, plan)
    taken, spent_ns = paged_decodes_until(state, cost, number, now_ns, until_ns, abort_ns, most)
    if len(outcome.steps) > 0:
        record_paged_decodes(plan, state, cost, outcome, now_ns, taken)
    outcome.histogram[plan, state.steps[state.server[0].current].num_decodes] += taken
    if taken > 1:
        skip_steps(state, taken - 1)
    outcome.totals[plan].decode_steps += taken
    outcome.totals[plan].decode_ns += spent_ns
    return taken, spent_ns


@jit
def run_decodes_to_next(
    plans: PlanArrays,
    plan: int,
    state: PagedState,
    cost: PagedCosts,
    scratch: Scratch,
    outcome: SimOutcome,
    expected: int,
    now_ns: int,
    max_steps: int,
) -> int:
    """As ``run_decodes``, up to the next arrival that could be admitted and the next client that leaves."""
    server = state.server[0]
    until_ns, abort_ns, most = FAR, FAR, max_steps
    if most > 1:
        most = min(most, 1 + more_equal_steps(state))
    if plans.plans[plan].num_abortable > 0:
        abort_ns = next_abort_ns(scratch)
        most = min(most, steps_to_enough(plans, plan, scratch, state))
    if server.num_waiting == 0 and server.num_running < server.limit and expected > 0:
        until_ns = int(scratch.heap[0].at_ns)
    _, spent_ns = run_decodes(plan, state, cost, outcome, now_ns, until_ns, abort_ns, most)
    return spent_ns


@jit
def run_step(
    plans: PlanArrays,
    plan: int,
    state: PagedState,
    cost: PagedCosts,
    scratch: Scratch,
    outcome: SimOutcome,
    expected: int,
    now_ns: int,
    max_steps: int,
) -> int:
    """The step that was just decided, and equal steps after it; returns how long they take."""
    step = state.steps[state.server[0].current]
    if step.num_scheduled == 0:
        return 0
    if step.num_chunk_tokens > 0:
        return run_mixed(plan, state, cost, outcome, now_ns)
    return run_decodes_to_next(plans, plan, state, cost, scratch, outcome, expected, now_ns, max_steps)


@jit
def end_steps(
    plans: PlanArrays,
    plan: int,
    state: PagedState,
    scratch: Scratch,
    outcome: SimOutcome,
    expected: int,
    now_ns: int,
) -> int:
    """The running step is over; returns the new number of expected arrivals. Steps taken at once give nobody its first
    token."""
    server, first_request = state.server[0], plans.plans[plan].first_request
    server.now_ns = now_ns
    num_finished = finish_paged(state)
    for place in range(server.num_first):
        outcome.requests[first_request + state.places[place].first].first_token_ns = now_ns
    for place in range(num_finished):
        row = int(state.places[place].finished)
        expected = complete(plans, plan, scratch, outcome, expected, row, now_ns)
    return expected


@jit
def reset_drafting(state: PagedState, cost: PagedCosts) -> None:
    """Make ``state`` a freshly started server, which accepts drafts by draws of this plan and replica."""
    reset_paged(state)
    state.server[0].draw_seed = cost.other[0].noise_seed


@jit
def run_paged_plan(
    plans: PlanArrays,
    plan: int,
    state: PagedState,
    cost: PagedCosts,
    scratch: Scratch,
    outcome: SimOutcome,
    max_steps: int,
) -> None:
    """Simulate one plan from a fresh server to its last completion.

    Its totals name the session whose request can never be admitted, or -1.
    """
    reset_drafting(state, cost)
    find_returns(plans, plan, scratch)
    server, totals = state.server[0], outcome.totals[plan]
    expected, loaded, num_evicted = begin(plans, plan, scratch, outcome, int(server.limit)), -1, 0
    has_aborts = plans.plans[plan].num_abortable > 0
    now_ns = int(totals.end_ns)
    while True:
        while expected > 0 and scratch.heap[0].at_ns <= now_ns:
            session = heap_pop(scratch.heap, expected)
            expected -= 1
            arrive(plans, plan, scratch, state, outcome, session)
        if paged_has_work(state) == 0:
            if expected == 0:
                break
            now_ns = int(scratch.heap[0].at_ns)
            continue
        server.now_ns = now_ns
        loaded = schedule_paged(plans, plan, state, loaded)
        if server.num_evicted > num_evicted:
            note_evicted(plan, outcome, int(server.num_evicted - num_evicted), now_ns)
            num_evicted = int(server.num_evicted)
        note_decision(plans, plan, state, outcome, now_ns)
        step = state.steps[server.current]
        if step.num_scheduled == 0 and step.num_preempted == 0 and server.num_running + server.num_waiting > 0:
            row = max(server.skipped_head, server.wait_head)
            totals.stuck_session = plans.requests[plans.plans[plan].first_request + row].session
            break
        now_ns += run_step(plans, plan, state, cost, scratch, outcome, expected, now_ns, max_steps)
        if has_aborts:
            expected = leave_by(plans, plan, state, scratch, outcome, expected, now_ns)
        expected = end_steps(plans, plan, state, scratch, outcome, expected, now_ns)
        if has_aborts:
            expected = leave_with_enough(plans, plan, state, scratch, outcome, expected, now_ns)
    totals.end_ns = now_ns


@compiled
def run_paged_plans(
    plans: PlanArrays,
    state: PagedState,
    scratch: Scratch,
    outcome: SimOutcome,
    cost: PagedCosts,
    first_plan: int,
    last_plan: int,
    max_steps: int,
) -> None:
    """Simulate plans [first_plan, last_plan), each on a fresh server: this module's only entrypoint."""
    for plan in range(first_plan, last_plan):
        take_costs(cost, plan - first_plan)
        run_paged_plan(plans, plan, state, cost, scratch, outcome, max_steps)
