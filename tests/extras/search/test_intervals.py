"""Intervals are wide where something is unknown, narrow where nothing is, and the same on every machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.errors import SpecError
from harness.extras.search.intervals import ABLATIONS, SpacePredictor
from harness.extras.search.space import DrawsSpec, SpaceSpec, parse_space
from harness.model.engine import EngineConfig, load_cost_model
from harness.model.experiment import build_plan
from harness.model.sim import plan_arrays, simulate
from harness.model.sim.draws import Perturbation, jitter, perturbation_of, perturbed
from harness.model.spec import ServerShape, WorkloadSpec

CERTAIN: dict[str, Any] = {
    "plans": "given",
    "start_ms": 0,
    "lag_ms": 0,
    "decode_sd": 0,
    "bucket_sd": 0,
    "prefill_sd": 0,
    "artifact_sd": 0,
    "step_sd": 0,
}
MORE_SLOTS = ServerShape(16, (1, 2, 4, 8, 16), 16, 8192)


def space(**prediction: Any) -> SpaceSpec:
    table = {
        "name": "intervals",
        "max_num_seqs": [8, 16],
        "inputs": {"users": [8], "search_seeds": [1], "evaluation_seeds": [2], "workload": {"wait_cap_s": 20}},
        "prediction": {"draws": 60, **prediction},
    }
    return parse_space(table, where="test")


def test_when_everything_is_known_but_the_order_the_interval_is_nearly_a_point() -> None:
    found = SpacePredictor(space(**CERTAIN)).predict(MORE_SLOTS, 8)
    assert found.high - found.low < 0.03
    assert found.low - 0.02 <= found.ratio_of_sums <= found.high + 0.02


def test_each_unknown_widens_the_interval() -> None:
    def width(**unknown: Any) -> float:
        found = SpacePredictor(space(**{**CERTAIN, **unknown})).predict(MORE_SLOTS, 8)
        return found.high - found.low

    known = width()
    assert width(plans="new") > 2 * known
    assert width(bucket_sd=0.05) > known
    assert width(prefill_sd=0.2) > known


def test_predictions_are_repeatable() -> None:
    assert SpacePredictor(space()).predict(MORE_SLOTS, 8) == SpacePredictor(space()).predict(MORE_SLOTS, 8)


def test_a_configuration_shows_no_difference_from_itself() -> None:
    base = space().baseline.shape
    found = SpacePredictor(space()).predict(base, 8)
    assert found.ratio_of_sums == found.median_of_pairs == 1.0
    assert not found.shows_difference


def test_nominal_ratios_are_those_of_the_simulated_evaluation_plans() -> None:
    spec = space()
    prediction = SpacePredictor(spec).predict(MORE_SLOTS, 8)
    plans = [build_plan(spec.inputs.workload_of(8), 2, replicate) for replicate in range(spec.inputs.replicates)]
    costs, base_costs = (
        np.array([simulate(plan, EngineConfig.of_shape(shape, spec.rules)).device_ns for plan in plans])
        for shape in (MORE_SLOTS, spec.baseline.shape)
    )
    assert len(plans) > 1
    assert prediction.ratio_of_sums == pytest.approx(costs.sum() / base_costs.sum())
    assert prediction.median_of_pairs == pytest.approx(np.median(costs / base_costs))
    assert prediction.ratio_of_sums != pytest.approx(prediction.median_of_pairs)


def test_more_replicates_narrow_the_interval() -> None:
    few, many = (SpacePredictor(space(replicates=count)).predict(MORE_SLOTS, 8) for count in (2, 12))
    assert many.high - many.low < few.high - few.low


def test_common_costs_cancel_in_a_ratio_of_the_same_steps() -> None:
    # Without waits and with slots to spare both configurations take the same steps, so only f(8) against f(6) is left.
    spec = parse_space(
        {
            "name": "same-steps",
            "max_num_seqs": [8],
            "inputs": {"users": [6], "search_seeds": [1], "treatment": "no-waits"},
            "baseline": {"kv_slots": 40},
            "prediction": {**CERTAIN, "draws": 40, "decode_sd": 0.2, "prefill_sd": 0.2},
        },
        where="test",
    )
    grid = ServerShape(8, (1, 2, 4, 8), 41, 8192)
    ours, base = SpacePredictor(spec).sampled((grid, spec.baseline.shape), (6,))
    assert np.abs(ours / base - 1).max() < 0.02


def test_jitter_only_delays_and_breaks_every_tie() -> None:
    arrays = plan_arrays([build_plan(WorkloadSpec(num_sessions=8), 1, 0)])
    moved = jitter(arrays, Perturbation(1, start_ms=0, lag_ms=2), 0)
    assert (moved.sessions["start_ns"] >= arrays.sessions["start_ns"]).all()
    assert (moved.requests["wait_ns"] >= arrays.requests["wait_ns"]).all()
    assert len(set(moved.sessions["start_ns"].tolist())) == 8
    other = jitter(arrays, Perturbation(1, start_ms=0, lag_ms=2), 1)
    assert not np.array_equal(moved.sessions["start_ns"], other.sessions["start_ns"])


def test_a_perturbed_cost_model_without_perturbation_is_the_model() -> None:
    model = load_cost_model("paper")
    same = perturbed(model, perturbation_of(space(**CERTAIN).prediction, "paper"), 3)
    for bucket in (1, 4, 6, 8, 10, 16):
        assert same.decode_step_ns(bucket, 1) == model.decode_step_ns(bucket, 1)
    assert same.prefill_ns(1000, 128) == model.prefill_ns(1000, 128)
    other = perturbed(model, Perturbation(1), 3)
    assert other.decode_step_ns(8, 8) != model.decode_step_ns(8, 8)


def test_samples_never_use_the_seeds_of_the_search_or_the_evaluation() -> None:
    with pytest.raises(SpecError, match="seed 2"):
        SpacePredictor(space(seed=2)).predict(MORE_SLOTS, 8)


def test_ablations_are_predicted_like_everything_else() -> None:
    plain = SpacePredictor(space()).predict(MORE_SLOTS, 8)
    for changed in ABLATIONS.values():
        found = SpacePredictor(space()).predict(MORE_SLOTS, 8, changed)
        assert 0.5 < found.low <= found.high < 1.5
        assert found.rules == (changed.rules or plain.rules)
    assert SpacePredictor(space()).predict(MORE_SLOTS, 8, ABLATIONS["no-waits"]).ratio_of_sums != plain.ratio_of_sums


COSTS = """
name = "mine"
source = "calibration"
[decode]
alpha_ms = 0.5
[decode.f_ms]
1 = 10.0
8 = 13.0
[prefill]
per_call_ms = 20.0
"""


def written(name: str, low: float, high: float) -> str:
    return f'"{name}" = {{low = {low}, high = {high}, level = 0.95, method = "percentile bootstrap", seed = 1}}\n'


DECODE = f"[calibration.decode.intervals]\n{written('f(1)', 9.804, 10.196)}{written('f(8)', 12.7452, 13.2548)}"
PREFILL = f"[calibration.prefill.intervals]\n{written('per_call_ms', 19.608, 20.392)}"
OF_A_VLLM = (
    "per_call_us_per_token = 20.0\n[chunked_prefill]\nper_step_ms = 20.0\nper_token_us = 20.0\n"
    "[calibration.prefill.intervals]\n"
    f"{written('per_call_ms', 1.0, 60.0)}{written('per_call_us_per_token', 19.608, 20.392)}"
)


@pytest.mark.parametrize(
    ("added", "known"), [(DECODE + PREFILL, ("bucket_sd", "prefill_sd")), (OF_A_VLLM, ("prefill_sd",))]
)
def test_a_calibrated_cost_file_brings_its_own_deviations_those_of_a_vllms_prompts_by_the_time_of_a_token(
    tmp_path: Path, added: str, known: tuple[str, ...]
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(COSTS + added, encoding="utf-8")
    found = perturbation_of(DrawsSpec(), str(path))
    assert [getattr(found, name) for name in known] == pytest.approx([0.01] * len(known), rel=1e-3)


def test_deviations_of_a_cost_file_widen_an_interval_and_must_be_readable(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(COSTS + DECODE + PREFILL, encoding="utf-8")
    assert perturbation_of(DrawsSpec(), "paper").sizes == Perturbation(0).sizes
    uncertain = space(**{**CERTAIN, "bucket_sd": None, "prefill_sd": None})
    wide = SpacePredictor(uncertain.model_copy(update={"cost_model": str(path)})).predict(MORE_SLOTS, 8)
    assert wide.low < wide.high
    broken = DECODE.replace(written("f(1)", 9.804, 10.196), '"f(1)" = "about ten"\n')
    path.write_text(COSTS + broken, encoding="utf-8")
    with pytest.raises(SpecError, match=r"its interval of f\(1\) cannot be read"):
        perturbation_of(DrawsSpec(), str(path))


def test_true_costs_are_drawn_from_the_covariance_that_a_cost_file_states(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        f"""{COSTS}[[errors]]
coefficients = ["f(1)", "f(8)", "alpha_ms", "per_call_ms"]
standard_errors = [0.2, 0.2, 0.0, 0.4]
correlations = [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
degrees = 20
""",
        encoding="utf-8",
    )
    found = perturbation_of(DrawsSpec.model_validate({**CERTAIN, "bucket_sd": None, "prefill_sd": None}), str(path))
    assert found.draws_errors
    assert "costs: drawn from the covariance of their fit" in found.line()
    assert "bucket_sd" not in found.line()
    model = load_cost_model(path)
    drawn = [perturbed(model, found, number) for number in range(400)]
    one, four, eight = (np.array([each.bucket_fs(size) / 1e12 for each in drawn]) for size in (1, 4, 8))
    # The file says that both move together; the size between them lies anywhere from one to the other.
    assert np.corrcoef(one, eight)[0, 1] > 0.999
    assert (one.std(), eight.std()) == pytest.approx((0.2, 0.2), rel=0.1)
    reach = 12 / 7
    assert np.ptp(four - (4 * one + 3 * eight) / 7) == pytest.approx(2 * reach, rel=0.05)
    assert np.array([each.call_fs / 1e12 for each in drawn]).std() == pytest.approx(0.4, rel=0.1)
    # What an experiment gives comes first.
    assert not perturbation_of(DrawsSpec(bucket_sd=0.01), str(path)).draws_errors
