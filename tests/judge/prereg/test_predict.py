"""A prediction is a distribution: means over perturbed draws, intervals, and what of them was only assumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.analysis.compare.drawn import DrawnCosts, Predictions
from harness.analysis.stats import t_quantile
from harness.clock import NS_PER_S, MonotonicClock
from harness.errors import RecordsError
from harness.judge.prereg.predict import drawn_ratios, predict_experiment, predict_runs, predict_until_sure
from harness.model.experiment import PlannedRuns, resolve
from harness.model.sim import simulate
from harness.model.sim.draws import perturbation_of
from harness.model.spec import PerturbationSpec, parse_experiment
from harness.runner import run_experiment


def planned(seed: int = 7, /, **prediction: Any) -> PlannedRuns:
    table = {
        "name": "drawn",
        "backend": "sim",
        "base_seed": seed,
        "replicates": 2,
        "prediction": prediction,
        "workload": {"num_sessions": 6, "wait_cap_s": 5.0},
        "condition": [{"name": "base"}, {"name": "finer", "server": {"decode_buckets": [1, 2, 4, 6, 8]}}],
    }
    return resolve(parse_experiment(table, where="test"))


def test_whoever_waits_for_predictions_is_told_the_share_done() -> None:
    shares: list[float] = []
    predict_experiment(planned(draws=1), on_progress=shares.append)
    assert shares == [0.25, 0.5, 0.75, 1.0]


def test_a_sealed_run_is_predicted_when_its_prediction_is_asked_for(tmp_path: Path) -> None:
    spec = planned(draws=1).spec
    runs = run_experiment(spec, runs_root=tmp_path).runs
    (tmp_path / "drawn" / "finer" / "0" / "plan.jsonl").unlink()
    predictions = predict_runs(runs)
    assert {name: list(found) for name, found in predictions.items()} == {"base": [0, 1], "finer": [0, 1]}
    assert predictions["base"][0] == predict_experiment(resolve(spec))["base"][0]
    with pytest.raises(RecordsError, match="plan"):
        predictions["finer"][0]


def test_a_single_draw_is_the_nominal_simulation() -> None:
    runs = planned(draws=1)
    predictions = predict_experiment(runs)
    for run in runs:
        found, nominal = predictions[run.condition.name][run.replicate], simulate(run.plan, run.server, run.cost_model)
        assert (found.device_ns, found.end_ns, found.num_evictions) == (
            nominal.device_ns,
            nominal.end_ns,
            nominal.num_evictions,
        )
        assert found.waiting_session_ns == nominal.wait_session_ns
        assert found.draws is None
        assert DrawnCosts.of([found]).interval is None


def test_a_prediction_is_the_mean_of_its_draws_and_its_interval_holds_one_more_outcome() -> None:
    predictions = predict_experiment(planned(draws=12))
    (found, _other) = predictions["base"].values()
    device = DrawnCosts.of([found]).interval
    assert device.estimate == pytest.approx(found.device_ns, rel=1e-6)
    assert (device.num_units, device.level) == (12, 0.9)
    # One more normal outcome: t s sqrt(1 + 1/K), not the interval of a mean.
    values = found.draws.device_ns
    s = (sum((value - device.estimate) ** 2 for value in values) / 11) ** 0.5
    assert device.high - device.estimate == pytest.approx(t_quantile(0.9, 11) * s * (13 / 12) ** 0.5)


def test_conditions_share_true_costs_so_that_their_ratio_is_surer_than_each() -> None:
    predictions = predict_experiment(planned(draws=20))
    own, base = (DrawnCosts.of(list(predictions[name].values())) for name in ("finer", "base"))
    ratio, alone = own.interval_to(base), base.interval
    assert ratio.width / ratio.estimate < alone.width / alone.estimate
    undrawn = [one.model_copy(update={"draws": None}) for one in predictions["base"].values()]
    assert own.interval_to(DrawnCosts.of(undrawn)) is None


def test_experiments_have_true_costs_of_their_own() -> None:
    first, again, second = (
        [predict_experiment(planned(seed, draws=100))[name][0] for name in ("base", "finer")] for seed in (7, 7, 8)
    )
    assert first == again
    costs = [[one.draws.device_ns for one in each if one.draws is not None] for each in (first, second)]
    # Drawn once for all experiments, the same error would stand in every interval.
    assert np.corrcoef(costs[0][0], costs[0][1])[0, 1] > 0.3
    assert abs(np.corrcoef(costs[0][0], costs[1][0])[0, 1]) < 0.3


def test_what_is_not_calibrated_is_said_to_be_assumed(tmp_path: Path) -> None:
    (run, *_rest) = planned()
    assert (
        "assumed"
        not in perturbation_of(
            PerturbationSpec(start_ms=1, lag_ms=1, step_sd=0, decode_sd=0, bucket_sd=0, prefill_sd=0, artifact_sd=0),
            run.cost_file,
        ).line()
    )
    file = tmp_path / "mine.toml"
    interval = '"f(8)" = {low = 12.9, high = 13.1, level = 0.95}'
    file.write_text(f"{run.cost_file.read_text()}\n[calibration.decode.intervals]\n{interval}\n")
    found = perturbation_of(PerturbationSpec(lag_ms=3.0), file)
    assert found.lag_ms == 3.0
    assert found.bucket_sd == pytest.approx(0.1 / 1.96 / 12.97, rel=1e-3)
    assert {"lag_ms", "bucket_sd"}.isdisjoint(found.assumed)
    assert "assumed, not calibrated: start_ms" in found.line()


def test_draws_go_on_until_the_error_is_a_tenth_of_the_effect_or_of_the_margin() -> None:
    runs = planned(draws=4)
    (_, few), (name, enough) = (next(drawn_ratios(runs.spec, made(runs))) for made in (predict_experiment, sure))
    assert not few.is_sure(MARGIN)
    assert enough.is_sure(MARGIN)
    assert enough.num_draws > 4
    same = predict_experiment(runs, num_draws=enough.num_draws)
    assert next(drawn_ratios(runs.spec, same)) == (name, enough)


def test_draws_end_where_the_time_for_them_is_over_and_a_nominal_prediction_stays_one() -> None:
    runs = planned(draws=4)
    slow = predict_until_sure(runs, MARGIN, clock=Slow())
    assert next(drawn_ratios(runs.spec, slow))[1].num_draws == 4
    nominal = planned(draws=1)
    assert predict_until_sure(nominal, MARGIN) == predict_experiment(nominal)


MARGIN = 0.02


def sure(runs: PlannedRuns) -> Predictions:
    return predict_until_sure(runs, MARGIN)


class Slow(MonotonicClock):
    """A machine on which each look at the clock comes a minute after the one before."""

    def __init__(self) -> None:
        self.at_ns = 0

    def now_ns(self) -> int:
        self.at_ns += 60 * NS_PER_S
        return self.at_ns


def test_predictions_that_were_frozen_with_the_former_key_of_buckets_open() -> None:
    (run, *_rest) = planned(draws=1)
    now = predict_experiment(planned(draws=1))[run.condition.name][run.replicate]
    before = {**now.model_dump(mode="json", exclude={"interpolated_buckets"}), "filled_in_buckets": [3]}
    assert type(now).model_validate(before) == now.model_copy(update={"interpolated_buckets": (3,)})
