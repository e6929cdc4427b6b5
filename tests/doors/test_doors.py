"""Whatever lies in a file that the harness reads, its parser answers with a value or one clear line."""

from __future__ import annotations

import random

import pytest

from tests.doors.doors import Door, doors
from tests.doors.knock import inputs, knock

NUM_INPUTS = 60


@pytest.mark.parametrize("door", list(doors()), ids=lambda door: door.name)
def test_a_door_answers_changed_texts_with_a_value_or_one_line(door: Door) -> None:
    rng = random.Random(13)
    for seed in door.seeds:
        assert knock(door, seed) is None
    for _, content in zip(range(NUM_INPUTS), inputs(door, rng), strict=False):
        find = knock(door, content)
        assert find is None, f"{find.what}\n{find.content[:300]!r}"
