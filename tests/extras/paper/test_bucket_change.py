"""The split of a padding's change: the paper's printed arithmetic, and the mean over all orders of the changes."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.extras.paper.bucket_change import (
    padding_of_histogram,
    removed_slots,
    shapley_split,
    split_by_integral,
    split_by_subsets,
)

OLD = {n: next(b for b in (1, 2, 4, 8) if b >= n) for n in range(1, 9)}
NEW = {n: next(b for b in (1, 2, 4, 6, 8) if b >= n) for n in range(1, 9)}
# Table S7 prints h(5) = 115, h(6) = 494 and 679 other steps; their bucket widths (1,691) and paddings (192) follow from
# the printed totals 6,563 and 1,525. Any h(1..4) with those sums gives the printed figures; this is one of them.
S7 = {1: 251, 2: 136, 3: 192, 4: 100, 5: 115, 6: 494}


def test_table_s7_totals() -> None:
    assert sum(S7.values()) == 1288
    assert padding_of_histogram(S7, OLD) == (1525, 6563)
    assert padding_of_histogram(S7, NEW) == (307, 5345)


def test_table_s7_removed_slots_and_their_shares() -> None:
    removed = removed_slots(S7, OLD, NEW)
    assert removed == {5: 230, 6: 988}
    # "The 609 bucket-8 steps of the baseline grid became 0" (3-1).
    assert sum(count for n, count in S7.items() if OLD[n] == 8) == 609
    assert all(NEW[n] != 8 for n in S7)
    assert [round(100 * slots / sum(removed.values()), 1) for slots in removed.values()] == [18.9, 81.1]


def test_table_s7_shapley_split() -> None:
    shares = shapley_split(S7, OLD, NEW)
    drop = 1525 / 6563 - 307 / 5345
    assert round(drop, 10) == 0.1749263916
    assert {n: round(share, 7) for n, share in shares.items()} == {5: 0.0333824, 6: 0.1415440}
    assert sum(shares.values()) == pytest.approx(drop, abs=1e-15)
    assert [round(100 * share / drop, 1) for share in shares.values()] == [19.1, 80.9]


@given(counts=st.lists(st.integers(1, 400), min_size=2, max_size=6))
def test_shapley_split_is_the_mean_over_all_orders(counts: list[int]) -> None:
    histogram = {n + 1: count for n, count in enumerate(counts)}
    old = dict.fromkeys(histogram, 8)
    new = {n: n for n in histogram}
    expected = dict.fromkeys(histogram, 0.0)
    orders = list(permutations(histogram))
    for order in orders:
        rule = dict(old)
        for n in order:
            before = padding_of_histogram(histogram, rule).ratio or 0.0
            rule[n] = new[n]
            expected[n] += (before - (padding_of_histogram(histogram, rule).ratio or 0.0)) / len(orders)
    assert shapley_split(histogram, old, new) == pytest.approx(expected, abs=1e-12)


def test_shapley_split_of_many_changes_agrees_with_enumeration() -> None:
    changes = np.random.default_rng(1).integers(-50, 300, size=14).astype(float)
    exact = split_by_subsets(changes, 4000.0, 9000.0)
    assert split_by_integral(changes, 4000.0, 9000.0) == pytest.approx(exact, abs=1e-13)


def test_shapley_split_of_forty_changes_sums_to_the_drop() -> None:
    histogram = dict.fromkeys(range(1, 41), 10)
    old, new = dict.fromkeys(histogram, 64), {n: n + 1 for n in histogram}
    drop = (padding_of_histogram(histogram, old).ratio or 0) - (padding_of_histogram(histogram, new).ratio or 0)
    assert sum(shapley_split(histogram, old, new).values()) == pytest.approx(drop, abs=1e-9)
