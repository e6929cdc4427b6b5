"""The short form of `benchmarks devices`: the device as a block keeps its word, a device for each condition not."""

from __future__ import annotations

from benchmarks.devices import bench_devices


def test_the_device_as_a_block_covers_and_a_device_for_each_condition_does_not() -> None:
    found = {figure.name.removeprefix("coverage, "): float(figure.value) for figure in bench_devices(20, 3)}
    # Three Monte Carlo errors of 20 experiments.
    assert found["device as a block"] >= 0.95 - 0.15
    assert found["device as a block, interaction"] >= 0.95 - 0.15
    assert found["pooled, a device pair per condition"] < 0.3
