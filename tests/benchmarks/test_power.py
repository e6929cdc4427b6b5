"""What `benchmarks power` draws: values of decisions, at ratios that are set."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.power import Population, block_values
from harness.judge.planning.needed import log_ratio_values


def test_values_are_those_of_decisions_and_a_set_ratio_is_the_true_one() -> None:
    population = Population.of("demo", 40)
    for costs, values in zip(population.costs, block_values(population.costs), strict=True):
        assert values == pytest.approx(log_ratio_values(*costs))
    moved = block_values(population.at(0.02).costs).mean(axis=1)
    assert np.abs(moved) == pytest.approx([0.02, 0.02])
