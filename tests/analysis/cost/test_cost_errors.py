"""The error of a cost model is in the interval of A: once, without what cancels, and "given" where it is unknown."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.channels import TEMPLATE
from benchmarks.costs import coverage_of_drawn_truth, drawn_intervals, fitted, true_model
from harness.analysis.calibration.fit import fit_decode
from harness.analysis.calibration.fit_points import StepPoint
from harness.analysis.compare.answer import interval_in_words
from harness.analysis.compare.channels import Comparison, compare
from harness.analysis.compare.ratio import estimate_of_blocks
from harness.analysis.cost.cost_errors import CostSide, cost_error, with_cost_error
from harness.analysis.cost.reconstruct import ChannelA
from harness.analysis.figures import run_figures
from harness.analysis.stats import of_blocks
from harness.errors import SpecError
from harness.model.engine import CostModel, load_cost_model
from harness.model.engine.cost import FS_PER_MS, FitErrors, size_name, to_fs
from harness.model.spec import parse_experiment
from harness.runner import run_experiment

MS = 1_000_000
PAPER = load_cost_model("paper")
# f known to 1 %, alpha and beta as the paper has them; no error of prefills.
ERRORS = FitErrors(
    ("f(1)", "f(2)", "f(4)", "f(8)", "alpha_ms", "beta_ms_per_request"),
    (0.1, 0.1, 0.1, 0.13, 0.0, 0.0),
    tuple(map(tuple, np.eye(6).tolist())),
    20,
)


def with_errors(model: CostModel, *errors: FitErrors) -> CostModel:
    return replace(model, errors=errors, _filled_fs={})


def priced(usage: dict[str, float], model: CostModel) -> ChannelA:
    costs = {size_name(size): model.bucket_fs(size) / FS_PER_MS for size in range(1, 17)} | model.coefficients
    return ChannelA(
        round(sum(costs[name] * amount for name, amount in usage.items()) * MS), 0, 0, 0, 0, "", usage, model
    )


def compared(own: dict[str, float], base: dict[str, float], model: CostModel) -> Comparison:
    """Three blocks whose costs scatter by a thousandth."""
    sides = [
        [
            replace(
                TEMPLATE, replicate=k, unit=k, a=priced({name: x * wobble for name, x in usage.items()}, model), b_ns=1
            )
            for k, wobble in enumerate(wobbles)
        ]
        for usage, wobbles in ((own, (1.0, 1.001, 0.999)), (base, (1.001, 0.999, 1.0)))
    ]
    return compare("base", *sides)


def test_the_usage_of_a_run_gives_its_modelled_time_again(tmp_path: Path) -> None:
    table = {
        "name": "small",
        "backend": "sim",
        "base_seed": 7,
        "replicates": 1,
        "workload": {"num_sessions": 3, "wait_cap_s": 1.0},
        "server": {"cost_model": "context-1-2-4-8"},
        "condition": [{"name": "base"}],
    }
    (run,) = run_experiment(parse_experiment(table, where="test"), runs_root=tmp_path).runs
    a = run_figures(run).a
    costs = run.cost_model.coefficients
    assert sum(costs[name] * amount for name, amount in a.usage.items()) * MS == pytest.approx(a.total_ns, rel=1e-6)
    assert a.usage["per_call_ms"] > 0
    assert a.usage["context_us_per_token"] > 0


def test_a_cost_that_both_sides_have_in_common_cancels() -> None:
    model = with_errors(PAPER, ERRORS)
    same = compared({"f(8)": 100.0}, {"f(8)": 200.0}, model)
    other = compared({"f(4)": 100.0}, {"f(8)": 100.0}, model)
    assert same.a.interval == replace(estimate_of_blocks(same.a.of_blocks).interval(), method=same.a.interval.method)
    # Two costs of 1 % each: 1.96 * .0136.
    assert math.log(other.a.interval.high / other.a.interval.low) / 2 > 0.026


def test_the_error_of_the_costs_is_there_however_many_blocks_there_are() -> None:
    model, rng = with_errors(PAPER, ERRORS), np.random.default_rng(1)
    error = cost_error(CostSide([priced({"f(4)": 1.0}, model)], 1.0), CostSide([priced({"f(8)": 1.0}, model)], -1.0))
    of_costs = math.hypot(0.1 / 10.825, 0.13 / 12.97)
    for num in (3, 1000):
        estimate = of_blocks(rng.normal(0, 0.001, num).tolist())
        assert with_cost_error(estimate, error).error == pytest.approx(math.hypot(estimate.error, of_costs), rel=1e-4)
        assert not with_cost_error(estimate, error).interval().is_given_costs


def test_two_cost_files_do_not_share_their_errors() -> None:
    models = [with_errors(PAPER, ERRORS), with_errors(replace(PAPER, name="other"), ERRORS)]
    sides = [CostSide([priced({"f(8)": 1.0}, model)], sign) for model, sign in zip(models, (1.0, -1.0), strict=True)]
    assert sum(variance for variance, _ in cost_error(*sides).parts) == pytest.approx(2 * (0.13 / 12.97) ** 2, rel=1e-4)


def test_costs_without_an_error_make_an_interval_given_these_costs() -> None:
    published = compared({"f(4)": 100.0}, {"f(8)": 100.0}, PAPER)
    assert interval_in_words(published.a.interval).startswith("95 % interval, cost model assumed exact: ")
    # An error of other costs is no error of this one.
    prefills = FitErrors(("per_call_ms",), (0.1,), ((1.0,),), 5)
    part = compared({"f(4)": 100.0}, {"f(8)": 100.0}, with_errors(PAPER, prefills))
    assert part.a.interval.is_given_costs
    assert interval_in_words(published.b.interval or part.a.interval).startswith("95 % interval")


def test_sizes_that_were_not_measured_carry_the_spread_of_models_that_fit_the_measured_ones() -> None:
    exact = with_errors(PAPER, replace(ERRORS, standard_errors=(0.0,) * 6))
    [(six, degrees)] = exact.error_of({"f(6)": 1.0}).parts
    # Flat up to either neighbour, or on the line between them: a uniform spread.
    assert six == pytest.approx(((12.97 - 10.825) / 2) ** 2 / 3)
    assert math.isinf(degrees)
    # Sizes of one gap move together, those above it by themselves.
    assert len(exact.error_of({"f(5)": 1.0, "f(6)": 1.0}).parts) == 1
    assert len(exact.error_of({"f(6)": 1.0, "f(16)": 1.0}).parts) == 2
    [(sixteen, _)] = exact.error_of({"f(16)": 1.0}).parts
    assert math.sqrt(3 * sixteen) == pytest.approx(17.26 - 12.97)
    # The error of the measured ones is in the line.
    (on_line, _spread) = with_errors(PAPER, ERRORS).error_of({"f(6)": 1.0}).parts
    assert on_line[0] == pytest.approx((0.1**2 + 0.13**2) / 4)


def test_files_that_differ_in_a_size_that_was_not_measured_overlap_or_say_what_they_are_given() -> None:
    # f(6) of the demo, by four files; that it is 11.0, 12.4 or 12.9 was measured by nobody.
    own = {"f(4)": 900.0, "f(6)": 950.0, "f(8)": 10.0}
    base = {"f(4)": 900.0, "f(8)": 960.0}
    measured = with_errors(PAPER, replace(ERRORS, standard_errors=(0.01,) * 4 + (0.0, 0.0)))
    intervals = {}
    for six_ms in (None, 11.0, 12.4, 12.9):
        f_fs = measured.f_fs if six_ms is None else {**measured.f_fs, 6: to_fs(six_ms, FS_PER_MS)}
        intervals[six_ms] = compared(own, base, replace(measured, f_fs=f_fs, _filled_fs={})).a.interval
    assert not intervals[None].is_given_costs
    for six_ms in (11.0, 12.4, 12.9):
        assert intervals[six_ms].is_given_costs
        assert intervals[None].contains(intervals[six_ms].estimate)


def test_a_calibration_knows_its_costs_better_with_less_noise() -> None:
    rng = np.random.default_rng(3)
    model = fitted(true_model(), (1, 2, 4, 6, 8), rng)
    (fit,) = model.errors
    assert fit.degrees == 24 - 6
    # Three restarts of .1 ms behind f(1), and beta beside it.
    assert 0.04 < fit.standard_errors[0] < 0.12


def test_points_without_freedom_are_known_by_what_scatters_inside_them() -> None:
    rng = np.random.default_rng(3)
    points = [StepPoint(n, n, None, 10 + n / 10 + rng.normal(0, 0.1, 40)) for n in (1, 2, 4, 8)]
    errors = fit_decode(points, seed=1).errors
    assert errors.degrees == 4 * 39
    assert errors.standard_errors[0] == pytest.approx(0.1 * 1.2533 / math.sqrt(40), rel=0.4)


ENTRY = """
[[errors]]
coefficients = ["f(4)", "f(8)"]
standard_errors = [0.1, 0.2]
correlations = [[1.0, 0.5], [0.5, 1.0]]
degrees = 9
"""


def cost_file(folder: Path, text: str) -> Path:
    path = folder / "costs.toml"
    path.write_text(Path("plans/costs/paper.toml").read_text(encoding="utf-8") + text, encoding="utf-8")
    return path


def test_a_cost_file_states_errors_and_one_without_them_still_reads(tmp_path: Path) -> None:
    [fit] = load_cost_model(cost_file(tmp_path, ENTRY)).errors
    assert fit.variance({"f(4)": 1.0, "f(8)": 1.0}) == pytest.approx(0.1**2 + 0.2**2 + 2 * 0.5 * 0.1 * 0.2)
    assert load_cost_model(cost_file(tmp_path, "")).errors == ()
    assert load_cost_model("paper").measured_sizes == (1, 2, 4, 8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('"f(4)"', '"f(6)"'), r"errors of f\(6\), which this file does not state"),
        (("[0.1, 0.2]", "[0.1]"), "need 2 standard errors and 2 x 2 correlations"),
        (("[[1.0, 0.5], ", "[[1.0], "), "need 2 standard errors and 2 x 2 correlations"),
        (("degrees = 9", "degrees = 0"), "degrees"),
        (("[0.1, 0.2]", "[-0.1, 0.2]"), "standard_errors"),
    ],
)
def test_errors_that_cannot_be_are_refused_by_name(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        load_cost_model(cost_file(tmp_path, ENTRY.replace(*change)))


def test_intervals_hold_a_truth_that_is_drawn_from_the_covariance_of_the_fit() -> None:
    # The short form of `python -m benchmarks costs`; three Monte Carlo errors of so many experiments.
    found = coverage_of_drawn_truth(12, 300)
    assert found.whole > 0.95 - 0.038
    assert found.blocks_alone < found.whole
    wide = drawn_intervals(fitted(true_model(), (1, 2, 4, 8), np.random.default_rng(1)), 12, np.random.default_rng(2))
    assert wide.whole[1] - wide.whole[0] > 2 * (wide.blocks_alone[1] - wide.blocks_alone[0])
