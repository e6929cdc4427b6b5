"""Tables for the compiled simulator, of the right sizes: costs of a configuration, working memory, room for results.

Nothing is simulated here.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from harness.compiled.records import IntArray, Records, new_records, records_of
from harness.engine.config import EngineConfig
from harness.engine.cost import CostModel
from harness.sim.kernel.arrays import (
    Arrival,
    BatchCost,
    CostArrays,
    EvictionRecord,
    OtherCost,
    Outcome,
    PlanArrays,
    PlanTotals,
    RequestResult,
    Scratch,
    SessionScratch,
    StepRecord,
)

NO_NOISE = np.zeros(1, dtype=np.int64)
NO_BATCH, NO_OTHER = new_records(BatchCost, 0), new_records(OtherCost, 0)


def cost_arrays(config: EngineConfig, cost_model: CostModel, chunked_prefill_calls: int = 0) -> CostArrays:
    """A cost model's coefficients for one configuration."""
    batch, other = _costs(config, [cost_model], 0, chunked_prefill_calls)
    return CostArrays(batch, other, NO_NOISE, NO_BATCH, NO_OTHER)


def drawn_cost_arrays(
    config: EngineConfig,
    cost_models: Sequence[CostModel],
    noise_seeds: Sequence[int] = (),
    noise: IntArray = NO_NOISE,
    *,
    chunked_prefill_calls: int = 0,
) -> CostArrays:
    """Coefficients of a cost model for each plan of a call. noise_seeds: below 2**32, one a plan; default 0."""
    batch, other = _costs(config, cost_models, noise_seeds or 0, chunked_prefill_calls)
    return CostArrays(batch[: config.max_num_seqs + 1].copy(), other[:1].copy(), noise, batch, other)


def _costs(
    config: EngineConfig, cost_models: Sequence[CostModel], noise_seeds: Sequence[int] | int, chunked_calls: int
) -> tuple[Records[BatchCost], Records[OtherCost]]:
    """Of one model after another: a record for each number of requests, and one of the other coefficients."""
    buckets = np.array(config.decode_buckets)[
        np.searchsorted(config.decode_buckets, np.arange(config.max_num_seqs + 1))
    ]
    buckets[0] = 0
    batch = new_records(BatchCost, len(buckets) * len(cost_models))
    batch["bucket"][:] = np.tile(buckets, len(cost_models))
    batch["base_fs"][:] = np.concatenate([model.decode_base_fs(config) for model in cost_models])
    coefficients = ("chunk_tokens", "call_fs", "token_fs", "position_fs", "context_fs")
    other = {name: [getattr(model, name) for model in cost_models] for name in coefficients}
    rest = {"chunked_calls": chunked_calls, "noise_seed": noise_seeds}
    return batch, records_of(OtherCost, {**other, **rest}, len(cost_models))


def costs_of_plan(costs: CostArrays, plan: int) -> CostArrays:
    """The costs of one plan of a call, for a call of its own."""
    if len(costs.drawn_other) == 0:
        return costs
    size = len(costs.batch)
    return costs._replace(
        batch=costs.drawn_batch[plan * size : (plan + 1) * size].copy(),
        other=costs.drawn_other[plan : plan + 1].copy(),
        drawn_batch=NO_BATCH,
        drawn_other=NO_OTHER,
    )


def new_scratch(plans: PlanArrays) -> Scratch:
    """Working memory for the largest of ``plans``."""
    num_sessions = int(plans.plans["num_sessions"].max())
    return Scratch(
        sessions=new_records(SessionScratch, num_sessions),
        heap=new_records(Arrival, num_sessions),
        num_watched=np.zeros(1, dtype=np.int64),
    )


def new_outcome(plans: PlanArrays, config: EngineConfig, step_room: int = 0, eviction_room: int = 0) -> Outcome:
    """Room for the results of ``plans``."""
    return Outcome(
        requests=new_records(RequestResult, len(plans.requests)),
        histogram=np.zeros((len(plans.plans), config.max_num_seqs + 1), dtype=np.int64),
        totals=new_records(PlanTotals, len(plans.plans)),
        steps=new_records(StepRecord, step_room),
        evictions=new_records(EvictionRecord, eviction_room),
    )
