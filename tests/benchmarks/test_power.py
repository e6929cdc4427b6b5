"""The short form of `benchmarks power`: adjusted plans keep their promise, and plans for one comparison do not."""

from __future__ import annotations

import re

import numpy as np
import pytest

from benchmarks.power import Population, bench_power, block_values
from harness.judge.advise.power import log_ratio_values


def test_the_short_study_keeps_what_the_long_one_shows() -> None:
    figures = {figure.name: figure for figure in bench_power(400, 400)}
    # Five Monte Carlo errors of 400 experiments beside the .03 of the long form.
    for case in ("differ by the margin", "equal", "as found"):
        assert float(figures[f"{case}: farthest from the promise"].value) <= 0.03 + 0.075
        lowest = float(re.match(r"[\d.]+", figures[f"{case}: not adjusted"].value)[0])  # type: ignore[index]
        assert lowest < 0.8
    assert float(figures["any of 6 ever wrong: alpha shared"].value) <= 0.05 + 0.03
    assert float(figures["any of 6 ever wrong: alpha for each"].value) > 0.08


def test_values_are_those_of_decisions_and_a_set_ratio_is_the_true_one() -> None:
    population = Population.of("demo", 40)
    for costs, values in zip(population.costs, block_values(population.costs), strict=True):
        assert values == pytest.approx(log_ratio_values(*costs))
    moved = block_values(population.at(0.02).costs).mean(axis=1)
    assert np.abs(moved) == pytest.approx([0.02, 0.02])
