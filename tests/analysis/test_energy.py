"""Energy is the integral of power over the time in flight, and nothing where power was sampled too seldom."""

from __future__ import annotations

import json
from itertools import accumulate, cycle, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.analysis.compare.measures import MEASURES
from harness.analysis.energy import energy_of, energy_of_sessions, power_samples, run_energy
from harness.analysis.figures import run_figures
from harness.analysis.summary import summarise
from harness.clock import NS_PER_S
from harness.judge.decisions.gate import gate_run
from harness.measure.records import layout
from harness.measure.records.run import SealedRun
from harness.present.export.baseline import load_baseline, save_baseline
from harness.runner import run_experiment
from tests.support.experiments import small_experiment
from tests.support.report_runs import Shape, as_sealed, seal_run


def every(seconds: float, watts: list[float], first_s: float = 0.0) -> list[tuple[int, float]]:
    """Samples at equal distances."""
    return [(round((first_s + place * seconds) * NS_PER_S), each) for place, each in enumerate(watts)]


def test_a_steady_power_gives_its_watts_times_the_seconds_in_flight() -> None:
    flights = [(NS_PER_S, 3 * NS_PER_S), (2 * NS_PER_S, 4 * NS_PER_S), (6 * NS_PER_S, 7 * NS_PER_S)]
    found = energy_of(every(0.5, [100.0] * 20), flights)
    assert found.joules == pytest.approx(400.0)
    assert found.error_joules == 0
    assert found.num_samples == 7 + 3


def test_a_power_that_moves_is_taken_to_go_straight_and_its_error_reaches_the_further_sample() -> None:
    found = energy_of(every(1.0, [100.0, 200.0, 100.0]), [(0, 2 * NS_PER_S)])
    assert found.joules == pytest.approx(300.0)
    assert found.error_joules == pytest.approx(100.0)
    part = energy_of(every(1.0, [100.0, 200.0]), [(NS_PER_S // 2, NS_PER_S)])
    assert part.joules == pytest.approx(87.5)
    assert part.error_joules == pytest.approx(87.5 - 50.0)  # 100 W until the last instant


@pytest.mark.parametrize(
    "samples", [every(1.01, [100.0] * 20), every(0.5, [100.0] * 3), every(0.5, [100.0] * 20, first_s=0.6), []]
)
def test_fewer_than_a_sample_a_second_of_the_time_in_flight_give_no_energy(samples: list[tuple[int, float]]) -> None:
    assert energy_of(samples, [(NS_PER_S // 2, 5 * NS_PER_S)]) is None


def walked(samples: list[tuple[int, float]], flights: list[tuple[int, int]]) -> tuple[float, float, int] | None:
    """Joules, error and samples by a walk over all samples for each stretch of time in flight."""
    ends = sorted({end for flight in flights for end in flight})
    in_flight: list[tuple[int, int]] = []
    for start_ns, end_ns in pairwise(ends):
        if any(low <= start_ns < high for low, high in flights):
            is_next = bool(in_flight) and in_flight[-1][1] == start_ns
            in_flight.append((in_flight.pop()[0] if is_next else start_ns, end_ns))
    joules = error = 0.0
    covered_ns = 0
    for start_ns, end_ns in in_flight:
        for (before_ns, before), (after_ns, after) in pairwise(samples):
            first_ns, last_ns = max(before_ns, start_ns), min(after_ns, end_ns)
            if first_ns < last_ns and after_ns - before_ns <= NS_PER_S:
                slope = (after - before) / (after_ns - before_ns)
                seconds = (last_ns - first_ns) / NS_PER_S
                line = before + slope * ((first_ns + last_ns) / 2 - before_ns)
                joules += line * seconds
                error += max(abs(line - before), abs(line - after)) * seconds
                covered_ns += last_ns - first_ns
    if not in_flight or covered_ns < sum(end - start for start, end in in_flight):
        return None
    return joules, error, sum(any(start <= at <= end for start, end in flights) for at, _watts in samples)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_joules_are_those_of_a_walk_over_all_samples(data: st.DataObject) -> None:
    gaps = data.draw(st.lists(st.sampled_from([0, 1, 400, 999, 1000, 1000, 1001]), max_size=12))
    samples = [(at * NS_PER_S // 1000, float(data.draw(st.integers(0, 400)))) for at in accumulate(gaps, initial=5)]
    instant = st.integers(-500, 8000).map(lambda at: at * NS_PER_S // 1000)
    flight = st.tuples(instant, instant).map(lambda ends: (min(ends), max(ends)))
    flights = data.draw(st.lists(flight, max_size=5))
    found, known = energy_of(samples, flights), walked(samples, flights)
    assert (found is None) == (known is None)
    if found is not None:
        assert (found.joules, found.error_joules, found.num_samples) == pytest.approx(known, rel=1e-12, abs=1e-9)


@pytest.mark.parametrize("per_s", [2, 10])
def test_the_joules_of_a_known_power_are_within_the_error_where_power_moves_one_way(per_s: int) -> None:
    # 100 W + 50 W/s^2 t^2 over 4 s: 400 J + 50/3 * 64 J.
    times_s = [place / per_s for place in range(4 * per_s + 1)]
    found = energy_of(every(1 / per_s, [100 + 50 * at * at for at in times_s]), [(0, 4 * NS_PER_S)])
    known = 400 + 50 / 3 * 64
    assert 0 < abs(found.joules - known) <= found.error_joules
    assert found.error_joules == pytest.approx(50 * 16 / 2 / per_s)


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_the_joules_of_a_power_that_steps_once_between_samples_are_within_the_error(data: st.DataObject) -> None:
    ms = 1_000_000
    times = list(accumulate(data.draw(st.lists(st.integers(1, 1000), min_size=1, max_size=8)), initial=0))
    watts = [float(data.draw(st.integers(0, 400))) for _ in times]
    steps = [data.draw(st.integers(first + 1, last)) for first, last in pairwise(times)]
    start, end = sorted(data.draw(st.lists(st.integers(0, times[-1]), min_size=2, max_size=2, unique=True)))
    known = sum(watts[sum(step <= at for step in steps)] for at in range(start, end)) / 1000
    samples = [(at * ms, each) for at, each in zip(times, watts, strict=True)]
    found = energy_of(samples, [(start * ms, end * ms)])
    assert abs(found.joules - known) <= found.error_joules + 1e-9


@pytest.mark.parametrize(("backend", "word"), [("emulator", "emulated power"), ("attached", "measured power")])
def test_emulated_joules_are_called_emulated_and_their_sampling_error_stands_beside(
    tmp_path: Path, backend: str, word: str
) -> None:
    run = run_with_power(tmp_path, [40.0, 60.0], backend=backend)
    energy, summary = run_energy(run), summarise([run])
    assert energy.is_emulated == (backend == "emulator")
    assert energy.error_joules == pytest.approx(10 / 50 * energy.joules, rel=0.2)
    assert word in summary.energy.name
    (row,) = summary.runs_to_arrow().to_pylist()
    assert row["energy_is_emulated"] == energy.is_emulated
    assert row["energy_sampling_error_J"] == energy.error_joules
    plain = summarise([seal_run(tmp_path / "plain")])
    assert plain.energy is None
    assert not [name for name in plain.runs_to_arrow().column_names if name.startswith("energy_J")]


def run_with_power(folder: Path, watts: list[float], **shape: Any) -> SealedRun:
    """A sealed run whose exporter was asked twice a second and gave these watts in turn."""
    spans = seal_run(folder / "spans").table("requests").select(["sent_ns", "done_ns"]).to_pylist()
    first_ns, last_ns = min(row["sent_ns"] for row in spans), max(row["done_ns"] for row in spans)
    at_ns = range(first_ns - NS_PER_S, last_ns + NS_PER_S, NS_PER_S // 2)
    reading = {"device": "rbln0", "card": "A", "units": {}}
    lines = [
        json.dumps({"at_ns": at, "reason": "interval", "readings": [reading | {"card_power_w": each}]})
        for at, each in zip(at_ns, cycle(watts), strict=False)
    ]
    return seal_run(folder / "with", Shape(files={layout.DEVICE_METRICS: "\n".join(lines)}, **shape))


def test_a_run_whose_exporter_was_asked_often_has_joules_a_token_and_a_session(tmp_path: Path) -> None:
    assert MEASURES["energy"].of(seal_run(tmp_path / "without")) is None
    run = run_with_power(tmp_path, [50.0])
    energy, value = run_energy(run), MEASURES["energy"].of(run)
    assert value.amount == pytest.approx(energy.joules)
    flight_s = run_figures(run).b_ns / NS_PER_S
    assert energy.joules == pytest.approx(50.0 * flight_s)
    assert MEASURES["energy"].bounds(run) is None  # steady power
    per_session = MEASURES["energy_session"].of(run)
    assert per_session is None or per_session.amount == value.amount


def test_joules_have_the_bounds_that_sampling_leaves_in_gate_baseline_and_table(tmp_path: Path) -> None:
    run = run_with_power(tmp_path, [40.0, 60.0])
    energy, tokens = run_energy(run), run_figures(run).generated_tokens
    least, most = ((energy.joules + sign * energy.error_joules) / tokens for sign in (-1, 1))
    assert gate_run(run).bounds["energy"] == pytest.approx((least, most))
    save_baseline(tmp_path / "saved", [run])
    (saved,) = load_baseline(tmp_path / "saved")
    assert saved.bounds["energy"] == pytest.approx((least, most))
    (row,) = summarise([run]).to_arrow().to_pylist()
    assert (row["J_per_token_at_least"], row["J_per_token_at_most"]) == pytest.approx((least, most))


def test_a_report_that_lacks_a_card_is_no_sample(tmp_path: Path) -> None:
    cards = [{"device": name, "card": name, "card_power_w": 100.0} for name in ("A", "B")]
    without_power = [cards[0], cards[1] | {"card_power_w": None}]
    reports = [cards, cards, cards[:1], cards, without_power, cards, cards, [cards[1]], cards]
    file = tmp_path / "devices.jsonl"
    file.write_text("".join(f"{json.dumps({'at_ns': at, 'readings': each})}\n" for at, each in enumerate(reports)))
    assert power_samples(file) == [(at, 200.0) for at, each in enumerate(reports) if each is cards]


def windowed(folder: Path, **keys: Any) -> SealedRun:
    """A simulated run of many equal sessions, whose exporter read 200 W where requests were in flight, else 100 W."""
    workload = {"num_sessions": 36, "concurrency": 3, "requests_per_session": 2}
    spec = small_experiment(backend="sim", time_scale=1.0, replicates=1, workload=workload, **keys)
    run = run_experiment(spec, runs_root=folder).runs[0]
    rows = run.table("requests").to_pylist()
    instants = range(-NS_PER_S, max(row["done_ns"] for row in rows) + NS_PER_S, NS_PER_S // 4)
    lines: list[str] = []
    for at in instants:
        watts = 100.0 + 100.0 * any(row["sent_ns"] <= at < row["done_ns"] for row in rows)
        reading = {"device": "rbln0", "card": "A", "units": {}, "card_power_w": watts}
        lines.append(json.dumps({"at_ns": at, "reason": "interval", "readings": [reading]}))
    (run.path / layout.DEVICE_METRICS).write_text("\n".join(lines))
    return as_sealed(run, run.path)


def test_joules_a_session_are_of_the_sessions_that_are_counted(tmp_path: Path) -> None:
    """A window that leaves out half of the sessions has their joules, not those of the run."""
    whole = MEASURES["energy_session"].of(windowed(tmp_path / "whole"))
    run = windowed(tmp_path / "part", window={"after_requests": 12})
    energy, part = run_energy(run), MEASURES["energy_session"].of(run)
    assert part.units < whole.units * 2 / 3
    assert part.amount < energy.joules * 2 / 3
    assert part.amount / part.units == pytest.approx(whole.amount / whole.units, rel=0.2)
    parts = [energy_of_sessions(run, np.arange(36) == session) for session in range(36)]
    assert sum(each.joules for each in parts if each is not None) == pytest.approx(energy.joules)


def test_the_table_of_energy_says_what_samples_cannot_bound(tmp_path: Path) -> None:
    table = summarise([run_with_power(tmp_path, [50.0])]).energy
    (cells,) = table.rows
    row = dict(zip(table.columns, cells, strict=True))
    assert row["sampling error, J"] == 0
    assert row["may miss, % of time"] == pytest.approx(100 * (1 - 0.05 ** (1 / row["samples"])))
    assert "nothing of pulses between two samples" in table.caption
