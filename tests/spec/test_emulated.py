from __future__ import annotations

import math

import pytest
from pydantic import ValidationError

from harness.spec.emulated import EmulatedDevice
from tests.support.experiments import small_experiment


def test_speed_drift_neighbours_and_noise_make_one_factor():
    device = EmulatedDevice(slower=0.03, drift_per_hour=0.02, noise=0.01, neighbour_cost=0.005)
    assert device.factor(hours=2, neighbours=3, normal=0) == pytest.approx(1.03 + 0.04 + 0.015)
    assert device.factor(hours=0, neighbours=0, normal=-2) == pytest.approx(1.03 * math.exp(-0.02))
    assert EmulatedDevice().factor(hours=5, neighbours=7, normal=3) == 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"fleet": {"devices": [0], "emulated": {1: {}}}}, "emulated.1 is none of the devices"),
        ({"fleet": {"devices": [0], "emulated": {0: {"slower": -1}}}}, "greater than"),
        (
            {"backend": "rbln", "time_scale": 1, "fleet": {"devices": [0], "emulated": {0: {}}}},
            "rbln has devices of its own",
        ),
    ],
)
def test_traits_of_no_device_or_of_a_real_one_are_refused(changes: dict[str, object], said: str):
    with pytest.raises(ValidationError, match=said):
        small_experiment(**changes)
