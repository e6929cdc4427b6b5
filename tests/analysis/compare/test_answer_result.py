"""Interval and verdict of one ratio: they never contradict, and say nothing of plans that nobody replayed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.analysis.compare.across import Side, compare_all, pairs_of
from harness.analysis.compare.answer import main_answers, result_of
from harness.analysis.compare.ratio import Family, Ratio, Verdict
from harness.analysis.stats import of_blocks
from harness.analysis.summary import summarise
from harness.judge.decisions.decide import Outcome
from harness.judge.prereg import decide
from harness.model.spec import parse_experiment
from harness.present.report.answers import answers
from harness.present.report.terminal import conditions_table
from harness.runner import run_experiment
from tests.support.experiments import small_experiment

CONDITIONS = [{"name": "base"}, {"name": "full", "server": {"decode_buckets": [8]}}]
values = st.lists(st.floats(-0.5, 0.5), min_size=3, max_size=12)


def ratio_of(values: list[float]) -> Ratio:
    return Ratio(ratio=1.0, values=tuple(values), blocks=of_blocks(values))


@given(values=values, size=st.integers(1, 12), is_checked=st.booleans())
def test_a_difference_is_shown_just_where_the_printed_interval_leaves_1_out(
    values: list[float], size: int, is_checked: bool
) -> None:
    result = result_of(ratio_of(values), len(values), Family(size, is_checked=is_checked))
    is_shown = result.verdict in (Verdict.LOWER, Verdict.HIGHER)
    assert is_shown == (result.interval is not None and not result.interval.contains(1))
    if result.p_adjusted is not None and abs(result.p_adjusted - 0.05) > 1e-9:
        assert is_shown == (result.p_adjusted < 0.05)


def test_the_intervals_of_a_family_hold_together() -> None:
    rng = np.random.default_rng(7)
    missed = 0
    for _ in range(1_000):
        every = rng.normal(0.0, 0.02, size=(6, 5))
        results = [result_of(ratio_of(each.tolist()), 5, Family(6)) for each in every]
        missed += any(result.verdict is not Verdict.NO_DIFFERENCE for result in results)
    assert missed / 1_000 == pytest.approx(0.05, abs=0.02)


def test_one_plan_repeated_says_nothing_of_other_plans_in_any_view(tmp_path: Path) -> None:
    rules = ("equivalence",)
    spec = small_experiment(
        backend="sim", replicates=4, baseline="base", condition=CONDITIONS, same_input=True, rules=rules
    )
    runs = run_experiment(spec, runs_root=tmp_path).runs
    words = "one plan, repeated 4 times: says nothing of other plans"
    summary = summarise(runs)
    (answer,) = main_answers(summary.answers).values()
    assert (answer.verdict, answer.interval, answer.result.p_adjusted) == (Verdict.ONE_PLAN, None, None)
    (said,) = [f"{one.text} {one.basis}" for one in answers(summary, str)]
    assert f"{words}; nothing varied between the runs" in said
    assert words.capitalize() in conditions_table(summary).caption
    sides = [Side(f"x/small/{name}", tuple(r for r in runs if r.condition == name)) for name in ("base", "full")]
    rows = compare_all(pairs_of(sides)).records()
    assert {row["verdict"] for row in rows if not str(row["verdict"]).startswith("too few")} == {"one plan, repeated"}
    assert all(row["low"] is None and row["p"] is None for row in rows)
    (decision,) = decide(runs).decisions
    assert (decision.outcome, decision.reason) == (Outcome.WITHHELD, words)


def test_a_rule_on_repeats_of_the_same_sessions_says_nothing_of_rare_plans(tmp_path: Path) -> None:
    conditions = [{"name": "base"}, {"name": "one", "server": {"decode_buckets": [8]}}]
    table = {"name": "whole", "backend": "sim", "replicates": 4, "baseline": "base", "condition": conditions}
    workload, stop = {"source": "trace", "trace": "research-agent"}, {"margin": 0.02, "budget": 4}
    runs = run_experiment(
        parse_experiment({**table, "workload": workload, "stop": stop}, where="x"), runs_root=tmp_path
    )
    (decision,) = (each for each in decide(runs.runs).decisions if each.rule == "stop")
    assert "4 repeats of the same sessions say nothing of others" in decision.reason
    assert "or rarer" not in decision.reason
