"""Orders of conditions: what each of them balances, counted."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from harness.experiment.orders import order_of_block
from harness.spec import OrderName

pytestmark = pytest.mark.same_everywhere
ORDERS: tuple[OrderName, ...] = ("rotation", "abba", "latin")


def blocks_of(order: OrderName, num_conditions: int, num_blocks: int) -> list[list[int]]:
    return [order_of_block(order, num_conditions, block) for block in range(num_blocks)]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("num_conditions", [1, 2, 3, 4, 5])
def test_every_block_has_every_condition_once_and_every_place_alike_over_whole_squares(
    order: OrderName, num_conditions: int
) -> None:
    blocks = blocks_of(order, num_conditions, 2 * num_conditions)
    assert all(sorted(block) == list(range(num_conditions)) for block in blocks)
    places = Counter((place, condition) for block in blocks for place, condition in enumerate(block))
    assert set(places.values()) == {2}


@pytest.mark.parametrize(("num_conditions", "num_blocks"), [(2, 2), (4, 4), (6, 6), (3, 6), (5, 10)])
def test_in_williams_squares_each_condition_follows_each_other_one_equally_often(
    num_conditions: int, num_blocks: int
) -> None:
    blocks = blocks_of("latin", num_conditions, num_blocks)
    follows = Counter(pair for block in blocks for pair in pairwise(block))
    assert len(follows) == num_conditions * (num_conditions - 1)
    assert len(set(follows.values())) == 1


def test_a_linear_drift_leaves_each_pair_of_blocks_there_and_back() -> None:
    assert blocks_of("abba", 2, 4) == [[0, 1], [1, 0], [1, 0], [0, 1]]
    for first, second in ((0, 1), (2, 3)):
        pair = [order_of_block("abba", 3, block) for block in (first, second)]
        assert [sum(block.index(condition) for block in pair) for condition in range(3)] == [2, 2, 2]


def test_rotation_moves_every_condition_by_one() -> None:
    assert blocks_of("rotation", 3, 4) == [[0, 1, 2], [1, 2, 0], [2, 0, 1], [0, 1, 2]]
