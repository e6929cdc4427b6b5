"""Predictions of every planned run, from the simulator, before anything is measured.

The same plan and server give the same prediction on every machine. Nothing is compared here.
Next: ``freeze`` writes them down; ``harness decide`` compares them with sealed runs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import pyarrow as pa

from harness.analysis import rearrivals
from harness.analysis.method.predictions import Prediction, Predictions
from harness.engine import CostModel
from harness.experiment import PlannedRuns
from harness.plan import Plan
from harness.records import SealedRun
from harness.sim import SimResult, simulate
from harness.spec import RulesName, ServerSpec


def predict(
    plan: Plan, server: ServerSpec, rules: RulesName | None = None, cost_model: CostModel | None = None
) -> Prediction:
    """One run. rules: the KV rules to predict with; default, those the server is said to follow.

    cost_model: default, the file that the server names.
    """
    asked = server if rules is None else server.model_copy(update={"rules": rules})
    return _prediction(plan, asked, simulate(plan, asked, cost_model))


def _prediction(plan: Plan, server: ServerSpec, result: SimResult) -> Prediction:
    buckets = server.decode_buckets
    bucket_slots = sum(
        count * buckets[bisect_left(buckets, n)] for n, count in enumerate(result.decode_histogram) if n and count
    )
    used_slots = sum(n * count for n, count in enumerate(result.decode_histogram))
    again = rearrivals(_as_answered(result.requests), plan)
    return Prediction(
        device_ns=result.device_ns,
        decode_ns=result.decode_ns,
        prefill_ns=result.prefill_ns,
        waiting_session_ns=result.wait_session_ns,
        end_ns=result.end_ns,
        num_decode_steps=result.num_decode_steps,
        padded_slots=bucket_slots - used_slots,
        bucket_slots=bucket_slots,
        num_rearrivals=len(again),
        num_reused=sum(one.is_reused for one in again),
        cached_tokens=result.cached_tokens,
        computed_tokens=result.computed_tokens,
        num_evictions=result.num_evictions,
        filled_in_buckets=result.filled_in_buckets,
    )


def _as_answered(requests: pa.Table) -> pa.Table:
    return requests.select(["session", "request", "prompt_tokens", "cached_tokens"])


def predict_experiment(planned: PlannedRuns, rules: RulesName | None = None) -> dict[str, dict[int, Prediction]]:
    """Every planned run of an experiment, by condition and replicate."""
    return {
        name: {run.replicate: predict(run.plan, run.server, rules, run.cost_model) for run in runs}
        for name, runs in planned.by_condition.items()
    }


def predict_runs(runs: Sequence[SealedRun], rules: RulesName | None = None) -> Predictions:
    """Predictions of runs that were sealed without any: from the plan that lies in each."""
    found: dict[str, dict[int, Prediction]] = {}
    for run in runs:
        found.setdefault(run.condition, {})[run.replicate] = predict(run.plan, run.server, rules, run.cost_model)
    return found
