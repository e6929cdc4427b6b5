"""The device as a factor: device means, honest degrees of freedom, the interaction; nothing of it with one device."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from harness.analysis.compare.across import Side, compare_all
from harness.analysis.cost.devices import BlockRatio, device_effect
from harness.analysis.stats import f_tail, of_blocks, t_quantile, t_tail
from harness.analysis.summary import summarise
from harness.measure.records.run import SealedRun
from harness.runner import run_experiment
from tests.support.experiments import small_experiment


def blocks(**by_device: list[float]) -> list[BlockRatio]:
    found: list[BlockRatio] = []
    for device, values in by_device.items():
        found += [BlockRatio(value, device, len(found) + place) for place, value in enumerate(values)]
    return found


def test_from_three_devices_on_their_means_are_what_scatters() -> None:
    estimate = device_effect(blocks(dev0=[0.00, 0.02], dev1=[0.03, 0.05], dev2=[0.06, 0.08])).estimate
    assert (estimate.mean, estimate.degrees) == (pytest.approx(0.04), 2)
    assert estimate.error == pytest.approx(0.03 / math.sqrt(3))
    interval = estimate.interval()
    assert math.log(interval.high) == pytest.approx(0.04 + t_quantile(0.95, 2) * 0.03 / math.sqrt(3))
    assert (interval.num_units, interval.unit) == (3, "devices")


def test_of_two_devices_only_the_spread_of_their_own_blocks_is_told() -> None:
    found = device_effect(blocks(dev0=[0.0, 0.02], dev1=[0.1, 0.12]))
    assert (found.estimate.mean, found.estimate.degrees, found.these) == (pytest.approx(0.06), 2, None)
    assert found.estimate.error == pytest.approx(math.sqrt(2e-4 * (1 / 2 + 1 / 2)) / 2)
    assert device_effect(blocks(dev0=[0.0], dev1=[0.1])).estimate is None


def test_a_device_with_more_blocks_weighs_no_more() -> None:
    estimate = device_effect(blocks(dev0=[0.0] * 9, dev1=[0.03], dev2=[0.06])).estimate
    assert estimate.mean == pytest.approx(0.03)


def test_the_interaction_is_fishers_test_by_hand() -> None:
    found = device_effect(blocks(dev0=[1.0, 2.0, 3.0], dev1=[2.0, 3.0, 4.0], dev2=[5.0, 6.0, 7.0])).interaction
    assert (found.f, found.degrees) == (pytest.approx(13), (2, 6))
    # With two degrees of freedom above, F has a closed form.
    assert found.p == pytest.approx((1 + 2 * 13 / 6) ** -3)
    assert found.sd == pytest.approx(math.sqrt((13 - 1) / 3))


@pytest.mark.parametrize("inside", [1, 2, 7, 40])
def test_fishers_f_of_one_degree_is_the_square_of_students_t(inside: int) -> None:
    assert f_tail(1.7**2, 1, inside) == pytest.approx(t_tail(1.7, inside))


def test_blocks_that_ran_at_once_by_plan_count_as_one() -> None:
    """Their host's noise is in both, with opposite signs where the conditions were exchanged."""
    noise = [0.05, -0.02, 0.03, 0.01]
    values = [0.01 + sign * one for one in noise for sign in (1, -1)]
    duets = [BlockRatio(value, f"dev{place % 2}", place // 2) for place, value in enumerate(values)]
    estimate = device_effect(duets).estimate
    assert (estimate.mean, estimate.degrees) == (pytest.approx(0.01), 3)
    assert estimate.error < 1e-12 < of_blocks(values).error


def test_where_devices_differ_in_the_effect_their_means_keep_coverage_and_pooled_blocks_do_not() -> None:
    rng = np.random.default_rng(11)
    held = np.zeros(2)
    num_experiments = 300
    for _ in range(num_experiments):
        values = rng.normal(0, 0.01, 4)[:, None] + rng.normal(0, 0.01, (4, 4))
        listed = [
            BlockRatio(float(values[place]), f"dev{place[0]}", 4 * place[0] + place[1]) for place in np.ndindex(4, 4)
        ]
        by_device = device_effect(listed).estimate
        for way, estimate in enumerate((by_device, of_blocks([one.value for one in listed]))):
            held[way] += estimate.interval().contains(1.0)
    assert held[0] / num_experiments == pytest.approx(0.95, abs=0.038)
    assert held[1] / num_experiments < 0.85


def fleet_runs(folder: Path, devices: list[int], **changes: object) -> tuple[SealedRun, ...]:
    table = {"backend": "sim", "replicates": 4, "order": "abba", "fleet": {"devices": devices}, **changes}
    return run_experiment(small_experiment(**table), runs_root=folder).runs


def test_with_one_device_every_figure_is_what_it_is_without_a_fleet(tmp_path: Path) -> None:
    plain, one = fleet_runs(tmp_path / "plain", [], fleet=None), fleet_runs(tmp_path / "one", [3])
    before, after = summarise(plain), summarise(one)
    assert after.to_arrow().equals(before.to_arrow())
    assert after.device_tables == []
    assert after.findings == before.findings
    sides = [(Side("more", runs[1::2]), Side("base", runs[::2])) for runs in (plain, one)]
    assert compare_all(sides[:1]).column("p") == compare_all(sides[1:]).column("p")


@pytest.fixture(scope="module")
def unequal(tmp_path_factory: pytest.TempPathFactory) -> tuple[SealedRun, ...]:
    """Four simulated devices with two blocks each; the third is 3 % slow."""
    emulated = {device: {"noise": 0.001, "speed_offset": 0.03 if device == 2 else 0.0} for device in range(4)}
    fleet = {"devices": [0, 1, 2, 3], "emulated": emulated}
    return fleet_runs(tmp_path_factory.mktemp("fleet"), [], replicates=8, fleet=fleet)


def test_an_emulated_slow_device_is_found_and_called_emulated(unequal: tuple[SealedRun, ...]) -> None:
    apart = [finding for finding in summarise(unequal).findings if finding.code == "device-apart"]
    assert len(apart) == 1
    assert "emulated dev2 is 3.0 % slower than the median of the others [2" in apart[0].evidence


def test_the_tables_of_a_fleet_show_each_device_and_their_mean(unequal: tuple[SealedRun, ...]) -> None:
    summary = summarise(unequal)
    devices, effects = summary.device_tables
    assert devices.column("device") == ["dev0", "dev1", "dev2", "dev3"]
    assert devices.column("emulated") == ["yes"] * 4
    on_b = [row for row in effects.records() if row["channel"] == "B"]
    assert [row["device"] for row in on_b] == ["dev0", "dev1", "dev2", "dev3", "all", "these alone"]
    compared = summary.condition("more").comparison
    assert (on_b[4]["low"], on_b[4]["high"]) == (compared.b.interval.low, compared.b.interval.high)
    assert compared.b.interval.unit == "devices"


def test_runs_of_other_devices_are_compared_only_with_a_word(unequal: tuple[SealedRun, ...]) -> None:
    base = Side("base", tuple(run for run in unequal if run.condition == "base"))
    more = Side("more", tuple(run for run in unequal if run.condition == "more"))
    assert set(compare_all([(more, base)]).column("same_device")) == {True}
