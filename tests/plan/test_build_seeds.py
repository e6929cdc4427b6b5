"""Uniform deviates of many seeds at once are those of Python's generators, to the bit."""

from __future__ import annotations

import random

import pytest

from harness.plan.build import FEW, uniforms

# Seeds of one word of the generator and of two, and where one ends and the other begins.
EDGES = [0, 1, 2**32 - 1, 2**32, 2**32 + 1, 2**63, 2**64 - 1]


@pytest.mark.parametrize("num_seeds", [len(EDGES), FEW + len(EDGES)])
@pytest.mark.parametrize("count", [1, 6, 113, 114])
def test_deviates_are_those_of_a_generator_of_each_seed(num_seeds: int, count: int) -> None:
    drawn = random.Random(num_seeds)
    seeds = [*EDGES, *(drawn.getrandbits(64) for _ in range(num_seeds - len(EDGES)))]
    found = uniforms(seeds, count)
    for place in {*range(len(EDGES)), num_seeds // 2, num_seeds - 1}:
        generator = random.Random(seeds[place])
        assert found[place].tolist() == [generator.random() for _ in range(count)]
