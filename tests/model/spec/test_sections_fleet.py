from __future__ import annotations

import math
from collections import Counter

import pytest
from pydantic import ValidationError

from harness.model.experiment import resolve
from harness.model.spec import EmulatedDevice, FleetSpec
from tests.support.experiments import small_experiment


def test_every_device_has_as_many_blocks_and_each_block_stays_whole_on_one():
    fleet = FleetSpec(devices=(0, 2, 5, 7))
    assert Counter(fleet.place_of(block).device for block in range(12)) == {0: 3, 2: 3, 5: 3, 7: 3}
    two = FleetSpec(devices=(0, 1), hosts=("alpha", "beta"))
    assert [str(place) for place in two.places] == ["alpha/dev0", "beta/dev0", "alpha/dev1", "beta/dev1"]


@pytest.mark.parametrize("order", ["rotation", "abba", "latin"])
def test_each_condition_runs_first_as_often_as_the_other_on_every_device(order: str):
    spec = small_experiment(replicates=8, order=order, fleet={"devices": [0, 1, 2, 3]})
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
        # Traits are of a device that is there and emulated.
        ({"fleet": {"devices": [0], "emulated": {1: {}}}}, "emulated.1 is not one of the devices"),
        ({"fleet": {"devices": [0], "emulated": {0: {"speed_offset": -1}}}}, "greater than"),
        (
            {"backend": "rbln", "time_scale": 1, "fleet": {"devices": [0], "emulated": {0: {}}}},
            "rbln has devices of its own",
        ),
    ],
)
def test_a_fleet_that_cannot_be_fair_or_made_is_refused(changes: dict[str, object], said: str):
    with pytest.raises(ValidationError, match=said):
        small_experiment(**changes)


def test_speed_drift_neighbours_and_noise_make_one_factor():
    device = EmulatedDevice(speed_offset=0.03, drift_per_hour=0.02, noise=0.01, neighbour_cost=0.005)
    assert device.factor(hours=2, neighbours=3, normal=0) == pytest.approx(1.03 + 0.04 + 0.015)
    assert device.factor(hours=0, neighbours=0, normal=-2) == pytest.approx(1.03 * math.exp(-0.02))
    assert EmulatedDevice().factor(hours=5, neighbours=7, normal=3) == 1
