"""Nothing within the bounds that a search prints is better than its proposal, on a few of the drawn spaces."""

from __future__ import annotations

import pytest

from benchmarks.spaces import aimed, held, numbers
from harness.tune.explore import Effort
from harness.tune.space import Thoroughness

pytestmark = pytest.mark.same_everywhere
BRIEF = Effort(400_000, 200_000, 100_000, Thoroughness(3, 60), few=4)


@pytest.mark.parametrize("number", [0, 2, 37])
def test_nothing_within_the_printed_bounds_is_better_than_the_proposal(number: int) -> None:
    assert held(number, BRIEF, rough=20, exact=300).is_good


@pytest.mark.parametrize("number", [4, 12])
def test_nothing_that_surely_meets_the_targets_is_better_than_what_is_proposed_within_them(number: int) -> None:
    found = aimed(number, BRIEF, rough=20, exact=200)
    assert found.is_good
    assert found.is_within


def test_printed_numbers_are_read_as_they_are_meant() -> None:
    text = "max_num_seqs: 1 to 3, 8\nkv_slots: 8, 10; more changes nothing"
    assert numbers(text, "max_num_seqs") == [1, 2, 3, 8]
    assert numbers(text, "kv_slots") == [8, 10]
    assert numbers(text, "num_gpu_blocks") == []
