"""Alignment's tables on small simulated experiments: sums before dividing, shares only at equal h(n)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.analysis.compare.answer import ExperimentRuns
from harness.extras.paper.catalogue import alignment, costs
from harness.model.spec import parse_experiment
from harness.runner import run_experiment

SIX = {"decode_buckets": [1, 2, 4, 6, 8]}


def experiment(folder: Path, *conditions: dict[str, Any], replicates: int = 2) -> ExperimentRuns:
    table = {
        "name": "small",
        "backend": "sim",
        "base_seed": 3,
        "replicates": replicates,
        "workload": {"num_sessions": 6, "generate_tokens": {"distribution": "fixed", "value": 24}, "wait_cap_s": 2.0},
        "condition": list(conditions),
    }
    return ExperimentRuns(run_experiment(parse_experiment(table, where="test"), runs_root=folder).runs)


@pytest.fixture(scope="module")
def waits(tmp_path_factory: pytest.TempPathFactory) -> ExperimentRuns:
    without = {"name": "without", "treatment": "no-waits"}
    return experiment(tmp_path_factory.mktemp("waits"), without, {"name": "with"})


def test_padding_of_a_pair_is_summed_before_it_is_divided(waits: ExperimentRuns) -> None:
    (row,) = alignment.alignment_table(waits).records()
    runs = waits.figures("with")
    padded, positions = (sum(getattr(run.padding, name) for run in runs) for name in ("padded_slots", "bucket_slots"))
    assert row["p_A"] == pytest.approx(padded / positions)
    assert row["steps_A"] == sum(run.num_steps for run in runs)
    assert (row["N"], row["grid"], row["replicates"]) == (6, "{1,2,4,8}", 2)


def test_the_histogram_counts_every_decode_step(waits: ExperimentRuns) -> None:
    for row in alignment.histogram_table(waits).records():
        counted = sum(value or 0 for name, value in row.items() if name.startswith("h("))
        assert counted == row["steps"]


def test_a_full_bucket_is_not_padded(waits: ExperimentRuns) -> None:
    runs = waits.figures("without")
    assert alignment.unpadded_share(runs) == 0  # six sessions in a bucket of eight, from the first step to the last
    assert alignment.unpadded_share([]) == 0


def test_contributions_are_shown_only_at_equal_histograms(tmp_path: Path) -> None:
    six = {"name": "six", "treatment": "no-waits", "server": SIX}
    assert not alignment.contribution_table(experiment(tmp_path, {"name": "base"}, six, replicates=1)).rows


def test_grids_are_paired_by_n_and_buckets_not_by_names(tmp_path: Path) -> None:
    found = experiment(
        tmp_path,
        {"name": "zeta"},
        {"name": "eta", "treatment": "no-waits"},
        {"name": "theta", "server": SIX},
        replicates=1,
    )
    (row,) = alignment.grid_table(found).records()
    assert (row["N"], row["grid"]) == (6, "{1,2,4,8}")


def test_costs_of_a_baseline_are_its_own_measure(waits: ExperimentRuns) -> None:
    rows = {row["condition"]: row for row in costs.cost_table(waits).records()}
    assert rows["without"]["ratio_A"] == rows["without"]["ratio_B"] == 1
    assert rows["with"]["ratio_A"] == pytest.approx(rows["with"]["A_s"] / rows["without"]["A_s"])
