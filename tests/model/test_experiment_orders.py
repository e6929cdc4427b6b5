"""Orders of conditions: what each of them balances, counted."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from pydantic import ValidationError

from harness.model.experiment import PlannedRun, order_of_block, resolve
from harness.model.spec import OrderName
from tests.support.experiments import small_experiment

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


def by_period(**changes: object) -> list[list[PlannedRun]]:
    runs = list(resolve(small_experiment(**changes)))
    numbers = [run.period.number for run in runs if run.period is not None]
    assert sorted(set(numbers)) == list(range(max(numbers) + 1))
    return [[run for run in runs if run.period and run.period.number == number] for number in range(max(numbers) + 1)]


def labels(period: list[PlannedRun]) -> list[str]:
    return sorted(f"{run.condition.name} on {run.place}" for run in period)


def test_alone_means_one_device_after_another_and_all_means_at_once() -> None:
    conditions = [
        {"name": "alone", "neighbours": 0},
        {"name": "two", "neighbours": 1},
        {"name": "all", "neighbours": "all"},
    ]
    periods = by_period(replicates=4, condition=conditions, fleet={"devices": [0, 1, 4, 5]})
    assert [labels(period) for period in periods] == [
        *([f"alone on dev{device}"] for device in (0, 1, 4, 5)),
        ["two on dev0", "two on dev1"],
        ["two on dev4", "two on dev5"],
        [f"all on dev{device}" for device in (0, 1, 4, 5)],
    ]
    assert [run.neighbours for run in periods[4]] == [(1,), (0,)]
    assert {run.plan.hash for period in periods for run in period} == {periods[0][0].plan.hash}


def test_a_duet_runs_both_conditions_at_once_and_then_exchanges_them_and_who_begins_alternates() -> None:
    periods = by_period(replicates=4, fleet={"devices": [0, 1], "lockstep": True})
    assert [labels(period) for period in periods] == [
        ["base on dev0", "more on dev1"],
        ["base on dev1", "more on dev0"],
        ["base on dev1", "more on dev0"],
        ["base on dev0", "more on dev1"],
    ]
    plans = [{run.plan.hash for run in period} for period in periods]
    assert [len(one) for one in plans] == [1] * 4
    assert plans[0] == plans[1] != plans[2]


def test_most_fleets_have_no_periods() -> None:
    runs = resolve(small_experiment(replicates=4, fleet={"devices": [0, 1]}))
    assert {run.period for run in runs} == {None}
    assert {run.neighbours for run in runs} == {(0,), (1,)}
    assert len({run.plan.hash for run in runs}) == 4


def test_devices_of_several_hosts_do_not_keep_step() -> None:
    with pytest.raises(ValidationError, match="several hosts do not keep step"):
        small_experiment(replicates=2, fleet={"devices": [0], "hosts": ["alpha", "beta"], "lockstep": True})


@pytest.mark.parametrize(
    ("neighbours", "said"), [(4, "4 neighbours, and a device has 3"), (2, "groups of 3 do not share 4 devices evenly")]
)
def test_neighbours_that_a_device_cannot_have_are_refused(neighbours: int, said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        small_experiment(
            replicates=4, condition=[{"name": "base", "neighbours": neighbours}], fleet={"devices": [0, 1, 2, 3]}
        )
