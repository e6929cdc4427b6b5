"""Energy is the integral of power over the time in flight, and nothing where power was sampled too seldom."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.analysis.compare.measures import MEASURES
from harness.analysis.energy import energy_of, run_energy
from harness.analysis.figures import run_figures
from harness.clock import NS_PER_S
from harness.measure.records import layout
from tests.support.report_runs import Shape, seal_run


def every(seconds: float, watts: list[float], first_s: float = 0.0) -> list[tuple[int, float]]:
    """Samples at equal distances."""
    return [(round((first_s + place * seconds) * NS_PER_S), each) for place, each in enumerate(watts)]


def test_a_steady_power_gives_its_watts_times_the_seconds_in_flight() -> None:
    flights = [(NS_PER_S, 3 * NS_PER_S), (2 * NS_PER_S, 4 * NS_PER_S), (6 * NS_PER_S, 7 * NS_PER_S)]
    found = energy_of(every(0.5, [100.0] * 20), flights)
    assert found is not None
    assert found.joules == pytest.approx(400.0)
    assert found.error_joules == 0
    assert found.num_samples == 7 + 3


def test_a_power_that_moves_is_taken_to_go_straight_and_its_error_is_half_of_each_move() -> None:
    found = energy_of(every(1.0, [100.0, 200.0, 100.0]), [(0, 2 * NS_PER_S)])
    assert found is not None
    assert found.joules == pytest.approx(300.0)
    assert found.error_joules == pytest.approx(100.0)
    part = energy_of(every(1.0, [100.0, 200.0]), [(NS_PER_S // 2, NS_PER_S)])
    assert part is not None
    assert part.joules == pytest.approx(87.5)


@pytest.mark.parametrize(
    "samples",
    [
        every(1.01, [100.0] * 20),
        every(0.5, [100.0] * 3),
        every(0.5, [100.0] * 20, first_s=0.6),
        [],
    ],
)
def test_fewer_than_a_sample_a_second_of_the_time_in_flight_give_no_energy(samples: list[tuple[int, float]]) -> None:
    assert energy_of(samples, [(NS_PER_S // 2, 5 * NS_PER_S)]) is None


def test_a_run_whose_exporter_was_asked_often_has_joules_a_token_and_a_session(tmp_path: Path) -> None:
    without = seal_run(tmp_path / "without")
    assert MEASURES["energy"].of(without) is None
    spans = without.table("requests").select(["sent_ns", "done_ns"]).to_pylist()
    first_ns, last_ns = min(row["sent_ns"] for row in spans), max(row["done_ns"] for row in spans)
    reading = {"device": "rbln0", "card": "A", "card_power_w": 50.0, "units": {}}
    lines = [
        json.dumps({"at_ns": at_ns, "reason": "interval", "readings": [reading]})
        for at_ns in range(first_ns - NS_PER_S, last_ns + NS_PER_S, NS_PER_S // 2)
    ]
    run = seal_run(tmp_path / "with", Shape(files={layout.DEVICE_METRICS: "\n".join(lines)}))
    energy, value = run_energy(run), MEASURES["energy"].of(run)
    assert energy is not None
    assert value is not None
    assert value.amount == pytest.approx(energy.joules)
    flight_s = run_figures(run).b_ns / NS_PER_S
    assert energy.joules == pytest.approx(50.0 * flight_s)
    per_session = MEASURES["energy_session"].of(run)
    assert per_session is None or per_session.amount == value.amount
