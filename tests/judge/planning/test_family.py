"""Power of adjusted verdicts: exact for one comparison, an equal part of alpha for several, as in drawn experiments."""

from __future__ import annotations

import numpy as np
import pytest

from harness.analysis.compare.stopping import bonferroni
from harness.judge.planning.family import Aim, PlannedFamily
from harness.judge.planning.power import difference_power, equivalence_power, spread_limit, superiority_power
from harness.model.spec import StopSpec


def test_a_single_comparison_has_the_exact_power() -> None:
    alone = PlannedFamily((0.02,), 0.05)
    assert alone.power(10, (0.02,), "difference") == (difference_power(10, 0.02, 0.02, 0.05),)
    assert alone.power(10, (-0.02,), "superiority") == (superiority_power(10, 0.02, -0.02, 0.05),)
    assert alone.power(10, (0.0,), "equivalence", 0.02) == (equivalence_power(10, 0.02, 0.02, 0.05),)


@pytest.mark.parametrize("aim", ["difference", "superiority", "equivalence"])
def test_the_power_among_several_is_that_at_an_equal_part_of_alpha(aim: str) -> None:
    size, effect = 6, {"difference": 0.02, "superiority": -0.02, "equivalence": 0.0}[aim]
    of_one = {"difference": difference_power, "superiority": superiority_power}.get(aim)
    (shown, *_others) = PlannedFamily((0.02,) * size, 0.05).power(14, (effect,) * size, aim, 0.02)  # type: ignore[arg-type]
    part = 0.05 / size
    exact = equivalence_power(14, 0.02, 0.02, part) if of_one is None else of_one(14, 0.02, effect, part)
    assert shown == pytest.approx(exact, abs=0.02)


def test_among_true_nulls_the_chance_of_any_false_difference_stays_below_alpha() -> None:
    shown = PlannedFamily((0.01,) * 6, 0.05).power(8, (0.0,) * 6, "difference")
    assert sum(shown) < 0.06


def test_skewed_blocks_have_the_power_of_experiments_drawn_from_them() -> None:
    rng = np.random.default_rng(2)
    values = rng.exponential(0.02, size=(3, 4_000)) - 0.02
    family = PlannedFamily(tuple(values.std(axis=1)), 0.05, values)
    (promised, *_others) = family.power(12, (0.02,) * 3, "difference")
    drawn = values[:, rng.integers(0, 4_000, size=(4_000, 12))] + 0.02
    t = drawn.mean(axis=2) / drawn.std(axis=2, ddof=1) * np.sqrt(12)
    from scipy.special import stdtr

    shown = (2 * stdtr(11, -np.abs(t[0])) < 0.05 / 3).mean()
    gaussian = PlannedFamily(family.sds, 0.05).power(12, (0.02,) * 3, "difference")[0]
    assert abs(promised - shown) < 0.03
    assert abs(gaussian - shown) > abs(promised - shown)


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
        planned = PlannedFamily((float(estimate),), 0.05, degrees=(num_runs - 1,)).blocks(
            0, (effect,), aim, 0.9, margin
        )
        assert planned is not None
        powers.append(PlannedFamily((sd,), 0.05).power(planned, (effect,), aim, margin)[0])
    assert np.mean(powers) == pytest.approx(0.9, abs=0.03)


def test_what_cannot_be_shown_needs_no_number_of_blocks() -> None:
    family = PlannedFamily((0.02, 0.02), 0.05)
    assert family.blocks(0, (0.0, 0.02), "difference", 0.9) is None
    assert family.blocks(0, (0.01, 0.0), "superiority", 0.9) is None
    assert family.blocks(0, (0.02, 0.0), "equivalence", 0.9, 0.02) is None


def test_sequences_share_alpha_in_equal_parts() -> None:
    stop = StopSpec(margin=0.02, alpha=0.06, budget=20)
    assert bonferroni(stop, 6).alpha == pytest.approx(0.01)
    assert bonferroni(stop, 1) == stop


def test_nine_of_ten_true_spreads_lie_below_the_limit() -> None:
    estimated = np.random.default_rng(3).normal(0, 1, size=(4_000, 4)).std(axis=1, ddof=1)
    below = np.mean([spread_limit(sd, 4) >= 1 for sd in estimated])
    assert 0.88 <= below <= 0.92
