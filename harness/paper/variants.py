"""Predictions of sealed runs under another rule: other KV rules, or re-arrivals pinned to what was observed.

Computed from the plans that lie in the runs; never compared as if a server behaved so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from harness.analysis.method.verdicts import ExperimentRuns
from harness.compiled.records import record_as_dict
from harness.engine import EngineConfig
from harness.prereg import predict_runs
from harness.records import SealedRun, paired
from harness.sim.kernel.arrays import with_column
from harness.sim.simulate import plan_arrays, run_batch
from harness.spec import RulesName


@dataclass(frozen=True, slots=True)
class VariantRatio:
    """One comparison under one variant. error: its distance from the ratio observed on channel A; None: unobserved."""

    ratio: float
    num_reused: int
    num_rearrivals: int
    observed_ratio: float | None

    @property
    def error(self) -> float | None:
        return None if self.observed_ratio is None else abs(self.ratio - self.observed_ratio)


def observed_ratio(experiment: ExperimentRuns, condition: str, baseline: str) -> float | None:
    """Channel A of a condition over its baseline's, sums over replicates."""
    pairs = experiment.pairs(condition, baseline)
    own_ns = sum(own.a.total_ns for own, _base in pairs if own.a is not None)
    base_ns = sum(base.a.total_ns for _own, base in pairs if base.a is not None)
    return own_ns / base_ns if base_ns else None


def predicted_ratio(
    experiment: ExperimentRuns, condition: str, baseline: str, rules: RulesName | None = None
) -> VariantRatio | None:
    """The full simulator under ``rules`` (default: what was predicted); None without runs of both."""
    pairs = paired(experiment.runs.get(condition, []), experiment.runs.get(baseline, []))
    if not pairs:
        return None
    if rules is None and experiment.predictions:
        predictions = experiment.predictions
    else:
        predictions = predict_runs([run for pair in pairs for run in pair], rules)
    own = [predictions[condition][run.replicate] for run, _base in pairs]
    base = [predictions[baseline][run.replicate] for _own, run in pairs]
    return VariantRatio(
        ratio=sum(one.device_ns for one in own) / sum(one.device_ns for one in base),
        num_reused=sum(one.num_reused for one in own),
        num_rearrivals=sum(one.num_rearrivals for one in own),
        observed_ratio=observed_ratio(experiment, condition, baseline),
    )


def fixed_arrival_ratio(experiment: ExperimentRuns, condition: str, baseline: str) -> VariantRatio | None:
    """Every re-arrival comes when it came in the baseline's run of the same replicate, whatever completes when."""
    pairs = paired(experiment.runs.get(condition, []), experiment.runs.get(baseline, []))
    if not pairs:
        return None
    changed = [_device_ns(own, _arrivals(base)) for own, base in pairs]
    unchanged = [_device_ns(base, None) for _own, base in pairs]
    return VariantRatio(
        ratio=sum(device for device, _ in changed) / sum(device for device, _ in unchanged),
        num_reused=sum(reused for _, reused in changed),
        num_rearrivals=sum(at_ns >= 0 for own, _ in pairs for at_ns in _arrivals(own)),
        observed_ratio=observed_ratio(experiment, condition, baseline),
    )


def _arrivals(run: SealedRun) -> Sequence[int]:
    """When each request of a run was sent, ns after its common start, in plan order; -1 for first requests."""
    requests = run.table("requests").sort_by([("session", "ascending"), ("request", "ascending")])
    rows: list[dict[str, Any]] = requests.to_pylist()
    start_ns = min(row["trigger_ns"] for row in rows)
    return [row["sent_ns"] - start_ns if row["request"] else -1 for row in rows]


def _device_ns(run: SealedRun, pinned_ns: Sequence[int] | None) -> tuple[int, int]:
    """(D, requests that reused) of a run's plan on its own configuration."""
    server = run.server
    arrays = plan_arrays([run.plan])
    if pinned_ns is not None:
        arrays = with_column(arrays, "pinned_ns", np.array(pinned_ns, dtype=np.int64))
    outcome = run_batch(arrays, EngineConfig.from_server(server), run.cost_model)
    totals = record_as_dict(outcome.totals, 0)
    reused = int(np.count_nonzero(outcome.requests["cached_tokens"] > 0))
    return totals["decode_ns"] + totals["prefill_ns"], reused
