"""Factors: given or read from old names, in one place; selections by value; what nobody has is named."""

from __future__ import annotations

from typing import Any

import pytest

from harness.errors import SpecError
from harness.extras.paper.rules import SaturationRule
from harness.model.spec import factors_from_name, factors_text, parse_experiment
from harness.model.spec.rules import is_selected, unmatched


def experiment(*conditions: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "name": "x",
        "base_seed": 1,
        "workload": {"num_sessions": 2},
        "condition": list(conditions) or [{"name": "base"}],
        **changes,
    }


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("n6-slots16", {"stratum": "n6", "configuration": "slots16", "N": 6, "slots": 16}),
        ("n10-nowaits", {"stratum": "n10", "configuration": "nowaits", "N": 10, "waits": False}),
        ("n6-waits", {"stratum": "n6", "configuration": "waits", "N": 6, "waits": True}),
        ("a1-b4", {"stratum": "a1", "configuration": "b4", "a": 1, "bucket": 4, "artifact": "a1"}),
        ("m7", {"m": 7}),
        ("base", {}),
    ],
)
def test_an_older_name_tells_its_factors(name: str, expected: dict[str, object]) -> None:
    assert factors_from_name(name) == expected


def test_given_factors_keep_their_types_and_silence_the_name() -> None:
    given = {"N": 6, "share": 0.5, "waits": True, "grid": "{1,2,4,8}"}
    spec = parse_experiment(experiment({"name": "n8-slots16", "factors": given}), where="here")
    assert spec.factors == {"n8-slots16": given}
    assert [type(value) for value in spec.factors["n8-slots16"].values()] == [int, float, bool, str]
    assert factors_text(given) == "N=6, share=0.5, waits=yes, grid={1,2,4,8}"


def test_names_are_read_only_where_no_condition_gives_factors() -> None:
    spec = parse_experiment(experiment({"name": "n6-base"}, {"name": "n8-base"}), where="here")
    assert [factors["N"] for factors in spec.factors.values()] == [6, 8]
    mixed = parse_experiment(experiment({"name": "n6-base", "factors": {"N": 6}}, {"name": "n8-base"}), where="here")
    assert mixed.factors == {"n6-base": {"N": 6}, "n8-base": {}}


@pytest.mark.parametrize("factors", [{"N": [6]}, {"": 1}, {"two words": 1}, {"N": None}])
def test_a_factor_is_a_number_a_word_or_a_truth_under_a_plain_name(factors: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match="factors"):
        parse_experiment(experiment({"name": "base", "factors": factors}), where="here")


def test_a_selection_asks_for_every_factor_it_names() -> None:
    asked = {"N": (6, 8), "waits": (True,)}
    assert is_selected(asked, "any", {"N": 6, "waits": True, "more": 1})
    assert not is_selected(asked, "any", {"N": 6, "waits": False})
    assert not is_selected(asked, "any", {"N": 6})
    assert not is_selected({}, "any", {"N": 6})
    assert is_selected(("n6-*",), "n6-base", {})


def test_what_no_condition_has_is_named() -> None:
    conditions = {"a": {"N": 6}, "b": {"N": 8}}
    assert unmatched({"N": (6, 7, 8)}, conditions) == ["N = 7"]
    assert unmatched(("a*", "c*"), conditions) == ["c*"]


def test_a_rule_by_a_factor_that_no_condition_has_is_refused() -> None:
    with pytest.raises(SpecError, match="rule 'saturation' uses factor 'slots'") as refused:
        parse_experiment(experiment({"name": "a", "factors": {"N": 6}}, rules=["saturation"]), where="mine.toml")
    assert refused.value.hint == "The conditions have N"


def test_an_older_experiment_is_never_refused_for_its_names() -> None:
    spec = parse_experiment(experiment({"name": "with"}, {"name": "without"}, rules=["direction"]), where="mine.toml")
    assert spec.rules == ("direction",)


def test_a_rule_that_does_not_exist_is_refused() -> None:
    with pytest.raises(SpecError, match="nobody"):
        parse_experiment(experiment(rules=["nobody"]), where="mine.toml")


def test_an_older_saturation_rule_finds_its_levels_in_older_names() -> None:
    rule = SaturationRule(name="s", kind="saturation", levels=("slots16", "slots24"), seed=1)
    conditions = {name: factors_from_name(name) for name in ("n6-base", "n6-slots16", "n6-slots24")}
    assert rule.has_subject_in(conditions)
    assert not rule.missing_from(conditions)
    assert not rule.has_subject_in({"n6-base": {"N": 6}})
