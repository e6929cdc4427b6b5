"""vLLM's scheduler with paged KV memory, one step after another, compiled. No clock: a step has no duration here.

A driver decides a step by ``decide_running``, and ``decide_waiting`` with the keys of each row that these name.
Source: vLLM 0.30.0 to 0.33.0, v1/core/sched/scheduler.py and async_scheduler.py, and v1/core/kv_cache_manager.py; where
the server never mixes, vllm-rbln 0.12.0, v1/core/rbln_scheduler.py.
"""

from __future__ import annotations

from harness.compiled import always_inline, jit
from harness.model.engine.blocks import (
    find_block,
    forget_content,
    free_seat_blocks,
    hold_block,
    match_second,
    pin_seat_blocks,
    register_block,
    reset_blocks,
    take_block,
)
from harness.model.engine.paged_state import ASIDE, ROW_SKIPPED, SKIPPED, PagedState
from harness.model.engine.state import QUEUED, ROW_GONE, ROW_RUNNING, ROW_WAITING
from harness.model.engine.steps import empty_queues, leave_running, queue_first, queue_last, unqueue


@jit
def reset_paged(state: PagedState) -> None:
    """Make ``state`` a freshly started server. Rows are left alone: ``submit_paged`` writes them whole."""
    state.server[0] = state.server[1]
    for step in range(2):
        state.steps[step] = state.steps[2]
    limit = state.server[0].limit
    for seat in range(limit):
        state.places[seat].free_seat = limit - 1 - seat
    empty_queues(state)
    reset_blocks(state)


@jit
def submit_paged(state: PagedState, row: int, prompt: int, max_tokens: int, stop_tokens: int) -> None:
    """Queue a request at the tail. ``stop_tokens`` is its true output length; nothing is scheduled by it."""
    state.rows[row] = state.fresh_row[0]
    server, request = state.server[0], state.rows[row]
    request.prompt = prompt
    request.end_output = min(stop_tokens, max_tokens, server.max_model_len - prompt)
    request.most_output = max_tokens
    request.status = ROW_WAITING
    request.seat = -1
    queue_last(state, row, QUEUED)


@jit
def keep_paged(state: PagedState, row: int, keep_ns: int) -> None:
    """Pin the blocks of a request for that long once it has ended, where the server pins."""
    state.rows[row].keep_ns = min(keep_ns, int(state.server[0].keep_kv_ns))


@jit
def unqueue_paged(state: PagedState, row: int) -> None:
    """Take a request out of its queue, wherever it stands."""
    unqueue(state, row, SKIPPED if state.rows[row].status == ROW_SKIPPED else QUEUED)


@jit
def set_aside(state: PagedState, row: int) -> None:
    """The step being decided passes over the head of the queue."""
    unqueue_paged(state, row)
    state.rows[row].status = ROW_SKIPPED
    queue_last(state, row, ASIDE)


@jit
def queue_aside(state: PagedState) -> None:
    """Those that were passed over come first, in their order."""
    while state.queues[ASIDE].tail >= 0:
        row = int(state.queues[ASIDE].tail)
        unqueue(state, row, ASIDE)
        queue_first(state, row, SKIPPED)


@jit
def leave_seat(state: PagedState, row: int) -> None:
    """Free the blocks of a running request, and its seat."""
    server, request = state.server[0], state.rows[row]
    free_seat_blocks(state, int(request.seat), int(request.num_blocks))
    state.places[server.free_seats].free_seat = request.seat
    server.free_seats += 1
    request.seat = -1
    request.num_blocks = 0
    request.registered = 0


@jit
def preempt_last(state: PagedState) -> int:
    """The last admitted goes back to the head of the queue with nothing computed; its answer becomes prompt."""
    server = state.server[0]
    server.num_running -= 1
    row = int(state.places[server.num_running].running)
    leave_seat(state, row)
    request = state.rows[row]
    request.computed = 0
    request.was_preempted = 1
    request.stale = request.in_flight
    request.placeholders = 0
    request.drafts = 0
    request.status = ROW_WAITING
    queue_first(state, row, QUEUED)
    return row


@jit
def leave_server(state: PagedState, row: int) -> None:
    """Take a request out of its queue or from its seat. Steps that hold it give it nothing from now on."""
    if state.rows[row].status == ROW_RUNNING:
        leave_running(state, row)
        leave_seat(state, row)
    else:
        unqueue_paged(state, row)
    state.rows[row].status = ROW_GONE


@jit
def abort_paged(state: PagedState, row: int) -> None:
    """Drop a request that waits or runs; one that is gone is ignored."""
    if state.rows[row].status != ROW_GONE:
        leave_server(state, row)


@jit
def register_full(state: PagedState, row: int, num_tokens: int) -> None:
    """The full blocks of a running request's first tokens can be matched from now on."""
    server, request = state.server[0], state.rows[row]
    if not server.is_caching:
        return
    # A key that names tokens after its block is not known before these are.
    num_full = min(num_tokens, request.prompt + request.output - server.key_lookahead) // server.block_tokens
    for place in range(request.registered, num_full):
        register_block(state, int(state.seat_blocks[request.seat, place]), int(state.seat_keys[request.seat, place]))
    request.registered = max(request.registered, num_full)


@jit
def grow(state: PagedState, row: int, num_tokens: int) -> bool:
    """Blocks for so many more tokens of a running request, and for those looked ahead; False changes nothing."""
    server, request = state.server[0], state.rows[row]
    num_covered = int(request.computed + num_tokens)
    num_held = min(num_covered + server.lookahead_tokens, server.max_model_len)
    needed = (num_held + server.block_tokens - 1) // server.block_tokens - request.num_blocks
    if needed > server.num_free:
        return False
    for _ in range(needed):
        state.seat_blocks[request.seat, request.num_blocks] = take_block(state)
        request.num_blocks += 1
    if not server.never_mixes:
        register_full(state, row, min(num_covered, int(request.prompt + request.output)))
    return True


@always_inline
def take_part(state: PagedState, which: int, row: int, num_tokens: int, is_padded: int) -> None:
    """A running request computes so many tokens in a step. is_padded: all but one are drafts that fill its batch."""
    server, step, request = state.server[0], state.steps[which], state.rows[row]
    part = state.parts[2 * server.limit * which + step.num_scheduled]
    known, computed = request.prompt + request.output + request.placeholders, request.computed
    part.row = row
    part.tokens = num_tokens
    part.is_unfinished = 0
    if computed + num_tokens < known:
        part.is_unfinished = 1
    request.is_part = part.is_unfinished
    part.drafts = max(computed + num_tokens - known, 0)
    part.accepted = 0
    part.is_padded = is_padded
    request.drafts = 0
    step.num_scheduled += 1
    if is_padded or ((known > request.prompt or server.never_mixes) and computed == known - 1):
        step.num_decodes += 1
        step.draft_tokens += part.drafts
        step.context_tokens += known + part.drafts
    else:
        step.num_chunk_tokens += num_tokens
        step.attended_tokens += num_tokens * computed + num_tokens * (num_tokens + 1) // 2
    request.computed += num_tokens
    request.in_flight += num_tokens
    if server.is_async and not part.is_unfinished:
        request.placeholders += 1 + part.drafts
        request.drafts = server.num_drafts
    server.budget -= num_tokens + server.draft_slots


@jit
def put_off(state: PagedState, which: int) -> None:
    """The running requests of the step being decided wait for the next one. They keep their blocks, and the drafts that
    it would have verified."""
    server, step = state.server[0], state.steps[which]
    for place in range(step.num_scheduled):
        part = state.parts[2 * server.limit * which + place]
        request = state.rows[part.row]
        request.computed -= part.tokens
        request.in_flight -= part.tokens
        request.drafts = part.drafts
    step.num_scheduled = 0
    step.num_decodes = 0
    step.draft_tokens = 0
    step.context_tokens = 0


@jit
def register_step(state: PagedState, which: int) -> None:
    """What the decided step fills can be matched from now on, where its own admissions could not match it."""
    server = state.server[0]
    if not server.never_mixes:
        return
    for place in range(state.steps[which].num_scheduled):
        row = int(state.parts[2 * server.limit * which + place].row)
        request = state.rows[row]
        register_full(state, row, int(min(request.computed, request.prompt + request.output)))


@jit
def num_open(state: PagedState, row: int) -> int:
    """Tokens that a running request can compute: 0 when a step in flight gives the last that it may have."""
    request = state.rows[row]
    # Even if all drafts in flight are rejected.
    least = request.computed + 2 - request.placeholders
    if request.placeholders > 0 and least >= request.prompt + request.most_output:
        return 0
    known = request.prompt + request.output + request.placeholders + request.drafts
    return int(min(known, state.server[0].max_model_len - 1) - request.computed)


@jit
def chunk_of(state: PagedState, num_tokens: int) -> int:
    """How many of so many tokens of one request the step being decided takes."""
    server = state.server[0]
    most = min(num_tokens, int(server.budget))
    return most if server.chunk_limit == 0 else min(most, int(server.chunk_limit))


@jit
def begin_step(state: PagedState, which: int, num_preempted: int) -> None:
    """Decide for the running requests, in the order of their admission; the last admitted give way.

    num_preempted: rows that the lists of the step name already. Source: scheduler.py, schedule().
    """
    state.steps[which] = state.steps[2]
    server, step = state.server[0], state.steps[which]
    step.num_preempted = num_preempted
    server.budget = server.max_step_tokens - server.draft_slots
    server.num_newly_preempted = 0
    server.has_parts = 0
    server.chunk_limit = 0
    # From vLLM 0.31.0 on a request without others may take the whole budget: there is nobody to hold up.
    if server.caps_lone_requests or server.num_running + server.num_waiting > 1:
        server.chunk_limit = server.long_prefill_tokens
    place = 0
    if server.never_mixes and server.num_running > 0:
        last = state.rows[state.places[server.num_running - 1].running]
        if last.computed < last.prompt + last.output - 1:
            place = int(server.num_running - 1)
    while place < server.num_running and server.budget > 0:
        row = int(state.places[place].running)
        num_tokens = chunk_of(state, num_open(state, row))
        place += 1
        if num_tokens == 0:
            continue
        is_out = False
        while not is_out and not grow(state, row, num_tokens):
            victim = preempt_last(state)
            state.parts[2 * server.limit * which + step.num_preempted].preempted = victim
            step.num_preempted += 1
            server.num_newly_preempted += 1
            is_out = victim == row
        if is_out:
            return
        server.has_parts |= state.rows[row].is_part
        take_part(state, which, row, num_tokens, 0)


@jit
def next_to_admit(state: PagedState, which: int) -> int:
    """The row that the step being decided may admit next, if its memory fits; -1: none. A step that preempted, admits
    nobody; where prompts run alone, neither does one that computes a part of a prompt."""
    server, step = state.server[0], state.steps[which]
    if server.num_newly_preempted > 0 or (server.never_mixes and step.num_chunk_tokens > 0):
        return -1
    while server.budget > 0 and server.num_running < server.limit:
        row = int(state.queues[SKIPPED].head)
        if row < 0:
            row = int(state.queues[QUEUED].head)
        if row >= 0 and server.never_mixes and step.num_admitted > 0:
            # Who comes after a request that decodes at once is taken for a prompt before its prefix is looked up.
            return row if state.rows[row].prompt + state.rows[row].output == 1 else -1
        if row < 0 or state.rows[row].stale == 0:
            return row
        # A token from before its preemption is still to come.
        set_aside(state, row)
    return -1


@jit
def match_prefix(state: PagedState, num_blocks: int) -> int:
    """How many of the first ``num_blocks`` keys of ``state.prefix`` are in memory; notes the block of each."""
    for place in range(num_blocks):
        block = find_block(state, int(state.prefix[place].key))
        if block == 0:
            return place
        state.prefix[place].hit = block
    return num_blocks


@always_inline
def find_prefix(state: PagedState, num_tokens: int) -> int:
    """How many blocks of the head of the queue, which has so many tokens, are taken from memory."""
    server, matched = state.server[0], 0
    if server.is_caching:
        # The last token is always computed: its output is the next token.
        matched = match_prefix(state, (num_tokens - 1) // int(server.block_tokens))
        if server.drops_last_match and matched > 0:
            matched -= 1
    return matched


@jit
def count_lookup(state: PagedState, row: int, num_tokens: int) -> None:
    """An admitted request was looked up: all its tokens, of which those computed already were found."""
    server, request = state.server[0], state.rows[row]
    if request.was_preempted:
        server.preempted_queries += num_tokens
        server.preempted_hits += request.computed
    else:
        server.queries += num_tokens
        server.hits += request.computed


@jit
def load_blocks(state: PagedState, which: int, seat: int, matched: int, most: int) -> int:
    """Blocks that come from the second memory into new ones, behind ``matched`` of ``most`` blocks; how many there
    are."""
    num_loaded = match_second(state, matched, most)
    for place in range(matched, matched + num_loaded):
        state.seat_blocks[seat, place] = take_block(state)
    for place in range(matched, matched + num_loaded):
        register_block(state, int(state.seat_blocks[seat, place]), int(state.prefix[place].key))
    state.steps[which].num_loaded += num_loaded
    return num_loaded


@jit
def padding_of(state: PagedState, which: int, num_tokens: int, num_cached: int) -> int:
    """Drafts that pad a request of so many tokens at its admission."""
    server, step = state.server[0], state.steps[which]
    if server.num_drafts == 0 or num_tokens - num_cached != 1 or server.has_parts or server.never_mixes:
        return 0
    has_others = step.num_scheduled > step.num_admitted or num_cached > 0
    if not has_others or num_cached + server.num_drafts + 2 > server.max_model_len:
        return 0
    return int(server.num_drafts)


@always_inline
def blocks_to_admit(state: PagedState, num_tokens: int, matched: int, num_padding: int) -> int:
    """Free blocks that a request needs of which ``matched`` blocks were found: for all its tokens, and for what its
    first step computes and looks ahead."""
    server = state.server[0]
    block_tokens, num_held = int(server.block_tokens), num_tokens
    if server.num_drafts > 0:
        new_tokens = chunk_of(state, num_tokens - matched * block_tokens + num_padding)
        most = min(matched * block_tokens + new_tokens + server.lookahead_tokens, server.max_model_len)
        num_held = max(num_tokens, int(most))
    needed = (num_held + block_tokens - 1) // block_tokens - matched
    for place in range(matched):
        if state.blocks[state.prefix[place].hit].holders == 0:
            needed += 1
    return needed


@jit
def admit_paged(state: PagedState, which: int, row: int) -> bool:
    """Admit the head of the queue to the step being decided, if all tokens that it has now fit into free blocks.

    With one token left to compute it is padded with drafts, so that the batch keeps its graph; it waits where the
    budget has no room for them. Source: scheduler.py, schedule(), pad_spec_decode.

    ``state.prefix`` must hold the keys of the full blocks of its prompt and answer, where prefixes are cached.
    """
    server, request = state.server[0], state.rows[row]
    num_tokens, block_tokens = int(request.prompt + request.output), int(server.block_tokens)
    matched = find_prefix(state, num_tokens)
    num_padding = padding_of(state, which, num_tokens, matched * block_tokens)
    if num_padding > 0 and 1 + num_padding > server.budget:
        return False
    runs_alone = server.never_mixes and num_tokens - matched * block_tokens > 1
    if runs_alone:
        server.budget = server.max_step_tokens
    if blocks_to_admit(state, num_tokens, matched, num_padding) > server.num_free:
        return False
    if runs_alone:
        put_off(state, which)
    unqueue_paged(state, row)
    server.free_seats -= 1
    seat = int(state.places[server.free_seats].free_seat)
    for place in range(matched):
        block = int(state.prefix[place].hit)
        hold_block(state, block)
        state.seat_blocks[seat, place] = block
    if server.is_caching:
        for place in range(matched, (request.prompt + request.end_output - 1) // block_tokens):
            state.seat_keys[seat, place] = state.prefix[place].key
    if server.second_room > 0:
        state.steps[which].asked_tokens += num_tokens - matched * block_tokens
        matched += load_blocks(state, which, seat, matched, (num_tokens - 1) // block_tokens)
    request.seat = seat
    request.status = ROW_RUNNING
    request.num_blocks = matched
    request.registered = matched
    request.computed = matched * block_tokens
    state.places[server.num_running].running = row
    server.num_running += 1
    part_tokens = chunk_of(state, int(num_tokens - request.computed + num_padding))
    # The whole prompt fits, and so does a part of it.
    grow(state, row, part_tokens)
    if server.is_caching:
        count_lookup(state, row, num_tokens)
    step = state.steps[which]
    part = state.parts[2 * server.limit * which + step.num_admitted]
    part.admitted = row
    part.cached_tokens = request.computed
    step.num_admitted += 1
    take_part(state, which, row, part_tokens, 1 if num_padding > 0 else 0)
    return True


@always_inline
def end_decision(state: PagedState, which: int) -> int:
    """The step is decided: -1."""
    queue_aside(state)
    register_step(state, which)
    return -1


@always_inline
def next_row(state: PagedState, which: int) -> int:
    """As ``next_to_admit``; where it is none, the step is decided."""
    row = next_to_admit(state, which)
    return row if row >= 0 else end_decision(state, which)


@jit
def decide_running(state: PagedState, which: int, num_preempted: int) -> int:
    """Decide a step for the running requests; returns the row that it may admit next, -1: the step is decided.

    num_preempted: see ``begin_step``.
    """
    begin_step(state, which, num_preempted)
    server, step = state.server[0], state.steps[which]
    if server.never_mixes and step.num_scheduled == 0 and server.num_newly_preempted > 0:
        # A prompt had to give way to nobody but itself. A step of nobody takes no time.
        server.num_futile += 1
        begin_step(state, which, int(step.num_preempted))
    return next_row(state, which)


@jit
def decide_waiting(state: PagedState, which: int, row: int) -> int:
    """Admit that row to the step if its memory fits; returns as ``decide_running``."""
    return next_row(state, which) if admit_paged(state, which, row) else end_decision(state, which)


@jit
def take_ahead(state: PagedState) -> int:
    """What the next step is: -1: one that was decided ahead runs now; else it must be decided, and so many preempted
    rows stand in its lists."""
    server = state.server[0]
    if not server.is_ahead:
        return 0
    server.current = 1 - server.current
    server.is_ahead = 0
    step = state.steps[server.current]
    # A step of nobody takes no time.
    return -1 if step.num_scheduled > 0 else int(step.num_preempted)


@jit
def next_ahead(state: PagedState) -> int:
    """The place of the step that is decided while the running one runs; -1: none is."""
    server = state.server[0]
    if not server.is_async or state.steps[server.current].num_scheduled == 0:
        return -1
    server.is_ahead = 1
    return int(1 - server.current)


@always_inline
def settle_drafts(state: PagedState, row: int, gained: int, num_drafts: int, num_accepted: int) -> None:
    """A running request has ``gained`` tokens more: what was rejected of its drafts is not computed, and new ones are
    there for its next step."""
    server, request = state.server[0], state.rows[row]
    request.computed -= num_drafts - num_accepted
    if server.is_async:
        # What lies behind the end of an answer stays computed and awaited, which is nothing in their difference.
        request.placeholders -= gained + num_drafts - num_accepted
        if request.in_flight > 0:
            # The step that was decided ahead took all drafts for accepted.
            state.steps[1 - server.current].context_tokens -= num_drafts - num_accepted
    else:
        request.drafts = server.num_drafts
        if server.trims_computed:
            request.computed -= 1 + num_accepted - gained
    if server.is_async or server.num_drafts == 0 or server.registers_drafts:
        register_full(state, row, int(request.computed - request.placeholders))


@jit
def draw_accepted(state: PagedState, row: int, num_drafts: int) -> int:
    """How many of so many drafts of a request are accepted, drawn by a hash of how many draws there were, and of it."""
    server, request = state.server[0], state.rows[row]
    server.num_draws += 1
    mixed = server.draw_seed + 0x9E3779B1 * server.num_draws + 0x5BD1E995 * request.prompt + 0x27D4EB2F * request.output
    mixed &= 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 16)) * 0x45D9F3B) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 16)) * 0x45D9F3B) & 0xFFFFFFFF
    mixed ^= mixed >> 16
    accepted = 0
    while accepted < num_drafts and mixed < state.rates[accepted]:
        accepted += 1
    return accepted


@jit
def finish_paged(state: PagedState) -> int:
    """The running step is over: a token for everyone whose prompt is computed; returns how many have finished.

    Who has its first token, and who has finished, stand in the places. Source: scheduler.py, update_from_output().
    """
    server = state.server[0]
    step, first_part = state.steps[server.current], 2 * server.limit * server.current
    server.num_finished = 0
    server.num_first = 0
    for place in range(step.num_scheduled):
        part = state.parts[first_part + place]
        row = int(part.row)
        request = state.rows[row]
        if request.status == ROW_GONE:
            # It was aborted, or ended in the step before.
            continue
        is_stale = request.stale > 0
        request.in_flight -= part.tokens
        if is_stale:
            request.stale -= part.tokens
        if part.is_unfinished:
            continue
        if request.output == 0:
            state.places[server.num_first].first = row
            server.num_first += 1
        if part.drafts > 0 and not part.is_padded and len(state.rates) > 0:
            part.accepted = draw_accepted(state, row, int(part.drafts))
        gained = min(1 + part.accepted, request.end_output - request.output)
        request.output += gained
        server.num_futile = 0
        if not is_stale:
            settle_drafts(state, row, int(gained), int(part.drafts), int(part.accepted))
        if request.output >= request.end_output:
            seat, count = int(request.seat), int(request.num_blocks)
            leave_server(state, row)
            if request.keep_ns > 0:
                pin_seat_blocks(state, seat, count, int(request.keep_ns))
            state.places[server.num_finished].finished = row
            server.num_finished += 1
    return int(server.num_finished)


@jit
def paged_has_work(state: PagedState) -> int:
    """Whether a request waits or runs, or a step that was decided for some has yet to run: 1, else 0."""
    server = state.server[0]
    if server.num_running + server.num_waiting > 0:
        return 1
    return 1 if server.is_ahead > 0 and state.steps[1 - server.current].num_scheduled > 0 else 0


@jit
def reset_prefixes(state: PagedState) -> int:
    """Forget the content of all blocks: 1; 0, and nothing happens, while a request holds some.

    Source: v1/core/block_pool.py, reset_prefix_cache().
    """
    if state.server[0].num_running > 0:
        return 0
    forget_content(state)
    return 1


@jit
def more_equal_steps(state: PagedState) -> int:
    """How many decode steps exactly like the running one must follow it while no request arrives or leaves.

    Until the first request ends or needs a block; where a waiting request lacks memory alone, also until a block is
    full, which may then be matched.
    """
    server = state.server[0]
    step, num_running, ahead = state.steps[server.current], server.num_running, 1 - server.current
    if step.num_chunk_tokens > 0 or step.num_preempted > 0 or step.num_loaded > 0 or server.num_drafts > 0:
        return 0
    if step.num_scheduled != num_running or num_running == 0 or (server.never_mixes and step.num_admitted > 0):
        return 0
    if server.is_async:
        after = state.steps[ahead]
        if after.num_chunk_tokens > 0 or after.num_preempted > 0 or after.num_scheduled != num_running:
            return 0
    is_refusing = server.num_waiting > 0 and num_running < server.limit
    more = int(server.max_model_len)
    for place in range(num_running):
        row = state.places[place].running
        request = state.rows[row]
        # The end of a prompt may be one token, which decodes where prompts run alone.
        if state.parts[2 * server.limit * server.current + place].row != row or request.output == 0:
            return 0
        more = min(more, request.end_output - request.output - 1)
        more = min(more, request.num_blocks * server.block_tokens - request.computed)
        num_full = request.computed
        if server.is_async:
            if state.parts[2 * server.limit * ahead + place].row != row or request.placeholders != 2:
                return 0
            more = min(more, request.most_output - request.output - 2)
            more = min(more, server.max_model_len - 2 - request.prompt - request.output)
            num_full = request.prompt + request.output
        if is_refusing:
            # What a step fills is matched by the admissions of the next one where steps never mix.
            more = min(more, server.block_tokens - 1 - (num_full - server.never_mixes) % server.block_tokens)
    return int(max(more, 0))


@jit
def skip_steps(state: PagedState, count: int) -> None:
    """Take so many of ``more_equal_steps``: the last of them is the running step from now on."""
    server = state.server[0]
    for place in range(server.num_running):
        request = state.rows[state.places[place].running]
        request.output += count
        request.computed += count
    state.steps[server.current].context_tokens += count * server.num_running
    if server.is_async:
        state.steps[1 - server.current].context_tokens += count * server.num_running
