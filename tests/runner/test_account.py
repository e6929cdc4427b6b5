"""What an experiment still takes is told from its plans, and corrected by the runs that have finished."""

from __future__ import annotations

from typing import Any

import pytest

from harness.experiment import resolve
from harness.records import RunKey
from harness.runner.account import Forecast, predicted_work
from tests.support.experiments import small_experiment


def forecast_of(backend: str, **spec: Any) -> tuple[Forecast, list[RunKey]]:
    planned = list(resolve(small_experiment(backend=backend, replicates=3, condition=[{"name": "only"}], **spec)))
    return Forecast(planned), [run.key for run in planned]


def test_a_modelled_server_differs_from_its_forecast_by_its_set_up() -> None:
    forecast, (first, second, third) = forecast_of("emulator")
    said_s = {key: forecast.of(key) or 0.0 for key in (first, second, third)}
    forecast.finished(first, said_s[first] + 2.0)
    assert [forecast.of(second), forecast.of(third)] == pytest.approx([said_s[second] + 2.0, said_s[third] + 2.0])
    assert forecast.left_s() == pytest.approx(said_s[second] + said_s[third] + 4.0)


def test_what_has_a_pace_of_its_own_is_forecast_at_that_pace() -> None:
    forecast, (first, second, third) = forecast_of("attached", time_scale=1.0)
    said_s = {key: forecast.of(key) or 0.0 for key in (first, second, third)}
    forecast.finished(first, 3 * said_s[first])
    assert [forecast.of(second), forecast.of(third)] == pytest.approx([3 * said_s[second], 3 * said_s[third]])


def test_simulated_runs_are_forecast_at_the_pace_of_those_after_the_first_and_before_not_at_all() -> None:
    forecast, keys = forecast_of("sim")
    assert forecast.left_s() is None
    forecast.finished(keys[0], 50.0)  # it loads code
    assert forecast.left_s() is None
    forecast.finished(keys[1], 2.0)
    assert forecast.left_s() == pytest.approx(2.0, rel=0.2)


def test_a_machine_that_became_busy_is_forecast_by_its_latest_runs() -> None:
    planned = list(resolve(small_experiment(backend="sim", replicates=20)))
    forecast, keys = Forecast(planned), [run.key for run in planned]
    for place, key in enumerate(keys[:-1]):
        forecast.finished(key, 1.0 if place < 20 else 5.0)
    assert forecast.left_s() == pytest.approx(5.0, rel=0.1)


def test_devices_that_keep_step_wait_for_each_other() -> None:
    shared = {"fleet": {"devices": [0, 1, 2], "lockstep": True}, "replicates": 3}
    planned = list(resolve(small_experiment(backend="emulator", **shared)))
    forecast = Forecast(planned)
    longest_s, in_turn_s = dict[int, float](), 0.0
    for run in planned:
        wall_s = forecast.of(run.key)
        assert run.period is not None
        assert wall_s is not None
        longest_s[run.period.number] = max(longest_s.get(run.period.number, 0.0), wall_s)
        in_turn_s += wall_s
    assert forecast.left_s() == pytest.approx(sum(longest_s.values()))
    assert sum(longest_s.values()) < in_turn_s


def test_simulated_devices_take_turns_on_this_machine() -> None:
    shared = {"fleet": {"devices": [0, 1, 2], "lockstep": True}, "replicates": 3}
    planned = list(resolve(small_experiment(backend="sim", **shared)))
    forecast = Forecast(planned)
    for run in planned[:2]:
        forecast.finished(run.key, 3.0)
    assert forecast.left_s() == pytest.approx(3.0 * len(planned[2:]), rel=0.1)


def test_a_simulated_run_takes_what_its_tokens_take() -> None:
    few, many = (
        next(iter(resolve(small_experiment(backend="sim", workload={"num_sessions": number})))) for number in (2, 30)
    )
    assert predicted_work(few) < predicted_work(many)
