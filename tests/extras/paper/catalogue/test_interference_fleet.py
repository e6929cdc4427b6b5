"""Neighbour null and duet on simulated devices: how many may run at once is decided, and a round is one datum."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.analysis.compare.answer import ExperimentRuns
from harness.analysis.summary import summarise
from harness.extras.paper.catalogue.interference import duet_table, neighbours_table
from harness.judge.decisions.verdicts import decide_experiment
from harness.measure.records.run import SealedRun
from harness.model.spec.rules import load_rule
from harness.runner import run_experiment
from tests.support.experiments import small_experiment


def runs_of(folder: Path, **changes: object) -> tuple[SealedRun, ...]:
    return run_experiment(small_experiment(backend="sim", **changes), runs_root=folder).runs


@pytest.fixture(scope="module")
def neighbour_null(tmp_path_factory: pytest.TempPathFactory) -> ExperimentRuns:
    """Four rounds of two devices; a busy neighbour costs 5 %."""
    emulated = {device: {"neighbour_cost": 0.05, "noise": 0.001} for device in (0, 1)}
    conditions = [{"name": "alone", "neighbours": 0}, {"name": "both", "neighbours": 1}]
    fleet = {"devices": [0, 1], "emulated": emulated}
    return ExperimentRuns(runs_of(tmp_path_factory.mktemp("null"), replicates=8, condition=conditions, fleet=fleet))


def test_what_a_busy_neighbour_costs_is_found_and_so_many_may_not_run_at_once(neighbour_null: ExperimentRuns) -> None:
    rows = neighbours_table(neighbour_null).records()
    assert [row["device"] for row in rows] == ["dev0", "dev1", "all"]
    assert rows[-1]["longer_%"] == pytest.approx(5.0, abs=1.5)
    assert float(rows[-1]["low_%"] or 0) > 1
    [decision] = decide_experiment([load_rule("neighbour-null")], neighbour_null, is_confirmatory=True)
    assert (decision.outcome.value, decision.label) == ("FAIL", "DIFFERENT")
    assert "on 4 rounds" in decision.reason


def test_a_run_beside_other_neighbours_than_planned_is_named(neighbour_null: ExperimentRuns) -> None:
    first, *others = neighbour_null.all_runs
    assert "neighbours-other" not in {finding.code for finding in summarise(neighbour_null.all_runs).findings}
    lonely = first.manifest.model_copy(update={"fleet": first.manifest.fleet.model_copy(update={"neighbours": (0, 7)})})
    findings = summarise([SealedRun(first.path, lonely), *others]).findings
    assert [f"{first.label} (2 of " in one.evidence for one in findings if one.code == "neighbours-other"] == [True]


def test_a_duet_has_a_row_for_each_round_and_rounds_are_what_scatters(tmp_path: Path) -> None:
    fleet = {"devices": [0, 1], "lockstep": True, "emulated": {1: {"speed_offset": 0.05}}}
    experiment = ExperimentRuns(runs_of(tmp_path, replicates=6, fleet=fleet))
    rows = duet_table(experiment).records()
    assert [row["round"] for row in rows] == [0, 1, 2, "sd"]
    for row in rows[:3]:
        assert row["mean_%"] == pytest.approx((float(row["dev0_%"] or 0) + float(row["dev1_%"] or 0)) / 2)
    compared = summarise(experiment.all_runs).condition("more").comparison
    assert (compared.b.interval.unit, compared.b.interval.num_units) == ("rounds", 3)
