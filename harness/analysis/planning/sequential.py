"""A mean log ratio that is checked while blocks come in: intervals that hold at every look, and the verdict at each.

Looks after every block use a confidence sequence; a few preset looks share alpha by a spending function. A fixed-n
interval is not offered: it misses more often the more often it is checked. Nothing is read.
Definitions: docs/planning-method.md, "Stopping" and "Preset looks".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from statistics import NormalDist

import numpy as np

from harness.analysis.stats import t_quantile
from harness.errors import SpecError
from harness.spec.sections import EVERY, StopSpec

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


# Variance of the prior over standardised effects is 1 / C2. Of 1/4, 1 and 4 this one is the narrowest at 10 to 40
# blocks, where experiments end.
C2 = 1.0


class StopVerdict(str, Enum):
    """What one look says. Inside the margin, equivalent comes before better and worse: so small an effect is none."""

    BETTER = "better"
    WORSE = "worse"
    EQUIVALENT = "equivalent"
    GO_ON = "go on"
    INCONCLUSIVE = "inconclusive"

    @property
    def is_final(self) -> bool:
        return self is not StopVerdict.GO_ON

    @property
    def is_answer(self) -> bool:
        return self not in (StopVerdict.GO_ON, StopVerdict.INCONCLUSIVE)


@dataclass(frozen=True, slots=True)
class Look:
    """One look at the mean log ratio of the first ``num_blocks`` blocks. half_width: inf while nothing can be said."""

    num_blocks: int
    mean: float
    sd: float
    half_width: float
    verdict: StopVerdict

    @property
    def low(self) -> float:
        return self.mean - self.half_width

    @property
    def high(self) -> float:
        return self.mean + self.half_width


def t_mixture_boundary(num_blocks: int, alpha: float, c2: float = C2) -> float:
    """The |t| that a Gaussian sample of mean 0 exceeds at any n, ever, with probability at most ``alpha``.

    inf where the sample is too small to say anything. The mixture of t likelihood ratios over a Gaussian prior of
    variance 1 / c2 on the standardised mean is a test martingale; by Ville's inequality it reaches 1 / alpha with
    probability at most alpha, and solving it for t gives this. Exact for Gaussian data with unknown variance.
    Source: Lai (1976), On confidence sequences; Wang and Ramdas (2023), Anytime-valid t-tests and confidence sequences
    for Gaussian means with unknown variance.
    """
    if num_blocks < 2:
        return math.inf
    n = num_blocks
    k = (math.sqrt((n + c2) / c2) / alpha) ** (2 / n)
    r = c2 / (n + c2)
    return math.sqrt((n - 1) * (k - 1) / (1 - r * k)) if r * k < 1 else math.inf


def boundary_of(stop: StopSpec) -> Callable[[int], float | None]:
    """|t| by the number of blocks, by the rule's own way of looking; None at a number at which it is not looked."""
    if stop.looks == EVERY:
        return lambda num_blocks: t_mixture_boundary(num_blocks, stop.alpha)
    preset = stop.preset_looks
    by_look = dict(zip(preset, spending_boundaries(preset, stop.budget, stop.alpha), strict=True))
    return by_look.get


def looks_at(differences: Sequence[float], stop: StopSpec, *, is_over: bool = False) -> Iterator[Look]:
    """Every look that the rule takes at the blocks' log ratios, in order, up to the first that decides.

    differences: shape (blocks,), ln(cost / baseline cost), in the order of the blocks. is_over: no block comes any
    more, so that the last look is taken at whatever is there and spends what is left of alpha.
    """
    boundary = boundary_of(stop)
    preset = stop.preset_looks
    for num_blocks in range(2, min(len(differences), stop.budget) + 1):
        is_last = num_blocks == stop.budget or (is_over and num_blocks == len(differences))
        t = boundary(num_blocks)
        if t is None and is_last:
            # Blocks were lost to INVALID runs: the looks that were, and then this one.
            taken = tuple(look for look in preset if look < num_blocks)
            t = spending_boundaries((*taken, num_blocks), num_blocks, stop.alpha, planned=stop.budget)[-1]
        if t is not None:
            look = _look(differences[:num_blocks], t, stop, is_last=is_last)
            yield look
            if look.verdict.is_final:
                return


def _look(differences: Sequence[float], t: float, stop: StopSpec, *, is_last: bool) -> Look:
    values = np.asarray(differences, dtype=np.float64)
    mean, sd = float(values.mean()), float(values.std(ddof=1))
    half = math.inf if math.isinf(t) else t * sd / math.sqrt(len(values))
    found = verdict(mean, half, stop.log_margin)
    if is_last and not found.is_answer:
        found = StopVerdict.INCONCLUSIVE
    return Look(len(values), mean, sd, half, found)


def verdict(mean: float, half_width: float, log_margin: float) -> StopVerdict:
    """What an interval of a mean log cost ratio says: the whole of it within the margin, below 0, above 0, or none."""
    low, high = mean - half_width, mean + half_width
    if -log_margin < low and high < log_margin:
        return StopVerdict.EQUIVALENT
    if high < 0:
        return StopVerdict.BETTER
    return StopVerdict.WORSE if low > 0 else StopVerdict.GO_ON


def blocks_left(look: Look, stop: StopSpec) -> int | None:
    """Blocks until the next look that decides, should mean and spread stay as they are; None: not within the budget."""
    boundary = boundary_of(stop)
    for num_blocks in range(look.num_blocks + 1, stop.budget + 1):
        t = boundary(num_blocks)
        half = math.inf if t is None or math.isinf(t) else t * look.sd / math.sqrt(num_blocks)
        if verdict(look.mean, half, stop.log_margin).is_answer:
            return num_blocks - look.num_blocks
    return None


def check_can_decide(stop: StopSpec, source: str) -> StopSpec:
    """The same rule, unless no look within its budget has a finite interval: then SpecError that names its source."""
    boundary = boundary_of(stop)
    if all(math.isinf(boundary(n) or math.inf) for n in range(2, stop.budget + 1)):
        first = next(n for n in range(2, 10_000) if math.isfinite(t_mixture_boundary(n, stop.alpha)))
        raise SpecError(
            f"{stop.budget} blocks never decide: the confidence sequence at alpha {stop.alpha:g} is infinite before "
            f"block {first}",
            where=f"{source}: stop.budget",
            hint="Raise it (`harness power` says to what), or preset a few looks: looks = [3]",
        )
    return stop
