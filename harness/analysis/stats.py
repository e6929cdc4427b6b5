"""Intervals, quantiles and exact pair enumerations: every figure of uncertainty names its method, unit and seed.

Pure numpy on small samples; a seed is always given, never taken from the machine.
Definitions: docs/reference/method-comparisons.md, "Intervals".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any, Literal, NamedTuple, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from harness.clock import NS_PER_S
from harness.errors import SpecError
from harness.table import interval_text

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)
FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
StatisticName = Literal["mean", "median"]
DEFAULT_RESAMPLES = 10_000
DEFAULT_LEVEL = 0.95
# Below this a spread is not known: two values are no interval.
MIN_REPLICATES = 3
# Values expected beyond a quantile, below which its interval would end at the largest of few.
MIN_BEYOND = 10
# Values of either kind that an interval of a share needs, and the shares that are tried for its ends.
MIN_OF_EACH = 3
SHARE_PLACES = 2000
# Below, no interval of a quantile holds as often as it says.
MIN_SAMPLES = 6
# Of an interval of a quantile: the scale of its test, how far the plain share may be off, and places tried at first.
TAIL_POWER = 0.75
FAR = 2.0
MOST_PLACES = 2048
ROUNDING = 1e-9
# Ends the method of an interval that holds only if the costs behind it are true.
GIVEN_COSTS = ", cost model assumed exact"
# Below, a standard error or a mean log ratio is the rounding of doubles.
NO_SCATTER = 1e-12
# The paper's q95: linear between order statistics reproduces every printed one of Table S2; no other rule does.
QUANTILE_METHOD = "linear"


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate and its interval. method: how it was made; unit: what was resampled; both say what it can mean.

    family: intervals that hold together at ``level``; each of them alone has level 1 - (1 - level) / family.
    """

    estimate: float
    low: float
    high: float
    level: float
    method: str
    unit: str
    num_units: int
    resamples: int
    seed: int
    family: int = 1

    @property
    def width(self) -> float:
        return self.high - self.low

    @property
    def is_given_costs(self) -> bool:
        """Whether it holds only if the costs behind it are true: nothing is known of their errors."""
        return self.method.endswith(GIVEN_COSTS)

    def contains(self, value: float) -> bool:
        return self.low <= value <= self.high

    def __str__(self) -> str:
        drawn = f", {self.resamples} resamples, seed {self.seed}" if self.resamples else ""
        drawn += f"; {self.family} intervals hold together" if self.family > 1 else ""
        ends = interval_text(self.low, self.high, between=", ")
        how, given = self.method.removesuffix(GIVEN_COSTS), GIVEN_COSTS if self.is_given_costs else ""
        return (
            f"{self.estimate:.4f} [{ends}] ({100 * self.level:.0f} % {how} over "
            f"{self.num_units} {self.unit}{given}{drawn})"
        )


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """How values are drawn again. The seed is always given."""

    seed: int
    resamples: int = DEFAULT_RESAMPLES
    level: float = DEFAULT_LEVEL

    def __post_init__(self) -> None:
        if not 0 < self.level < 1 or self.resamples < 1:
            raise SpecError(f"level {self.level} or resamples {self.resamples} make no interval", where="statistics")


def bootstrap_interval(
    values: Sequence[float] | Mapping[str, Sequence[float]] | Mapping[str, FloatArray],
    bootstrap: Bootstrap,
    *,
    unit: str,
    statistic: StatisticName = "median",
) -> Interval:
    """Percentile bootstrap of one statistic over exchangeable values, or within each of several strata of them.

    Each stratum keeps its share of values. unit: what one value is, e.g. "N x replicate comparisons". Raises SpecError
    without values.
    """
    strata: Any = values.values() if isinstance(values, Mapping) else [values]
    arrays = [np.asarray(each, dtype=np.float64) for each in strata]
    if not arrays or any(len(values) == 0 for values in arrays):
        raise SpecError("an interval over no values was asked for", where="statistics", hint="Seal more runs")
    rng, resamples = np.random.default_rng(bootstrap.seed), bootstrap.resamples
    columns = [values[rng.integers(0, len(values), size=(resamples, len(values)))] for values in arrays]
    reduce: Callable[..., Any] = np.mean if statistic == "mean" else np.median
    tail = (1 - bootstrap.level) / 2
    low, high = quantiles(reduce(np.concatenate(columns, axis=1), axis=1), [tail, 1 - tail])
    return Interval(
        estimate=float(reduce(np.concatenate(arrays))),
        low=low,
        high=high,
        level=bootstrap.level,
        method=f"percentile bootstrap of the {statistic}" + ("" if len(arrays) == 1 else ", stratified"),
        unit=unit,
        num_units=sum(map(len, arrays)),
        resamples=resamples,
        seed=bootstrap.seed,
    )


def log_mean_values(costs: Sequence[float], units: Sequence[float] | None = None) -> FloatArray:
    """Values whose mean is ln(sum of costs / sum of units) and whose spread gives its standard error.

    The delta method of a ratio of sums: each value holds the relative deviation of its own cost less that of its own
    units. units: default: 1 each, which makes it the mean cost. Both sums must be above 0.
    """
    cost = np.asarray(costs, dtype=np.float64)
    unit = np.ones_like(cost) if units is None else np.asarray(units, dtype=np.float64)
    return np.log(cost.sum() / unit.sum()) + cost / cost.mean() - unit / unit.mean()


class Base(NamedTuple):
    """The mean cost of a baseline: its relative variance, and that which it shares with the mean of the other side."""

    variance: float
    shared: float = 0.0


class Estimate(NamedTuple):
    """A mean, its standard error and the degrees of freedom of its t, which need not be whole.

    method: what scatters, in words. base: of the log of a ratio of sums, whose interval is Fieller's: every r at which
    |t| of the mean of cost - r x baseline cost is at most that of the level.
    Source: Fieller (1954), Some problems in interval estimation.
    """

    mean: float
    error: float
    degrees: float
    method: str
    unit: str
    num_units: int
    base: Base | None = None

    @property
    def p(self) -> float:
        """Two-sided p of the t test that the mean is 0; without any scatter 1 or 0."""
        return t_tail(self._t_at(0.0), self.degrees)

    def p_below(self, limit: float) -> float:
        """One-sided p of the t test that the mean is ``limit`` at least; without any scatter 1 or 0."""
        t = self._t_at(limit)
        tail = t_tail(t, self.degrees) / 2
        return tail if t < 0 else 1 - tail

    def _t_at(self, limit: float) -> float:
        distance, error = self.mean - limit, self.error
        if error < NO_SCATTER:
            return 0.0 if abs(distance) < NO_SCATTER else math.copysign(math.inf, distance)
        if self.base is not None:
            # Of the mean of cost - r x baseline cost, in units of r x the mean baseline cost.
            over, distance = math.exp(distance), math.expm1(distance)
            variance = over**2 * self._own_variance - 2 * over * self.base.shared + self.base.variance
            error = math.sqrt(max(variance, NO_SCATTER**2))
        return distance / error

    @property
    def _own_variance(self) -> float:
        return self.error**2 if self.base is None else self.error**2 - self.base.variance + 2 * self.base.shared

    @property
    def inverse(self) -> Estimate:
        """Of the baseline over the other side."""
        base = None if self.base is None else Base(self._own_variance, self.base.shared)
        return self._replace(mean=-self.mean, base=base)

    def ends(self, t: float) -> tuple[float, float]:
        """What lies ``t`` standard errors off. Infinite where the mean cost of a baseline is not told from 0."""
        half = t * self.error
        if self.base is None:
            return self.mean - half, self.mean + half
        variance, shared = self.base
        square, middle = 1 - t * t * variance, 1 - t * t * shared
        root = math.sqrt(max(0.0, half**2 - t**4 * (self._own_variance * variance - shared**2)))
        if square <= 0 or middle <= root:
            return -math.inf, math.inf
        return self.mean + math.log((middle - root) / square), self.mean + math.log((middle + root) / square)

    @property
    def low(self) -> float:
        return self.ends(t_quantile(DEFAULT_LEVEL, self.degrees))[0]

    @property
    def high(self) -> float:
        return self.ends(t_quantile(DEFAULT_LEVEL, self.degrees))[1]

    def interval(
        self,
        of: Callable[[float], float] = math.exp,
        level: float = DEFAULT_LEVEL,
        *,
        family: int = 1,
        ends: tuple[float, float] | None = None,
    ) -> Interval:
        """The t interval of a ratio, by the mean of its logs; of: makes the figure of the mean.

        family: intervals that are to hold together at ``level`` (Bonferroni). ends: of another interval than that of t.
        """
        low, high = ends or self.ends(t_quantile(1 - (1 - level) / family, self.degrees))
        about = (level, self.method, self.unit, self.num_units, 0, 0, family)
        return Interval(of(self.mean), of(low), of(high), *about)


def of_ratio(whole: Estimate | None, own: Estimate | None, base: Estimate | None) -> Estimate | None:
    """The estimate of a log ratio of sums, from those of own - base, own and base (``log_mean_values`` each)."""
    if whole is None or own is None or base is None:
        return None
    shared = (own.error**2 + base.error**2 - whole.error**2) / 2
    return whole._replace(base=Base(base.error**2, shared))


def of_blocks(values: Sequence[float]) -> Estimate:
    """The mean of two blocks or more by their own spread, on whichever device."""
    error = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return Estimate(float(np.mean(values)), error, len(values) - 1, "t interval of the mean", "blocks", len(values))


def contrast(samples: Sequence[tuple[float, Sequence[float] | FloatArray]]) -> Estimate:
    """A weighted sum of the means of independent samples, as (weight, values); degrees rounded down (Welch)."""
    mean = sum(weight * float(np.mean(values)) for weight, values in samples)
    parts = [weight**2 * float(np.var(values, ddof=1)) / len(values) for weight, values in samples]
    spread = sum(part**2 / (len(values) - 1) for part, (_, values) in zip(parts, samples, strict=True))
    degrees = max(1, math.floor(sum(parts) ** 2 / spread)) if spread else 1
    num_values = sum(len(values) for _, values in samples)
    return Estimate(mean, math.sqrt(sum(parts)), degrees, "Welch's t interval", "runs", num_values)


def mean_interval(values: Sequence[float], *, unit: str, level: float = DEFAULT_LEVEL) -> Interval | None:
    """t interval of a mean; None below MIN_REPLICATES."""
    return None if len(values) < MIN_REPLICATES else of_blocks(values)._replace(unit=unit).interval(float, level)


def prediction_interval(draws: FloatArray, level: float) -> Interval | None:
    """Where one more outcome would lie that scatters as the draws do, normally; None below MIN_REPLICATES.

    mean +- t s sqrt(1 + 1/K): wider than quantiles of few draws, by what K of them leave unknown.
    """
    if len(draws) < MIN_REPLICATES:
        return None
    error = float(draws.std(ddof=1)) * math.sqrt(1 + 1 / len(draws))
    num_draws = len(draws)
    estimate = Estimate(float(draws.mean()), error, num_draws - 1, "t prediction interval", "draws", num_draws)
    return estimate.interval(float, level)


@lru_cache(maxsize=1024)
def t_quantile(level: float, degrees: float) -> float:
    """The t that |T| stays below with probability ``level``."""
    return float(_special().stdtrit(degrees, (1 + level) / 2))


def t_tail(t: float, degrees: float) -> float:
    """P(|T| > |t|) of Student's t: a two-sided p."""
    return float(2 * _special().stdtr(degrees, -abs(t)))


def f_tail(f: float, between: int, inside: int) -> float:
    """P(F > f) of Fisher's F with these degrees of freedom."""
    return float(_special().fdtrc(between, inside, f))


def binomial_cdf(most: int, trials: int, chance: float) -> float:
    """P(Binomial(trials, chance) <= most).

    Summed here: every summary of a run needs it, and loading scipy would take longer than the summary.
    """
    log_all = math.lgamma(trials + 1)
    return math.fsum(
        math.exp(
            log_all
            - math.lgamma(k + 1)
            - math.lgamma(trials - k + 1)
            + k * math.log(chance)
            + (trials - k) * math.log1p(-chance)
        )
        for k in range(most + 1)
    )


def most_missed(number: int) -> float:
    """The upper bound of a share of which ``number`` independent draws held none, or all but it: 1 - .05^(1/n)."""
    return 1 - (1 - DEFAULT_LEVEL) ** (1 / number) if number else 1.0


def pooled_variance(groups: Iterable[Sequence[float]]) -> tuple[float, int]:
    """(variance inside groups, its degrees of freedom); nan without any."""
    values = [np.asarray(group, dtype=np.float64) for group in groups]
    degrees = sum(len(group) - 1 for group in values)
    squares = sum(float(((group - group.mean()) ** 2).sum()) for group in values)
    return (squares / degrees if degrees else math.nan), degrees


def quantile(values: Iterable[float], q: float) -> float:
    """A quantile by the rule that the paper's printed ones follow (linear between order statistics)."""
    return quantiles(np.fromiter(values, dtype=np.float64), [q])[0]


def quantiles(values: FloatArray, at: Sequence[float]) -> list[float]:
    """Several quantiles by the same rule: the values are put in order once."""
    return np.quantile(values, at, method=QUANTILE_METHOD).tolist()


class NoInterval(str, Enum):
    """Why a percentile has no interval over runs."""

    RUNS = "too few runs"
    VALUES = "too few values beyond it"
    EACH = "too few of one kind"
    SPREAD = "no spread"
    RARE = "rare cases decide"


def quantile_intervals(
    samples: Sequence[FloatArray], at: Sequence[float], *, unit: str = "runs"
) -> list[Interval | NoInterval]:
    """Intervals of quantiles of all values together, whose samples (runs) are independent and whose values need not be.

    An interval holds every x of which a t test over the samples does not show that the share of values up to x is
    another one than q. It lies among the values, holds the quantile and is never of zero width. None of fewer samples
    than MIN_SAMPLES, or where fewer than MIN_BEYOND values are expected beyond the quantile. How often it holds:
    docs/evidence/error-rates.md.
    """
    ordered = [np.sort(sample) for sample in samples]
    values = np.sort(np.concatenate(ordered))
    return [_quantile_interval(ordered, values, q, unit) for q in at]


def _quantile_interval(ordered: Sequence[FloatArray], values: FloatArray, q: float, unit: str) -> Interval | NoInterval:
    if len(ordered) < MIN_SAMPLES:
        return NoInterval.RUNS
    if len(values) * min(q, 1 - q) < MIN_BEYOND - ROUNDING:
        return NoInterval.VALUES
    # Every place of few values; of many some of them first, then all between the outermost that hold and their next.
    places = np.unique(np.linspace(0, len(values) - 1, min(len(values), MOST_PLACES)).astype(np.int64))
    held = np.flatnonzero(_may_hold(ordered, values[places], q))
    at = float(np.quantile(values, q, method=QUANTILE_METHOD))
    if not len(held):
        return NoInterval.SPREAD
    below = np.arange(places[max(0, held[0] - 1)], places[held[0]] + 1)
    above = np.arange(places[held[-1]], places[min(len(places) - 1, held[-1] + 1)] + 1)
    first = below[_may_hold(ordered, values[below], q)][0]
    last = above[_may_hold(ordered, values[above], q)][-1]
    # The share changes at the next value alone: all up to it is held.
    end = min(int(np.searchsorted(values, values[last], side="right")), len(values) - 1)
    low, high = min(at, float(values[first])), max(at, float(values[end]))
    if low == high:
        return NoInterval.SPREAD
    return Interval(at, low, high, DEFAULT_LEVEL, "t test of the share below", unit, len(ordered), 0, 0)


def _may_hold(ordered: Sequence[FloatArray], at: FloatArray, q: float) -> NDArray[np.bool_]:
    """Of which instants ``at`` the test does not show that another share than q of the values lies up to them.

    The test is on a scale on which a share of few large clusters is nearly symmetric, and half a value is left for the
    steps of a share. That scale cannot tell the last few values from q: the plain share must not be far off either.
    All three are chosen by coverage (docs/evidence/error-rates.md).
    """
    counts = np.array([np.searchsorted(sample, at, side="right") for sample in ordered], dtype=np.float64)
    sizes: FloatArray = np.array([[len(sample)] for sample in ordered], dtype=np.float64)
    return _may_be(counts, sizes, np.asarray(q), 0.5 / float(sizes.sum()))


def _may_be(counts: FloatArray, sizes: FloatArray, q: FloatArray, step: float) -> NDArray[np.bool_]:
    """Where the test of ``_may_hold`` does not show that sum(counts) / sum(sizes) over samples is another share than q.

    counts: shape (samples, places); sizes: (samples, 1); step: half of what one value adds to a share.
    """
    num_samples = len(counts)
    share = counts.sum(axis=0) / sizes.sum()
    error = ((counts - share * sizes) / sizes.mean()).std(axis=0, ddof=1) / math.sqrt(num_samples)
    nearest = share + np.clip(q - share, -step, step)
    inner = np.clip(nearest, ROUNDING, 1 - ROUNDING)
    distance = np.abs(_stretched(inner) - _stretched(np.clip(q, ROUNDING, 1 - ROUNDING)))
    slope = inner ** (-TAIL_POWER - 1) + (1 - inner) ** (-TAIL_POWER - 1)
    most = t_quantile(DEFAULT_LEVEL, num_samples - 1) * error
    return (distance <= most * slope) & (np.abs(nearest - q) <= FAR * most) | (nearest == q)


def share_interval(
    parts: Sequence[FloatArray], wholes: Sequence[FloatArray], *, unit: str = "runs"
) -> Interval | NoInterval:
    """Interval of sum(parts) / sum(wholes), whose samples (runs) are independent and whose values need not be.

    parts, wholes: of each value of each sample, 0 <= part <= whole. The test is that of ``quantile_intervals``: the
    interval holds every share that a t test over the samples does not tell from the observed one. None of fewer samples
    than MIN_SAMPLES, or where fewer than MIN_OF_EACH values are above 0, or below their whole.
    """
    samples = [(part, whole) for part, whole in zip(parts, wholes, strict=True) if whole.sum() > 0]
    if len(samples) < MIN_SAMPLES:
        return NoInterval.RUNS
    part, whole = (np.concatenate(side) for side in zip(*samples, strict=True))
    if part.sum() in (0, whole.sum()):
        return NoInterval.SPREAD
    if min(np.count_nonzero(part > 0), np.count_nonzero(part < whole)) < MIN_OF_EACH:
        return NoInterval.EACH
    counts = np.array([[part.sum()] for part, _ in samples], dtype=np.float64)
    sizes = np.array([[whole.sum()] for _, whole in samples], dtype=np.float64)
    at, places = float(counts.sum() / sizes.sum()), np.arange(SHARE_PLACES + 1) / SHARE_PLACES
    held = places[_may_be(counts, sizes, places, 0.5 / np.count_nonzero(whole))]
    low, high = min([at, *held[:1]]), max([at, *held[-1:]])
    if low == high:
        return NoInterval.SPREAD
    return Interval(at, low, high, DEFAULT_LEVEL, "t test of the share", unit, len(samples), 0, 0)


def _stretched(share: Any) -> Any:
    return ((1 - share) ** -TAIL_POWER - share**-TAIL_POWER) / TAIL_POWER


def effective_number(amounts: FloatArray) -> float:
    """How many equal amounts would be as unevenly shared as these are: all of them to 1; 0 where all are 0."""
    squares = float((amounts**2).sum())
    return float(amounts.sum()) ** 2 / squares if squares else 0.0


def lag_one(values: Sequence[float]) -> float:
    """Correlation of each value with the next one; 0 where nothing varies."""
    left = np.asarray(values, dtype=np.float64) - np.mean(values)
    squares = float((left**2).sum())
    return float((left[1:] * left[:-1]).sum()) / squares if squares else 0.0


def median_bound(values: Sequence[float], confidence: float) -> float | None:
    """A value that the median of where ``values`` come from does not exceed; None where they are too few to say so.

    The smallest order statistic that lies below the median with probability 1 - confidence at most, whatever the
    distribution: from 7 values on at .99 the largest.
    """
    num_values = len(values)
    # P(at least k of so many lie below their median) is, by symmetry, that of at most num_values - k.
    ranks = (k for k in range(1, num_values + 1) if binomial_cdf(num_values - k, num_values, 0.5) <= 1 - confidence)
    rank = next(ranks, None)
    return None if rank is None else sorted(values)[rank - 1]


@overload
def sum_or_none(values: Iterable[int | None]) -> int | None: ...
@overload
def sum_or_none(values: Iterable[T | None], start: T) -> T | None: ...
def sum_or_none(values: Iterable[Any], start: Any = 0) -> Any:
    """The sum; None where one of the values is unknown."""
    listed = list(values)
    return None if None in listed else sum(listed, start)


def when_known(of: Callable[..., T], *values: object) -> T | None:
    """A function of values; None where one of them is unknown."""
    return None if None in values else of(*values)


def paired(values: Iterable[T], others: Iterable[T], key: Callable[[T], Hashable]) -> list[tuple[T, T]]:
    """(value, other) of equal key, in the order of ``values``; what has no partner is left out."""
    partners = {key(other): other for other in others}
    return [(value, partners[key(value)]) for value in values if key(value) in partners]


def grouped(values: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """The values by their key, in the order in which keys come first."""
    groups: dict[K, list[T]] = {}
    for value in values:
        groups.setdefault(key(value), []).append(value)
    return groups


def ratio(value: float | None, over: float | None) -> float | None:
    """The ratio; None where either is unknown or ``over`` is 0."""
    return value / over if value is not None and over else None


def seconds(ns: int | None) -> float | None:
    """The same time in seconds; None where it is unknown."""
    return None if ns is None else ns / NS_PER_S


def median(values: Iterable[float]) -> float:
    """The median; the mean of the middle two of an even number."""
    return float(np.median(np.fromiter(values, dtype=np.float64)))


def percent(log_ratio: float) -> str:
    """A log ratio as a change in per cent, with its sign and two digits."""
    return f"{100 * math.expm1(log_ratio):+.2f} %"


def holm(values: Sequence[float | None]) -> list[float | None]:
    """Holm's adjusted p-values, in the order given: the chance of even one false difference stays below the level.

    What has no p-value was not tested: it has no adjusted one, and does not count.
    """
    tested = sorted((p, place) for place, p in enumerate(values) if p is not None)
    adjusted: list[float | None] = [None] * len(values)
    highest = 0.0
    for rank, (p, place) in enumerate(tested):
        highest = max(highest, min(1.0, (len(tested) - rank) * p))
        adjusted[place] = highest
    return adjusted


def _special() -> Any:
    """``scipy.special``, imported at first use: it takes longer to load than most commands take."""
    from scipy import special

    return special
