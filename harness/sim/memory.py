"""Tables for the compiled simulator, of the right sizes: costs of a configuration, working memory, room for results.

Nothing is simulated here. Next: ``kernel.events`` runs on them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from harness.compiled.records import IntArray, new_records, records_of
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


def cost_arrays(config: EngineConfig, cost_model: CostModel, chunked_prefill_calls: int = 0) -> CostArrays:
    """A cost model's coefficients for one configuration."""
    return drawn_cost_arrays(config, [cost_model], chunked_prefill_calls=chunked_prefill_calls)._replace(
        drawn_batch=new_records(BatchCost, 0), drawn_other=new_records(OtherCost, 0)
    )


def drawn_cost_arrays(
    config: EngineConfig,
    cost_models: Sequence[CostModel],
    noise_seeds: Sequence[int] = (),
    noise: IntArray = NO_NOISE,
    *,
    chunked_prefill_calls: int = 0,
) -> CostArrays:
    """Coefficients of a cost model for each plan of a call. noise_seeds: below 2**32, one a plan; default 0."""
    buckets = [0, *(config.bucket_of(num_seqs) for num_seqs in range(1, config.max_num_seqs + 1))]
    coefficients = ("chunk_tokens", "call_fs", "token_fs", "position_fs", "context_fs")
    other = {name: [getattr(model, name) for model in cost_models] for name in coefficients}
    rest = {"chunked_calls": chunked_prefill_calls, "noise_seed": noise_seeds or 0}
    base_fs = np.concatenate([model.decode_base_fs(config) for model in cost_models])
    drawn_batch = records_of(
        BatchCost, {"bucket": np.tile(buckets, len(cost_models)), "base_fs": base_fs}, len(base_fs)
    )
    drawn_other = records_of(OtherCost, {**other, **rest}, len(cost_models))
    return CostArrays(drawn_batch[: len(buckets)].copy(), drawn_other[:1].copy(), noise, drawn_batch, drawn_other)


def costs_of_plan(costs: CostArrays, plan: int) -> CostArrays:
    """The costs of one plan of a call, for a call of its own."""
    if len(costs.drawn_other) == 0:
        return costs
    size = len(costs.batch)
    return costs._replace(
        batch=costs.drawn_batch[plan * size : (plan + 1) * size].copy(),
        other=costs.drawn_other[plan : plan + 1].copy(),
        drawn_batch=new_records(BatchCost, 0),
        drawn_other=new_records(OtherCost, 0),
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
