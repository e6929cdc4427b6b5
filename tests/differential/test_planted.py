"""The comparison of paged schedulers sees mistakes, each of ten, and sees none where there is none."""

from __future__ import annotations

import pytest

from tests.differential.planted import PLANTED, Plant, first_difference, nothing

NUM_HISTORIES, NUM_STEPS = 32, 100


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_mistake_is_noticed(plant: Plant) -> None:
    _, differences = first_difference(plant, NUM_HISTORIES, NUM_STEPS)
    assert differences


def test_without_a_mistake_nothing_differs() -> None:
    assert first_difference(nothing, NUM_HISTORIES, NUM_STEPS) == (-1, [])
