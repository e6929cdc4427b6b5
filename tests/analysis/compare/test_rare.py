"""What stands beside a verdict: how rare a plan may be that was not seen, the one that decides, and a skew."""

from __future__ import annotations

import pytest

from harness.analysis.compare.rare import shape_in_words, unseen_in_words

pytestmark = pytest.mark.same_everywhere


@pytest.mark.parametrize(("num_plans", "rarity"), [(6, "2.5"), (12, "4.5"), (24, "8.5"), (400, "134")])
def test_so_many_plans_leave_open_plans_that_are_so_rare(num_plans: int, rarity: str) -> None:
    assert unseen_in_words(num_plans) == f"a plan in {rarity} or rarer may differ"
    assert 1 - (1 - 1 / float(rarity)) ** num_plans == pytest.approx(0.95, abs=0.01)


def test_the_one_replicate_that_decides_is_named() -> None:
    values = [-0.02, -0.021, -0.019, -0.02, -0.022, 0.05]
    assert shape_in_words(values, range(6)).startswith("replicate 5 decides: without it, cheaper; a plan in 2.5")
    assert shape_in_words(values[:5], range(5)) == unseen_in_words(5)


def test_a_skew_is_named_from_eight_plans_on() -> None:
    values = [-0.02, -0.021, -0.019, -0.02, -0.022, -0.018, -0.0205, -0.0195, 0.005, -0.02]
    assert "skew +2.6: alpha is promised for log ratios that are nearly symmetric" in shape_in_words(values, range(10))
    assert "skew" not in shape_in_words(values[:8], range(8))
