"""Any conditions against each other: pairing by plan, ratios, and one error rate over all pairs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from harness.analysis.compare.across import Side, compare_all, pairs_of
from harness.analysis.compare.answer import main_answers
from harness.analysis.compare.measures import MEASURES, OF_SERVERS
from harness.analysis.stats import holm, t_quantile, t_tail
from harness.analysis.summary import summarise
from harness.errors import SpecError
from harness.measure.records.run import SealedRun
from harness.runner import run_experiment
from tests.support.experiments import small_experiment


def side(folder: Path, name: str, **changes: object) -> Side:
    spec = small_experiment(**{"backend": "sim", "replicates": 3, "condition": [{"name": name}], **changes})
    runs: tuple[SealedRun, ...] = run_experiment(spec, runs_root=folder).runs
    return Side(f"{folder.name}/{name}", runs)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Side:
    """Three runs that several tests compare with."""
    return side(tmp_path_factory.mktemp("monday"), "base")


def test_runs_of_equal_plans_are_paired_across_experiments_and_others_are_not(base: Side, tmp_path: Path) -> None:
    again = side(tmp_path / "tuesday", "base")
    other = side(tmp_path / "other", "base", base_seed=99)
    rows = compare_all(pairs_of([again, other], [base])).records()
    same = [row for row in rows if row["condition"] == again.name]
    assert all(row["paired"] and row["ratio"] == pytest.approx(1) and row["low"] is None for row in same)
    assert {row["verdict"] for row in same if row["measure"] != "ttft_p99_ms"} >= {"nothing varied"}
    assert not {"lower", "higher", "cheaper", "more expensive"} & {row["verdict"] for row in same}
    assert not any(row["paired"] for row in rows if row["condition"] == other.name)
    # Both channels of a simulation are the same cost: it is one hypothesis.
    of_simulations = [one for one in MEASURES.values() if one.name not in OF_SERVERS and not one.target]
    # No device of a simulation takes power.
    assert [row["measure"] for row in same] == [one.column for one in of_simulations if "energy" not in one.name]


def test_a_side_with_further_plans_is_paired_by_those_that_both_replayed(base: Side, tmp_path: Path) -> None:
    rows = compare_all(pairs_of([side(tmp_path / "more", "base", replicates=4)], [base])).records()
    assert all(row["paired"] and row["runs"] == "3:3" and row["ratio"] == pytest.approx(1) for row in rows)


def test_a_slower_server_differs_and_one_replicate_says_nothing(base: Side, tmp_path: Path) -> None:
    slow = side(tmp_path / "slow", "slow", server={"decode_buckets": [8]})
    row = compare_all([(slow, base)]).records()[0]
    assert (row["measure"], row["verdict"]) == ("cost_s_per_token", "more expensive")
    assert row["ratio"] > 1.05
    assert row["low"] > 1
    assert row["mean"] / row["baseline_mean"] == pytest.approx(row["ratio"], rel=0.01)
    few = (Side(slow.name, slow.runs[:1]), Side(base.name, base.runs[:1]))
    assert all(row["p"] is None and row["verdict"].startswith("too few") for row in compare_all([few]).records())


def test_the_experiments_baselines_are_taken_and_never_the_alphabet(tmp_path: Path) -> None:
    conditions = [{"name": "a-slow", "server": {"decode_buckets": [8]}}, {"name": "b-base"}, {"name": "c-again"}]
    spec = small_experiment(backend="sim", replicates=5, baseline="b-base", condition=conditions)
    runs = run_experiment(spec, runs_root=tmp_path).runs
    names = [str(one["name"]) for one in conditions]
    sides = [Side(f"x/small/{name}", tuple(run for run in runs if run.condition == name)) for name in names]
    table = compare_all(pairs_of(sides))
    costs = {row["condition"]: row for row in table.records() if row["measure"] == "cost_s_per_token"}
    assert {row["baseline"] for row in costs.values()} == {"x/small/b-base"}
    shown = {f"x/small/{name}": one for name, one in main_answers(summarise(runs).answers).items()}
    assert costs.keys() == shown.keys()
    for name, row in costs.items():
        answer = shown[name]
        assert row["ratio"] == pytest.approx(answer.ratio)
        assert row["low"] == (answer.interval and pytest.approx(answer.interval.low))
        assert (row["family"], answer.result.family) == (2, 2)
        assert row["p_adjusted"] == (answer.result.p_adjusted and pytest.approx(answer.result.p_adjusted))
        assert row["verdict"] == answer.label
    assert [one.label for one in shown.values()] == ["more expensive", "nothing varied"]
    assert [one.doubt for one in shown.values()] == [
        "an interval of 5 replicates may hold too seldom: in .89, not .95; a plan in 2.2 or rarer may differ",
        "",
    ]


def test_without_a_baseline_among_them_conditions_are_not_compared(base: Side, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="--baseline"):
        pairs_of([base, side(tmp_path / "tuesday", "base")])


def test_holm_bounds_the_chance_of_any_false_difference() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    draws = np.random.default_rng(5).uniform(size=(2000, 10))
    assert sum(any(p is not None and p < 0.05 for p in holm(list(row))) for row in draws) / 2000 <= 0.06


@pytest.mark.parametrize("degrees", [1, 2, 5, 30])
def test_the_t_distribution_and_its_quantile_are_inverse(degrees: int) -> None:
    assert t_tail(t_quantile(0.95, degrees), degrees) == pytest.approx(0.05)
