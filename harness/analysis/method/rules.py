"""Decision rules as data: one TOML file per rule, every limit in it, nothing hidden in code.

A rule says what is compared, under which preconditions, and what is exploratory; it never changes after it was frozen.
Nothing here decides. Next: ``decide`` applies a rule to sealed runs; ``harness.prereg`` freezes it.
Definitions: docs/method.md, "Decisions".
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError, model_validator

from harness.errors import SpecError
from harness.shipped import find_shipped
from harness.spec import Spec, describe_validation_error, load_toml

Band = tuple[float, float]
TimesSource = Literal["reported", "steps"]


class _Rule(Spec):
    """What every rule has. conditions, exploratory: shell patterns over condition names.

    A condition that matches ``exploratory`` is computed and reported, but NOT SUBJECT to the rule.
    """

    name: str
    version: int = Field(default=1, ge=1)
    source: str = ""
    question: str = ""
    conditions: tuple[str, ...] = ("*",)
    exploratory: tuple[str, ...] = ()
    min_replicates: int = Field(default=1, ge=1, description="fewer valid ones: WITHHELD")

    def applies_to(self, condition: str) -> bool:
        """Whether a condition is looked at under this rule at all."""
        return any(fnmatchcase(condition, pattern) for pattern in (*self.conditions, *self.exploratory))

    def has_subject_in(self, conditions: Sequence[str]) -> bool:
        """Whether an experiment with these conditions has anything for this rule to look at."""
        return any(self.applies_to(condition) for condition in conditions)

    def is_exploratory(self, condition: str) -> bool:
        return any(fnmatchcase(condition, pattern) for pattern in self.exploratory)


class CostRule(_Rule):
    """Predicted against measured cost ratio of a condition to its baseline (paper 4-3).

    tolerance: which rule of channel agreement decides; the other one is reported beside it.
    """

    kind: Literal["cost-validation"]
    tau0: float = Field(default=0.02, gt=0)
    tolerance: Literal["revised", "initial"] = "revised"
    max_error: float = Field(default=0.03, gt=0)
    equivalence_band: Band = (0.98, 1.02)


class DirectionRule(_Rule):
    """Occupancy ratio R = (1 - p_A) / (1 - p_C) of a condition with waits to its baseline without (paper S4)."""

    kind: Literal["direction"]
    band: Band = (0.97, 1.03)
    min_blocks_outside: int = Field(default=5, ge=1)
    num_blocks: int = Field(default=6, ge=1)


class OccupancyPredictionRule(_Rule):
    """Predicted against measured R, blocks pooled (paper S4)."""

    kind: Literal["occupancy-prediction"]
    max_error: float = Field(default=0.05, gt=0)
    equivalence_band: Band = (0.97, 1.03)


class SaturationRule(_Rule):
    """Adjacent slot counts whose cost no longer differs (paper 5-4).

    levels: ascending; conditions are called ``<stratum>-<level>``. is_stratified: resample within each stratum.
    """

    kind: Literal["saturation"]
    levels: tuple[str, ...] = Field(min_length=2)
    confidence: float = Field(default=0.95, gt=0, lt=1)
    max_width: float = Field(default=0.04, gt=0)
    resamples: int = Field(default=10_000, ge=100)
    seed: int = Field(ge=0)
    is_stratified: bool = False

    def has_subject_in(self, conditions: Sequence[str]) -> bool:
        levels = {condition.rpartition("-")[2] for condition in conditions}
        return len(levels & set(self.levels)) > 1


class RecompilationRule(_Rule):
    """Medians of two artifacts against the differences of session pairs of one artifact (paper S2).

    Conditions are called ``<artifact>-b<bucket>``; replicates are its sessions. resolution_ms: step times are rounded
    to it before anything is compared, as the paper's were recorded. times: the server's own report of its model time
    ("reported", as in the paper), whole step periods ("steps"), or the report where every session has one ("any").
    """

    kind: Literal["recompilation"]
    comparisons: tuple[tuple[str, str], ...] = Field(min_length=1)
    null_quantile: float = Field(default=0.95, gt=0, lt=1)
    resolution_ms: float = Field(default=0.01, ge=0)
    times: Literal[TimesSource, "any"] = "any"

    def has_subject_in(self, conditions: Sequence[str]) -> bool:
        artifacts = {condition.rpartition("-b")[0] for condition in conditions}
        return any({x, y} <= artifacts for x, y in self.comparisons)


class NoTreatmentRule(_Rule):
    """Whether tau covers the run-to-run difference of the two channels for the same input (paper S1)."""

    kind: Literal["no-treatment"]
    tau0: float = Field(default=0.02, gt=0)
    sum_size: int = Field(default=3, ge=1)
    tau0_grid: tuple[float, ...] = (0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.045, 0.05)


class InterferenceRule(_Rule):
    """Injected prefill against background sessions (paper 3-3): existence, simultaneity, growth with length.

    control: the condition without an injection. A control that crosses the threshold makes existence PARTIAL.
    """

    kind: Literal["interference"]
    control: str = "control"
    threshold: float = Field(default=5.0, gt=1, description="spike / baseline interval")
    background_group: str = "background"
    injected_group: str = "injected"

    def has_subject_in(self, conditions: Sequence[str]) -> bool:
        return self.control in conditions and len(conditions) > 1

    @model_validator(mode="after")
    def _distinct(self) -> InterferenceRule:
        if self.background_group == self.injected_group:
            raise ValueError("background_group and injected_group are the same")
        return self


DecisionRule = Annotated[
    CostRule
    | DirectionRule
    | OccupancyPredictionRule
    | SaturationRule
    | RecompilationRule
    | NoTreatmentRule
    | InterferenceRule,
    Field(discriminator="kind"),
]
_ADAPTER: TypeAdapter[DecisionRule] = TypeAdapter(DecisionRule)


def parse_rule(table: dict[str, Any], *, where: str) -> DecisionRule:
    """A rule from a TOML table; raises SpecError naming every key that is wrong."""
    try:
        return _ADAPTER.validate_python(table)
    except ValidationError as error:
        raise SpecError(
            describe_validation_error(error), where=where, hint="Compare with plans/rules/*.toml"
        ) from error


def find_rule(name_or_path: str) -> Path:
    """The file of a shipped rule, or of a user's own."""
    return find_shipped("rules", name_or_path, what="decision rule")


def load_rule(name_or_path: str) -> DecisionRule:
    """The rule in a file."""
    path = find_rule(name_or_path)
    return parse_rule(load_toml(path), where=str(path))
