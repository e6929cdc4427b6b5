"""Who runs beside whom in a fleet that keeps step: groups of neighbours, duets that exchange, one plan for a round."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from harness.experiment import PlannedRun, resolve
from tests.support.experiments import small_experiment


def by_period(**changes: object) -> list[list[PlannedRun]]:
    runs = list(resolve(small_experiment(**changes)))
    numbers = [run.period.number for run in runs if run.period is not None]
    assert sorted(set(numbers)) == list(range(max(numbers) + 1))
    return [[run for run in runs if run.period and run.period.number == number] for number in range(max(numbers) + 1)]


def told(period: list[PlannedRun]) -> list[str]:
    return sorted(f"{run.condition.name} on {run.place}" for run in period)


def test_alone_means_one_device_after_another_and_all_means_at_once() -> None:
    conditions = [
        {"name": "alone", "neighbours": 0},
        {"name": "two", "neighbours": 1},
        {"name": "all", "neighbours": "all"},
    ]
    periods = by_period(replicates=4, condition=conditions, fleet={"devices": [0, 1, 4, 5]})
    assert [told(period) for period in periods] == [
        *([f"alone on dev{device}"] for device in (0, 1, 4, 5)),
        ["two on dev0", "two on dev1"],
        ["two on dev4", "two on dev5"],
        [f"all on dev{device}" for device in (0, 1, 4, 5)],
    ]
    assert [run.neighbours for run in periods[4]] == [(1,), (0,)]
    assert {run.plan.hash for period in periods for run in period} == {periods[0][0].plan.hash}


def test_a_duet_runs_both_conditions_at_once_and_then_exchanges_them_and_who_begins_alternates() -> None:
    periods = by_period(replicates=4, fleet={"devices": [0, 1], "lockstep": True})
    assert [told(period) for period in periods] == [
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
