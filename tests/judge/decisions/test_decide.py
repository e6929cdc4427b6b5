"""Rules at their edges: what withholds, what fails, what is not subject, and that limits come from the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.errors import SpecError
from harness.judge.decisions import decide
from harness.judge.decisions.decide import Costs, Outcome
from harness.model.spec.rules import CostRule, load_rule, parse_rule
from harness.shipped import shipped_names

COST = CostRule(name="c", kind="cost-validation")


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
        (0.95, 0.90, 0.5, Outcome.WITHHELD),  # even when the error is large
        (0.95, 0.95, 0.92, Outcome.PASS),  # |e| exactly at the limit
        (0.95, 0.95, 0.9199, Outcome.FAIL),
        (1.01, 1.01, 0.99, Outcome.PASS),  # other sides of 1, both in the equivalence band
        (1.03, 1.03, 1.01, Outcome.PASS),
        (1.021, 1.021, 0.995, Outcome.FAIL),
    ],
)
def test_cost_validation_at_its_edges(ratio_a: float, ratio_b: float, predicted: float, outcome: Outcome) -> None:
    assert decide.decide_cost(COST, "x", costs(ratio_a, ratio_b, predicted)).outcome is outcome


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


@pytest.mark.parametrize("name", shipped_names("rules"))
def test_shipped_rules_load_and_are_called_what_their_file_is_called(name: str) -> None:
    rule = load_rule(name)
    assert rule.name == name
    assert rule.question


def test_a_rule_with_an_unknown_key_names_it() -> None:
    with pytest.raises(SpecError, match="max_eror"):
        parse_rule({"kind": "cost-validation", "name": "c", "max_eror": 0.03}, where="mine.toml")


def test_a_kind_that_no_package_has_lists_those_there_are() -> None:
    with pytest.raises(SpecError, match=r"unknown kind of rule 'guess'; use one of cost-validation, .*direction"):
        parse_rule({"kind": "guess", "name": "g"}, where="mine.toml")


def test_an_unknown_rule_lists_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="saturation"):
        load_rule("nothing")
    with pytest.raises(SpecError, match="no such decision rule file"):
        load_rule(str(tmp_path / "gone.toml"))
