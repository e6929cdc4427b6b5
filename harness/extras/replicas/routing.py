"""The policies of ``policies`` for the compiled simulator: which replica serves a request. Integers only.

A router remembers what it sent to a replica in the tables of a second memory: keys by last use.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from harness.compiled import jit
from harness.compiled.records import IntArray, Records, Several, new_records
from harness.extras.replicas.policies import (
    BLOCK_TOKENS,
    KEPT_BLOCKS,
    MOST_LEAD,
    LeastRequests,
    PrefixAware,
    RoundRobin,
    SessionAffinity,
)
from harness.model.engine.blocks import find_second, put_second
from harness.model.engine.config import EngineConfig
from harness.model.engine.paged_state import PagedState, new_paged_state
from harness.model.engine.paged_steps import reset_paged
from harness.model.engine.steps import FAR
from harness.model.sim.kernel.arrays import PlanArrays
from harness.model.sim.kernel.arrivals import load_keys
from harness.stacks.rbln.rules.kv_rules import PAGED

ROUND_ROBIN, LEAST_REQUESTS, SESSION_AFFINITY, PREFIX_AWARE = range(4)
_NUMBERS = {
    RoundRobin.name: ROUND_ROBIN,
    LeastRequests.name: LEAST_REQUESTS,
    SessionAffinity.name: SESSION_AFFINITY,
    PrefixAware.name: PREFIX_AWARE,
}


class RouterChoice:
    """The policy, and the replica of the last request."""

    policy: int
    last: int


class RoutedReplica:
    """What a replica does, and what the router knows of it.

    start_ns, end_ns: of its running steps; FAR: it is idle. most: of equal decode steps, which end with the one that
    runs when a request arrives; 0: the end is fixed. abort_ns: when a client leaves one of its requests. taken: steps.
    loaded: the row whose keys its server holds. open: requests. matched: leading blocks of the
    prompt being routed that it was sent.
    """

    start_ns: int
    end_ns: int
    most: int
    abort_ns: int
    taken: int
    loaded: int
    open: int
    matched: int


class RoutedSession:
    """The home of the whole session at this place; -1: none."""

    home: int


class Router(NamedTuple):
    """choice (1,); replicas (replicas,); sessions (of the largest plan,).

    whole: the whole session that each session of all plans is a part of, within its plan, see ``whole_sessions``.
    """

    choice: Records[RouterChoice]
    replicas: Records[RoutedReplica]
    sessions: Records[RoutedSession]
    whole: IntArray


def new_router(policy: str, num_replicas: int, arrays: PlanArrays) -> tuple[Router, Several[PagedState]]:
    """A router for these plans, and what it remembers of each replica."""
    choice = new_records(RouterChoice, 1)
    choice["policy"][:] = _NUMBERS[policy]
    router = Router(
        choice,
        new_records(RoutedReplica, num_replicas),
        new_records(RoutedSession, int(arrays.plans["num_sessions"].max())),
        _whole(arrays) if policy == SessionAffinity.name else np.zeros(0, dtype=np.int64),
    )
    prompts = arrays.requests["keep"] + arrays.requests["new"] if policy == PrefixAware.name else np.zeros(1, np.int64)
    longest, most = int(prompts.max()) // BLOCK_TOKENS + 1, int((prompts // BLOCK_TOKENS).sum()) + 1
    remembered = EngineConfig(
        1,
        (),
        slot_tokens=longest * BLOCK_TOKENS,
        block_tokens=BLOCK_TOKENS,
        rules=PAGED,
        num_gpu_blocks=longest + 1,
        offload_blocks=min(KEPT_BLOCKS, most),
    )
    return router, Several([new_paged_state(remembered, 0) for _ in range(num_replicas)])


def _whole(arrays: PlanArrays) -> IntArray:
    sessions, num_followers = arrays.sessions, arrays.sessions["num_followers"]
    firsts = np.repeat(arrays.plans["first_session"], arrays.plans["num_sessions"])
    goes_on = sessions["continues"] >= 0
    is_part = goes_on | (sessions["is_start_waited"] > 0)
    if not is_part.any():
        return np.arange(len(sessions)) - firsts
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    before = np.repeat(np.arange(len(sessions)), num_followers)
    # Draws of a plan share its followers.
    shift = sessions["first_follower"] - (num_followers.cumsum() - num_followers)
    after = arrays.followers[np.arange(len(before)) + np.repeat(shift, num_followers)] + firsts[before]
    ends = np.concatenate([before[is_part[after]], sessions["continues"][goes_on] + firsts[goes_on]])
    starts = np.concatenate([after[is_part[after]], np.flatnonzero(goes_on)])
    links = coo_array((np.ones(len(ends)), (ends, starts)), shape=(len(sessions), len(sessions)))
    _, part = connected_components(links, directed=False)
    _, lowest = np.unique(part, return_index=True)
    return lowest[part] - firsts


@jit
def reset_router(router: Router, sent: Several[PagedState]) -> None:
    """A router that has seen nothing, before idle replicas."""
    router.choice[0].last = len(router.replicas) - 1
    for place in range(len(router.replicas)):
        replica = router.replicas[place]
        replica.end_ns = FAR
        replica.loaded = -1
        replica.open = 0
        if router.choice[0].policy == PREFIX_AWARE:
            reset_paged(sent[place])
    for session in range(len(router.sessions)):
        router.sessions[session].home = -1


@jit
def best_replica(router: Router, is_by_prompt: bool) -> int:
    """The replica with the fewest open requests; among equals the next after the last choice.

    is_by_prompt: of those that were sent most of the prompt.
    """
    num, replicas = len(router.replicas), router.replicas
    best = (router.choice[0].last + 1) % num
    other = best
    for _ in range(1, num):
        other = (other + 1) % num
        more = replicas[other].matched - replicas[best].matched if is_by_prompt else 0
        if more > 0 or (more == 0 and replicas[other].open < replicas[best].open):
            best = other
    return int(best)


@jit
def by_prefix(plans: PlanArrays, plan: int, router: Router, sent: Several[PagedState], row: int, least: int) -> int:
    """The replica that was sent most of a prompt, unless it has ``MOST_LEAD`` open requests more; it is sent it."""
    planned = plans.requests[plans.plans[plan].first_request + row]
    prompt, keys = int(planned.keep + planned.new), sent[0].prefix
    num_keys = prompt // BLOCK_TOKENS
    load_keys(plans, plan, sent[0], row, prompt, 0)
    for place in range(len(router.replicas)):
        matched = 0
        while matched < num_keys and find_second(sent[place], int(keys[matched].key)) != 0:
            matched += 1
        router.replicas[place].matched = matched
    best = best_replica(router, True)
    lead = router.replicas[best].open - router.replicas[least].open
    if router.replicas[best].matched == 0 or lead > MOST_LEAD:
        best = least
    for place in range(num_keys):
        put_second(sent[best], int(keys[place].key))
    return best


@jit
def choose(plans: PlanArrays, plan: int, router: Router, sent: Several[PagedState], session: int, row: int) -> int:
    """The replica of a session's next request."""
    policy = router.choice[0].policy
    if policy == ROUND_ROBIN:
        return int((router.choice[0].last + 1) % len(router.replicas))
    least = best_replica(router, False)
    if policy == LEAST_REQUESTS:
        return least
    if policy == PREFIX_AWARE:
        return by_prefix(plans, plan, router, sent, row, least)
    whole = router.whole[plans.plans[plan].first_session + session]
    if router.sessions[whole].home < 0:
        router.sessions[whole].home = least
    return int(router.sessions[whole].home)


@jit
def route(plans: PlanArrays, plan: int, router: Router, sent: Several[PagedState], session: int, row: int) -> int:
    """The replica that serves a session's next request from now on."""
    place = choose(plans, plan, router, sent, session, row)
    router.choice[0].last = place
    router.replicas[place].open += 1
    return place
