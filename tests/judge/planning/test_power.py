"""Numbers of blocks: against scipy 1.16 (nct, and quadrature of the joint law), by simulation, and by the papers."""

from __future__ import annotations

import math

import numpy as np
import pytest

from harness.analysis.stats import t_quantile
from harness.judge.planning.power import (
    PlannedTest,
    blocks_for_precision,
    blocks_until_decided,
    variance_components,
)
from harness.model.spec import StopSpec

MARGIN = math.log(1.02)


@pytest.mark.parametrize(
    ("num_blocks", "effect", "power"),
    [
        (4, 0.0, 0.7056250031263098),
        (5, 0.0, 0.875940135376897),
        (6, 0.0, 0.9538328633111753),
        (7, 0.0, 0.9837393962400111),
        (6, 0.005, 0.8614680565562058),
        (10, 0.005, 0.9846777263066374),
    ],
)
def test_power_of_two_one_sided_tests_is_that_of_scipys_quadrature(
    num_blocks: int, effect: float, power: float
) -> None:
    assert PlannedTest(0.0113, 0.05, MARGIN).power(num_blocks, effect, "equivalence") == pytest.approx(power, abs=1e-9)


@pytest.mark.parametrize(
    ("num_blocks", "power"),
    [(5, 0.4013899173717953), (10, 0.8030968566327219), (13, 0.9107084757398161), (14, 0.9323694812114373)],
)
def test_power_to_find_a_difference_is_that_of_scipys_noncentral_t(num_blocks: int, power: float) -> None:
    assert PlannedTest(0.02, 0.05).power(num_blocks, 0.02, "difference") == pytest.approx(power, abs=1e-9)


@pytest.mark.parametrize(("sd", "blocks"), [(0.004, 3), (0.0113, 6), (0.02, 13), (0.03, 27)])
def test_blocks_for_a_margin_of_two_percent_keep_their_promise(sd: float, blocks: int) -> None:
    """Of 4,000 simulated experiments at least .9 are shown equal, less three standard errors."""
    assert PlannedTest(sd, 0.05, MARGIN).blocks(0.0, "equivalence", 0.9) == blocks
    values = np.random.default_rng(9).normal(0, sd, size=(4_000, blocks))
    half = t_quantile(0.9, blocks - 1) * values.std(axis=1, ddof=1) / math.sqrt(blocks)
    shown = float(np.mean(np.abs(values.mean(axis=1)) + half < MARGIN))
    assert shown >= 0.9 - 3 * math.sqrt(0.9 * 0.1 / 4_000)


def test_a_precision_is_reached_by_the_block_that_is_named_and_not_before() -> None:
    blocks = blocks_for_precision(0.02, 0.01, 0.05)
    widths = [t_quantile(0.95, n - 1) * 0.02 / math.sqrt(n) for n in (blocks - 1, blocks)]
    assert widths[1] <= 0.01 < widths[0]


def test_what_no_experiment_reaches_is_none() -> None:
    assert PlannedTest(0.5, 0.05, MARGIN).blocks(0.0, "equivalence", 0.9) is None
    assert PlannedTest(0.01, 0.05, MARGIN).blocks(0.03, "equivalence", 0.9) is None
    assert PlannedTest(0.01, 0.05, MARGIN).blocks(0.0, "difference", 0.9) is None
    assert PlannedTest(0.01, 0.025).blocks(0.01, "superiority", 0.9) is None


def test_two_levels_are_told_apart_by_their_mean_squares() -> None:
    rng = np.random.default_rng(3)
    values = rng.normal(0, 0.02, size=(4_000, 1)) + rng.normal(0, 0.01, size=(4_000, 4))
    between, within = variance_components(values)
    assert between == pytest.approx(0.02, rel=0.05)
    assert within == pytest.approx(0.01, rel=0.03)
    assert variance_components(np.array([[1.0, -1.0], [-1.0, 1.0]]))[0] == 0.0


def test_sequential_experiments_end_sooner_the_larger_the_effect_and_not_all_within_a_small_budget() -> None:
    stop = StopSpec(margin=0.02, budget=40)
    small, large = (float(np.median(blocks_until_decided(0.01, effect, stop))) for effect in (0.02, 0.1))
    assert large == 5 < small
    assert float(np.mean(blocks_until_decided(0.1, 0.0, stop) > stop.budget)) > 0.5
