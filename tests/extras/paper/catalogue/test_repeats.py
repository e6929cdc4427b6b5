"""Repeats and decompositions: the sum decides, replicates show its parts, and intervals begin at three replicates."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from harness.analysis.compare.answer import ExperimentRuns
from harness.analysis.summary import summarise
from harness.extras.paper.catalogue import costs, repeats
from harness.judge.catalogue import prediction_table
from harness.judge.prereg import predict_runs
from harness.measure.records.run import SealedRun
from harness.model.spec import parse_experiment
from harness.runner import run_experiment


def slots(n: int, count: int) -> dict[str, Any]:
    return {
        "name": f"users{n}.slots{count}",
        "factors": {"N": n, "slots": count},
        "baseline": f"users{n}.slots8",
        "workload": {"num_sessions": n},
        "server": {"kv_slots": count},
    }


SLOTS = tuple(slots(n, count) for n in (2, 3) for count in (8, 10, 12))


def sealed(folder: Path, replicates: int, conditions: Sequence[dict[str, Any]] = SLOTS) -> list[SealedRun]:
    table = {
        "name": "small",
        "backend": "sim",
        "base_seed": 5,
        "replicates": replicates,
        "prediction": {"draws": 1},  # the nominal simulation, which is what happens in virtual time
        "workload": {"num_sessions": 2, "generate_tokens": {"distribution": "fixed", "value": 8}, "wait_cap_s": 1.0},
        "condition": list(conditions),
    }
    return list(run_experiment(parse_experiment(table, where="test"), runs_root=folder).runs)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[SealedRun]:
    return sealed(tmp_path_factory.mktemp("runs"), 3)


@pytest.fixture(scope="module")
def experiment(runs: list[SealedRun]) -> ExperimentRuns:
    return ExperimentRuns(runs, predict_runs(runs))


def test_a_decomposition_ends_with_the_sum_of_its_replicates(experiment: ExperimentRuns) -> None:
    rows = [row for row in costs.decomposition_table(experiment).records() if row["condition"] == "users3.slots10"]
    assert [row["replicate"] for row in rows] == ["0", "1", "2", "sum"]
    assert rows[-1]["changed_A_s"] == pytest.approx(sum(row["changed_A_s"] for row in rows[:-1]))
    assert rows[-1]["saving_A"] == pytest.approx(1 - rows[-1]["ratio_A"])


def test_predictions_of_simulated_runs_come_true(experiment: ExperimentRuns) -> None:
    for row in prediction_table(experiment).records():
        assert row["error"] == pytest.approx(0)
        assert row["predicted_reuse"] == row["observed_reuse"]


def test_adjacent_slot_counts_are_the_values_of_a_factor(experiment: ExperimentRuns) -> None:
    (row,) = costs.adjacent_table(experiment).records()
    assert (row["pair"], row["comparisons"]) == ("slots10 -> slots12", 6)
    assert {"median_N2", "median_N3"} <= row.keys()
    assert set(costs.adjacent_intervals(experiment)) == {"median slots10 -> slots12", "median slots10 -> slots12, by N"}


def test_ratios_have_intervals_from_three_replicates_on_and_only_where_something_varied(
    experiment: ExperimentRuns, tmp_path: Path
) -> None:
    assert costs.ratio_intervals(experiment) == {}
    wide = {**slots(2, 10), "server": {"kv_slots": 10, "decode_buckets": [8]}}
    (interval,) = costs.ratio_intervals(ExperimentRuns(sealed(tmp_path / "3", 3, [slots(2, 8), wide]))).values()
    assert interval.low < interval.estimate < interval.high
    assert "t interval" in interval.method
    assert costs.ratio_intervals(ExperimentRuns(sealed(tmp_path / "2", 2, [slots(2, 8), wide]))) == {}


def test_an_interval_over_other_work_says_that_it_is_per_generated_token(tmp_path: Path) -> None:
    users = [slots(2, 8), {**slots(3, 8), "baseline": "users2.slots8"}]
    (name,) = costs.ratio_intervals(ExperimentRuns(sealed(tmp_path, 3, users)))
    assert name == "users3.slots8 / users2.slots8, channel A, per generated token"


def test_a_wider_default_never_agrees_less(experiment: ExperimentRuns) -> None:
    by_condition: dict[str, list[bool]] = {}
    for row in costs.sensitivity_table(experiment).records():
        by_condition.setdefault(str(row["condition"]), []).append(bool(row["is_agreed"]))
    assert len(by_condition) == 4
    for agreed in by_condition.values():
        assert agreed == sorted(agreed)


def test_reuse_by_repeat_counts_every_run(experiment: ExperimentRuns) -> None:
    rows = repeats.survival_variation_table(experiment).records()
    assert sum(row["runs"] for row in rows) == 18


def test_ratios_are_per_generated_token_where_the_work_differs(tmp_path: Path) -> None:
    longer = {
        "name": "longer",
        "baseline": "short",
        "workload": {"generate_tokens": {"distribution": "fixed", "value": 16}},
    }
    runs = ExperimentRuns(sealed(tmp_path, 3, [{"name": "short"}, longer]))
    [row] = [row for row in costs.cost_table(runs).records() if row["condition"] == "longer"]
    [_short, of_longer] = summarise(runs.runs["short"] + runs.runs["longer"]).conditions
    assert row["ratio_of"] == "generated token"
    assert (row["ratio_A"], row["ratio_B"]) == pytest.approx(
        (of_longer.comparison.ratio_a, of_longer.comparison.ratio_b)
    )
    summed = costs.decomposition_table(runs).records()[-1]
    assert (summed["replicate"], summed["ratio_A"]) == ("sum", pytest.approx(row["ratio_A"]))
    assert row["ratio_A"] < 1 < row["A_s"] / summed["baseline_A_s"]


def test_sessions_are_grouped_by_factors_whatever_conditions_are_called(tmp_path: Path) -> None:
    conditions = [
        {"name": f"{name}.{b}", "factors": {"artifact": name, "bucket": b}, "workload": {"num_sessions": b}}
        for name in ("first", "again")
        for b in (1, 2)
    ]
    rows = repeats.session_table(ExperimentRuns(sealed(tmp_path, 2, conditions))).records()
    grouped = [(1, "again"), (1, "first"), (2, "again"), (2, "first")]
    assert [(row["bucket"], row["artifact"]) for row in rows] == grouped
    assert {(row["source"], row["null_pairs"]) for row in rows} == {("steps", 2)}
