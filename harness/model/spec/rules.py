"""Decision rules as data: one TOML file a rule, with every limit.

Definitions: docs/reference/method-comparisons.md, "Decisions".

A rule says what is compared, under which preconditions, and what is exploratory. It selects conditions by their
factors: what an experiment varies, by name and value. Nothing is decided here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    SerializeAsAny,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    ValidationError,
)

from harness.errors import SpecError
from harness.model.spec.base import Spec, describe_validation_error, load_toml
from harness.model.spec.sections import Basis
from harness.plugins import Registry
from harness.shipped import find_shipped

Factor = StrictBool | StrictInt | StrictFloat | StrictStr
Factors = Mapping[str, Factor]
FACTOR_PATTERN = re.compile(r"^[A-Za-z][A-Za-z0-9_]{0,31}$")
# Patterns of condition names, or the allowed values of some factors.
Selection = tuple[str, ...] | dict[str, tuple[Factor, ...]]
# Abbreviations in names.
ABBREVIATED = {"n": "N", "b": "bucket"}


def _named_well(factors: dict[str, Factor]) -> dict[str, Factor]:
    for name in factors:
        if not FACTOR_PATTERN.match(name):
            raise ValueError(f"factor {name!r} must match {FACTOR_PATTERN.pattern}")
    return factors


WrittenFactors = Annotated[dict[str, Factor], AfterValidator(_named_well)]


def factors_from_name(name: str) -> dict[str, Factor]:
    """Factors in the name of a condition.

    "n6-slots16": N 6, slots 16, stratum "n6", configuration "slots16". "a1-b4": artifact "a1", bucket 4. "n6-nowaits":
    waits false. Other words are ignored.
    """
    stratum, separator, last = name.rpartition("-")
    factors: dict[str, Factor] = {"stratum": stratum, "configuration": last} if separator else {}
    for word in name.split("-"):
        if word in ("waits", "nowaits"):
            factors["waits"] = word == "waits"
        elif (number := re.fullmatch(r"([a-z]+)(\d+)", word)) is not None:
            factors[ABBREVIATED.get(number[1], number[1])] = int(number[2])
    if stratum and re.fullmatch(r"b\d+", last):
        factors["artifact"] = stratum
    return factors


def factors_text(factors: Factors) -> str:
    """Factors as text: N=6, waits=yes."""
    return ", ".join(f"{name}={value_text(value)}" for name, value in factors.items())


def value_text(value: Factor) -> str:
    """A value as text: yes or no, a number without trailing zeros, words unchanged."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def level_text(factor: str, value: Factor) -> str:
    """A value with the name of its factor, slots16; a word without."""
    return value if isinstance(value, str) else f"{factor}{value_text(value)}"


def is_selected(selection: Selection, name: str, factors: Factors) -> bool:
    """Whether a condition matches a pattern, or has one of the allowed values for every factor of the selection."""
    if isinstance(selection, dict):
        return bool(selection) and all(factors.get(factor) in values for factor, values in selection.items())
    return any(fnmatchcase(name, pattern) for pattern in selection)


def unmatched(selection: Selection, conditions: Mapping[str, Factors]) -> list[str]:
    """The parts of a selection that no condition has: patterns, or values of factors."""
    if isinstance(selection, dict):
        wanted = [(factor, value) for factor, values in selection.items() for value in values]
        return [
            f"{factor} = {value_text(value)}"
            for factor, value in wanted
            if not any(factor in factors and factors[factor] == value for factors in conditions.values())
        ]
    return [pattern for pattern in selection if not any(fnmatchcase(name, pattern) for name in conditions)]


def factor_names(conditions: Iterable[Factors]) -> list[str]:
    """Every factor that some condition has, in the order of first appearance."""
    return list(dict.fromkeys(name for factors in conditions for name in factors))


Band = tuple[float, float]
# Conditions of an experiment: name -> factors.
Conditions = Mapping[str, Factors]


class DecisionRule(Spec):
    """Keys of every rule. conditions, exploratory: conditions by the values of factors, or by patterns of names.

    A condition that ``exploratory`` selects is computed and reported, but NOT SUBJECT to the rule. cases_at: place of
    the function from the rule and ``ExperimentRuns`` to its ``harness.judge.decisions.verdicts.Case``s.
    """

    cases_at: ClassVar[str]
    kind: Any  # a literal of each subclass

    name: str
    version: int = Field(default=1, ge=1)
    source: str = ""
    question: str = ""
    conditions: Selection = ("*",)
    exploratory: Selection = ()
    min_replicates: int = Field(default=1, ge=1, description="fewer valid ones: WITHHELD")

    def applies_to(self, condition: str, factors: Factors) -> bool:
        """Whether this rule computes anything for a condition."""
        return is_selected(self.conditions, condition, factors) or self.is_exploratory(condition, factors)

    def is_exploratory(self, condition: str, factors: Factors) -> bool:
        return is_selected(self.exploratory, condition, factors)

    def has_subject_in(self, conditions: Conditions) -> bool:
        """Whether this rule applies to any of these conditions."""
        return any(self.applies_to(name, factors) for name, factors in conditions.items())

    def missing_from(self, conditions: Conditions) -> list[str]:
        """Values of factors, or patterns of names, that the rule selects and no condition has."""
        return unmatched(self.conditions, conditions)

    @property
    def factors_named(self) -> tuple[str, ...]:
        """Factors that the rule needs."""
        selections = (self.conditions, self.exploratory)
        return tuple(
            dict.fromkeys(name for selection in selections if isinstance(selection, dict) for name in selection)
        )


class CostRule(DecisionRule):
    """Predicted against measured cost ratio of a condition to its baseline (paper 4-3).

    tolerance: which rule of channel agreement decides; the other one is reported beside it.
    """

    cases_at: ClassVar[str] = "harness.judge.decisions.verdicts:cost_cases"
    kind: Literal["cost-validation"]
    tau0: float = Field(default=0.02, gt=0)
    tolerance: Literal["revised", "initial"] = "revised"
    max_error: float = Field(default=0.03, gt=0)
    equivalence_band: Band = (0.98, 1.02)


class EquivalenceRule(DecisionRule):
    """Whether a cost ratio lies within a margin of 1, shown by two one-sided tests (Schuirmann 1987).

    Where the experiment declares a stopping rule, its sequence decides, on the same channel and at most at this alpha.
    """

    cases_at: ClassVar[str] = "harness.judge.decisions.verdicts:margin_cases"
    kind: Literal["equivalence"]
    min_replicates: int = Field(default=3, ge=2, description="fewer valid ones: WITHHELD")
    margin: float = Field(gt=0, lt=1, description="ratios from 1 / (1 + margin) to 1 + margin count as equal")
    alpha: float = Field(default=0.05, gt=0, lt=0.5, description="of each of the two tests")
    channel: Basis = "a"


class SuperiorityRule(DecisionRule):
    """Whether a condition is cheaper than its baseline by at least a margin: a one-sided test of the ratio of sums.

    The ratio is of the costs on the same plans. Where the experiment declares a stopping rule, its sequence decides, on
    the same channel and at most at twice this alpha (it has two sides). Where no run has a step log, channel B decides.
    """

    cases_at: ClassVar[str] = "harness.judge.decisions.verdicts:margin_cases"
    kind: Literal["superiority"]
    min_replicates: int = Field(default=3, ge=3, description="fewer valid ones: WITHHELD")
    margin: float = Field(default=0.0, ge=0, lt=1, description="ratios below 1 - margin count as cheaper")
    alpha: float = Field(
        default=0.025, gt=0, lt=0.5, description="of the one-sided test; the interval has level 1 - 2 alpha"
    )
    channel: Basis = "a"

    @property
    def limit(self) -> float:
        """The ratio below which a condition counts as cheaper."""
        return 1 - self.margin


RULE_KINDS: Mapping[str, type[DecisionRule]] = Registry(
    "rules", {"cost-validation": CostRule, "equivalence": EquivalenceRule, "superiority": SuperiorityRule}
)


def _of_its_kind(table: Any) -> Any:
    """The rule in a table, as the class of its kind; ValueError for a kind that neither the core nor a plug-in has."""
    if not isinstance(table, dict):
        return table
    kind = str(cast("dict[str, Any]", table).get("kind", ""))
    if kind not in RULE_KINDS:
        kinds = ", ".join(RULE_KINDS)
        raise ValueError(f"kind: unknown kind of rule {kind!r}; use one of {kinds}, or install its plug-in")
    try:
        return RULE_KINDS[kind].model_validate(table)
    except ValidationError as error:
        raise ValueError(describe_validation_error(error)) from error


AnyRule = Annotated[SerializeAsAny[DecisionRule], BeforeValidator(_of_its_kind)]
"""A rule of any kind, as a key of another specification."""


def parse_rule(table: dict[str, Any], *, where: str) -> DecisionRule:
    """A rule from a TOML table; raises SpecError naming every key that is wrong."""
    try:
        return _of_its_kind(table)
    except ValueError as error:
        raise SpecError(str(error), where=where, hint="Compare with plans/rules/*.toml") from error


def find_rule(name_or_path: str) -> Path:
    """The file of a shipped rule, or the given file."""
    return find_shipped("rules", name_or_path, what="decision rule")


def load_rule(name_or_path: str) -> DecisionRule:
    """The rule in a file."""
    path = find_rule(name_or_path)
    return parse_rule(load_toml(path), where=str(path))
