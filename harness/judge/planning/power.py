"""How many blocks a precision or a verdict needs.

A block's datum is its log cost ratio, Gaussian with a given spread; powers are exact for that, by quadrature over the
sample's own spread. Nothing is read.
Definitions: docs/reference/method-planning.md, "Power".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from harness.analysis.compare.stopping import UNSEEN, boundary_of
from harness.analysis.stats import FloatArray, t_quantile
from harness.model.spec.sections import StopSpec

MOST_BLOCKS = 1000
NODES = 200
PATHS = 2_000
SEED = 20261121
# Of the chi-squared distribution of a spread that was estimated, equally likely.
SPREADS = (np.arange(64) + 0.5) / 64
LEAST_SD = 1e-9
Aim = Literal["difference", "equivalence", "superiority"]
_gauss_legendre = cache(np.polynomial.legendre.leggauss)


def blocks_for_precision(sd: float, half_width: float, alpha: float) -> int | None:
    """Fewest blocks whose t interval has at most this half width: n >= (t_{n-1} sd / w)^2, iterated."""
    return fewest(lambda n: half_width - t_quantile(1 - alpha, n - 1) * sd / math.sqrt(n), 0.0)


@dataclass(frozen=True, slots=True)
class PlannedTest:
    """A comparison that is tested at alpha, for Gaussian log ratios of blocks with this spread.

    log_margin: ln of what counts as equal. degrees: of freedom of ``sd`` where it was estimated; a power is then the
    mean over the true spreads that these leave possible. 0: it is true.
    """

    sd: float
    alpha: float
    log_margin: float = 0.0
    degrees: int = 0

    def power(self, num_blocks: int, effect: float, aim: Aim) -> float:
        """The probability of the verdict, should the true log ratio be ``effect``.

        difference: the two-sided t test leaves 0 out. equivalence: both one-sided tests show the mean within the margin
        of 0. superiority: the one-sided test shows it below 0.
        """
        factors = _spread_factors(self.degrees) if self.degrees else (1.0,)
        return float(np.mean([self._power(num_blocks, max(self.sd, LEAST_SD) * one, effect, aim) for one in factors]))

    def blocks(self, effect: float, aim: Aim, wanted: float) -> int | None:
        """Fewest blocks that give the verdict with this probability; None: above what can be had."""
        if (aim == "difference" and effect == 0) or (aim == "superiority" and effect >= 0):
            return None
        if aim == "equivalence" and abs(effect) >= self.log_margin:
            return None
        return fewest(lambda n: self.power(n, effect, aim), wanted)

    def _power(self, num_blocks: int, sd: float, effect: float, aim: Aim) -> float:
        """The power for this true spread: the sample's own spread s, of which the mean is independent, is integrated.

        Sources: Phillips (1990), Power of the two one-sided tests procedure in bioequivalence (Owen's Q); tails of the
        noncentral t. By quadrature too: scipy's ``nctdtr`` is nan where its lower tail is small.
        """
        from scipy.special import ndtr

        degrees, error = num_blocks - 1, sd / math.sqrt(num_blocks)
        t = t_quantile(1 - self.alpha * (1 if aim == "difference" else 2), degrees)
        # In standard errors; the interval's half width is t s / sigma of them.
        shift, room = effect / error, self.log_margin / error
        if aim == "difference":
            return _over_spread(lambda ratio: ndtr(shift - t * ratio) + ndtr(-shift - t * ratio), degrees)
        if aim == "superiority":
            return _over_spread(lambda ratio: ndtr(-shift - t * ratio), degrees)
        # Beyond room / t no mean shows it: there the integrand has a corner, and quadrature stops.
        return _over_spread(
            lambda ratio: ndtr(room - t * ratio - shift) - ndtr(t * ratio - room - shift), degrees, room / t
        )


@cache
def _spread_factors(degrees: int) -> tuple[float, ...]:
    """True spreads over the estimated one, equally likely, where it has so many degrees of freedom."""
    from scipy.special import chdtri

    return tuple(np.sqrt(degrees / chdtri(degrees, SPREADS)).tolist())


def _over_spread(value: Callable[[FloatArray], FloatArray], degrees: int, most: float = math.inf) -> float:
    """Mean of a function of s / sigma, chi distributed over sqrt(degrees), from 0 to ``most``; Gauss and Legendre."""
    end = min(most * math.sqrt(degrees), math.sqrt(degrees) + 9.0)
    start = max(0.0, math.sqrt(degrees) - 9.0)
    if end <= start:
        return 0.0
    ratios, weights = _chi_nodes(degrees, start, end)
    return min(1.0, max(0.0, float(np.sum(weights * value(ratios)))))


@lru_cache(maxsize=512)
def _chi_nodes(degrees: int, start: float, end: float) -> tuple[FloatArray, FloatArray]:
    """Nodes of s / sigma, and their weights times the density of chi, from ``start`` to ``end``."""
    nodes, weights = _gauss_legendre(NODES)
    x = start + (nodes + 1) * (end - start) / 2
    log_density = (1 - degrees / 2) * math.log(2) - math.lgamma(degrees / 2) + (degrees - 1) * np.log(x) - x**2 / 2
    return x / math.sqrt(degrees), weights * np.exp(log_density) * (end - start) / 2


def fewest(value: Callable[[int], float], wanted: float) -> int | None:
    """The smallest number of blocks from 2 on whose rising ``value`` reaches ``wanted``; None beyond MOST_BLOCKS."""
    low, high = 1, 2
    while value(high) < wanted:
        low, high = high, 2 * high
        if low >= MOST_BLOCKS:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if value(middle) >= wanted else (middle, high)
    return high if high <= MOST_BLOCKS else None


def blocks_until_decided(
    sd: float, effect: float, stop: StopSpec, paths: int = PATHS, degrees: int = 0
) -> NDArray[np.int64]:
    """Blocks at which each of ``paths`` simulated experiments has its verdict; budget + 1 where it never has one.

    degrees: of freedom of ``sd`` where it was estimated, so that the true one differs from path to path; 0: it is true.
    """
    rng = np.random.default_rng(SEED)
    values = rng.normal(0.0, sd, size=(paths, stop.budget))
    if degrees:
        values *= np.sqrt(degrees / rng.chisquare(degrees, size=(paths, 1)))
    values += effect
    n = np.arange(1, stop.budget + 1)
    mean = values.cumsum(axis=1) / n
    spread = np.sqrt(np.maximum((values**2).cumsum(axis=1) - n * mean**2, 0.0) / np.maximum(n - 1, 1))
    boundary = boundary_of(stop)
    t = np.array([math.inf, *(boundary(k) or math.inf for k in range(2, stop.budget + 1))])
    half = np.where(np.isinf(t), np.inf, t * np.hypot(spread, UNSEEN / np.sqrt(n)) / np.sqrt(n))
    is_equal = (np.abs(mean) + half) < stop.log_margin
    is_decided = is_equal | (np.abs(mean) > half)
    return np.where(is_decided.any(axis=1), is_decided.argmax(axis=1) + 1, stop.budget + 1)


def spread_limit(sd: float, num_blocks: int, level: float = 0.9) -> float:
    """The spread that the true one stays below with probability ``level``, where ``sd`` was estimated from so few."""
    from scipy.special import chdtri

    return sd * math.sqrt((num_blocks - 1) / float(chdtri(num_blocks - 1, level)))


def variance_components(values: FloatArray) -> tuple[float, float]:
    """(between, within) standard deviations of a balanced two-level sample, shape (groups, repeats).

    Unbiased mean squares; a negative between-component is 0. Source: Kalibera and Jones (2013), Rigorous benchmarking
    in reasonable time.
    """
    num_repeats = values.shape[1]
    within = float(values.var(axis=1, ddof=1).mean()) if num_repeats > 1 else 0.0
    between = float(values.mean(axis=1).var(ddof=1)) - within / num_repeats
    return math.sqrt(max(0.0, between)), math.sqrt(within)
