"""A few preset looks share alpha: the boundaries of a group-sequential t test.

The error that is spent by each look is the spending function's; boundaries come from that and from nothing seen.
Definitions: docs/planning.md, "Preset looks".
"""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import NormalDist

import numpy as np

from harness.analysis.method.stats import t_quantile

# 200,000 paths leave an error of .0005 in the alpha that a boundary spends.
PATHS = 200_000
SEED = 20261121


def obrien_fleming_spent(fraction: float, alpha: float) -> float:
    """Alpha spent when ``fraction`` of the planned blocks is seen: little early, all of it at the end.

    Source: Lan and DeMets (1983), Discrete sequential boundaries for clinical trials, their first function, with
    alpha / 2 on each side.
    """
    normal = NormalDist()
    return 4 * (1 - normal.cdf(normal.inv_cdf(1 - alpha / 4) / math.sqrt(min(1.0, fraction))))


@lru_cache(maxsize=64)
def spending_boundaries(
    looks: tuple[int, ...], num_blocks: int, alpha: float, planned: int | None = None
) -> tuple[float, ...]:
    """|t| at each look, such that a mean of 0 crosses any of them with probability ``alpha``.

    looks: numbers of blocks, ascending. num_blocks: at which all of alpha is spent; earlier looks spend by their share
    of ``planned`` (default the same). The first boundary is exact; later ones are quantiles among paths of Gaussian
    samples that crossed none before, whose mean and sum of squares are carried from look to look.
    """
    rng = np.random.default_rng(SEED)
    mean, squares, seen = np.zeros(PATHS), np.zeros(PATHS), 0
    is_inside = np.ones(PATHS, dtype=bool)
    spent, found = 0.0, list[float]()
    for look in looks:
        added = look - seen
        own_mean = rng.standard_normal(PATHS) / math.sqrt(added)
        own_squares = rng.chisquare(added - 1, PATHS) if added > 1 else np.zeros(PATHS)
        # Chan, Golub and LeVeque (1983): means and sums of squares of two samples, joined.
        shift = own_mean - mean
        squares += own_squares + shift**2 * (seen * added / look)
        mean += shift * (added / look)
        seen = look
        t = np.abs(mean) * math.sqrt(look) / np.sqrt(squares / (look - 1))
        now = alpha if look == num_blocks else obrien_fleming_spent(look / (planned or num_blocks), alpha)
        if not found:
            boundary = t_quantile(1 - now, look - 1)
        else:
            inside = np.sort(t[is_inside])
            crossing = max(0, min(len(inside) - 1, round((now - spent) * PATHS)))
            boundary = float(inside[len(inside) - 1 - crossing])
        is_inside &= t <= boundary
        spent = now
        found.append(boundary)
    return tuple(found)
