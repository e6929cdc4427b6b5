"""The arrays that the compiled simulator reads and writes: plans, costs, working memory, results.

All int64, times in ns after the common start. Nothing is computed here but their sizes.
Next: ``events`` runs on them; ``simulate`` fills the plans in and reads the results.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from harness.engine.config import EngineConfig
from harness.engine.cost import CostModel
from harness.engine.state import IntArray

# Columns of Outcome.requests.
O_CACHED = 0
O_ARRIVAL = 1
O_ADMITTED = 2
O_FIRST_TOKEN = 3
O_COMPLETED = 4
O_HIT_TOKENS = 5
O_PREEMPTIONS = 6
NUM_O = 7

# Columns of Outcome.steps.
T_START = 0
T_KIND = 1
T_NUM_SEQS = 2
T_BUCKET = 3
T_COUNT = 4
T_SESSION = 5
T_REQUEST = 6
T_COMPUTED = 7
T_DURATION = 8
NUM_T = 9

# Columns of Outcome.evictions.
V_AT = 0
V_SLOT = 1
V_CALLER = 2
V_SESSION = 3
V_REQUEST = 4
NUM_V = 5

# Columns of Outcome.totals.
A_DECODE_NS = 0
A_PREFILL_NS = 1
A_WAIT_NS = 2
A_END_NS = 3
A_DECODE_STEPS = 4
A_PREFILLS = 5
A_EVICTIONS = 6
A_COMPUTED = 7
A_CACHED = 8
A_PREEMPTIONS = 9
A_NUM_STEP_RECORDS = 10
A_NUM_EVICTION_RECORDS = 11
A_STUCK_SESSION = 12
NUM_A = 13

OWNER_STRIDE = 1 << 20
"""Block i of a stream that request r wrote has key (r + 2) * OWNER_STRIDE + i; r = -1: the shared prefix;
r = number of requests + c: the named blocks up to the end of chain c."""


class PlanArrays(NamedTuple):
    """One or more plans, end to end. All int64.

    first_session (plans + 1,). Per session: first_request (sessions + 1,), start_ns, after, continues (indices within
    the plan, -1: none), root (the session whose stream it goes on with, for rules that go by session),
    num_before (how many sessions must have completed before it starts). first_follower (sessions + 1,), follower: who
    waits for each session. first_name (sessions + 1,), name: the named blocks that each fresh stream begins with, as
    numbers of chains of names; named_tokens (plans,): their size. Per request: keep, new, generate (tokens), wait_ns,
    session (within the plan). shared_prefix (plans,): tokens. pinned_ns (requests,): when a re-arrival comes, whatever
    the completion before it, but not earlier than that; -1: so long after it as the wait says.
    """

    first_session: IntArray
    first_request: IntArray
    start_ns: IntArray
    after: IntArray
    continues: IntArray
    root: IntArray
    num_before: IntArray
    first_follower: IntArray
    follower: IntArray
    first_name: IntArray
    name: IntArray
    named_tokens: IntArray
    keep: IntArray
    new: IntArray
    generate: IntArray
    wait_ns: IntArray
    session: IntArray
    shared_prefix: IntArray
    pinned_ns: IntArray


class CostArrays(NamedTuple):
    """base_fs (limit + 1,): decode cost of n requests without context. bucket (limit + 1,). other: see P_*.

    chunked (1,): device calls of a prefill between which the others decode one step; 0: prefill holds decode back.
    """

    base_fs: IntArray
    bucket: IntArray
    other: IntArray
    chunked: IntArray


class Scratch(NamedTuple):
    """Working memory for the largest plan. heap, arrival_ns, next_request, num_missing (sessions,).

    owner: (sessions, blocks).
    """

    heap: IntArray
    arrival_ns: IntArray
    next_request: IntArray
    num_missing: IntArray
    owner: IntArray


class Outcome(NamedTuple):
    """Results. requests (all requests, NUM_O); histogram (plans, limit + 1): decode steps by n; totals (plans, NUM_A);
    steps (room, NUM_T) and evictions (room, NUM_V): records of the last plan, as many as fit (room 0: none wanted).
    """

    requests: IntArray
    histogram: IntArray
    totals: IntArray
    steps: IntArray
    evictions: IntArray


def cost_arrays(config: EngineConfig, cost_model: CostModel) -> CostArrays:
    """A cost model's coefficients for one configuration."""
    buckets = [0, *(config.bucket_of(num_seqs) for num_seqs in range(1, config.max_num_seqs + 1))]
    return CostArrays(
        base_fs=cost_model.decode_base_fs(config),
        bucket=np.array(buckets, dtype=np.int64),
        other=cost_model.prefill_array(),
        chunked=np.zeros(1, dtype=np.int64),
    )


def new_scratch(config: EngineConfig, num_sessions: int) -> Scratch:
    """Working memory for plans of at most ``num_sessions`` sessions."""
    blocks = config.slot_tokens // config.block_tokens
    return Scratch(
        heap=np.zeros(num_sessions, dtype=np.int64),
        arrival_ns=np.zeros(num_sessions, dtype=np.int64),
        next_request=np.zeros(num_sessions, dtype=np.int64),
        num_missing=np.zeros(num_sessions, dtype=np.int64),
        owner=np.zeros((num_sessions, blocks), dtype=np.int64),
    )


def new_outcome(plans: PlanArrays, config: EngineConfig, step_room: int = 0, eviction_room: int = 0) -> Outcome:
    """Room for the results of ``plans``."""
    num_plans = len(plans.first_session) - 1
    return Outcome(
        requests=np.zeros((len(plans.keep), NUM_O), dtype=np.int64),
        histogram=np.zeros((num_plans, config.max_num_seqs + 1), dtype=np.int64),
        totals=np.zeros((num_plans, NUM_A), dtype=np.int64),
        steps=np.zeros((step_room, NUM_T), dtype=np.int64),
        evictions=np.zeros((eviction_room, NUM_V), dtype=np.int64),
    )
