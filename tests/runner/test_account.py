"""What an experiment still takes is told from its plans, and corrected by the runs that have finished."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.experiment import resolve
from harness.records import RunKey
from harness.runner.account import Forecast
from tests.support.experiments import small_experiment


def forecast_of(backend: str, folder: Path, **spec: Any) -> tuple[Forecast, list[RunKey]]:
    planned = list(resolve(small_experiment(backend=backend, replicates=3, condition=[{"name": "only"}], **spec)))
    return Forecast(planned, folder), [run.key for run in planned]


def test_a_modelled_server_differs_from_its_forecast_by_its_set_up(tmp_path: Path) -> None:
    forecast, (first, second, third) = forecast_of("emulator", tmp_path)
    said_s = [forecast.of(key) for key in (first, second, third)]
    forecast.finished(first, said_s[0] + 2.0)
    assert [forecast.of(second), forecast.of(third)] == pytest.approx([said_s[1] + 2.0, said_s[2] + 2.0])
    assert forecast.left_s() == pytest.approx(sum(said_s[1:]) + 4.0)


def test_what_has_a_pace_of_its_own_is_forecast_at_that_pace(tmp_path: Path) -> None:
    forecast, (first, second, third) = forecast_of("attached", tmp_path, time_scale=1.0)
    said_s = [forecast.of(key) for key in (first, second, third)]
    forecast.finished(first, 3 * said_s[0])
    assert [forecast.of(second), forecast.of(third)] == pytest.approx([3 * said_s[1], 3 * said_s[2]])


def test_what_the_first_simulation_loads_is_no_pace_of_those_after_it(tmp_path: Path) -> None:
    forecast, keys = forecast_of("sim", tmp_path)
    said_s = [forecast.of(key) for key in keys]
    loading_s = forecast.left_s() - sum(said_s)
    assert loading_s > 0
    forecast.finished(keys[0], said_s[0] + loading_s)
    assert forecast.left_s() == pytest.approx(sum(said_s[1:]))


def test_a_machine_that_became_busy_is_forecast_by_its_latest_runs(tmp_path: Path) -> None:
    planned = list(resolve(small_experiment(backend="sim", replicates=20)))
    forecast, keys = Forecast(planned, tmp_path), [run.key for run in planned]
    said_s = {key: forecast.of(key) for key in keys}
    for place, key in enumerate(keys[:-1]):
        forecast.finished(key, said_s[key] * (1 if place < 20 else 5))
    assert forecast.left_s() == pytest.approx(5 * said_s[keys[-1]])


@pytest.mark.parametrize("backend", ["emulator", "sim"])
def test_devices_that_keep_step_wait_for_each_other_and_simulated_ones_take_turns(backend: str, tmp_path: Path) -> None:
    shared = {"fleet": {"devices": [0, 1, 2], "lockstep": True}, "replicates": 3}
    planned = list(resolve(small_experiment(backend=backend, **shared)))
    forecast = Forecast(planned, tmp_path)
    longest_s = dict[int, float]()
    for run in planned:
        assert run.period is not None
        longest_s[run.period.number] = max(longest_s.get(run.period.number, 0.0), forecast.of(run.key))
    in_turn_s = sum(forecast.of(run.key) for run in planned)
    if backend == "emulator":
        assert forecast.left_s() == pytest.approx(sum(longest_s.values()))
        assert forecast.left_s() < in_turn_s
    else:
        assert forecast.left_s() >= in_turn_s


def test_a_simulated_run_costs_what_its_tokens_cost(tmp_path: Path) -> None:
    planned = [
        run
        for num_sessions in (2, 30)
        for run in resolve(
            small_experiment(backend="sim", name=f"of-{num_sessions}", workload={"num_sessions": num_sessions})
        )
    ]
    forecast = Forecast(planned, tmp_path)
    assert forecast.of(planned[0].key) < forecast.of(planned[-1].key)
