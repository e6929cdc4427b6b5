from __future__ import annotations

from collections import Counter

import pytest
from pydantic import ValidationError

from harness.experiment import resolve
from harness.spec import FleetSpec
from tests.support.experiments import small_experiment


def test_every_device_has_as_many_blocks_and_each_block_stays_whole_on_one():
    fleet = FleetSpec(devices=(0, 2, 5, 7))
    assert Counter(fleet.place_of(block).device for block in range(12)) == {0: 3, 2: 3, 5: 3, 7: 3}
    two = FleetSpec(devices=(0, 1), hosts=("alpha", "beta"))
    assert [str(place) for place in two.places] == ["alpha/dev0", "beta/dev0", "alpha/dev1", "beta/dev1"]


@pytest.mark.parametrize("order", ["rotation", "abba", "latin"])
def test_each_condition_runs_first_as_often_as_the_other_on_every_device(order: str):
    spec = small_experiment(replicates=8, order=order, fleet={"devices": [0, 1, 2, 3]})
    assert spec.fleet is not None
    first = Counter(
        (spec.fleet.place_of(run.replicate).device, run.condition.name) for run in resolve(spec) if run.order_index == 0
    )
    assert first == dict.fromkeys(((device, name) for device in range(4) for name in ("base", "more")), 1)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"replicates": 6, "fleet": {"devices": [0, 1, 2, 3]}}, "use 8 replicates"),
        ({"fleet": {"devices": []}}, "at least 1"),
        ({"replicates": 2, "fleet": {"devices": [1, 1]}}, "distinct"),
        ({"replicates": 2, "fleet": {"devices": [0, 1], "hosts": ["-oProxyCommand=x"]}}, "hosts must be"),
        ({"replicates": 2, "fleet": {"devices": [0, 1]}, "server": {"port": 8000}}, "server.port"),
    ],
)
def test_a_fleet_that_cannot_be_fair_is_refused(changes: dict[str, object], said: str):
    with pytest.raises(ValidationError, match=said):
        small_experiment(**changes)
