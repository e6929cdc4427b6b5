"""Power of verdicts: exact, and where few runs told the spread, over their estimates and the experiments after them."""

from __future__ import annotations

import numpy as np
import pytest

from harness.analysis.compare.stopping import bonferroni
from harness.judge.planning.power import Aim, PlannedTest, spread_limit
from harness.model.spec import StopSpec


@pytest.mark.parametrize("num_runs", [6, 12])
@pytest.mark.parametrize("aim", ["difference", "superiority", "equivalence"])
def test_a_plan_after_a_few_runs_keeps_its_power_over_their_estimates_and_its_experiments(
    num_runs: int, aim: Aim
) -> None:
    from scipy.special import gammaincinv

    sd, margin = 0.02, 0.02
    effect = {"difference": margin, "superiority": -margin, "equivalence": 0.0}[aim]
    # Every estimate of so many blocks, equally likely: quantiles of chi squared.
    shares = (np.arange(40) + 0.5) / 40
    estimates = sd * np.sqrt(2 * gammaincinv((num_runs - 1) / 2, shares) / (num_runs - 1))
    powers = []
    for estimate in estimates:
        planned = PlannedTest(float(estimate), 0.05, margin, num_runs - 1).blocks(effect, aim, 0.9)
        powers.append(PlannedTest(sd, 0.05, margin).power(planned, effect, aim))
    assert np.mean(powers) == pytest.approx(0.9, abs=0.03)


def test_sequences_share_alpha_in_equal_parts() -> None:
    stop = StopSpec(margin=0.02, alpha=0.06, budget=20)
    assert bonferroni(stop, 6).alpha == pytest.approx(0.01)
    assert bonferroni(stop, 1) == stop


def test_nine_of_ten_true_spreads_lie_below_the_limit() -> None:
    estimated = np.random.default_rng(3).normal(0, 1, size=(4_000, 4)).std(axis=1, ddof=1)
    below = np.mean([spread_limit(sd, 4) >= 1 for sd in estimated])
    assert 0.88 <= below <= 0.92
