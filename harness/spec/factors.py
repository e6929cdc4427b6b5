"""Factors: what an experiment varies between its conditions, by name and value; selections pick conditions by them.

Names of conditions are read for factors only where an experiment gives none, in one function here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Annotated

from pydantic import AfterValidator, StrictBool, StrictFloat, StrictInt, StrictStr

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
