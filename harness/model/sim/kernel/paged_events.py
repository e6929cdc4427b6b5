"""Steps of a simulated server with paged KV memory, as ``events`` has those of slots; compiled, integer ns."""

from __future__ import annotations

from harness.compiled import always_inline, jit
from harness.model.engine.paged_state import SKIPPED, PagedState, PagedStep
from harness.model.engine.paged_steps import (
    decide_running,
    decide_waiting,
    finish_paged,
    more_equal_steps,
    next_ahead,
    skip_steps,
    take_ahead,
)
from harness.model.engine.state import CALLER_REQUEST, FS_PER_NS, QUEUED, ROW_GONE, STEP_DECODE, STEP_PREFILL
from harness.model.engine.steps import FAR
from harness.model.sim.kernel.arrays import PagedCosts
from harness.model.sim.kernel.arrivals import AnyRun, PagedRun, load_keys
from harness.model.sim.kernel.events import (
    STEP_NOTHING,
    STEP_STUCK,
    noisy_ns,
    record_eviction,
    record_step,
    steps_so_far,
)

STEP_MIXED = 3
"""Decodes and parts of prompts in one step."""
MOST_FUTILE = 4
"""So often may prompts give way to themselves before the server counts as stuck: what is cached differs at first."""


@jit
def chunk_ns(cost: PagedCosts, step: PagedStep, base_fs: int) -> int:
    """How long the parts of prompts of a step take, and ``base_fs`` with them."""
    other, attended = cost.other[0], step.attended_tokens
    tokens = max(step.num_chunk_tokens, other.least_chunk)
    whole_ns = other.chunk_token_ns * tokens + other.attended_ns * attended
    total_fs = base_fs + other.chunk_step_fs + other.chunk_token_fs * tokens + other.attended_fs * attended
    return int(whole_ns + (total_fs + FS_PER_NS // 2) // FS_PER_NS)


@always_inline
def batch_place(cost: PagedCosts, step: PagedStep) -> int:
    """Where in ``PagedCosts.batch`` the cost of a step's decodes is."""
    place, other = int(step.num_decodes), cost.other[0]
    if step.draft_tokens > 0:
        if not other.counts_requests:
            place += int(step.draft_tokens)
        if other.counts_requests or step.draft_tokens == other.num_drafts * step.num_decodes:
            place += int(other.first_uniform)
    return place


@always_inline
def paged_step_ns(cost: PagedCosts, step: PagedStep, context_tokens: int) -> int:
    """How long a step takes, with what a lacking graph adds, as ``CostModel`` has it. context_tokens: of decodes."""
    other, batch = cost.other[0], cost.batch[batch_place(cost, step)]
    context_ns, context_fs = other.context_ns * context_tokens, other.context_fs * context_tokens
    # A draft is a token of the step, and no decode.
    context_fs -= other.beta_fs * step.draft_tokens
    # The step waits for what it reads from the second memory, and for the drafter.
    context_ns += step.num_loaded * other.load_block_ns + other.draft_ns
    if step.num_chunk_tokens == 0:
        return int(context_ns + (batch.base_fs + context_fs + FS_PER_NS // 2) // FS_PER_NS + batch.eager_ns)
    spent_ns = context_ns + chunk_ns(cost, step, int(batch.mixed_fs + context_fs))
    if step.num_decodes + step.draft_tokens + step.num_chunk_tokens > other.largest_captured:
        spent_ns += other.chunk_eager_ns
    return int(spent_ns)


@jit
def find_returns(run: AnyRun, plan: int) -> None:
    """How long the text of each session waits at its end, as ``return_waits_ns`` has it; where a server keeps KV."""
    own, followers, returns = run.plans.plans[plan], run.plans.followers, run.scratch.returns
    if len(returns) == 0:
        return
    for session in range(own.num_sessions):
        returns[session].start_ns = 0
        returns[session].return_ns = FAR
    for session in range(own.num_sessions):
        planned = run.plans.sessions[own.first_session + session]
        start_ns = returns[session].start_ns + planned.start_ns
        end_ns = start_ns
        for request in range(planned.first_request, planned.first_request + planned.num_requests - 1):
            end_ns += run.plans.requests[request].wait_ns
        returns[session].end_ns = end_ns
        for edge in range(planned.first_follower, planned.first_follower + planned.num_followers):
            follower = followers[edge]
            returns[follower].start_ns = max(returns[follower].start_ns, end_ns)
        if planned.continues >= 0:
            part = returns[planned.continues]
            part.return_ns = min(part.return_ns, start_ns - part.end_ns)


@jit
def decide_paged(run: PagedRun, plan: int, which: int, num_preempted: int, loaded: int) -> int:
    """Decide a step. loaded: the row whose keys ``state.prefix`` holds; returns whose it holds now."""
    row = decide_running(run.state, which, num_preempted)
    while row >= 0:
        if row != loaded and run.state.server[0].is_caching:
            num_tokens = int(run.state.rows[row].prompt + run.state.rows[row].end_output)
            load_keys(run.plans, plan, run.state, row, num_tokens, int(run.state.server[0].key_lookahead))
            loaded = row
        row = decide_waiting(run.state, which, row)
    return loaded


@jit
def schedule_paged(run: PagedRun, plan: int, loaded: int) -> int:
    """The next step runs; with asynchronous scheduling the step after it is decided now. loaded: as above."""
    num_preempted = take_ahead(run.state)
    if num_preempted >= 0:
        loaded = decide_paged(run, plan, int(run.state.server[0].current), num_preempted, loaded)
    ahead = next_ahead(run.state)
    if ahead >= 0:
        loaded = decide_paged(run, plan, ahead, 0, loaded)
    return loaded


@jit
def note_decision(run: PagedRun, plan: int, now_ns: int) -> None:
    """Note whom the step that begins now admits, and who was preempted for it, unless they are gone since."""
    server, totals = run.state.server[0], run.outcome.totals[plan]
    step, first_part = run.state.steps[server.current], 2 * server.limit * server.current
    first_request = run.plans.plans[plan].first_request
    for place in range(step.num_admitted):
        row = run.state.parts[first_part + place].admitted
        result = run.outcome.requests[first_request + row]
        if result.admitted_ns < 0 and run.state.rows[row].status != ROW_GONE:
            cached_tokens = run.state.parts[first_part + place].cached_tokens
            result.admitted_ns = now_ns
            result.cached_tokens = cached_tokens
            # With paged memory a hash that is found is a block that is there.
            result.hash_hit_tokens = cached_tokens
            totals.cached_tokens += cached_tokens
    for place in range(step.num_preempted):
        row = run.state.parts[first_part + place].preempted
        if run.state.rows[row].status != ROW_GONE:
            run.outcome.requests[first_request + row].preemptions += 1
            totals.preemptions += 1


@jit
def note_evicted(run: PagedRun, plan: int, now_ns: int) -> None:
    """Record blocks with content that were used again since the last step; a block belongs to no request."""
    totals = run.outcome.totals[plan]
    for _ in range(run.state.server[0].num_evicted - totals.evictions):
        record_eviction(run.outcome, plan, now_ns, -1, CALLER_REQUEST, -1, -1)
    totals.evictions = run.state.server[0].num_evicted


@jit
def run_mixed(run: PagedRun, plan: int, now_ns: int) -> int:
    """Record the running step, which computes parts of prompts; returns its duration."""
    step, totals = run.state.steps[run.state.server[0].current], run.outcome.totals[plan]
    each_ns = noisy_ns(
        run.cost, steps_so_far(run.outcome, plan), paged_step_ns(run.cost, step, int(step.context_tokens))
    )
    kind, computed = STEP_PREFILL, int(step.num_chunk_tokens)
    if step.num_decodes > 0:
        kind = STEP_MIXED
    record_step(run.outcome, plan, now_ns, kind, int(step.num_scheduled), 0, computed, -1, -1, each_ns)
    totals.prefills += 1
    totals.prefill_ns += each_ns
    totals.computed_tokens += computed
    num_waiting = step.num_decodes
    if run.cost.other[0].counts_requests:
        num_waiting = run.state.server[0].num_running - step.num_scheduled
    totals.wait_ns += num_waiting * chunk_ns(run.cost, step, 0)
    return each_ns


@always_inline
def paged_batch(run: PagedRun) -> tuple[int, int]:
    """Decodes of the running step, and the size that it is run with."""
    step = run.state.steps[run.state.server[0].current]
    return int(step.num_decodes), int(run.cost.batch[batch_place(run.cost, step)].bucket)


@always_inline
def paged_decode_ns(run: PagedRun, place: int) -> int:
    """As ``slot_decode_ns``."""
    step = run.state.steps[run.state.server[0].current]
    return paged_step_ns(run.cost, step, int(step.context_tokens + place * step.num_decodes))


@jit
def paged_steps_ahead(state: PagedState, max_steps: int) -> int:
    """As ``slot_steps_ahead``."""
    return int(min(max_steps, 1 + more_equal_steps(state)))


@jit
def decide_in_blocks(run: PagedRun, plan: int, loaded: int, now_ns: int) -> tuple[int, int]:
    """As ``decide_in_slots``. A step with parts of prompts is a prefill here."""
    server = run.state.server[0]
    server.now_ns = now_ns
    # Each plan and replica accepts drafts by draws of its own.
    server.draw_seed = run.cost.other[0].noise_seed
    loaded = schedule_paged(run, plan, loaded)
    note_evicted(run, plan, now_ns)
    note_decision(run, plan, now_ns)
    step, kind = run.state.steps[server.current], STEP_NOTHING
    if server.num_futile > MOST_FUTILE:
        kind = STEP_STUCK
    elif step.num_chunk_tokens > 0:
        kind = STEP_PREFILL
    elif step.num_scheduled > 0:
        kind = STEP_DECODE
    elif step.num_preempted == 0 and server.num_running + server.num_waiting > 0:
        kind = STEP_STUCK
    return loaded, kind


@jit
def finish_in_blocks(run: PagedRun, plan: int, taken: int, now_ns: int) -> None:
    """As ``finish_in_slots``. Steps taken at once give nobody its first token."""
    server, first_request = run.state.server[0], run.plans.plans[plan].first_request
    if taken > 1:
        skip_steps(run.state, taken - 1)
    server.now_ns = now_ns
    finish_paged(run.state)
    for place in range(server.num_first):
        run.outcome.requests[first_request + run.state.places[place].first].first_token_ns = now_ns


@jit
def stuck_paged(state: PagedState) -> int:
    """As ``stuck_in_slots``, or that is admitted, lacks a block for its last part and gives way to itself, for ever."""
    server = state.server[0]
    if server.num_futile > MOST_FUTILE:
        return int(state.places[server.num_running - 1].running)
    return int(max(state.queues[SKIPPED].head, state.queues[QUEUED].head))
