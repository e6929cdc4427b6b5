"""Power of comparisons that are judged together: each verdict at an equal part of alpha (Bonferroni).

A block's datum is the vector of their log cost ratios. Experiments are drawn from blocks that are known, since these
are skewed and correlated, or else from a Gaussian; with a fixed seed.
Definitions: docs/reference/method-planning.md, "Several comparisons".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Literal

import numpy as np

from harness.analysis.stats import FloatArray
from harness.judge.planning.power import difference_power, equivalence_power, fewest, superiority_power

# Of the chi-squared distribution of a spread that was estimated, equally likely.
SPREADS = (np.arange(64) + 0.5) / 64
# An error of .003 in a power of .9.
PATHS, PATHS_AT_ONCE = 10_000, 1_000
# Means of more blocks are Gaussian enough.
MOST_DRAWN_BLOCKS = 120
SEED = 20261125
LEAST_SD = 1e-9
Aim = Literal["difference", "equivalence", "superiority"]


@dataclass(frozen=True)
class PlannedFamily:
    """Comparisons that are judged together, at ``alpha`` over all of them.

    sds: of one block's log ratio of each. values: log ratios of known blocks, shape (comparisons, blocks), of which
    their distribution and correlations count; None: Gaussian and independent, as too few blocks show otherwise.
    degrees: of freedom of each of the sds where they were estimated; a power is then the mean over the true spreads
    that these leave possible, so that it holds over estimates and experiments together. Empty: the sds are true.
    """

    sds: tuple[float, ...]
    alpha: float
    values: FloatArray | None = None
    degrees: tuple[int, ...] = ()
    _powers: dict[tuple[object, ...], tuple[float, ...]] = field(
        default_factory=dict[tuple[object, ...], tuple[float, ...]], compare=False, repr=False
    )

    def power(self, num_blocks: int, effects: Sequence[float], aim: Aim, log_margin: float = 0.0) -> tuple[float, ...]:
        """The probability of each verdict at these true log ratios.

        difference: the two-sided t test leaves 0 out. equivalence: both one-sided tests show the mean within the margin
        of 0. superiority: the one-sided test shows it below 0. A single comparison is by quadrature.
        """
        key = (num_blocks, *effects, aim, log_margin)
        if key not in self._powers:
            is_single = len(self.sds) == 1
            made = self._exact(num_blocks, effects[0], aim, log_margin) if is_single else None
            self._powers[key] = self._simulated(num_blocks, effects, aim, log_margin) if made is None else (made,)
        return self._powers[key]

    def blocks(
        self, place: int, effects: Sequence[float], aim: Aim, power: float, log_margin: float = 0.0
    ) -> int | None:
        """Fewest blocks that give one comparison its verdict with this probability; None: above what can be had."""
        effect = effects[place]
        if (aim == "difference" and effect == 0) or (aim == "superiority" and effect >= 0):
            return None
        if aim == "equivalence" and abs(effect) >= log_margin:
            return None
        return fewest(lambda n: self.power(n, effects, aim, log_margin)[place], power)

    def _exact(self, num_blocks: int, effect: float, aim: Aim, log_margin: float) -> float:
        def power(sd: float) -> float:
            if aim == "difference":
                return difference_power(num_blocks, sd, effect, self.alpha)
            if aim == "superiority":
                return superiority_power(num_blocks, sd, effect, self.alpha)
            return equivalence_power(num_blocks, sd, log_margin, self.alpha, effect)

        sd = max(self.sds[0], LEAST_SD)
        if not self.degrees:
            return power(sd)
        return float(np.mean([power(sd * factor) for factor in _spread_factors(self.degrees[0])]))

    def _simulated(self, num_blocks: int, effects: Sequence[float], aim: Aim, log_margin: float) -> tuple[float, ...]:
        from scipy.special import stdtr

        shown = np.zeros(len(self.sds))
        rng, sds, degrees = np.random.default_rng(SEED), np.maximum(self.sds, LEAST_SD), num_blocks - 1
        for _ in range(PATHS // PATHS_AT_ONCE):
            means, spreads = self._samples(rng, num_blocks)
            true_sds = sds * self._drawn_factors(rng)
            mean, error = np.asarray(effects) + true_sds * means, true_sds * spreads / math.sqrt(num_blocks)
            with np.errstate(divide="ignore"):
                if aim == "difference":
                    p = 2 * stdtr(degrees, -np.abs(mean) / error)
                elif aim == "superiority":
                    p = stdtr(degrees, mean / error)
                else:
                    p = stdtr(degrees, (np.abs(mean) - log_margin) / error)
            shown += (p < self.alpha / len(self.sds)).sum(axis=0)
        return tuple((shown / PATHS).tolist())

    def _drawn_factors(self, rng: np.random.Generator) -> FloatArray:
        """True spreads over the estimated ones, shape (experiments, comparisons); 1 where they are known."""
        if not self.degrees:
            return np.ones(len(self.sds))
        degrees = np.asarray(self.degrees, dtype=np.float64)
        return np.sqrt(degrees / rng.chisquare(degrees, size=(PATHS_AT_ONCE, len(self.sds))))

    def _samples(self, rng: np.random.Generator, num_blocks: int) -> tuple[FloatArray, FloatArray]:
        """Means and spreads of PATHS_AT_ONCE experiments in units of the sds, each (experiments, comparisons)."""
        size = (PATHS_AT_ONCE, len(self.sds))
        if self.values is not None and num_blocks <= MOST_DRAWN_BLOCKS:
            standard = (self.values - self.values.mean(axis=1, keepdims=True)) / self.values.std(axis=1, keepdims=True)
            places = rng.integers(0, standard.shape[1], size=(PATHS_AT_ONCE, num_blocks))
            drawn = standard[:, places]
            return drawn.mean(axis=2).T, np.maximum(drawn.std(axis=2, ddof=1).T, LEAST_SD)
        normal = rng.standard_normal(size)
        if self.values is not None:
            normal = normal @ _root(np.asarray(np.corrcoef(self.values), dtype=np.float64)).T
        spreads = np.sqrt(rng.chisquare(num_blocks - 1, size=size) / (num_blocks - 1))
        return normal / math.sqrt(num_blocks), spreads


@cache
def _spread_factors(degrees: int) -> tuple[float, ...]:
    """True spreads over the estimated one, equally likely, where it has so many degrees of freedom."""
    from scipy.special import chdtri

    return tuple(np.sqrt(degrees / chdtri(degrees, SPREADS)).tolist())


def _root(correlations: FloatArray) -> FloatArray:
    """A matrix whose product with its transpose is this one, which need not have full rank."""
    values, vectors = np.linalg.eigh(correlations)
    return np.asarray(vectors * np.sqrt(np.maximum(values, 0.0)), dtype=np.float64)
