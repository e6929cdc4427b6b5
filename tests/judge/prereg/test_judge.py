"""Without rules to judge by, those that have something to judge in the runs are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.analysis.compare.answer import main_answers
from harness.analysis.summary import summarise
from harness.errors import SpecError
from harness.judge.prereg import decide
from harness.model.spec.rules import load_rule
from harness.runner import run_experiment
from tests.support.experiments import small_experiment


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
    assert answer.interval is not None
    decided = decision.intervals["ratio"]
    assert (decided.estimate, decided.high) == pytest.approx((answer.ratio, answer.interval.high))
