"""Statistics of the paper alone: pairs of repeats, the direction of padding, critical counts, times of full buckets.

Pure functions of figures and of sealed runs. Source: the paper, its Tables S2, S3, S5 and section S4.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from harness.analysis.calibration.scatter import run_steady_step_ns
from harness.analysis.stats import FloatArray, median, quantile
from harness.clock import NS_PER_MS
from harness.errors import SpecError
from harness.measure.records.run import SealedRun
from harness.measure.records.schema import values_of

# A difference of padding is in a direction only outside this band of R (paper S4).
DIRECTION_BAND = (0.97, 1.03)


@dataclass(frozen=True, slots=True)
class Spread:
    """An exactly enumerated distribution, by the three figures that the paper prints."""

    num_values: int
    median: float
    q95: float
    maximum: float


def spread(values: Sequence[float] | FloatArray) -> Spread:
    """Median, 95th percentile and maximum. Raises SpecError without values."""
    if len(values) == 0:
        raise SpecError("a distribution of no values was asked for", where="statistics", hint="Seal more runs")
    return Spread(len(values), median(values), quantile(values, 0.95), float(np.max(values)))


def pooled_pair_differences(groups: Iterable[Sequence[float]]) -> list[float]:
    """|x_i - x_j| of all pairs within each group, pooled; 30 from 3 artifacts of 5 sessions."""
    return [abs(x - y) for group in groups for x, y in combinations(group, 2)]


def disjoint_sum_pair_differences(a: Sequence[float], b: Sequence[float], size: int = 3) -> FloatArray:
    """|A_i / A_j - B_i / B_j| of sums over two disjoint sets of ``size`` runs: how differently two channels quantify
    the same change. 2,100 from 10 runs taken 3 and 3; 45 single pairs.

    Each unordered pair of sets occurs once, the set with the lowest run number first. The pairs share runs: they are
    not independent samples.
    """
    sets = list(combinations(range(len(a)), size))
    pairs = [(one, other) for one, other in combinations(sets, 2) if not set(one) & set(other)]
    if not pairs:
        return np.zeros(0)
    firsts, seconds = (np.array(side) for side in zip(*pairs, strict=True))
    totals = [
        (values[firsts].sum(axis=1), values[seconds].sum(axis=1))
        for values in (np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64))
    ]
    return np.abs(totals[0][0] / totals[0][1] - totals[1][0] / totals[1][1])


def coefficient_of_variation(values: Sequence[float]) -> float:
    """Sample standard deviation over mean."""
    array = np.asarray(values, dtype=np.float64)
    return float(array.std(ddof=1) / array.mean())


def occupancy_ratio(padding_with_waits: float, padding_without_waits: float) -> float:
    """R = (1 - p_A) / (1 - p_C): above 1, the condition with tool waiting has the lower padding (S4)."""
    return (1 - padding_with_waits) / (1 - padding_without_waits)


def direction(occupancy: float, band: tuple[float, float] = DIRECTION_BAND) -> str:
    """ "above", "inside" or "below" the direction band."""
    if occupancy > band[1]:
        return "above"
    return "below" if occupancy < band[0] else "inside"


def critical_request_count(is_reused_by_count: Mapping[int, Sequence[bool]]) -> int | None:
    """The largest number m of background requests at which reuse is retained in every replicate, and at all smaller
    m that were tried; None when it is lost at the smallest one."""
    critical: int | None = None
    for count in sorted(is_reused_by_count):
        if not all(is_reused_by_count[count]):
            break
        critical = count
    return critical


def full_bucket_ms(run: SealedRun, bucket: int) -> float | None:
    """Median duration of steps with the bucket exactly full, ms; None when there was none."""
    durations = run_steady_step_ns(run).get((bucket, bucket))
    return None if durations is None or not len(durations) else float(np.median(durations)) / NS_PER_MS


def reported_model_ms(run: SealedRun, bucket: int) -> float | None:
    """The server's own median model time (p50) with the bucket exactly full, ms; None where it did not report one.

    The report (VLLM_RBLN_METRICS) pools all decode steps of a server's life, so it stands for a bucket only when every
    step of the run had it full. Its resolution is 0.01 ms; the paper's Tables S2 and S3 print this figure.
    """
    reported = run.launch.decode_p50_ms("MODEL")
    is_always_full = set(values_of(run.table("steps"), "n", "b")) == {(bucket, bucket)}
    return reported if is_always_full else None
