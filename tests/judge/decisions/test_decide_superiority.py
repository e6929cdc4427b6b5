"""Superiority: false PASS at most alpha, power as promised, the sequence where one was declared, and the sentence."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import numpy as np
import pytest

from harness.analysis.compare.answer import cost_sentence
from harness.analysis.compare.ratio import BlockCosts, estimate_of_blocks
from harness.analysis.compare.stopping import ComparedBlocks, ComparisonLooks, SequentialStatus, looks_at
from harness.analysis.cost.cost_errors import UNKNOWN
from harness.analysis.stats import FloatArray, Interval
from harness.judge.decisions.decide import Outcome, decide_margin
from harness.judge.planning.needed import log_ratio_values
from harness.judge.planning.power import PlannedTest
from harness.model.spec import StopSpec
from harness.model.spec.rules import SuperiorityRule
from harness.model.spec.sections import Basis

RULE = SuperiorityRule(name="cheaper", kind="superiority")
BASE = (10.0, 14.0, 12.0, 9.0, 13.0, 11.0)
CHEAPER = (9.5, 13.5, 11.4, 8.7, 12.4, 10.6)
SCATTERED = (9.0, 14.5, 11.0, 9.9, 13.4, 10.6)


def values_of(costs: Sequence[float], base: Sequence[float] = BASE) -> FloatArray:
    return log_ratio_values(np.array(costs), np.array(base))


def ratios_of(costs: Sequence[float], base: Sequence[float] = BASE, channel: Basis = "a") -> ComparedBlocks:
    blocks = (tuple(map(BlockCosts, costs, base)), tuple(range(len(costs))))
    missing = "no step log" if channel == "b" else ""
    return ComparedBlocks(
        "twelve-slots", "base", channel, *blocks, tuple(values_of(costs, base).tolist()), without=missing, costs=UNKNOWN
    )


def experiments(ratio: float, num_blocks: int, sd: float, num: int = 1_000) -> list[list[BlockCosts]]:
    """Experiments whose plans differ in size by a quarter and whose blocks scatter by ``sd`` about the true ratio."""
    rng = np.random.default_rng(20271123)
    base = rng.lognormal(0.0, 0.25, size=(num, num_blocks))
    own: FloatArray = base * ratio * rng.lognormal(-(sd**2) / 2, sd, size=base.shape)
    return [list(map(BlockCosts, *sides)) for sides in zip(own.tolist(), base.tolist(), strict=True)]


def share_passed(found: list[list[BlockCosts]], limit: float = 1.0) -> float:
    return float(np.mean([estimate_of_blocks(each).p_below(math.log(limit)) < RULE.alpha for each in found]))


def test_p_is_that_of_scipys_one_sided_t_test_of_the_differences() -> None:
    from scipy.stats import ttest_1samp

    differences = np.array(CHEAPER) - 0.97 * np.array(BASE)
    found = estimate_of_blocks(ratios_of(CHEAPER).blocks)
    _, expected = ttest_1samp(differences, 0.0, alternative="less")
    assert found.p_below(math.log(0.97)) == pytest.approx(expected)
    _, expected = ttest_1samp(np.array(CHEAPER) - np.array(BASE), 0.0)
    assert found.p == pytest.approx(expected)


def test_an_interval_ends_where_the_test_of_the_differences_does() -> None:
    from scipy.stats import ttest_1samp

    found = estimate_of_blocks(ratios_of(SCATTERED).blocks)
    for end in (found.low, found.high):
        differences = np.array(SCATTERED) - math.exp(end) * np.array(BASE)
        _, p = ttest_1samp(differences, 0.0)
        assert p == pytest.approx(0.05)
    assert found.inverse.low == pytest.approx(-found.high)
    wide = estimate_of_blocks([BlockCosts(1, 1), BlockCosts(1, 40), BlockCosts(1, 2)])
    assert (wide.low, wide.high) == (-math.inf, math.inf), "the baseline's mean cost is not told from 0"


@pytest.mark.parametrize(("num_blocks", "sd"), [(3, 0.01), (7, 0.035), (20, 0.06)])
def test_no_more_than_alpha_of_experiments_without_a_difference_pass(num_blocks: int, sd: float) -> None:
    """Alpha and two Monte Carlo errors of 1,000 experiments."""
    most = RULE.alpha + 2 * math.sqrt(0.025 * 0.975 / 1_000)
    assert share_passed(experiments(1.0, num_blocks, sd)) <= most
    assert share_passed(experiments(0.98, num_blocks, sd), 0.98) <= most


@pytest.mark.parametrize(("ratio", "sd"), [(0.98, 0.01), (0.945, 0.035), (0.9, 0.1)])
def test_the_blocks_that_power_names_show_a_cheaper_condition_as_often_as_promised(ratio: float, sd: float) -> None:
    (blocks_of_many,) = experiments(ratio, 20_000, sd, num=1)
    many = log_ratio_values(*np.array(blocks_of_many)[:, :2].T)
    spread, effect = float(many.std(ddof=1)), math.log(ratio)
    planned = PlannedTest(spread, RULE.alpha)
    blocks = planned.blocks(effect, "superiority", 0.9)
    assert planned.power(blocks, effect, "superiority") >= 0.9
    # Two Monte Carlo errors of 1,000 experiments.
    assert share_passed(experiments(ratio, blocks, sd)) >= 0.9 - 2 * math.sqrt(0.9 * 0.1 / 1_000)


def test_a_cheaper_condition_passes_in_a_sentence_and_by_a_margin_only_where_that_is_shown() -> None:
    passed = decide_margin(RULE, ratios_of(CHEAPER))
    assert (passed.outcome, passed.label) == (Outcome.PASS, "CHEAPER")
    assert passed.answer == "Yes: twelve-slots costs 4.2 % less than base (3.4 to 5.0 % less): PASS"
    assert decide_margin(RULE.model_copy(update={"margin": 0.04}), ratios_of(CHEAPER)).outcome is Outcome.FAIL
    assert decide_margin(RULE.model_copy(update={"margin": 0.03}), ratios_of(CHEAPER)).outcome is Outcome.PASS
    dearer = decide_margin(RULE, ratios_of(BASE, CHEAPER))
    assert (dearer.outcome, dearer.label) == (Outcome.FAIL, "MORE EXPENSIVE")
    assert re.match(r"No: .* costs 4\.4 % more than base", dearer.answer)


def test_a_scattered_difference_is_not_shown() -> None:
    scattered = decide_margin(RULE, ratios_of(SCATTERED))
    assert (scattered.outcome, scattered.label) == (Outcome.FAIL, "NOT SHOWN")
    assert re.match("Not shown to be cheaper: .*% less to ", scattered.sentence)
    assert "not shown to be cheaper" in scattered.reason
    assert ".031" not in scattered.reason
    assert "simulated, .031 of equal conditions pass" in decide_margin(RULE, ratios_of(CHEAPER)).reason
    assert re.search(r"one-sided p = 0\.\d+, not below 0\.025, against a ratio of 1;", scattered.reason)


def test_equal_costs_say_that_nothing_used_the_difference_and_what_to_do() -> None:
    equal = decide_margin(RULE, ratios_of(BASE))
    assert equal.outcome is Outcome.WITHHELD
    assert "no run used what the conditions differ in" in equal.reason
    assert "workload.num_sessions" in equal.reason


def test_of_costs_that_were_checked_while_they_came_in_the_sequence_decides() -> None:
    ratios, stop = ratios_of(CHEAPER), StopSpec(margin=0.02, budget=24)
    looks = ComparisonLooks("twelve-slots", "base", ratios.blocks, tuple(looks_at(ratios.blocks, stop)), None)
    decision = decide_margin(RULE, ratios, SequentialStatus(stop, 6, (looks,)))
    assert decision.outcome is Outcome.PASS
    assert "declared sequence" in decision.reason
    sloppy = SequentialStatus(StopSpec(margin=0.02, budget=24, alpha=0.1), 6, (looks,))
    assert decide_margin(RULE, ratios, sloppy).outcome is Outcome.WITHHELD


def test_costs_without_a_step_log_say_that_modelled_device_time_is_missing() -> None:
    reason = decide_margin(RULE, ratios_of(CHEAPER, channel="b")).reason
    assert "time in flight (B), as modelled device time (A) is not there (no step log)" in reason


def test_a_rule_on_the_time_in_steps_names_it() -> None:
    on_steps = RULE.model_copy(update={"channel": "s"})
    assert "6 blocks, time in steps (S)" in decide_margin(on_steps, ratios_of(CHEAPER, channel="s")).reason
    missing = decide_margin(on_steps, ratios_of(CHEAPER, channel="b")).reason
    assert "time in flight (B), as time in steps (S) is not there" in missing


def test_sentences_name_both_directions() -> None:
    crossing = Interval(0.99, 0.96, 1.02, 0.95, "", "blocks", 3, 0, 0)
    sentence = cost_sentence("bucket6", "base", crossing)
    assert sentence == "bucket6 costs 1.0 % less than base (4.0 % less to 2.0 % more)"
