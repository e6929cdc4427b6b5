"""Padding of decode steps: h(n), the padding ratio, and how much of its change each request count accounts for.

Pure arithmetic over (n, b) pairs: no model, no time.
Definitions: docs/reference/method.md, "Padding", "Decomposition of a bucket change".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

# 2^16 subsets are enumerated in milliseconds; above that the same sum is taken as an integral.
MAX_ENUMERATED = 16
QUADRATURE_NODES = 64

StepHistogram = Mapping[int, int]
BucketRule = Mapping[int, int]


class Padding(NamedTuple):
    """Bucket positions of decode steps: ``padded_slots`` of ``bucket_slots`` held no request."""

    padded_slots: int
    bucket_slots: int

    @property
    def ratio(self) -> float | None:
        """p = sum(b - n) / sum(b); None without steps."""
        return self.padded_slots / self.bucket_slots if self.bucket_slots else None


def steps_by_n_b(steps: pa.Table) -> dict[tuple[int, int], int]:
    """Decode steps by (requests really in the step, bucket). steps: columns n, b."""
    pairs = zip(steps.column("n").to_pylist(), steps.column("b").to_pylist(), strict=True)
    return dict(sorted(Counter(pairs).items()))


def padding(steps: pa.Table) -> Padding:
    """Padded and total bucket positions over decode steps."""
    n, b = steps.column("n").to_numpy(), steps.column("b").to_numpy()
    bucket_slots = int(b.sum(dtype=np.int64))
    return Padding(bucket_slots - int(n.sum(dtype=np.int64)), bucket_slots)


def total_padding(paddings: Iterable[Padding]) -> Padding:
    """Numerators and denominators summed before dividing."""
    listed = list(paddings)
    return Padding(sum(one.padded_slots for one in listed), sum(one.bucket_slots for one in listed))


def padding_of_histogram(histogram: StepHistogram, rule: BucketRule) -> Padding:
    """The padding that h(n) has under a bucket rule b(n)."""
    bucket_slots = sum(count * rule[n] for n, count in histogram.items())
    return Padding(bucket_slots - sum(count * n for n, count in histogram.items()), bucket_slots)


def bucket_rule(buckets: Sequence[int], histogram: StepHistogram) -> dict[int, int]:
    """The size that a step of n requests is run with; above the largest compiled size it is not padded."""
    return {n: next((bucket for bucket in buckets if bucket >= n), n) for n in histogram}


def removed_slots(histogram: StepHistogram, old: BucketRule, new: BucketRule) -> dict[int, int]:
    """D_n = h(n) (b_old(n) - b_new(n)) for every n whose bucket changed (negative where it grew)."""
    return {n: count * (old[n] - new[n]) for n, count in sorted(histogram.items()) if old[n] != new[n]}


def shapley_split(histogram: StepHistogram, old: BucketRule, new: BucketRule) -> dict[int, float]:
    """Share of each changed n in the drop of the padding ratio, averaged over all orders of applying the changes.

    The shares sum to p_old - p_new. Requires equal h(n) under both rules, which the caller has checked. Any number of
    changed n. Source: paper S5, there for two.
    """
    removed = removed_slots(histogram, old, new)
    before = padding_of_histogram(histogram, old)
    if not removed:
        return {}
    changes = np.array(list(removed.values()), dtype=np.float64)
    occupied = float(before.bucket_slots - before.padded_slots)
    split = _split_by_subsets if len(changes) <= MAX_ENUMERATED else _split_by_integral
    return dict(zip(removed, split(changes, occupied, float(before.bucket_slots)).tolist(), strict=True))


def _split_by_subsets(changes: NDArray[np.float64], occupied: float, bucket_slots: float) -> NDArray[np.float64]:
    # p depends on a subset only through the slots it removes: p(x) = 1 - occupied / (bucket_slots - x).
    count = len(changes)
    subsets = np.arange(1 << count)
    members = (subsets[:, None] >> np.arange(count)) & 1
    padding_of = 1 - occupied / (bucket_slots - members @ changes)
    size = members.sum(axis=1)
    factorial = np.cumprod([1.0, *range(1, count + 1)])
    shares = np.empty(count)
    for i in range(count):
        without = subsets[members[:, i] == 0]
        weight = factorial[size[without]] * factorial[count - size[without] - 1] / factorial[count]
        shares[i] = np.sum(weight * (padding_of[without] - padding_of[without | (1 << i)]))
    return shares


def _split_by_integral(changes: NDArray[np.float64], occupied: float, bucket_slots: float) -> NDArray[np.float64]:
    # With 1/(B - x) = int_0^inf exp(-(B - x) u) du, the mean over orders is the integral over q in [0, 1] in which
    # every other change is present with probability q (Owen's multilinear extension of the Shapley value).
    least = bucket_slots - changes[changes > 0].sum()
    v, v_weight = np.polynomial.laguerre.laggauss(QUADRATURE_NODES)
    x, x_weight = np.polynomial.legendre.leggauss(QUADRATURE_NODES)
    q, q_weight = (x + 1) / 2, x_weight / 2
    u = v / least
    # Shape (changes, q, u); logs keep exp(-B u) and the product from leaving the range of a double.
    log_factor = np.log1p(q[None, :, None] * np.expm1(changes[:, None, None] * u[None, None, :]))
    log_all = log_factor.sum(axis=0)
    shares = np.empty(len(changes))
    for i, change in enumerate(changes):
        integrand = np.exp(log_all - log_factor[i] - bucket_slots * u + v) * np.expm1(change * u)
        shares[i] = occupied / least * (q_weight @ integrand @ v_weight)
    return shares
