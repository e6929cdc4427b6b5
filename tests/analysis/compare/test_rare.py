"""What stands beside a verdict: how rare a plan may be that was not seen, the one that decides, and a skew."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from harness.analysis.compare.rare import shape_in_words, unseen_in_words
from harness.analysis.compare.ratio import BlockCosts


@pytest.mark.parametrize(("num_plans", "rarity"), [(6, "2.5"), (12, "4.5"), (24, "8.5"), (400, "134")])
def test_so_many_plans_leave_open_plans_that_are_so_rare(num_plans: int, rarity: str) -> None:
    assert unseen_in_words(num_plans) == f"a plan in {rarity} or rarer may differ"
    assert 1 - (1 - 1 / float(rarity)) ** num_plans == pytest.approx(0.95, abs=0.01)


def blocks(changes: Sequence[float], cost: float = 100.0) -> list[BlockCosts]:
    return [BlockCosts(cost * (1 + change), cost) for change in changes]


def test_the_one_replicate_that_decides_is_named_by_the_ratio_of_sums() -> None:
    changes = [-0.02, -0.021, -0.019, -0.02, -0.022, 0.05]
    words = shape_in_words(blocks(changes), range(6))
    assert words.startswith("replicate 5 decides: without it, cheaper; a plan in 2.5")
    assert shape_in_words(blocks(changes[:5]), range(5)).endswith(f"not .95; {unseen_in_words(5)}")
    # Of these costs the logs of single plans call the last one decisive; in the sum it weighs little.
    heavy = [*blocks(changes[:5]), BlockCosts(1.05, 1.0)]
    assert "decides" not in shape_in_words(heavy, range(6))


def test_an_interval_of_few_replicates_says_how_seldom_it_may_hold() -> None:
    few, enough = (shape_in_words(blocks([-0.02, -0.021, -0.019, -0.02, -0.022, -0.018][:n]), range(n)) for n in (3, 6))
    assert few.startswith("an interval of 3 replicates may hold too seldom: in .78, not .95; ")
    assert "seldom" not in enough


def test_a_skew_is_named_from_eight_plans_on() -> None:
    changes = [-0.02, -0.021, -0.019, -0.02, -0.022, -0.018, -0.0205, -0.0195, 0.005, -0.02]
    words = shape_in_words(blocks(changes), range(10))
    assert "skew +2.6: alpha is promised for ratios that are nearly symmetric" in words
    assert "skew" not in shape_in_words(blocks(changes[:8]), range(8))
