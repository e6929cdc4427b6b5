"""Fits recover what points were made from, say what they cannot tell, and give the paper's own figures."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from harness.analysis.calibration.fit import Fit, fit_decode, fit_decode_with_report, fit_prefill
from harness.analysis.calibration.fit_points import PrefillPoint, StepPoint
from harness.errors import SpecError
from harness.model.engine import CostModel, load_cost_model

PAPER, CONTEXT = load_cost_model("paper"), load_cost_model("context-1-2-4-8")
MS = 1e6
BUCKET_OF = {1: 1, 2: 2, 3: 4, 4: 4, 5: 8, 6: 8, 7: 8, 8: 8}


def points_of(
    model: CostModel,
    n: tuple[int, ...] = (1, 2, 3, 4, 6, 8),
    contexts: tuple[int, ...] = (512, 1500, 3000),
    noise: float = 0.0,
) -> list[StepPoint]:
    rng = np.random.default_rng(3)
    found: list[StepPoint] = []
    for num_seqs, context in product(n, contexts):
        step_ms = model.decode_step_ns(BUCKET_OF[num_seqs], num_seqs, num_seqs * context) / MS
        blocks = step_ms + noise * rng.standard_normal(20)
        found.append(StepPoint(num_seqs, BUCKET_OF[num_seqs], float(num_seqs * context), blocks))
    return found


def step_ms(fit: Fit, n: int, context_tokens: int) -> float:
    context_ms = fit["context_us_per_token"] / 1000 * context_tokens
    return fit.f_ms[BUCKET_OF[n]] + fit["alpha_ms"] + fit["beta_ms_per_request"] * n + context_ms


def prefill_ms(fit: Fit, tokens: int) -> float:
    return -(-tokens // 128) * (fit["per_call_ms"] + fit["per_call_us_per_token"] / 1000 * tokens)


@pytest.mark.parametrize("model", [PAPER, CONTEXT], ids=["paper", "context"])
def test_a_known_model_is_recovered_from_its_own_steps(model: CostModel) -> None:
    fit = fit_decode(points_of(model), seed=1)
    for n, context in product(range(1, 9), (512, 2000, 3000)):
        truth_ms = model.decode_step_ns(BUCKET_OF[n], n, n * context) / MS
        assert step_ms(fit, n, n * context) == pytest.approx(truth_ms, abs=2e-6)
    assert fit.error.max_ms < 2e-6
    assert fit.error.held_out_max_ms < 1e-5


def test_noise_widens_the_intervals_and_the_truth_stays_inside() -> None:
    quiet, noisy = (fit_decode(points_of(CONTEXT, noise=noise), seed=1) for noise in (0.01, 0.1))
    for name, truth in (("beta_ms_per_request", -0.004913), ("context_us_per_token", 0.145345), ("f(8)", 13.46253)):
        assert noisy.intervals[name].width > quiet.intervals[name].width
        assert noisy.intervals[name].contains(truth)


def test_a_context_term_that_is_not_there_is_left_out_and_said() -> None:
    fit = fit_decode(points_of(PAPER, noise=0.02), seed=1)
    assert fit["context_us_per_token"] == 0.0
    assert any("context term is left out" in note for note in fit.notes)
    assert fit_decode(points_of(PAPER, noise=0.02), with_context=True, seed=1)["context_us_per_token"] != 0.0


def test_the_same_seed_gives_the_same_intervals_which_name_method_unit_and_seed() -> None:
    first, again = (fit_decode(points_of(CONTEXT, noise=0.05), seed=9) for _ in range(2))
    assert first.intervals == again.intervals
    interval = first.intervals["f(4)"]
    assert (interval.seed, interval.unit) == (9, "blocks of 4 steps")
    assert "bootstrap" in interval.method


def test_full_buckets_alone_at_one_context_give_no_slope_and_ask_for_none() -> None:
    fit = fit_decode(points_of(PAPER, n=(1, 2, 4, 8), contexts=(512,)), seed=1)
    assert fit["beta_ms_per_request"] == 0.0
    assert "beta_ms_per_request" not in fit.intervals
    assert fit.error.num_not_held_out == 4


def test_points_that_cannot_tell_context_from_requests_are_refused_by_name() -> None:
    with pytest.raises(SpecError, match=r"cannot tell .*context_us_per_token"):
        fit_decode(points_of(CONTEXT, contexts=(512,)), with_context=True, seed=1)


def test_a_pass_of_the_drafter_takes_no_less_than_nothing() -> None:
    points = points_of(PAPER)
    points += [replace(point, passes=2, block_periods_ms=point.block_periods_ms - 0.02) for point in points]
    fit = fit_decode(points, seed=1)
    assert fit["per_pass_ms"] == 0.0
    assert any("per_pass_ms is held at 0: -0.010000 came out" in note for note in fit.notes)


def test_the_papers_way_takes_f_from_the_report_and_a_line_through_the_rest() -> None:
    f_ms = {1: 9.870, 2: 10.420, 4: 10.825, 8: 12.970}
    fit = fit_decode_with_report(points_of(PAPER, contexts=(512,)), f_ms, seed=1)
    assert fit["alpha_ms"] == pytest.approx(0.501, abs=1e-6)
    assert fit["beta_ms_per_request"] == pytest.approx(0.0413, abs=1e-6)
    with pytest.raises(SpecError, match="two numbers of requests"):
        fit_decode_with_report(points_of(PAPER, n=(8,), contexts=(512,)), f_ms, seed=1)


def test_the_published_inter_token_times_give_nearly_the_papers_line() -> None:
    # Published by the same authors for n = 1..8 at short contexts; not the data behind the printed coefficients
    # (0.501, 0.0413), whose table is not public.
    measured_ms = (10.379, 10.975, 11.482, 11.569, 13.632, 13.696, 13.785, 13.795)
    points = [StepPoint(n, BUCKET_OF[n], None, np.array([ms])) for n, ms in enumerate(measured_ms, 1)]
    fit = fit_decode_with_report(points, {1: 9.870, 2: 10.420, 4: 10.825, 8: 12.970}, seed=1)
    assert (round(fit["alpha_ms"], 3), round(fit["beta_ms_per_request"], 4)) == (0.492, 0.0433)
    assert fit.error.max_ms < 0.08


def prefills(observed_ms: dict[int, float]) -> list[PrefillPoint]:
    return [PrefillPoint(length, 0, elapsed_ms) for length, elapsed_ms in observed_ms.items()]


def test_the_papers_four_observations_give_its_prefill_coefficients_and_residual() -> None:
    # Table IV's medians and about 359 ms at 2,008 tokens. Printed: 21.206 ms and 0.6399 us, from unrounded times.
    fit = fit_prefill(prefills({500: 88.5, 2000: 359.6, 6000: 1177.2, 2008: 359.0}), seed=1)
    assert fit["per_call_ms"] == pytest.approx(21.206, rel=5e-4)
    assert fit["per_call_us_per_token"] == pytest.approx(0.6399, rel=3e-3)
    assert round(fit.error.max_ms, 1) == 2.4
    assert fit.fitted_tokens == (500, 6000)
    assert prefill_ms(fit, 88) == pytest.approx(PAPER.prefill_ns(88) / MS, abs=0.02)


def test_prefills_of_one_length_are_no_line() -> None:
    with pytest.raises(SpecError, match="two lengths"):
        fit_prefill(prefills({500: 88.5}), seed=1)


def test_a_prefill_is_counted_in_device_calls_of_128_tokens() -> None:
    fit = fit_prefill(prefills({length: PAPER.prefill_ns(length) / MS for length in (128, 129, 1000, 6000)}), seed=1)
    assert prefill_ms(fit, 128) == pytest.approx(PAPER.prefill_ns(128) / MS, abs=1e-5)
    assert prefill_ms(fit, 129) == pytest.approx(PAPER.prefill_ns(129) / MS, abs=1e-5)


def test_what_a_step_of_prompts_takes_more_without_a_graph_is_told_from_its_tokens() -> None:
    works = [(8, False), (16, False), (32, False), (128, True), (512, True), (2000, True)]
    points = [
        PrefillPoint(length, 0, 1.5 + 0.01 * length + 25.0 * is_eager + wobble, length, 4.0, is_eager)
        for length, is_eager in works
        for wobble in (-0.01, 0.0, 0.01)
    ]
    fit = fit_prefill(points, seed=1, chunk_tokens=4096, is_relative=True)
    assert fit["per_step_eager_ms"] == pytest.approx(25.0, rel=0.01)
    assert fit["per_call_ms"] == pytest.approx(1.5, rel=0.02)
    assert fit.error.max_ms < 0.1
    without = [replace(point, is_eager=False) for point in points]
    assert fit_prefill(without, seed=1, chunk_tokens=4096, is_relative=True)["per_step_eager_ms"] == 0


def test_a_request_more_that_makes_a_step_shorter_is_said() -> None:
    shorter = replace(PAPER, beta_fs=-PAPER.beta_fs, _filled_fs={})
    (note,) = (note for note in fit_decode(points_of(shorter), seed=1).notes if "makes a step shorter" in note)
    assert "not as the cost of a request" in note
    assert not any("makes a step shorter" in note for note in fit_decode(points_of(PAPER), seed=1).notes)


def test_a_fit_of_shares_holds_short_prefills_to_the_line_as_well_as_long_ones() -> None:
    # Long prefills of a host that was 5 % slower then: a fit of times gives the short ones what is left over.
    observed_ms = {8: 4.0, 64: 20.8, 500: 151.6, 2000: 632.1, 4000: 1262.5}
    of_times, of_shares = (
        fit_prefill(prefills(observed_ms), seed=1, chunk_tokens=4096, is_relative=choice) for choice in (False, True)
    )
    assert of_times.error.max_share > 0.2
    assert of_shares.error.max_share < 0.04


def test_a_context_cost_below_0_makes_no_sense_is_held_at_0_and_said() -> None:
    backwards = replace(CONTEXT, context_fs=-CONTEXT.context_fs, _filled_fs={})
    for with_context in (None, True):
        fit = fit_decode(points_of(backwards, noise=0.01), with_context=with_context, seed=1)
        assert fit["context_us_per_token"] == 0.0
        assert "context_us_per_token" not in fit.errors.names
        assert any("held at 0: a longer context cannot make a step shorter" in note for note in fit.notes)


def test_a_prefill_coefficient_below_0_is_held_at_0_and_said() -> None:
    per_call = fit_prefill(prefills({100: 1.0, 1000: 80.0, 2000: 320.0, 4000: 1400.0}), seed=1)
    assert per_call["per_call_ms"] == 0.0
    assert per_call["per_call_us_per_token"] > 0
    [note] = per_call.notes
    assert note.startswith("per_call_ms is held at 0: -")
    per_token = fit_prefill(prefills({128: 30.0, 1280: 200.0, 2560: 300.0}), seed=1)
    assert per_token["per_call_us_per_token"] == 0.0
    assert per_token.errors.names == ("per_call_ms",)


def test_the_worst_error_stands_beside_the_step_that_it_is_of() -> None:
    assert fit_decode(points_of(PAPER, noise=0.02), seed=1).error.is_good
    points = points_of(PAPER, noise=0.02)
    slow = [replace(points[4], block_periods_ms=points[4].block_periods_ms + 1.65), *points[:4], *points[5:]]
    error = fit_decode(slow, seed=1).error
    assert not error.is_good
    assert error.worst == "2 requests of about 1536 tokens, size 2"
    assert f"{100 * error.largest_share:.1f} %" in error.worst_in_words
    assert error.worst_ms == pytest.approx(error.largest_share * error.worst_of_ms)


def test_the_covariance_of_a_fit_is_that_of_repeated_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    # The intervals of each fit are not the subject.
    monkeypatch.setattr("harness.analysis.calibration.fit.RESAMPLES", 20)
    # Each point is moved by itself, as a restart moves it; 100 calibrations of one server.
    rng, fits = np.random.default_rng(5), []
    for _ in range(100):
        moved = [
            replace(point, block_periods_ms=point.block_periods_ms + rng.normal(0, 0.1)) for point in points_of(PAPER)
        ]
        fits.append(fit_decode(moved, with_context=False, seed=1))
    for place, name in enumerate(fits[0].errors.names):
        values = [fit.f_ms[8] if name == "f(8)" else fit["beta_ms_per_request"] for fit in fits]
        if name in ("f(8)", "beta_ms_per_request"):
            stated = np.sqrt(np.mean([fit.errors.standard_errors[place] ** 2 for fit in fits]))
            assert np.std(values) == pytest.approx(stated, rel=0.2)
