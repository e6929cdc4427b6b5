"""Any conditions against each other: pairing by plan, ratios, and one error rate over all pairs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from harness.analysis.method.across import Side, compare_all, holm
from harness.analysis.method.stats import t_quantile, t_tail
from harness.records import SealedRun
from harness.runner import run_experiment
from tests.support.experiments import small_experiment


def side(folder: Path, name: str, **changes: object) -> Side:
    spec = small_experiment(**{"backend": "sim", "replicates": 3, "condition": [{"name": name}], **changes})
    runs: tuple[SealedRun, ...] = run_experiment(spec, runs_root=folder).runs
    return Side(f"{folder.name}/{name}", runs)


def test_runs_of_equal_plans_are_paired_across_experiments_and_others_are_not(tmp_path: Path) -> None:
    base = side(tmp_path / "monday", "base")
    again = side(tmp_path / "tuesday", "base")
    other = side(tmp_path / "other", "base", base_seed=99)
    rows = compare_all([base, again, other]).records()
    same = [row for row in rows if (row["this"], row["other"]) == (base.name, again.name)]
    assert all(row["paired"] and row["ratio"] == pytest.approx(1) and row["p_holm"] == 1 for row in same)
    assert not any(row["paired"] for row in rows if other.name in (row["this"], row["other"]))
    assert len(rows) == 3 * 6


def test_a_side_with_further_plans_is_paired_by_those_that_both_replayed(tmp_path: Path) -> None:
    more, few = side(tmp_path / "more", "base", replicates=4), side(tmp_path / "few", "base")
    rows = compare_all([more, few]).records()
    assert all(row["paired"] and row["runs"] == "3:3" and row["ratio"] == pytest.approx(1) for row in rows)


def test_a_slower_server_differs_and_one_replicate_says_nothing(tmp_path: Path) -> None:
    base = side(tmp_path / "base", "base")
    slow = side(tmp_path / "slow", "slow", server={"decode_buckets": [8]})
    row = next(row for row in compare_all([slow, base]).records() if row["measure"] == "A_s_per_token")
    assert row["ratio"] > 1.05
    assert row["low"] > 1
    few = [Side(one.name, one.runs[:1]) for one in (slow, base)]
    assert all(row["p"] is None and row["p_holm"] is None for row in compare_all(few).records())


def test_holm_bounds_the_chance_of_any_false_difference() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    draws = np.random.default_rng(5).uniform(size=(2000, 10))
    assert sum(min(holm(list(row))) < 0.05 for row in draws) / 2000 <= 0.06


@pytest.mark.parametrize("degrees", [1, 2, 5, 30])
def test_the_t_distribution_and_its_quantile_are_inverse(degrees: int) -> None:
    assert t_tail(t_quantile(0.95, degrees), degrees) == pytest.approx(0.05)
