"""Two releases side by side: where their decisions part, and that equal rules part nowhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.errors import SpecError
from harness.extras.releases.compare import compare_releases
from harness.measure.records.run import SealedRun
from harness.runner import run_experiment
from tests.support.experiments import small_experiment


def runs_under(rules: str, root: Path, **changes: object) -> list[SealedRun]:
    """Six users on three slots under the rules of a release."""
    spec = small_experiment(
        backend="sim",
        replicates=3,
        workload={
            "num_sessions": 6,
            "requests_per_session": 4,
            "prompt_tokens": {"distribution": "uniform", "low": 600, "high": 900},
            "generate_tokens": {"distribution": "uniform", "low": 20, "high": 60},
            "wait_cap_s": 2.0,
        },
        server={"rules": rules, "max_num_seqs": 4, "decode_buckets": [1, 2, 4], "kv_slots": 4},
        condition=[{"name": "base"}],
        **changes,
    )
    return list(run_experiment(spec, runs_root=root / rules).require_valid().runs)


def test_decisions_figures_and_names_of_two_rule_sets_stand_side_by_side(tmp_path: Path) -> None:
    old, new = runs_under("vendor-0.12.0", tmp_path), runs_under("upstream-lru", tmp_path)
    decisions, figures, names = compare_releases(old, new, ("0.12.0", "next"))
    assert decisions.column("run") == ["base/0", "base/1", "base/2"]
    parted = [row for row in decisions.records() if row["first_event"] is not None]
    assert parted
    assert all(int(str(row["events"])) > 0 and " : " in str(row["at_first_event"]) for row in parted)
    (reuse,) = [row for row in figures.records() if row["figure"] == "reuse"]
    assert reuse["differs"] is not None
    assert "no accelerator was measured" in figures.origin
    assert names.rows == ()


def test_the_same_rules_part_nowhere(tmp_path: Path) -> None:
    old = runs_under("vendor-0.12.0", tmp_path / "old")
    decisions, figures, _ = compare_releases(old, runs_under("vendor-0.12.0", tmp_path / "new"), ("a", "b"))
    assert {(row["first_step"], row["steps"], row["events"]) for row in decisions.records()} == {(None, 0, 0)}
    assert True not in figures.column("differs")


def test_runs_of_other_plans_are_no_pair(tmp_path: Path) -> None:
    old = runs_under("vendor-0.12.0", tmp_path)
    with pytest.raises(SpecError, match="no plan ran validly on both releases"):
        compare_releases(old, runs_under("upstream-lru", tmp_path, base_seed=8), ("a", "b"))
