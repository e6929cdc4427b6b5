"""The paper's own statistics: exact enumerations by hand, and its printed inputs and outputs."""

from __future__ import annotations

import pytest

from harness.errors import SpecError
from harness.extras.paper import statistics


def test_disjoint_sums_by_hand() -> None:
    a, b = [1.0, 2.0, 3.0, 4.0], [1.0, 1.0, 1.0, 1.0]
    expected = [abs((a[i] + a[j]) / (a[k] + a[m]) - 1) for i, j, k, m in ((0, 1, 2, 3), (0, 2, 1, 3), (0, 3, 1, 2))]
    assert sorted(statistics.disjoint_sum_pair_differences(a, b, 2)) == pytest.approx(sorted(expected))


def test_proportional_channels_never_differ() -> None:
    a = [3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
    b = [1.1 * value for value in a]
    assert max(statistics.disjoint_sum_pair_differences(a, b, 1)) < 1e-12
    assert statistics.disjoint_sum_pair_differences(a, b).max() < 1e-12


def test_too_few_runs_make_no_pair_of_sums() -> None:
    assert len(statistics.disjoint_sum_pair_differences([1.0] * 5, [1.0] * 5, 3)) == 0


def test_pairs_are_taken_within_groups_only() -> None:
    groups = [(1.0, 2.0, 4.0), (100.0, 101.0)]
    assert sorted(statistics.pooled_pair_differences(groups)) == [1.0, 1.0, 2.0, 3.0]


def test_coefficient_of_variation() -> None:
    assert statistics.coefficient_of_variation([1.0, 2.0, 3.0]) == pytest.approx(0.5)


def test_no_values_have_no_spread() -> None:
    with pytest.raises(SpecError, match="no values"):
        statistics.spread([])


# Table S5 prints p_A and p_C to four places; R follows to within what that rounding allows.
@pytest.mark.parametrize(
    ("p_a", "p_c", "printed", "direction"),
    [
        (0.1687, 0.1627, 0.9928, "inside"),
        (0.1656, 0.1843, 1.0229, "inside"),
        (0.1236, 0.1638, 1.0481, "above"),
        (0.2180, 0.2118, 0.9922, "inside"),
        (0.1323, 0.2135, 1.1032, "above"),
        (0.1252, 0.1373, 1.0140, "inside"),
    ],
)
def test_table_s5_occupancy_ratio(p_a: float, p_c: float, printed: float, direction: str) -> None:
    ratio = statistics.occupancy_ratio(p_a, p_c)
    assert ratio == pytest.approx(printed, abs=2e-4)
    assert statistics.direction(ratio) == direction


def test_critical_request_count_of_the_sequential_experiment() -> None:
    survived = {5: [True] * 3, 6: [True] * 3, 7: [False] * 3, 8: [False] * 3}
    assert statistics.critical_request_count(survived) == 6
    assert statistics.critical_request_count({5: [True, False]}) is None
    # Reuse that comes back later does not raise it: it must be retained at every smaller count too.
    assert statistics.critical_request_count({5: [True], 6: [False], 7: [True]}) == 5
