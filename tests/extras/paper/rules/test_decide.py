"""The paper's rules at their edges: what confirms, what withholds, and that nothing varied is said."""

from __future__ import annotations

import pytest

from harness.analysis.cost.padding import Padding
from harness.extras.paper.rules import DirectionRule, NoTreatmentRule, RecompilationRule, SaturationRule, decide
from harness.extras.paper.rules.decide import PaddingPair
from harness.judge.decisions.decide import Outcome

DIRECTION = DirectionRule(name="d", kind="direction")


def test_a_direction_needs_five_of_six_blocks_and_the_pooled_ratio() -> None:
    above, inside = 1.05, 1.0
    confirmed = decide.decide_occupancies(DIRECTION, "x", [above] * 5 + [inside], 1.04)
    assert confirmed.label == "CONFIRMED above"
    assert decide.decide_occupancies(DIRECTION, "x", [above] * 4 + [inside] * 2, 1.04).outcome is Outcome.FAIL
    assert decide.decide_occupancies(DIRECTION, "x", [above] * 5 + [inside], 1.02).outcome is Outcome.FAIL
    assert decide.decide_occupancies(DIRECTION, "x", [0.95] * 6, 0.95).label == "CONFIRMED below"
    assert decide.decide_occupancies(DIRECTION, "x", [above] * 3 + [0.95] * 3, 1.0).outcome is Outcome.FAIL


def test_a_direction_with_too_few_blocks_is_withheld() -> None:
    assert decide.decide_occupancies(DIRECTION, "x", [1.05] * 3, 1.05).outcome is Outcome.WITHHELD


def test_pooling_sums_numerators_and_denominators() -> None:
    blocks = [PaddingPair(Padding(10, 100), Padding(30, 100)), PaddingPair(Padding(0, 900), Padding(0, 900))]
    assert blocks[0].occupancy == pytest.approx(0.9 / 0.7)
    assert decide.pooled(blocks).occupancy == pytest.approx(0.99 / 0.97)


def test_saturation_needs_one_inside_and_a_narrow_interval() -> None:
    rule = SaturationRule(name="s", kind="saturation", levels=("a", "b"), seed=1)
    narrow = {"n6": [0.999, 1.0, 1.001], "n8": [1.0, 1.0, 1.002]}
    wide = {"n6": [0.9, 1.0, 1.1], "n8": [0.9, 1.0, 1.1]}
    away = {"n6": [0.95, 0.951, 0.952], "n8": [0.95, 0.949, 0.951]}
    assert [decide.decide_saturation(rule, "x", ratios).label for ratios in (narrow, wide, away)] == [
        "SATURATED",
        "NOT SATURATED",
        "NOT SATURATED",
    ]


def test_no_treatment_compares_the_sums_that_decisions_use() -> None:
    rule = NoTreatmentRule(name="t", kind="no-treatment")
    a = [10.0, 10.0, 10.0, 10.0, 10.0, 10.0, 10.0, 10.0, 10.0, 10.6]
    b = [10.3, 10.2, 10.3, 10.2, 10.3, 10.2, 10.3, 10.2, 10.3, 10.2]
    decision = decide.decide_no_treatment(rule, "n6", a, b)
    assert (decision.numbers["single_pairs"], decision.numbers["sum_pairs"]) == (45, 2100)
    assert decision.numbers["sum_max"] < decision.numbers["single_max"]
    # Neither r/B of these runs (0.0185) nor the default of 0.02 covers the sums; 0.03 would.
    assert decision.numbers["sum_q95"] > 0.02
    assert decision.numbers["least_covering_tau0"] == 0.03


def test_a_decision_on_a_spread_of_zero_says_that_nothing_varied() -> None:
    words = "nothing varied between these runs"
    no_treatment = NoTreatmentRule(name="t", kind="no-treatment")
    covered = decide.decide_no_treatment(no_treatment, "n6", [10.0] * 10, [10.1] * 10)
    assert (covered.label, words in covered.reason) == ("COVERED", True)
    varied = decide.decide_no_treatment(no_treatment, "n6", [10.0] * 9 + [10.1], [10.1] * 10)
    assert (varied.label, words in varied.reason) == ("COVERED", False)
    recompiled = RecompilationRule(name="r", kind="recompilation", comparisons=(("a1", "a3"),))
    within = decide.decide_recompilation(recompiled, "a1 vs a3", ([12.0] * 3, [12.0] * 3), [0.0] * 6)
    assert (within.label, words in within.reason) == ("WITHIN", True)
    noisy = decide.decide_recompilation(recompiled, "a1 vs a3", ([12.0] * 3, [12.0] * 3), [0.0] * 5 + [0.1])
    assert (noisy.label, words in noisy.reason) == ("WITHIN", False)
