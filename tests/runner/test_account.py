"""What an experiment still takes is told from its plans, and corrected by the runs that have finished."""

from __future__ import annotations

from typing import Any

import pytest

from harness.experiment import resolve
from harness.records import RunKey
from harness.runner.account import Forecast
from tests.support.experiments import small_experiment


def forecast_of(backend: str, **spec: Any) -> tuple[Forecast, list[RunKey]]:
    planned = list(resolve(small_experiment(backend=backend, replicates=3, condition=[{"name": "only"}], **spec)))
    return Forecast(planned), [run.key for run in planned]


def test_a_modelled_server_differs_from_its_forecast_by_its_set_up() -> None:
    forecast, (first, second, third) = forecast_of("emulator")
    said_s = [forecast.of(key) for key in (first, second, third)]
    forecast.finished(first, said_s[0] + 2.0)
    assert [forecast.of(second), forecast.of(third)] == pytest.approx([said_s[1] + 2.0, said_s[2] + 2.0])
    assert forecast.left_s() == pytest.approx(sum(said_s[1:]) + 4.0)


@pytest.mark.parametrize("backend", ["attached", "sim"])
def test_what_has_a_pace_of_its_own_is_forecast_at_that_pace(backend: str) -> None:
    forecast, (first, second, third) = forecast_of(backend, time_scale=1.0)
    said_s = [forecast.of(key) for key in (first, second, third)]
    forecast.finished(first, 3 * said_s[0])
    assert [forecast.of(second), forecast.of(third)] == pytest.approx([3 * said_s[1], 3 * said_s[2]])


def test_a_simulated_run_costs_what_its_tokens_cost() -> None:
    small, keys = forecast_of("sim")
    large, _ = forecast_of("sim", workload={"num_sessions": 30})
    assert small.of(keys[0]) < large.of(keys[0])
