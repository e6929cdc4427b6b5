"""Whether error rates and powers are as promised: sequences, preset looks, equivalence and superiority.

Blocks are drawn from a population of simulated ones, whose mean is known exactly; each has a plan draw and a restart of
its own. No server runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from benchmarks import SIX_SESSIONS
from benchmarks.figure import Figure
from harness.analysis.compare.boundaries import t_mixture_boundary
from harness.analysis.compare.ratio import BlockCosts, estimate_of_blocks
from harness.analysis.compare.stopping import UNSEEN, Look, boundary_of
from harness.analysis.stats import MIN_REPLICATES, FloatArray, t_quantile
from harness.judge.planning.needed import log_ratio_values, simulated_pairs
from harness.judge.planning.power import PlannedTest
from harness.model.spec import ExperimentSpec, StopSpec, load_experiment

EXPERIMENTS, LOOKS, POPULATION = 1_000, 60, 4_000
ALPHA, SUPERIORITY_ALPHA, MARGIN, POWER = 0.05, 0.025, 0.02, 0.9
SDS = (0.004, 0.0113, 0.02)
PRESET = (6, 12, 24)
SEED = 20261122


class Population(NamedTuple):
    """What simulated blocks of one comparison add to the log of its ratio of sums, and its name."""

    name: str
    values: FloatArray

    def drawn(self, num_experiments: int, num_blocks: int, seed: int = SEED) -> FloatArray:
        """Experiments whose blocks are drawn from it, about a mean of 0; shape (experiments, blocks)."""
        places = np.random.default_rng(seed).integers(0, len(self.values), size=(num_experiments, num_blocks))
        return (self.values - self.values.mean())[places]

    def scaled(self, sd: float) -> Population:
        """The same shape with another spread."""
        return self._replace(values=self.values * (sd / float(self.values.std())))


def cost_pairs(spec: ExperimentSpec, num_blocks: int) -> dict[str, FloatArray]:
    """Device times of each condition and of its baseline in simulated blocks, shape (2, blocks)."""
    pairs, _ = simulated_pairs(spec, num_blocks, restarts=1)
    return {condition: np.array([changed[:, 0], base[:, 0]]) for (condition, _), (changed, base) in pairs.items()}


def populations(pairs: Mapping[str, FloatArray]) -> list[Population]:
    return [Population(name, log_ratio_values(changed, base)) for name, (changed, base) in pairs.items()]


def ended(looks: Iterable[Look]) -> Look:
    """The look at which a sequence ends: the first with a final verdict, else the last."""
    last: Look | None = None
    for last in looks:
        if last.verdict.is_final:
            break
    assert last is not None, "a budget has looks"
    return last


def t_paths(values: FloatArray) -> FloatArray:
    """|t| of the mean of the first 1, 2, ... blocks of each experiment; nan where there is no spread."""
    n = np.arange(1, values.shape[1] + 1)
    mean = values.cumsum(axis=1) / n
    squares = (values**2).cumsum(axis=1) - n * mean**2
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.abs(mean) * np.sqrt(n) / np.sqrt(np.maximum(squares, 0) / (n - 1))


def ever_missed(values: FloatArray, boundary: Callable[[int], float | None]) -> float:
    """Share of experiments whose interval leaves the true mean, 0, out at any look."""
    limits = [boundary(n) if n > 1 else None for n in range(1, values.shape[1] + 1)]
    outside = t_paths(values) > np.array([math.inf if limit is None else limit for limit in limits])
    return float(outside.any(axis=1).mean())


def blocks_taken(values: FloatArray, stop: StopSpec) -> tuple[float, float]:
    """Mean number of blocks until a verdict or the end of the budget, and the share with a verdict."""
    n = np.arange(1, stop.budget + 1)
    mean, t = values.cumsum(axis=1) / n, t_paths(values)
    boundary = boundary_of(stop)
    limits = np.array([(boundary(k) if k > 1 else None) or math.inf for k in range(1, stop.budget + 1)])
    with np.errstate(invalid="ignore", divide="ignore"):
        spread = np.hypot(np.abs(mean) * np.sqrt(n) / t, UNSEEN / np.sqrt(n))
        half = np.where(np.isinf(limits), math.inf, limits * spread / np.sqrt(n))
    is_decided = (np.abs(mean) + half < stop.log_margin) | (np.abs(mean) > half)
    has_verdict = is_decided.any(axis=1)
    return float(np.where(has_verdict, is_decided.argmax(axis=1) + 1, stop.budget).mean()), float(has_verdict.mean())


def shown_equal(values: FloatArray) -> float:
    """Share of experiments in which two one-sided tests show equivalence."""
    n = values.shape[1]
    half = t_quantile(1 - 2 * ALPHA, n - 1) * values.std(axis=1, ddof=1) / math.sqrt(n)
    return float(np.mean(np.abs(values.mean(axis=1)) + half < math.log1p(MARGIN)))


def shown_cheaper(pair: FloatArray, num_blocks: int, num_experiments: int) -> float:
    """Share of experiments, drawn from the blocks of one comparison, that pass superiority at margin 0."""
    places = np.random.default_rng(SEED).integers(0, pair.shape[1], size=(num_experiments, num_blocks))
    estimates = (
        estimate_of_blocks(list(map(BlockCosts, *block.tolist()))) for block in pair[:, places].transpose(1, 0, 2)
    )
    return float(np.mean([estimate.p_below(0.0) < SUPERIORITY_ALPHA for estimate in estimates]))


def bench_stopping(num_experiments: int = EXPERIMENTS, num_blocks: int = POPULATION) -> Iterator[Figure]:
    """Misses, the negative control, powers as promised and what stopping saves, for each comparison."""
    pairs = cost_pairs(load_experiment(SIX_SESSIONS), num_blocks)
    drawn = populations(pairs)
    for population in drawn:
        yield from _misses(population, num_experiments)
        yield from _with_invalid(population, num_experiments)
    for name, pair in pairs.items():
        yield from _superior(name, pair, 10 * num_experiments)
    for sd in SDS:
        yield _promise(drawn[0].scaled(sd), sd, 10 * num_experiments)
    for times in (0.0, 1.0, 2.0, 4.0):
        yield from _saved(drawn[0].scaled(SDS[-1]), times, num_experiments)


def _superior(name: str, pair: FloatArray, num_experiments: int) -> Iterator[Figure]:
    """PASS where there is no difference, and where there is the simulated one, with the blocks that power names."""
    values = log_ratio_values(*pair)
    mean, sd = float(values.mean()), float(values.std(ddof=1))
    blocks = PlannedTest(sd, SUPERIORITY_ALPHA).blocks(mean, "superiority", POWER)
    if blocks is None:
        return
    blocks = max(blocks, MIN_REPLICATES)
    null = pair / pair.sum(axis=1, keepdims=True)
    error = math.sqrt(SUPERIORITY_ALPHA * (1 - SUPERIORITY_ALPHA) / num_experiments)
    note = f"{blocks} blocks, {num_experiments:,} experiments, Monte Carlo error {error:.4f}"
    false, true = (shown_cheaper(each, blocks, num_experiments) for each in (null, pair))
    yield Figure(f"shown cheaper, {name}: true ratio 1", f"{false:.3f}", f"<= {SUPERIORITY_ALPHA}", note)
    yield Figure(f"shown cheaper, {name}: true ratio {math.exp(mean):.3f}", f"{true:.3f}", f">= {POWER}", note)


def _misses(population: Population, num_experiments: int) -> Iterator[Figure]:
    values = population.drawn(num_experiments, LOOKS)
    preset = boundary_of(StopSpec(margin=MARGIN, alpha=ALPHA, budget=PRESET[-1], looks=PRESET))
    note = f"{num_experiments:,} experiments"
    yield Figure(
        f"ever missed, {population.name}: sequence",
        f"{ever_missed(values, lambda n: t_mixture_boundary(n, ALPHA)):.3f}",
        f"<= {ALPHA}",
        f"{LOOKS} looks, {note}",
    )
    few = values[:, : PRESET[-1]]
    yield Figure(
        f"ever missed, {population.name}: preset looks", f"{ever_missed(few, preset):.3f}", f"{ALPHA}", f"at {PRESET}"
    )
    fixed = ever_missed(values, lambda n: t_quantile(1 - ALPHA, n - 1))
    yield Figure(
        f"ever missed, {population.name}: fixed-n looked at", f"{fixed:.3f}", "", "negative control; not offered"
    )


def _with_invalid(population: Population, num_experiments: int) -> Iterator[Figure]:
    """Looks at the valid blocks so far, whose INVALID ones come later: the true mean is ever left out."""
    rng = np.random.default_rng([SEED, 11])
    values = population.drawn(num_experiments, LOOKS)
    is_dear = values > np.median(values)
    note = f"{LOOKS} looks and one at each that came later, {num_experiments:,} experiments"
    for name, chances in {
        "of 5": np.full(values.shape, 0.2),
        "of 10, of the dearer half 3": 0.1 + 0.2 * is_dear,
    }.items():
        is_late = rng.random(values.shape) < chances
        # Valid ones in their order, then those that were INVALID before.
        arrived = np.take_along_axis(values, np.argsort(is_late, axis=1, kind="stable"), axis=1)
        missed = ever_missed(arrived, lambda n: t_mixture_boundary(n, ALPHA))
        yield Figure(f"ever missed, {population.name}: 1 {name} INVALID at first", f"{missed:.3f}", f"<= {ALPHA}", note)


def _promise(population: Population, sd: float, num_experiments: int) -> Figure:
    blocks = PlannedTest(sd, ALPHA, math.log1p(MARGIN)).blocks(0.0, "equivalence", POWER)
    assert blocks is not None, "a spread that any experiment can bear"
    share = shown_equal(population.drawn(num_experiments, blocks))
    error = math.sqrt(POWER * (1 - POWER) / num_experiments)
    note = f"{blocks} blocks, {num_experiments:,} experiments, Monte Carlo error {error:.3f}"
    return Figure(f"shown equal within {MARGIN:.0%}, sd {sd:g}", f"{share:.3f}", f">= {POWER}", note)


def _saved(population: Population, times: float, num_experiments: int) -> Iterator[Figure]:
    """Mean blocks of sequential experiments beside the fixed design that the same margin asks for."""
    sd, margin = SDS[-1], math.log1p(MARGIN)
    planned = PlannedTest(sd, ALPHA, margin)
    needs = (planned.blocks(0.0, "equivalence", POWER), planned.blocks(margin, "difference", POWER))
    fixed = max(count for count in needs if count is not None)
    rules = {
        "a look at every block": StopSpec(margin=MARGIN, alpha=ALPHA, budget=4 * fixed),
        f"looks at {fixed // 3}, {2 * fixed // 3}, {fixed + 2}": StopSpec(
            margin=MARGIN, alpha=ALPHA, budget=fixed + 2, looks=(fixed // 3, 2 * fixed // 3, fixed + 2)
        ),
    }
    for name, stop in rules.items():
        blocks, decided = blocks_taken(population.drawn(num_experiments, stop.budget) + times * margin, stop)
        yield Figure(
            f"blocks, true effect {times:g} margins, {name}",
            f"{blocks:.1f}",
            "",
            f"fixed design {fixed}, saved {fixed - blocks:+.1f}; with a verdict {decided:.1%}",
        )
