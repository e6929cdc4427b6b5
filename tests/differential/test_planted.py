"""The comparison of paged schedulers sees mistakes, each of ten, and sees none where there is none."""

from __future__ import annotations

import pytest

from tests.differential.planted import (
    PLANTED,
    PLANTED_WITH_DRAFTS,
    Plant,
    first_difference,
    first_difference_with_drafts,
    nothing,
)

NUM_HISTORIES, NUM_STEPS = 32, 100


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_mistake_is_noticed(plant: Plant) -> None:
    _, differences = first_difference(plant, NUM_HISTORIES, NUM_STEPS)
    assert differences


def test_without_a_mistake_nothing_differs() -> None:
    assert first_difference(nothing, NUM_HISTORIES, NUM_STEPS) == (-1, [])


def test_each_mistake_with_drafts_is_noticed_and_none_is_seen_where_none_is() -> None:
    assert len(PLANTED_WITH_DRAFTS) == 10
    assert first_difference_with_drafts(nothing, 40, 100) == (-1, [])
    noticed = {name: first_difference_with_drafts(plant, 200, 100)[0] for name, plant in PLANTED_WITH_DRAFTS.items()}
    assert [name for name, seed in noticed.items() if seed < 0] == []
