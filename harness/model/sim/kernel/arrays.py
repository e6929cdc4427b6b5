"""The tables that the compiled simulator reads and writes: plans, costs, working memory, results; and how to make them.

All values are int64, times in ns after the common start.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from harness.compiled.records import IntArray, Records, new_records, records_of
from harness.model.engine.config import EngineConfig
from harness.model.engine.cost import CostModel
from harness.model.engine.state import FS_PER_NS

OWNER_STRIDE = 1 << 20
"""Block i of a stream that request r wrote has key (r + 2) * OWNER_STRIDE + i; r = -1: the shared prefix;
r = number of requests + c: the named blocks up to the end of chain c."""


class PlanRecord:
    """One plan: where its sessions and requests are in the tables of all plans. shared_prefix: tokens.

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

    root: the first session of the stream that it continues, for rules by session. num_before: sessions that must have
    completed before it starts. first_follower, num_followers: the sessions that wait for it. first_name, num_names: the
    named blocks that its fresh stream begins with. is_start_waited: see ``SessionPlan``.
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
    is_start_waited: int


class RequestRecord:
    """One request: tokens kept, new and generated. session: within the plan.

    pinned_ns: fixed instant of a re-arrival, or the completion before it if that is later; -1: the completion plus the
    wait. abort_ns, abort_tokens: when the client leaves, since its arrival and by tokens received; 0: never.
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

    noise_seed: where in ``CostArrays.noise`` the steps of a plan begin to draw.
    """

    chunk_tokens: int
    call_fs: int
    token_fs: int
    position_fs: int
    context_fs: int
    noise_seed: int


class CostArrays(NamedTuple):
    """batch (limit + 1,): by number of requests. other (1,).

    noise (power of 2,): millionths by which steps last longer; each step draws one; a single entry: no noise.
    drawn_batch (plans x (limit + 1),), drawn_other (plans,): costs of each plan of a call, copied to batch and other
    when the plan begins; empty: the same costs for all.
    """

    batch: Records[BatchCost]
    other: Records[OtherCost]
    noise: IntArray
    drawn_batch: Records[BatchCost]
    drawn_other: Records[OtherCost]


class PagedBatchCost:
    """A step of n decodes, or of n of their tokens where they have drafts: the size that it is padded to without parts
    of prompts, and its cost with and without them.

    eager_ns: what it takes more where it has no graph.
    """

    bucket: int
    base_fs: int
    mixed_fs: int
    eager_ns: int


class PagedOtherCost:
    """Coefficients of a cost model. Those of a token are split in whole ns and the fs left: sums stay inside int64.

    load_block_ns: for each block from the second memory. largest_captured: tokens of the largest step with a graph.
    least_chunk: tokens that a part of a prompt takes at least. counts_requests: sizes are numbers of requests.
    num_drafts: of each decode of a uniform step; first_uniform: place of such steps in ``PagedCosts.batch``. beta_fs:
    of a decode. draft_ns: of the drafter, after each step. noise_seed: see ``OtherCost``.
    """

    context_ns: int
    context_fs: int
    chunk_step_fs: int
    chunk_token_ns: int
    chunk_token_fs: int
    attended_ns: int
    attended_fs: int
    chunk_eager_ns: int
    load_block_ns: int
    largest_captured: int
    least_chunk: int
    counts_requests: int
    num_drafts: int
    first_uniform: int
    beta_fs: int
    draft_ns: int
    noise_seed: int


class PagedCosts(NamedTuple):
    """batch (limit + 1,): by number of decodes; with N drafts (2 + 2 limit (1 + N),): by their tokens, and then by the
    tokens of uniform steps, or by their number without and then with drafts where sizes count requests. other (1,).

    noise, drawn_batch, drawn_other: see ``CostArrays``.
    """

    batch: Records[PagedBatchCost]
    other: Records[PagedOtherCost]
    noise: IntArray
    drawn_batch: Records[PagedBatchCost]
    drawn_other: Records[PagedOtherCost]


class Arrival:
    """A place of the heap of next arrivals: when, and which session."""

    at_ns: int
    session: int


class SessionScratch:
    """State of the session at this place, except ``watched``, a list of its own in no order.

    num_missing: sessions that it still waits for. watched: sessions whose current request the client may leave.
    abort_at_ns: when the client leaves this session's request. replica: which of several servers has it.
    """

    arrival_ns: int
    next_request: int
    num_missing: int
    watched: int
    abort_at_ns: int
    replica: int


class SessionReturn:
    """When a session starts and ends if no answer takes any time, and how long until the first that continues it.

    return_ns: FAR where none does.
    """

    start_ns: int
    end_ns: int
    return_ns: int


class Scratch(NamedTuple):
    """Working memory for the largest plan. sessions (sessions,); heap (sessions,): next arrivals, earliest first.

    num_watched (1,): how many sessions have a current request that the client may leave. returns (sessions,) where KV
    is kept until a session returns, else (0,). no_totals, no_result (1,): of a plan and a request that have not begun.
    """

    sessions: Records[SessionScratch]
    heap: Records[Arrival]
    num_watched: IntArray
    returns: Records[SessionReturn]
    no_totals: Records[PlanTotals]
    no_result: Records[RequestResult]


class RequestResult:
    """Result of one request; -1: not yet. completed_ns: its end, or when the client left.

    aborted_tokens: tokens received before the client left, -1 for a complete answer.
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
    """One slot evicted at the start of a step, and the request whose prompt it held."""

    at_ns: int
    slot: int
    caller: int
    session: int
    request: int


class PlanTotals:
    """Sums of one plan. stuck_session: the session whose request can never be admitted, or -1."""

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


class SimOutcome(NamedTuple):
    """Results. requests (all requests,); histogram (plans, limit + 1): decode steps by n; totals (plans,).

    steps (room,) and evictions (room,): records of the last plan, as many as fit (room 0: none).
    """

    requests: Records[RequestResult]
    histogram: IntArray
    totals: Records[PlanTotals]
    steps: Records[StepRecord]
    evictions: Records[EvictionRecord]

    @property
    def device_ns(self) -> IntArray:
        """D of each plan: the sum of all its step times; shape (plans,)."""
        return self.totals["decode_ns"] + self.totals["prefill_ns"]


def noise_place(number: int, num_places: int) -> int:
    """The entry of a noise table that a step draws, by a hash of its number and the seed of its plan, summed.

    The number decides, so steps taken together draw the same noise as steps taken one by one.
    """
    mixed = number & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 16)) * 0x45D9F3B) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 16)) * 0x45D9F3B) & 0xFFFFFFFF
    return (mixed ^ (mixed >> 16)) & (num_places - 1)


NO_NOISE = np.zeros(1, dtype=np.int64)
NO_BATCH, NO_OTHER = new_records(BatchCost, 0), new_records(OtherCost, 0)
NO_PAGED_BATCH, NO_PAGED_OTHER = new_records(PagedBatchCost, 0), new_records(PagedOtherCost, 0)
_NEVER = 1 << 62


def cost_arrays(
    config: EngineConfig, models: Sequence[CostModel], noise_seeds: Sequence[int] = (), noise: IntArray = NO_NOISE
) -> CostArrays:
    """Coefficients of the costs of each plan of a call, or of one model for all. noise_seeds: below 2**32."""
    sizes = np.searchsorted(config.decode_buckets, np.arange(config.max_num_seqs + 1))
    buckets = np.array(config.decode_buckets)[sizes]
    buckets[0] = 0
    batch = new_records(BatchCost, len(buckets) * len(models))
    batch["bucket"][:] = np.tile(buckets, len(models))
    batch["base_fs"][:] = np.concatenate([model.decode_base_fs(config) for model in models])
    coefficients = ("chunk_tokens", "call_fs", "token_fs", "position_fs", "context_fs")
    columns = {name: [getattr(model, name) for model in models] for name in coefficients}
    other = records_of(OtherCost, {**columns, "noise_seed": list(noise_seeds) or 0}, len(models))
    if len(models) == 1:
        return CostArrays(batch, other, noise, NO_BATCH, NO_OTHER)
    return CostArrays(batch[: len(buckets)].copy(), other[:1].copy(), noise, batch, other)


def paged_costs(
    config: EngineConfig,
    cost_models: Sequence[CostModel],
    most_decodes: int,
    noise_seeds: Sequence[int] = (),
    noise: IntArray = NO_NOISE,
) -> PagedCosts:
    """Coefficients of the costs of each plan of a call, or of one model for all. most_decodes: of any step.

    Raises SpecError for a cost model that does not say what parts of prompts, or drafts, cost.
    """
    for model in cost_models:
        model.check_paged(config)
    batch, other = _batch_costs(config, cost_models, most_decodes), _other_costs(config, cost_models, noise_seeds)
    if len(cost_models) == 1:
        return PagedCosts(batch, other, noise, NO_PAGED_BATCH, NO_PAGED_OTHER)
    return PagedCosts(batch[: len(batch) // len(cost_models)].copy(), other[:1].copy(), noise, batch, other)


def _batch_costs(config: EngineConfig, models: Sequence[CostModel], most_decodes: int) -> Records[PagedBatchCost]:
    query = 1 + config.drafts.num_drafts
    never_mixes, size = config.rule_set.never_mixes, config.max_num_seqs * query + 1
    numbers = range(1, most_decodes * (1 if never_mixes else query) + 1)
    captures, counts = bool(config.capture_sizes), np.array(numbers)
    # Without drafts every decode step is uniform.
    kinds = [True] if query == 1 else [False, True]
    batch = new_records(PagedBatchCost, size * len(kinds) * len(models))
    for kind, is_uniform in enumerate(kinds):
        if never_mixes:
            graphs = [("FULL", config.padded(number)) for number in numbers]
        else:
            graphs = [config.graph(number, is_uniform=is_uniform) for number in numbers]
        is_eager = np.array([captures and mode == "NONE" for mode, _ in graphs], dtype=np.int64)
        for place, model in enumerate(models):
            first, priced = (place * len(kinds) + kind) * size + 1, model
            if never_mixes:
                priced = model.of_query(config.queries[kind])
            rows, rest_fs = slice(first, first + len(numbers)), model.alpha_fs + model.beta_fs * counts
            batch["bucket"][rows] = [bucket for _, bucket in graphs]
            batch["base_fs"][rows] = rest_fs + [priced.bucket_fs(bucket) for _, bucket in graphs]
            batch["mixed_fs"][rows] = rest_fs + [model.bucket_fs(number) for number in numbers]
            batch["eager_ns"][rows] = is_eager * model.eager_ns
    return batch


def _other_costs(
    config: EngineConfig, models: Sequence[CostModel], noise_seeds: Sequence[int]
) -> Records[PagedOtherCost]:
    columns: dict[str, list[int]] = {}
    for name, field in (("context", "context_fs"), ("chunk_token", "chunk_token_fs"), ("attended", "attended_fs")):
        split = [divmod(getattr(model, field), FS_PER_NS) for model in models]
        columns[f"{name}_ns"], columns[f"{name}_fs"] = [ns for ns, _ in split], [fs for _, fs in split]
    is_native = config.rule_set.never_mixes
    largest = config.capture_sizes[-1] if config.capture_sizes and not is_native else _NEVER
    return records_of(
        PagedOtherCost,
        {
            **columns,
            "chunk_step_fs": [model.chunk_step_fs or 0 for model in models],
            "chunk_eager_ns": [model.chunk_eager_ns for model in models],
            "load_block_ns": config.offload_block_ns,
            "largest_captured": largest,
            "least_chunk": config.max_num_batched_tokens * is_native,
            "counts_requests": is_native,
            "num_drafts": config.drafts.num_drafts,
            "first_uniform": config.max_num_seqs * (1 + config.drafts.num_drafts) + 1,
            "beta_fs": [0 if is_native else model.beta_fs for model in models],
            "draft_ns": [(model.draft_pass_ns or 0) * config.drafts.num_passes for model in models],
            "noise_seed": list(noise_seeds) or 0,
        },
        len(models),
    )


def copy_costs(costs: CostArrays, into: CostArrays) -> None:
    """Write the coefficients into the tables of other costs for a server of the same limit."""
    for table, other in ((costs.batch, into.batch), (costs.other, into.other)):
        np.copyto(cast("NDArray[np.void]", other), cast("NDArray[np.void]", table))


def new_scratch(plans: PlanArrays, *, knows_returns: bool = False) -> Scratch:
    """Working memory for the largest of ``plans``. knows_returns: a server keeps KV until a session returns."""
    num_sessions = int(plans.plans["num_sessions"].max())
    return Scratch(
        sessions=new_records(SessionScratch, num_sessions),
        heap=new_records(Arrival, num_sessions),
        num_watched=np.zeros(1, dtype=np.int64),
        returns=new_records(SessionReturn, num_sessions if knows_returns else 0),
        no_totals=records_of(PlanTotals, {"stuck_session": -1}, 1),
        no_result=records_of(RequestResult, dict.fromkeys(("admitted_ns", "first_token_ns", "aborted_tokens"), -1), 1),
    )


def new_outcome(plans: PlanArrays, config: EngineConfig, step_room: int = 0, eviction_room: int = 0) -> SimOutcome:
    """Room for the results of ``plans``."""
    return SimOutcome(
        requests=new_records(RequestResult, len(plans.requests)),
        histogram=np.zeros((len(plans.plans), config.max_num_seqs + 1), dtype=np.int64),
        totals=new_records(PlanTotals, len(plans.plans)),
        steps=new_records(StepRecord, step_room),
        evictions=new_records(EvictionRecord, eviction_room),
    )
