"""Whether `harness power` keeps its promise where several comparisons are judged together, fixed and sequential.

Experiments are drawn from a population of simulated blocks of `configuration`, whose six comparisons share plans and
baselines; the true ratios are set by scaling costs. No server runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.figure import Figure
from benchmarks.stopping import blocks_taken, cost_pairs, t_paths
from harness.analysis.compare.stopping import bonferroni, boundary_of
from harness.analysis.stats import FloatArray
from harness.judge.planning.needed import Components, Goal, needed_together
from harness.judge.planning.power import MOST_BLOCKS, Aim, PlannedTest
from harness.model.spec import StopSpec, load_experiment

EXPERIMENTS, POPULATION, LOOKS, SEED = 1_000, 4_000, 60, 20261126
GOAL = Goal()
HELD_AT = (3, 6, 12)
# Spreads at which a plan is made; between them it is interpolated.
GRID = 40


class Population(NamedTuple):
    """Simulated blocks of comparisons that are judged together. costs: shape (comparisons, 2, blocks)."""

    names: tuple[str, ...]
    costs: FloatArray

    @classmethod
    def of(cls, experiment: str, num_blocks: int) -> Population:
        pairs = cost_pairs(load_experiment(experiment), num_blocks)
        return cls(tuple(pairs), np.array(list(pairs.values())))

    @property
    def components(self) -> list[Components]:
        """The spreads of the whole population, as ``harness power`` estimates them from fewer blocks."""
        num_blocks = self.costs.shape[2]
        return [
            Components(name, "base", float(values.mean()), float(values.std()), None, None, num_blocks)
            for name, values in zip(self.names, block_values(self.costs), strict=True)
        ]

    @property
    def logs(self) -> FloatArray:
        """ln(cost / baseline cost) of each block, as a sequence looks at it; shape (comparisons, blocks)."""
        return np.log(self.costs[:, 0] / self.costs[:, 1])

    def at(self, size: float) -> Population:
        """The same blocks, every true log ratio having this size and its own sign."""
        found = np.log(self.costs[:, 0].sum(axis=1) / self.costs[:, 1].sum(axis=1))
        costs = self.costs.copy()
        costs[:, 0] *= np.exp(np.copysign(size, found) - found)[:, None]
        return self._replace(costs=costs)

    def drawn(self, num_experiments: int, num_blocks: int) -> FloatArray:
        """Values of experiments whose blocks are drawn from these, shape (comparisons, experiments, blocks)."""
        return block_values(self.costs[:, :, self.places(num_experiments, num_blocks)])

    def places(self, num_experiments: int, num_blocks: int) -> npt.NDArray[np.int64]:
        """The blocks of these experiments."""
        return np.random.default_rng(SEED).integers(0, self.costs.shape[2], size=(num_experiments, num_blocks))


def block_values(costs: FloatArray) -> FloatArray:
    """One value a block as in decisions, their mean being ln of the ratio of sums; costs: (..., 2, ..., blocks)."""
    own, base = costs[:, 0], costs[:, 1]
    own_mean, base_mean = own.mean(axis=-1, keepdims=True), base.mean(axis=-1, keepdims=True)
    return np.log(own_mean / base_mean) + own / own_mean - base / base_mean


def verdicts(values: FloatArray, aim: Aim, alpha: float, log_margin: float) -> npt.NDArray[np.bool_]:
    """Which comparisons have their verdict at their part of alpha, shape (experiments, comparisons)."""
    from scipy.special import stdtr

    n = values.shape[-1]
    mean, error = values.mean(axis=-1), values.std(axis=-1, ddof=1) / math.sqrt(n)
    if aim == "difference":
        p = 2 * stdtr(n - 1, -np.abs(mean) / error)
    else:
        p = stdtr(n - 1, (np.abs(mean) - log_margin) / error)
    return p.T < alpha / len(values)  # noqa: SIM300


def bench_power(num_experiments: int = EXPERIMENTS, num_blocks: int = POPULATION) -> Iterator[Figure]:
    """How often intervals of ratios hold, shares of experiments with their verdict, and how often any is wrong."""
    population, margin = Population.of("configuration", num_blocks), GOAL.log_margin
    yield from _held("configuration", population.at(0.0), num_experiments)
    yield from _held("demo", Population.of("demo", num_blocks).at(0.0), num_experiments)
    yield from _kept("differ by the margin", population.at(margin), "difference", num_experiments)
    yield from _kept("equal", population.at(0.0), "equivalence", num_experiments)
    yield from _kept("as found", population, "difference", num_experiments)
    yield from _after_runs(population, num_experiments)
    yield from _wrong(population, num_experiments)
    yield from _ended(population, num_experiments)


def _held(name: str, null: Population, num_experiments: int) -> Iterator[Figure]:
    """How often the interval of one ratio holds, and any verdict of all comparisons is wrong; true ratios are 1."""
    for num_blocks in HELD_AT:
        # The interval of a ratio leaves 1 out where a t test tells the mean difference of costs from 0.
        values = (null.costs[:, 0] - null.costs[:, 1])[:, null.places(num_experiments, num_blocks)]
        alone, together = (~verdicts(values, "difference", GOAL.alpha * size, 0.0) for size in (len(values), 1))
        shares = alone.mean(axis=0)
        note = f"{num_experiments:,} experiments, {len(values)} comparisons"
        yield Figure(
            f"{name}: interval of a ratio holds, {num_blocks} blocks",
            f"{shares.min():.3f} to {shares.max():.3f}",
            "",
            note,
        )
        wrong = 1 - together.all(axis=1).mean()
        yield Figure(
            f"{name}: any of {len(values)} wrong, {num_blocks} blocks", f"{wrong:.3f}", f"<= {GOAL.alpha}", note
        )


def _kept(name: str, case: Population, aim: Aim, num_experiments: int) -> Iterator[Figure]:
    """The share of each comparison with its verdict, beside the power promised at the blocks that it needs.

    And the shares with the blocks of a comparison that is judged alone, as a negative control.
    """
    components = case.components
    margin, farthest, unadjusted = GOAL.log_margin, 0.0, list[float]()
    for place, parts in enumerate(components):
        plan, alone = (PlannedTest(parts.sd, GOAL.alpha / size, margin) for size in (len(components), 1))
        count, few = (each.blocks(parts.mean, aim, GOAL.power) for each in (plan, alone))
        if count is None or few is None:
            continue
        share, promised = _share(case, place, aim, count, num_experiments), plan.power(count, parts.mean, aim)
        unadjusted.append(_share(case, place, aim, few, num_experiments))
        farthest = max(farthest, promised - share)
        error = math.sqrt(share * (1 - share) / num_experiments)
        note = f"{count} blocks, {num_experiments:,} experiments, Monte Carlo error {error:.3f}"
        yield Figure(f"{name}: {parts.condition}", f"{share:.3f}", f"{promised:.3f} promised", note)
    yield Figure(f"{name}: farthest below the promise", f"{farthest:.3f}", "<= 0.03")
    control = "negative control: blocks of a comparison that is judged alone"
    yield Figure(f"{name}: not adjusted", f"{min(unadjusted):.3f} to {max(unadjusted):.3f}", "", control)


def _share(case: Population, place: int, aim: Aim, blocks: int, num_experiments: int) -> float:
    values = case.drawn(num_experiments, blocks)
    return float(verdicts(values, aim, GOAL.alpha, GOAL.log_margin)[:, place].mean())


def _after_runs(population: Population, num_experiments: int) -> Iterator[Figure]:
    """Shares of experiments with their verdict where a few runs, drawn before, told how many blocks each needs."""
    aims: tuple[tuple[Aim, float], ...] = (("difference", GOAL.log_margin), ("equivalence", 0.0))
    for num_runs, (aim, size) in product((6, 12), aims):
        case = population.at(size)
        pilots = case.drawn(num_experiments, num_runs).std(axis=-1, ddof=1)
        kept = [_kept_after(case, place, aim, sds, num_runs) for place, sds in enumerate(pilots)]
        note = f"{num_experiments:,} experiments a comparison, each after {num_runs} blocks of its own; farthest from "
        shares, promised = zip(*kept, strict=True)
        yield Figure(
            f"planned after {num_runs} runs, {aim}",
            f"{min(shares):.3f} to {max(shares):.3f}",
            f"{min(promised):.3f} to {max(promised):.3f} promised",
            f"{note}its promise {max(abs(one - other) for one, other in kept):.3f}",
        )


def _kept_after(case: Population, place: int, aim: Aim, sds: FloatArray, num_runs: int) -> tuple[float, float]:
    """The share of experiments with their verdict, each with the blocks that its own runs ask for, and the promise."""
    effect = GOAL.log_margin if aim == "difference" else 0.0
    grid = np.geomspace(sds.min(), sds.max(), GRID)
    plans = [PlannedTest(float(sd), GOAL.alpha, GOAL.log_margin, num_runs - 1) for sd in grid]
    needed = [plan.blocks(effect, aim, GOAL.power) or MOST_BLOCKS for plan in plans]
    promised = [plan.power(count, effect, aim) for plan, count in zip(plans, needed, strict=True)]
    blocks = np.ceil(np.interp(sds, grid, needed)).astype(int)
    rng, num_kept = np.random.default_rng([SEED, num_runs, place]), 0
    for count, size in zip(*np.unique(blocks, return_counts=True), strict=True):
        places = rng.integers(0, case.costs.shape[2], size=(size, count))
        values = block_values(case.costs[place : place + 1, :, places])
        num_kept += int(verdicts(values, aim, GOAL.alpha, GOAL.log_margin).sum())
    return num_kept / len(sds), float(np.interp(sds, grid, promised).mean())


def _wrong(population: Population, num_experiments: int) -> Iterator[Figure]:
    """How often any of the comparisons is wrong when all are looked at after each block and no ratio differs from 1."""
    logs = population.logs - population.logs.mean(axis=1, keepdims=True)
    places = np.random.default_rng(SEED).integers(0, logs.shape[1], size=(num_experiments, LOOKS))
    note = f"{LOOKS} looks, {num_experiments:,} experiments, every true ratio 1"
    for name, share, mark in (("alpha shared", len(logs), f"<= {GOAL.alpha}"), ("alpha for each", 1, "")):
        stop = bonferroni(StopSpec(margin=GOAL.margin, alpha=GOAL.alpha, budget=LOOKS), share)
        boundary = boundary_of(stop)
        limits = np.array([math.inf, *(boundary(n) or math.inf for n in range(2, LOOKS + 1))])
        is_wrong = np.array([(t_paths(values[places]) > limits).any(axis=1) for values in logs])
        yield Figure(f"any of {len(logs)} ever wrong: {name}", f"{is_wrong.any(axis=0).mean():.3f}", mark, note)


def _ended(population: Population, num_experiments: int) -> Iterator[Figure]:
    """The share of sequential experiments that end within the blocks that are named for nine of ten."""
    components = population.components
    for place, need in enumerate(needed_together(components, GOAL)):
        if need.looked_90 is None:
            continue
        logs, mean = population.logs[place], components[place].mean
        stop = bonferroni(StopSpec(margin=GOAL.margin, alpha=GOAL.alpha, budget=need.looked_90), len(components))
        places = np.random.default_rng(SEED).integers(0, len(logs), size=(num_experiments, stop.budget))
        effects = [mean] if abs(mean) > 2 * GOAL.log_margin else [0.0, GOAL.log_margin]
        shares = [blocks_taken((logs - logs.mean() + effect)[places], stop)[1] for effect in effects]
        note = f"within {stop.budget} blocks, {num_experiments:,} experiments"
        yield Figure(
            f"ended when looked at: {population.names[place]}", f"{min(shares):.3f}", f"{GOAL.power} promised", note
        )
