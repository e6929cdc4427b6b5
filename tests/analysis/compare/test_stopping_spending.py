"""Boundaries of preset looks: published values where the sample is large, t quantiles where it is small."""

from __future__ import annotations

import math

import numpy as np
import pytest

from harness.analysis.compare.boundaries import obrien_fleming_spent, spending_boundaries
from harness.analysis.stats import t_quantile


def test_many_blocks_give_the_published_boundaries_of_four_equal_looks() -> None:
    """Jennison and Turnbull (2000), and every program for Lan and DeMets' first function: z at alpha .05, two-sided."""
    found = spending_boundaries((5_000, 10_000, 15_000, 20_000), 20_000, 0.05)
    assert found == pytest.approx((4.333, 2.963, 2.359, 2.014), rel=0.02)


def test_one_look_at_the_end_is_the_fixed_t_interval() -> None:
    assert spending_boundaries((12,), 12, 0.05) == pytest.approx((t_quantile(0.95, 11),))


def test_everything_is_spent_at_the_end_and_almost_nothing_early() -> None:
    assert obrien_fleming_spent(1.0, 0.05) == pytest.approx(0.05)
    assert obrien_fleming_spent(0.25, 0.05) == pytest.approx(1.47e-5, rel=0.02)


def test_samples_of_few_blocks_cross_any_boundary_with_probability_alpha() -> None:
    looks = (4, 8, 12)
    boundaries = spending_boundaries(looks, 12, 0.05)
    values = np.random.default_rng(7).standard_normal((40_000, 12))
    crossed = np.zeros(len(values), dtype=bool)
    for look, boundary in zip(looks, boundaries, strict=True):
        seen = values[:, :look]
        crossed |= np.abs(seen.mean(axis=1)) * math.sqrt(look) / seen.std(axis=1, ddof=1) > boundary
    assert float(crossed.mean()) == pytest.approx(0.05, abs=0.004)
