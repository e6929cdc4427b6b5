"""The tables that the compiled simulator reads and writes: plans, costs, working memory, results.

All int64, times in ns after the common start. Nothing is computed here.
"""

from __future__ import annotations

from typing import NamedTuple

from harness.compiled.records import IntArray, Records

OWNER_STRIDE = 1 << 20
"""Block i of a stream that request r wrote has key (r + 2) * OWNER_STRIDE + i; r = -1: the shared prefix;
r = number of requests + c: the named blocks up to the end of chain c."""


class PlanRecord:
    """One plan: its sessions and requests, in the tables of all plans. shared_prefix: tokens.

    named_tokens: size of a named block. num_abortable: requests that the client may leave.
    """

    first_session: int
    num_sessions: int
    first_request: int
    num_requests: int
    shared_prefix: int
    named_tokens: int
    num_abortable: int


class SessionRecord:
    """One session; after, continues, root are indices within the plan, -1: none.

    root: the session whose stream it goes on with, for rules that go by session. num_before: sessions that must have
    completed before it starts. first_follower, num_followers: who waits for it. first_name, num_names: the named
    blocks that its fresh stream begins with.
    """

    first_request: int
    num_requests: int
    start_ns: int
    after: int
    continues: int
    root: int
    num_before: int
    first_follower: int
    num_followers: int
    first_name: int
    num_names: int


class RequestRecord:
    """One request: tokens kept, new and generated. session: within the plan.

    pinned_ns: when a re-arrival comes, whatever the completion before it, but not earlier than that; -1: so long after
    it as the wait says. abort_ns, abort_tokens: when the client leaves, since its arrival and by tokens received; 0:
    never.
    """

    keep: int
    new: int
    generate: int
    wait_ns: int
    session: int
    pinned_ns: int
    abort_ns: int
    abort_tokens: int


class PlanArrays(NamedTuple):
    """One or more plans, end to end: plans (plans,), sessions (all sessions,), requests (all requests,).

    followers: sessions, within their plan. names: numbers of chains of names.
    """

    plans: Records[PlanRecord]
    sessions: Records[SessionRecord]
    requests: Records[RequestRecord]
    followers: IntArray
    names: IntArray


def with_column(plans: PlanArrays, name: str, values: IntArray) -> PlanArrays:
    """The plans with one field of every request replaced; the tables given stay as they are."""
    requests = plans.requests.copy()
    requests[name][:] = values
    return plans._replace(requests=requests)


class BatchCost:
    """A decode step of n requests: its bucket, and its cost without context."""

    bucket: int
    base_fs: int


class OtherCost:
    """Coefficients of prefill and of context, see CostModel.

    chunked_calls: device calls of a prefill between which the others decode one step; 0: prefill holds decode back.
    noise_seed: where in ``CostArrays.noise`` the steps of a plan begin to draw.
    """

    chunk_tokens: int
    call_fs: int
    token_fs: int
    position_fs: int
    context_fs: int
    chunked_calls: int
    noise_seed: int


class CostArrays(NamedTuple):
    """batch (limit + 1,): by number of requests. other (1,).

    noise (power of 2,): millionths by which steps last longer, drawn from by each step anew; of one place: no noise.
    drawn_batch (plans x (limit + 1),), drawn_other (plans,): costs of each plan of a call, that take the place of batch
    and other one after another; empty: the same for all.
    """

    batch: Records[BatchCost]
    other: Records[OtherCost]
    noise: IntArray
    drawn_batch: Records[BatchCost]
    drawn_other: Records[OtherCost]


class Arrival:
    """A place of the heap of next arrivals: when, and which session."""

    at_ns: int
    session: int


class SessionScratch:
    """All but ``watched`` are of the session at this place.

    num_missing: sessions that it still waits for. watched: sessions whose request the client may leave, in no order;
    abort_at_ns: when it leaves this session's.
    """

    arrival_ns: int
    next_request: int
    num_missing: int
    watched: int
    abort_at_ns: int


class Scratch(NamedTuple):
    """Working memory for the largest plan. sessions (sessions,); heap (sessions,): next arrivals, earliest first.

    num_watched (1,): how many sessions have a request under way that the client may leave.
    """

    sessions: Records[SessionScratch]
    heap: Records[Arrival]
    num_watched: IntArray


class RequestResult:
    """What became of one request; -1: not yet. completed_ns: its end, or when the client left.

    aborted_tokens: tokens received by then, -1 for an answer that the client stayed for.
    """

    cached_tokens: int
    arrival_ns: int
    admitted_ns: int
    first_token_ns: int
    completed_ns: int
    hash_hit_tokens: int
    preemptions: int
    aborted_tokens: int


class StepRecord:
    """``count`` equal decode steps, or one prefill (bucket 0) of a session's request; -1 where it does not apply."""

    start_ns: int
    kind: int
    num_seqs: int
    bucket: int
    count: int
    session: int
    request: int
    computed_tokens: int
    duration_ns: int


class EvictionRecord:
    """One slot evicted at the start of a step, and whose prompt it had held."""

    at_ns: int
    slot: int
    caller: int
    session: int
    request: int


class PlanTotals:
    """Sums of one plan. stuck_session: whose request can never be admitted, or -1."""

    decode_ns: int
    prefill_ns: int
    wait_ns: int
    end_ns: int
    decode_steps: int
    prefills: int
    evictions: int
    computed_tokens: int
    cached_tokens: int
    preemptions: int
    num_step_records: int
    num_eviction_records: int
    stuck_session: int


class Outcome(NamedTuple):
    """Results. requests (all requests,); histogram (plans, limit + 1): decode steps by n; totals (plans,).

    steps (room,) and evictions (room,): records of the last plan, as many as fit (room 0: none wanted).
    """

    requests: Records[RequestResult]
    histogram: IntArray
    totals: Records[PlanTotals]
    steps: Records[StepRecord]
    evictions: Records[EvictionRecord]
