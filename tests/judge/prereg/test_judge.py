"""What is decided of runs without rules, of INVALID runs alone, and of runs that are still being made."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from harness.analysis.compare.answer import main_answers
from harness.analysis.summary import summarise
from harness.errors import SpecError
from harness.judge.prereg import authorize, decide
from harness.judge.prereg.repository import Repository
from harness.measure.records import layout
from harness.model.spec.rules import load_rule
from harness.outputs import hold_lock
from harness.runner import run_experiment
from tests.support.experiments import small_experiment
from tests.support.workplace import Workplace


def test_without_rules_those_that_apply_to_the_runs_are_named(tmp_path: Path) -> None:
    treated = [{"name": "base"}, {"name": "straight", "treatment": "no-waits"}]
    of_waits, of_sizes = (
        run_experiment(spec, runs_root=tmp_path / spec.name).runs
        for spec in (
            small_experiment(backend="sim", time_scale=1.0, name="waits", condition=treated),
            small_experiment(backend="sim", time_scale=1.0),
        )
    )
    offered: list[list[str]] = []
    for runs in (of_waits, of_sizes):
        with pytest.raises(SpecError, match="the experiment names no rules") as refused:
            decide(runs)
        offered.append(str(refused.value.hint).removeprefix("Name one with --rule: ").split(", "))
        for name in offered[-1]:
            assert decide(runs, [name]).decisions, load_rule(name)
    assert "direction" in offered[0]
    assert "direction" not in offered[1], "it is about waits"
    assert "superiority" in offered[1]


def test_a_stopping_rule_that_ended_no_runs_decides_nothing_of_them(tmp_path: Path) -> None:
    declared = {"margin": 0.02, "alpha": 0.05, "budget": 6}
    spec = small_experiment(backend="sim", time_scale=1.0, replicates=3, stop=declared)
    runs = run_experiment(spec, runs_root=tmp_path).runs
    (decision,) = decide(runs, ["superiority"]).decisions
    (answer,) = main_answers(summarise(runs).answers).values()
    decided = decision.intervals["ratio"]
    assert (decided.estimate, decided.high) == pytest.approx((answer.ratio, answer.interval.high))


def test_a_run_that_is_being_made_is_called_running_and_a_killed_one_is_not(measured: Workplace) -> None:
    _, authorization = authorize(measured.frozen, runs_root=measured.runs)
    run = authorization.planned.runs[0]
    authorization.ledger.start(run)
    folder = measured.runs / "small" / run.condition.name / f"{run.replicate}.partial"
    folder.mkdir()
    lock = hold_lock(folder / layout.LOCK, "writing this run", "Wait")
    assert decide(measured.sealed).account_lines[-1].endswith(f": still running (pid {os.getpid()})")
    os.close(lock)
    assert decide(measured.sealed).account_lines[-1].endswith(": its process ended without an entry")


def test_invalid_runs_alone_give_a_decision_for_each_rule_and_comparison(place: Workplace) -> None:
    text = place.experiment_file.read_text().replace("plans/rules/mine.toml", "superiority")
    place.experiment_file.write_text(text)
    place.commit_all()
    runs = place.run_confirmatory(
        place.freeze().path, busy=[f"{name}/{replicate}" for name in ("base", "more") for replicate in range(3)]
    )
    (decision,) = decide(runs).decisions
    assert (decision.subject, decision.outcome.value) == ("more vs base", "WITHHELD")
    assert "0 valid replicates" in decision.reason


def test_an_error_of_git_is_told_in_its_own_words(place: Workplace) -> None:
    (place.root / ".git" / "config").write_text("[broken")
    with pytest.raises(SpecError, match="bad config line"):
        Repository(place.root)
