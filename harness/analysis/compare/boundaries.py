"""|t| at each look of a sequence: boundaries that a mean of 0 crosses at any look with probability alpha at most.

A check after every block has a confidence sequence; a few preset looks share alpha by a spending function. Nothing is
read. Definitions: docs/reference/method-planning.md, "Stopping" and "Preset looks".
"""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import NormalDist

import numpy as np

from harness.analysis.stats import t_quantile

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
    fractions = [look / (planned or num_blocks) for look in looks]
    spent = [
        alpha if look == num_blocks else obrien_fleming_spent(fraction, alpha)
        for look, fraction in zip(looks, fractions, strict=True)
    ]
    rng = np.random.default_rng(SEED)
    mean, squares, seen = np.zeros(PATHS), np.zeros(PATHS), 0
    is_inside = np.ones(PATHS, dtype=bool)
    before, boundaries = 0.0, list[float]()
    for look, now in zip(looks, spent, strict=True):
        added = look - seen
        own_mean = rng.standard_normal(PATHS) / math.sqrt(added)
        own_squares = rng.chisquare(added - 1, PATHS) if added > 1 else np.zeros(PATHS)
        # Chan, Golub and LeVeque (1983): means and sums of squares of two samples, joined.
        shift = own_mean - mean
        squares += own_squares + shift**2 * (seen * added / look)
        mean += shift * (added / look)
        seen = look
        t = np.abs(mean) * math.sqrt(look) / np.sqrt(squares / (look - 1))
        if not boundaries:
            boundary = t_quantile(1 - now, look - 1)
        else:
            inside = np.sort(t[is_inside])
            crossing = round((now - before) * PATHS)
            boundary = float(inside[len(inside) - 1 - max(0, min(len(inside) - 1, crossing))])
        is_inside &= t <= boundary
        before = now
        boundaries.append(boundary)
    return tuple(boundaries)


# Variance of the prior over standardised effects is 1 / C2. Of 1/4, 1 and 4 this gives the narrowest intervals at 10 to
# 40 blocks, where experiments end.
C2 = 1.0


def t_mixture_boundary(num_blocks: int, alpha: float) -> float:
    """The |t| that a Gaussian sample of mean 0 exceeds at any n, ever, with probability at most ``alpha``.

    inf where the sample is too small to say anything. The mixture of t likelihood ratios over a Gaussian prior of
    variance 1 / C2 on the standardised mean is a test martingale; by Ville's inequality it reaches 1 / alpha with
    probability at most alpha, and solving it for t gives this. Exact for Gaussian data with unknown variance.
    Source: Lai (1976), On confidence sequences; Wang and Ramdas (2023), Anytime-valid t-tests and confidence sequences
    for Gaussian means with unknown variance.
    """
    if num_blocks < 2:
        return math.inf
    n = num_blocks
    k = (math.sqrt((n + C2) / C2) / alpha) ** (2 / n)
    r = C2 / (n + C2)
    return math.sqrt((n - 1) * (k - 1) / (1 - r * k)) if r * k < 1 else math.inf
