"""The error beside a predicted ratio holds the truth as often as it says, and asks for the draws that it needs."""

from __future__ import annotations

import math

import numpy as np
import pytest

from harness.analysis.compare.drawn import DrawnCosts, DrawnRatio
from harness.analysis.stats import FloatArray


def ratio_of_means(costs: FloatArray, base: FloatArray) -> DrawnRatio:
    return DrawnCosts(costs).ratio_to(DrawnCosts(base))


def test_the_stated_error_holds_the_true_ratio_in_19_of_20_sets_of_draws() -> None:
    rng, trials = np.random.default_rng(3), 2_000
    common = rng.normal(1, 0.05, size=(trials, 40))
    costs, base = (common * rng.normal(mean, 0.01, size=common.shape) for mean in (0.98, 1.0))
    found = [ratio_of_means(*pair) for pair in zip(costs, base, strict=True)]
    share = np.mean([abs(one.ratio - 0.98) <= one.error for one in found])
    assert 0.93 <= share <= 0.97


def test_what_both_sides_of_a_draw_share_leaves_no_error() -> None:
    common = np.random.default_rng(4).normal(100, 20, size=50)
    assert ratio_of_means(0.9 * common, common) == pytest.approx((0.9, 0.0, 50))


def test_the_draws_that_are_asked_for_make_the_error_a_tenth_of_the_effect_or_of_the_margin() -> None:
    rough = DrawnRatio(0.985, 0.01, 20)
    needed = rough.draws_needed(0.02)
    assert rough.error * math.sqrt(20 / needed) <= 0.1 * 0.02
    large_effect = DrawnRatio(0.8, 0.01, 20)
    assert large_effect.is_sure(0.02)
    assert large_effect.draws_needed(0.02) == 20


def test_one_draw_has_no_error_and_shows_nothing() -> None:
    one = ratio_of_means(np.array([90.0]), np.array([100.0]))
    assert math.isnan(one.error)
    assert not one.shows_effect
    assert 0 < ratio_of_means(np.array([90.0, 92.0]), np.array([100.0, 101.0])).error < 1


def test_without_draws_on_both_sides_there_is_no_ratio() -> None:
    drawn, nominal = DrawnCosts(np.array([90.0, 91.0, 92.0])), DrawnCosts.of([])
    assert nominal.interval is None
    assert (drawn.ratio_to(nominal), nominal.ratio_to(nominal), drawn.interval_to(nominal)) == (None, None, None)
