"""Power of adjusted verdicts: exact for one comparison, between the bounds for several, as in drawn experiments."""

from __future__ import annotations

import numpy as np
import pytest

from harness.analysis.stats import holm
from harness.judge.planning.family import Family, holm_rejects
from harness.judge.planning.power import difference_power, equivalence_power, spread_limit, superiority_power
from harness.judge.planning.stopping import of_family
from harness.spec import StopSpec


def test_holm_rejects_what_the_adjusted_p_values_reject() -> None:
    p = np.random.default_rng(1).uniform(0, 0.1, size=(500, 4))
    expected = [[adjusted is not None and adjusted < 0.05 for adjusted in holm(row)] for row in p.tolist()]
    assert holm_rejects(p, 0.05).tolist() == expected


def test_a_single_comparison_has_the_exact_power() -> None:
    alone = Family((0.02,), 0.05)
    assert alone.power(10, (0.02,), "difference") == (difference_power(10, 0.02, 0.02, 0.05),)
    assert alone.power(10, (-0.02,), "superiority") == (superiority_power(10, 0.02, -0.02, 0.05),)
    assert alone.power(10, (0.0,), "equivalence", 0.02) == (equivalence_power(10, 0.02, 0.02, 0.05),)


@pytest.mark.parametrize("aim", ["difference", "superiority", "equivalence"])
def test_the_power_among_several_lies_between_that_at_all_of_alpha_and_at_an_equal_part(aim: str) -> None:
    size, effect = 6, {"difference": 0.02, "superiority": -0.02, "equivalence": 0.0}[aim]
    of_one = {"difference": difference_power, "superiority": superiority_power}.get(aim)
    (shown, *_others) = Family((0.02,) * size, 0.05).power(14, (effect,) * size, aim, 0.02)  # type: ignore[arg-type]
    most, least = (
        equivalence_power(14, 0.02, 0.02, alpha) if of_one is None else of_one(14, 0.02, effect, alpha)
        for alpha in (0.05, 0.05 / size)
    )
    assert least + 0.01 < shown < most


def test_among_true_nulls_the_chance_of_any_false_difference_stays_below_alpha() -> None:
    shown = Family((0.01,) * 6, 0.05).power(8, (0.0,) * 6, "difference")
    assert sum(shown) < 0.06


def test_skewed_blocks_have_the_power_of_experiments_drawn_from_them() -> None:
    rng = np.random.default_rng(2)
    values = rng.exponential(0.02, size=(3, 4_000)) - 0.02
    family = Family(tuple(values.std(axis=1)), 0.05, values)
    (promised, *_others) = family.power(12, (0.02,) * 3, "difference")
    drawn = values[:, rng.integers(0, 4_000, size=(4_000, 12))] + 0.02
    t = drawn.mean(axis=2) / drawn.std(axis=2, ddof=1) * np.sqrt(12)
    from scipy.special import stdtr

    shown = holm_rejects(2 * stdtr(11, -np.abs(t)).T, 0.05)[:, 0].mean()
    gaussian = Family(family.sds, 0.05).power(12, (0.02,) * 3, "difference")[0]
    assert abs(promised - shown) < 0.03
    assert abs(gaussian - shown) > abs(promised - shown)


def test_what_cannot_be_shown_needs_no_number_of_blocks() -> None:
    family = Family((0.02, 0.02), 0.05)
    assert family.blocks(0, (0.0, 0.02), "difference", 0.9) is None
    assert family.blocks(0, (0.01, 0.0), "superiority", 0.9) is None
    assert family.blocks(0, (0.02, 0.0), "equivalence", 0.9, 0.02) is None


def test_sequences_share_alpha_in_equal_parts() -> None:
    stop = StopSpec(margin=0.02, alpha=0.06, budget=20)
    assert of_family(stop, 6).alpha == pytest.approx(0.01)
    assert of_family(stop, 1) == stop


def test_nine_of_ten_true_spreads_lie_below_the_limit() -> None:
    estimated = np.random.default_rng(3).normal(0, 1, size=(4_000, 4)).std(axis=1, ddof=1)
    below = np.mean([spread_limit(sd, 4) >= 1 for sd in estimated])
    assert 0.88 <= below <= 0.92
