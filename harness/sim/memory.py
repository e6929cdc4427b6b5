"""Tables for the compiled simulator, of the right sizes: costs of a configuration, working memory, room for results.

Nothing is simulated here. Next: ``kernel.events`` runs on them.
"""

from __future__ import annotations

import numpy as np

from harness.compiled.records import new_records, records_of
from harness.engine.config import EngineConfig
from harness.engine.cost import CostModel
from harness.sim.kernel.arrays import (
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


def cost_arrays(config: EngineConfig, cost_model: CostModel, chunked_prefill_calls: int = 0) -> CostArrays:
    """A cost model's coefficients for one configuration."""
    buckets = [0, *(config.bucket_of(num_seqs) for num_seqs in range(1, config.max_num_seqs + 1))]
    other = {
        "chunk_tokens": cost_model.chunk_tokens,
        "call_fs": cost_model.call_fs,
        "token_fs": cost_model.token_fs,
        "position_fs": cost_model.position_fs,
        "context_fs": cost_model.context_fs,
        "chunked_calls": chunked_prefill_calls,
    }
    return CostArrays(
        batch=records_of(BatchCost, {"bucket": buckets, "base_fs": cost_model.decode_base_fs(config)}, len(buckets)),
        other=records_of(OtherCost, dict(other), 1),
    )


def new_scratch(config: EngineConfig, plans: PlanArrays) -> Scratch:
    """Working memory for the largest of ``plans``."""
    num_sessions = int(plans.plans["num_sessions"].max())
    blocks = config.slot_tokens // config.block_tokens
    return Scratch(
        sessions=new_records(SessionScratch, num_sessions),
        owner=np.zeros((num_sessions, blocks), dtype=np.int64),
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
