"""How long decode steps took, and how far sealed runs scatter about the cost model: deviations for drawn predictions.

The log stamps a step when it begins; the interval to the next step is its duration when no prefill lies between and n
and b stay. Scatter is measured from runs of the same condition, and from what a cost model leaves of buckets and
compilations. Nothing is assumed: what runs cannot show is left out.
Definitions: docs/reference/method-planning.md, "How far runs scatter".
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from harness.analysis.cost.reconstruct import decode_step_ns, step_contexts
from harness.analysis.figures import lateness
from harness.analysis.stats import FloatArray, IntArray, grouped, pooled_variance
from harness.measure.records.run import SealedRun, once_per_run
from harness.measure.records.schema import rows_where, values_of


def steady_steps(steps: pa.Table, kv_events: pa.Table) -> tuple[IntArray, IntArray]:
    """(places, durations in ns) of the steps that were followed at once by one of the same n and b, in their order.

    Steps without a stamp give nothing. Source of the order: ``kv_events.step`` counts decode steps logged before.
    """
    stamped = steps.column("log_ns")
    if steps.num_rows < 2 or stamped.null_count:
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    n, b = steps.column("n").to_numpy(), steps.column("b").to_numpy()
    is_clean = (n[1:] == n[:-1]) & (b[1:] == b[:-1])
    interrupted = rows_where(kv_events, "kind", "alloc").column("step").to_numpy()
    inside = interrupted[(interrupted >= 1) & (interrupted < steps.num_rows)]
    is_clean[inside - 1] = False
    places = np.flatnonzero(is_clean)
    return places, np.diff(stamped.to_numpy())[places]


def steady_step_ns(steps: pa.Table, kv_events: pa.Table) -> dict[tuple[int, int], IntArray]:
    """Durations of ``steady_steps`` by (n, b), ns."""
    places, durations = steady_steps(steps, kv_events)
    kept = steps.take(pa.array(places))
    n, b = (kept.column(name).to_numpy() for name in ("n", "b"))
    return {
        (seqs, bucket): durations[(n == seqs) & (b == bucket)]
        for seqs, bucket in sorted(set(values_of(kept, "n", "b")))
    }


@once_per_run
def run_steady_step_ns(run: SealedRun) -> Mapping[tuple[int, int], IntArray]:
    """Durations of a run's undisturbed decode steps by (n, b), model ns."""
    return steady_step_ns(run.table("steps"), run.table("kv_events"))


MIN_STEPS = 10
# A normal value lies within +-1.645 sd with 90 %; a difference of two scatters sqrt 2 as far.
CENTRAL_90 = 2 * 1.6448536269514722
PERCENTILES = (5, 95)


class Deviation(NamedTuple):
    """One figure, in the unit of its key in [prediction], and how many of what (``unit``) it comes from."""

    value: float
    num_units: int
    unit: str


class StepRatios(NamedTuple):
    """A run's undisturbed decode steps: ln(observed / modelled) and the bucket of each, in their order."""

    log_ratio: FloatArray
    bucket: FloatArray


class Level(NamedTuple):
    """One run's mean ln(observed / modelled), of what condition and what compilation."""

    condition: str
    artifact: Hashable
    mean: float


def scatter(runs: Sequence[SealedRun]) -> Mapping[str, Deviation]:
    """Deviations by their key in [prediction]; a key that these valid, measured runs do not show is left out."""
    starts, lags = _delays_ms(runs)
    ratios = [(run, steps) for run in runs if len((steps := step_ratios(run)).log_ratio) >= MIN_STEPS]
    levels = [Level(run.condition, artifact_of(run), float(steps.log_ratio.mean())) for run, steps in ratios]
    deviations = {
        "start_ms": Deviation(float(np.mean(starts)), len(starts), "sessions") if len(starts) else None,
        "lag_ms": Deviation(float(np.mean(lags)), len(lags), "re-arrivals") if len(lags) else None,
        "step_sd": step_deviation([steps for _run, steps in ratios]),
        "decode_sd": restart_deviation(levels),
        "bucket_sd": bucket_deviation([(artifact_of(run), steps) for run, steps in ratios]),
        "artifact_sd": artifact_deviation(levels),
    }
    return {key: deviation for key, deviation in deviations.items() if deviation is not None}


def cost_bias(runs: Sequence[SealedRun]) -> float | None:
    """How much longer steps last than the cost model says, as a share: mean over runs; None without step stamps."""
    means = [float(ratios.mean()) for run in runs if len(ratios := step_ratios(run).log_ratio) >= MIN_STEPS]
    return float(np.expm1(np.mean(means))) if means else None


def step_ratios(run: SealedRun) -> StepRatios:
    """Empty for a run without step stamps, or where a context-dependent cost model cannot be applied."""
    steps, kv_events = run.table("steps"), run.table("kv_events")
    places, observed_ns = steady_steps(steps, kv_events)
    contexts = step_contexts(steps, kv_events, run.table("requests"))
    if not len(places) or (run.cost_model.context_fs and not contexts.is_exact):
        return StepRatios(np.zeros(0), np.zeros(0))
    modelled_ns = decode_step_ns(steps, contexts.context_tokens, run.cost_model)[places]
    is_timed = observed_ns > 0
    log_ratio = np.log(observed_ns[is_timed] / modelled_ns[is_timed])
    return StepRatios(log_ratio, steps.column("b").to_numpy()[places][is_timed].astype(np.float64))


def step_deviation(runs: Iterable[StepRatios]) -> Deviation | None:
    """Each step on its own: half the central 90 % range of successive differences, so that neither a slow trend nor a
    rare stall counts. A stamp that is late lengthens one interval and shortens the next, so this is an upper bound."""
    moved = _joined([np.diff(run.log_ratio)[np.diff(run.bucket) == 0] for run in runs])
    if len(moved) < MIN_STEPS:
        return None
    low, high = np.percentile(moved, PERCENTILES)
    return Deviation(float(high - low) / CENTRAL_90 / math.sqrt(2), len(moved), "pairs of steps")


def restart_deviation(levels: Sequence[Level]) -> Deviation | None:
    """Runs of one condition about their mean, pooled over conditions: what all steps of one server life share."""
    groups = grouped(levels, lambda level: level.condition).values()
    return _pooled(([level.mean for level in group] for group in groups), "server lives")


def bucket_deviation(runs: Sequence[tuple[Hashable, StepRatios]]) -> Deviation | None:
    """Buckets about the mean of their compilation, each the mean of its runs: what the cost model leaves of f(b)."""
    means: dict[Hashable, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for artifact, run in runs:
        for bucket in np.unique(run.bucket):
            of_bucket = run.log_ratio[run.bucket == bucket]
            if len(of_bucket) >= MIN_STEPS:
                means[artifact][float(bucket)].append(float(of_bucket.mean()))
    return _pooled(([float(np.mean(each)) for each in buckets.values()] for buckets in means.values()), "buckets")


def artifact_deviation(levels: Sequence[Level]) -> Deviation | None:
    """Compilations about their mean, less what restarts alone would give."""
    groups = [[level.mean for level in group] for group in grouped(levels, lambda level: level.artifact).values()]
    if len(groups) < 2:
        return None
    restarts = restart_deviation(levels)
    fewest = min(len(group) for group in groups)
    within = 0.0 if restarts is None else restarts.value**2 / fewest
    between = float(np.var([np.mean(group) for group in groups], ddof=1)) - within
    return Deviation(math.sqrt(max(0.0, between)), len(groups), "compilations")


def _pooled(groups: Iterable[Sequence[float]], unit: str) -> Deviation | None:
    """Spread within groups of at least two; None where there is none."""
    several = [group for group in groups if len(group) > 1]
    variance, degrees = pooled_variance(several)
    return Deviation(math.sqrt(variance), degrees + len(several), unit) if degrees else None


def _delays_ms(runs: Iterable[SealedRun]) -> tuple[FloatArray, FloatArray]:
    """How late sessions started after the first of their run, and re-arrivals left after they were due, model ms."""
    starts: list[FloatArray] = []
    lags: list[FloatArray] = []
    for run in runs:
        scale = run.manifest.clock.scale
        late = lateness(run.table("requests"), scale)
        if len(late.start_ms):
            starts.append((late.start_ms - late.start_ms.min()) * scale)
        lags.append(np.maximum(late.rearrival_ms, 0) * scale)
    return _joined(starts), _joined(lags)


def artifact_of(run: SealedRun) -> Hashable:
    """What is compiled into the server of a run."""
    server = run.server
    return server.artifact, server.max_num_seqs, server.decode_buckets, server.kv_slots, server.slot_tokens


def _joined(parts: Sequence[FloatArray]) -> FloatArray:
    return np.concatenate([np.zeros(0), *parts])
