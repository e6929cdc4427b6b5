"""What each request count contributes to the change of padding between two bucket sets, at the same h(n).

Definitions: docs/reference/method.md, "Decomposition of a bucket change".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from harness.analysis.cost.padding import Padding, padding_of

# 2^16 subsets are enumerated in milliseconds; above that the same sum is taken as an integral.
MAX_ENUMERATED = 16
QUADRATURE_NODES = 64

StepHistogram = Mapping[int, int]
BucketRule = Mapping[int, int]


def padding_of_histogram(histogram: StepHistogram, rule: BucketRule) -> Padding:
    """The padding that h(n) has under a bucket rule b(n)."""
    return padding_of({(n, rule[n]): count for n, count in histogram.items()})


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
    split = split_by_subsets if len(changes) <= MAX_ENUMERATED else split_by_integral
    return dict(zip(removed, split(changes, occupied, float(before.bucket_slots)).tolist(), strict=True))


def split_by_subsets(changes: NDArray[np.float64], occupied: float, bucket_slots: float) -> NDArray[np.float64]:
    """Shares of ``shapley_split`` by every subset of the changes, which are slots removed, shape (changes,)."""
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


def split_by_integral(changes: NDArray[np.float64], occupied: float, bucket_slots: float) -> NDArray[np.float64]:
    """The same by quadrature."""
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
