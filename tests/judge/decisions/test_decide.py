"""Rules at their edges: what withholds, what fails, what is not subject, and that limits come from the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.analysis.cost.padding import Padding
from harness.errors import SpecError
from harness.judge.decisions import decide
from harness.judge.decisions.decide import Block, Costs, Outcome
from harness.model.spec.rules import (
    CostRule,
    DirectionRule,
    NoTreatmentRule,
    RecompilationRule,
    SaturationRule,
    load_rule,
    parse_rule,
)
from harness.shipped import shipped_names

COST = CostRule(name="c", kind="cost-validation")
DIRECTION = DirectionRule(name="d", kind="direction")


def test_a_pass_of_a_prediction_says_that_the_prediction_passed() -> None:
    said = decide.decide_cost(COST, "more", costs(0.99, 0.99, 0.98)).answer
    held = "whether the prediction for more holds (cost ratio 0.9800, measured 0.9900)"
    assert said == f"{held}, not whether it costs less: PASS"
    assert decide.decide_cost(COST, "more", costs(0.95, 0.80, 0.5)).answer == ""


def costs(ratio_a: float, ratio_b: float, predicted: float, residual: float = 0.01) -> Costs:
    return Costs(ratio_a, ratio_b / (1 - residual), 1.0, 1.0 / (1 - residual), predicted, 1.0)


@pytest.mark.parametrize(
    ("ratio_a", "ratio_b", "predicted", "outcome"),
    [
        (0.95, 0.95, 0.93, Outcome.PASS),
        (0.95, 0.97, 0.93, Outcome.PASS),  # channels differ by exactly tau
        (0.95, 0.9701, 0.93, Outcome.WITHHELD),
        (0.95, 0.95, 0.92, Outcome.PASS),  # |e| exactly at the limit
        (0.95, 0.95, 0.9199, Outcome.FAIL),
        (1.01, 1.01, 0.99, Outcome.PASS),  # other sides of 1, both in the equivalence band
        (1.03, 1.03, 1.01, Outcome.PASS),
        (1.021, 1.021, 0.995, Outcome.FAIL),
    ],
)
def test_cost_validation_at_its_edges(ratio_a: float, ratio_b: float, predicted: float, outcome: Outcome) -> None:
    assert decide.decide_cost(COST, "x", costs(ratio_a, ratio_b, predicted)).outcome is outcome


def test_a_channel_disagreement_withholds_even_when_the_error_is_large() -> None:
    assert decide.decide_cost(COST, "x", costs(0.95, 0.90, 0.5)).outcome is Outcome.WITHHELD


def test_both_tolerances_are_reported_whichever_decides() -> None:
    numbers = costs(0.95, 0.98, 0.94, residual=0.05)
    revised = decide.decide_cost(COST, "x", numbers)
    initial = decide.decide_cost(COST.model_copy(update={"tolerance": "initial"}), "x", numbers)
    assert (revised.outcome, initial.outcome) == (Outcome.PASS, Outcome.WITHHELD)
    for decision in (revised, initial):
        assert decision.numbers["tau_initial"] == 0.02
        assert decision.numbers["tau_revised"] == pytest.approx(0.05)
        assert "0.0200" in decision.reason
        assert "0.0500" in decision.reason


def test_what_is_exploratory_keeps_its_numbers_and_loses_its_standing() -> None:
    decision = decide.decide_cost(COST, "x", costs(0.95, 0.95, 0.5)).not_subject("exploratory")
    assert decision.outcome is Outcome.NOT_SUBJECT
    assert decision.would_be is Outcome.FAIL
    assert decision.numbers["predicted_ratio"] == 0.5


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
    blocks = [Block(Padding(10, 100), Padding(30, 100)), Block(Padding(0, 900), Padding(0, 900))]
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
    assert decision.numbers["sum_max"] < decision.numbers["single_max"]  # type: ignore[operator]
    # Neither r/B of these runs (0.0185) nor the default of 0.02 covers the sums; 0.03 would.
    assert decision.numbers["sum_q95"] > 0.02  # type: ignore[operator]
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


@pytest.mark.parametrize("name", shipped_names("rules"))
def test_shipped_rules_load_and_are_called_what_their_file_is_called(name: str) -> None:
    rule = load_rule(name)
    assert rule.name == name
    assert rule.question


def test_a_rule_with_an_unknown_key_names_it() -> None:
    with pytest.raises(SpecError, match="max_eror"):
        parse_rule({"kind": "cost-validation", "name": "c", "max_eror": 0.03}, where="mine.toml")


def test_an_unknown_rule_lists_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="saturation"):
        load_rule("nothing")
    with pytest.raises(SpecError, match="no such decision rule file"):
        load_rule(str(tmp_path / "gone.toml"))
