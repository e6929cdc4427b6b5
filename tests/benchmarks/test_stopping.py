"""The short form of `benchmarks stopping`: what it measures moves as it must."""

from __future__ import annotations

import numpy as np

from benchmarks import SIX_SESSIONS
from benchmarks.stopping import ALPHA, PRESET, Population, blocks_taken, cost_pairs, ever_missed, populations
from harness.analysis.compare.boundaries import t_mixture_boundary
from harness.analysis.compare.stopping import boundary_of
from harness.analysis.stats import t_quantile
from harness.model.spec import StopSpec, load_experiment


def test_on_drawn_plans_the_sequence_misses_seldom_and_a_fixed_interval_that_is_looked_at_often() -> None:
    found = populations(cost_pairs(load_experiment(SIX_SESSIONS), 120))
    assert [one.name for one in found] == ["bucket6-waits", "bucket6-nowaits"]
    values = found[-1].drawn(300, 60)
    sequence = ever_missed(values, lambda n: t_mixture_boundary(n, ALPHA))
    fixed = ever_missed(values, lambda n: t_quantile(1 - ALPHA, n - 1))
    # Alpha and three Monte Carlo errors of 300 experiments.
    assert sequence <= ALPHA + 0.038
    assert fixed > 4 * ALPHA
    preset = boundary_of(StopSpec(margin=0.02, alpha=ALPHA, budget=PRESET[-1], looks=PRESET))
    assert ever_missed(values[:, : PRESET[-1]], preset) < fixed / 2


def test_the_larger_the_effect_the_fewer_blocks_are_taken() -> None:
    one = Population("gaussian", np.random.default_rng(5).normal(0, 0.02, 4_000))
    stop = StopSpec(margin=0.02, budget=52)
    taken = [blocks_taken(one.drawn(300, 52) + effect, stop)[0] for effect in (0.02, 0.04, 0.08)]
    assert taken[0] > taken[1] > taken[2] > 5
