"""How often the interval of a cost ratio on modelled device time (A) holds the truth, where the costs are estimates.

Blocks are drawn with the steps of six users by number of requests; sizes {1,2,4,6,8} are compared with {1,2,4,8}. The
true costs differ from those of the cost file, so that the true ratio is known. No server runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from benchmarks.channels import TEMPLATE
from benchmarks.figure import Figure
from benchmarks.stopping import PRESET, SUPERIORITY_ALPHA, ended
from harness.analysis.calibration.fit import fit_decode
from harness.analysis.calibration.fit_points import StepPoint
from harness.analysis.compare.channels import ChannelRatio, compare
from harness.analysis.compare.ratio import estimate_of_blocks
from harness.analysis.compare.stopping import looks_at
from harness.analysis.cost.cost_errors import errors_of_first
from harness.analysis.cost.reconstruct import ChannelA
from harness.analysis.figures import RunFigures
from harness.analysis.stats import FloatArray
from harness.clock import NS_PER_MS
from harness.model.engine import CostModel, load_cost_model
from harness.model.engine.cost import FS_PER_MS, FitErrors, size_name, to_fs
from harness.model.spec import StopSpec

EXPERIMENTS, SEED = 200, 20261125
NUM_BLOCKS = (3, 6, 12)
SIZES, BASE_SIZES = (1, 2, 4, 6, 8), (1, 2, 4, 8)
# Mean decode steps of a block by requests, 1 to 6, and how far they scatter: of both sides alike, and of one.
STEPS = np.array([250.0, 300.0, 400.0, 500.0, 550.0, 400.0])
BLOCK_SD, SIDE_SD = 0.1, 0.03
PREFILL_CALLS = 120.0
# A point of a calibration: a restart moves it so far, ms; the steps inside a run scatter less.
POINT_SD, STEP_SD, POINTS_OF_N = 0.1, 0.02, 3
TRUE_SIX_MS = 12.4
Coefficients = Mapping[str, float]


def true_model() -> CostModel:
    """The published costs with a size of six between its neighbours, and without what has no error here."""
    paper = load_cost_model("paper")
    f_fs = {**paper.f_fs, 6: to_fs(TRUE_SIX_MS, FS_PER_MS)}
    return replace(paper, f_fs=dict(sorted(f_fs.items())), alpha_fs=0, call_fs=0, token_fs=0, _filled_fs={})


def usage_of(steps: FloatArray, sizes: Sequence[int]) -> dict[str, float]:
    """What steps by requests, from 1 on, take of each coefficient."""
    usage = dict.fromkeys(map(size_name, sizes), 0.0)
    for n, count in enumerate(steps.tolist(), 1):
        usage[size_name(min(size for size in sizes if size >= n))] += count
    return {**usage, "beta_ms_per_request": float(steps @ np.arange(1, len(steps) + 1))}


def priced_ms(usage: Mapping[str, float], costs: Coefficients) -> float:
    return sum(amount * costs[name] for name, amount in usage.items())


def true_log_ratio(costs: Coefficients) -> float:
    """The log ratio of mean blocks."""
    return math.log(priced_ms(usage_of(STEPS, SIZES), costs) / priced_ms(usage_of(STEPS, BASE_SIZES), costs))


class Intervals(NamedTuple):
    """Of one experiment, on the log scale: with the error of the costs, and by the blocks alone."""

    whole: tuple[float, float]
    blocks_alone: tuple[float, float]


def drawn_ratio(model: CostModel, num_blocks: int, rng: np.random.Generator) -> ChannelRatio:
    """The ratio of A in an experiment whose runs are priced by ``model``."""
    costs = {**model.coefficients, **{size_name(size): model.bucket_fs(size) / FS_PER_MS for size in SIZES}}
    sides: list[list[RunFigures]] = [[], []]
    for block in range(num_blocks):
        common = STEPS * np.exp(rng.normal(0, BLOCK_SD))
        for side, sizes in zip(sides, (SIZES, BASE_SIZES), strict=True):
            usage = usage_of(common * np.exp(rng.normal(0, SIDE_SD, len(STEPS))), sizes)
            a_ns = round(priced_ms(usage, costs) * NS_PER_MS)
            channel = ChannelA(a_ns, 0, usage=usage, cost_model=model)
            side.append(replace(TEMPLATE, replicate=block, unit=block, a=channel, b_ns=a_ns))
    compared = compare("base", *sides)
    assert compared is not None, "every block has both sides"
    assert compared.a is not None, "drawn runs have channel A"
    return compared.a


def drawn_intervals(model: CostModel, num_blocks: int, rng: np.random.Generator) -> Intervals:
    """The interval of such an experiment."""
    found = drawn_ratio(model, num_blocks, rng)
    assert found.interval is not None, "there are three blocks or more"
    plain = estimate_of_blocks(found.of_blocks)
    return Intervals((math.log(found.interval.low), math.log(found.interval.high)), (plain.low, plain.high))


def coverage_of_sequences(stop: StopSpec, num: int, seed: int = SEED) -> Coverage:
    """Intervals at the look at which a stopping rule ends; the true costs are drawn from the covariance of one fit."""
    rng = np.random.default_rng([seed, stop.budget, 4])
    model = fitted(true_model(), SIZES, rng)
    held: list[list[bool]] = []
    for _ in range(num):
        found, at = drawn_ratio(model, stop.budget, rng), true_log_ratio(drawn_truth(model, rng))
        every = (
            ended(looks_at(found.of_blocks, stop, costs=costs)) for costs in ([*errors_of_first(found.priced)], ())
        )
        held.append([look.low <= math.exp(at) <= look.high for look in every])
    return Coverage(*np.mean(held, axis=0).tolist())


def false_superiority(num_blocks: int, num: int, seed: int = SEED) -> Coverage:
    """Shares of experiments that superiority does not pass where the true ratio is its limit."""
    rng = np.random.default_rng([seed, num_blocks, 5])
    model = fitted(true_model(), SIZES, rng)
    passed: list[list[bool]] = []
    for _ in range(num):
        found, limit = drawn_ratio(model, num_blocks, rng), math.exp(true_log_ratio(drawn_truth(model, rng)))
        assert found.estimate is not None, "there are three blocks or more"
        estimates = (found.estimate, estimate_of_blocks(found.of_blocks))
        passed.append([estimate.p_below(math.log(limit)) >= SUPERIORITY_ALPHA for estimate in estimates])
    return Coverage(*np.mean(passed, axis=0).tolist())


def fitted(truth: CostModel, sizes: Sequence[int], rng: np.random.Generator) -> CostModel:
    """A calibration of such a server: each n up to 8 at some points, each of them moved by a restart of its own."""
    points = [
        StepPoint(
            n,
            size,
            None,
            truth.decode_step_ns(size, n) / NS_PER_MS + rng.normal(0, POINT_SD) + rng.normal(0, STEP_SD, 8),
        )
        for n in range(1, max(sizes) + 1)
        for size in [min(size for size in sizes if size >= n)]
        for _ in range(POINTS_OF_N)
    ]
    fit = fit_decode(points, with_context=False, seed=SEED)
    return replace(
        truth,
        f_fs={size: to_fs(f_ms, FS_PER_MS) for size, f_ms in fit.f_ms.items()},
        beta_fs=to_fs(fit["beta_ms_per_request"], FS_PER_MS),
        errors=(fit.errors,),
        _filled_fs={},
    )


def drawn_truth(model: CostModel, rng: np.random.Generator) -> Coefficients:
    """True costs that differ from those of a cost file as its errors say."""
    costs = model.coefficients
    for fit in model.errors:
        costs |= _moved(costs, fit, rng)
    return costs


def _moved(costs: Coefficients, fit: FitErrors, rng: np.random.Generator) -> Coefficients:
    errors = np.array(fit.standard_errors)
    covariance = np.array(fit.correlations) * np.outer(errors, errors)
    moved = rng.multivariate_normal(np.zeros(len(errors)), covariance)
    return {name: costs[name] + float(change) for name, change in zip(fit.names, moved, strict=True)}


class Coverage(NamedTuple):
    """Shares of intervals that hold the truth: with the error of the costs, and by the blocks alone."""

    whole: float
    blocks_alone: float


def coverage_of_drawn_truth(num_blocks: int, num: int, seed: int = SEED) -> Coverage:
    """One cost file; the true costs are drawn from the covariance of its fit."""
    rng = np.random.default_rng([seed, num_blocks, 1])
    model = fitted(true_model(), SIZES, rng)
    made = [(drawn_intervals(model, num_blocks, rng), true_log_ratio(drawn_truth(model, rng))) for _ in range(num)]
    return _coverage(made)


def coverage_of_fits(num_blocks: int, num: int, seed: int = SEED) -> Coverage:
    """One truth; each experiment has a calibration of its own."""
    rng, truth = np.random.default_rng([seed, num_blocks, 2]), true_model()
    at = true_log_ratio(truth.coefficients)
    return _coverage([(drawn_intervals(fitted(truth, SIZES, rng), num_blocks, rng), at) for _ in range(num)])


def coverage_of_unmeasured(num_blocks: int, num: int, seed: int = SEED) -> Coverage:
    """The size of six was not measured; its true cost lies anywhere between those of its neighbours."""
    rng, truth = np.random.default_rng([seed, num_blocks, 3]), true_model()
    made: list[tuple[Intervals, float]] = []
    for _ in range(num):
        six_ms = rng.uniform(truth.f_fs[4], truth.f_fs[8]) / FS_PER_MS
        model = fitted(truth, BASE_SIZES, rng)
        made.append((drawn_intervals(model, num_blocks, rng), true_log_ratio({**truth.coefficients, "f(6)": six_ms})))
    return _coverage(made)


def _coverage(made: Sequence[tuple[Intervals, float]]) -> Coverage:
    held = [[low <= at <= high for low, high in intervals] for intervals, at in made]
    whole, alone = np.mean(held, axis=0).tolist()
    return Coverage(whole, alone)


STOPS = {
    "after every block": StopSpec(margin=0.001, budget=24),
    "three preset looks": StopSpec(margin=0.001, budget=PRESET[-1], looks=PRESET),
}


def bench_costs(num_experiments: int = EXPERIMENTS) -> Iterator[Figure]:
    """Coverage of the 95 % interval of A where the cost model is an estimate."""
    kinds = {
        "true costs drawn from the fit's covariance": (coverage_of_drawn_truth, "0.93 to 0.97"),
        "a calibration for each experiment": (coverage_of_fits, "0.93 to 0.97"),
        "a size that was not measured": (coverage_of_unmeasured, ">= 0.93"),
    }
    found: list[tuple[str, Coverage, str]] = []
    for name, (measure, mark) in kinds.items():
        for num_blocks in NUM_BLOCKS:
            found.append((f"coverage of A, {name}, {num_blocks} blocks", measure(num_blocks, num_experiments), mark))
    for name, stop in STOPS.items():
        found.append((f"coverage of A, looks {name}", coverage_of_sequences(stop, num_experiments), ">= 0.95"))
    for num_blocks in NUM_BLOCKS:
        name = f"superiority not passed where the ratio is its limit, {num_blocks} blocks"
        found.append((name, false_superiority(num_blocks, num_experiments), f">= {1 - SUPERIORITY_ALPHA}"))
    for name, shares, mark in found:
        error = math.sqrt(max(shares.whole * (1 - shares.whole), 1e-4) / num_experiments)
        note = f"by the blocks alone {shares.blocks_alone:.3f}; Monte Carlo error {error:.3f}"
        yield Figure(name, f"{shares.whole:.3f}", mark, note)
