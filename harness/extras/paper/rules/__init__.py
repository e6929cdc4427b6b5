"""The paper's rules: padding's direction, occupancy, saturation, recompilation, repeats, injected prefills.

Definitions: docs/reference/method-comparisons.md, "Decisions". Nothing is decided here.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from harness.model.spec import Factor
from harness.model.spec.rules import Band, Conditions, DecisionRule, unmatched

_CASES = "harness.extras.paper.rules.cases"

TimesSource = Literal["reported", "steps"]


class DirectionRule(DecisionRule):
    """Occupancy ratio R = (1 - p_A) / (1 - p_C) of a condition with waits to its baseline without (paper S4)."""

    cases_at: ClassVar[str] = f"{_CASES}:direction_cases"
    kind: Literal["direction"]
    band: Band = (0.97, 1.03)
    min_blocks_outside: int = Field(default=5, ge=1)
    num_blocks: int = Field(default=6, ge=1)


class OccupancyPredictionRule(DecisionRule):
    """Predicted against measured R, blocks pooled (paper S4)."""

    cases_at: ClassVar[str] = f"{_CASES}:occupancy_cases"
    kind: Literal["occupancy-prediction"]
    max_error: float = Field(default=0.05, gt=0)
    equivalence_band: Band = (0.97, 1.03)


class SaturationRule(DecisionRule):
    """Adjacent slot counts whose cost no longer differs (paper 5-4).

    levels: values of ``factor``, ascending. strata: factors whose values must be equal in what is compared.
    is_stratified: resample within each stratum.
    """

    cases_at: ClassVar[str] = f"{_CASES}:saturation_cases"
    kind: Literal["saturation"]
    factor: str = "configuration"
    levels: tuple[Factor, ...] = Field(min_length=2)
    strata: tuple[str, ...] = ("stratum",)
    confidence: float = Field(default=0.95, gt=0, lt=1)
    max_width: float = Field(default=0.04, gt=0)
    resamples: int = Field(default=10_000, ge=100)
    seed: int = Field(ge=0)
    is_stratified: bool = False

    def has_subject_in(self, conditions: Conditions) -> bool:
        return len({factors.get(self.factor) for factors in conditions.values()} & set(self.levels)) > 1

    def missing_from(self, conditions: Conditions) -> list[str]:
        return unmatched({self.factor: self.levels}, conditions)

    @property
    def factors_named(self) -> tuple[str, ...]:
        return (self.factor, *self.strata)


class RecompilationRule(DecisionRule):
    """Medians of two artifacts against the differences of session pairs of one artifact (paper S2).

    Conditions have the factors ``artifact`` and ``bucket``; replicates are an artifact's sessions. resolution_ms: step
    times are rounded to it before anything is compared, as the paper's were recorded. times: the server's own report of
    its model time ("reported", as in the paper), whole step periods ("steps"), or the report where every session has
    one ("any").
    """

    cases_at: ClassVar[str] = f"{_CASES}:recompilation_cases"
    kind: Literal["recompilation"]
    comparisons: tuple[tuple[str, str], ...] = Field(min_length=1)
    null_quantile: float = Field(default=0.95, gt=0, lt=1)
    resolution_ms: float = Field(default=0.01, ge=0)
    times: Literal[TimesSource, "any"] = "any"

    def has_subject_in(self, conditions: Conditions) -> bool:
        artifacts = {factors.get("artifact") for factors in conditions.values()}
        return any({x, y} <= artifacts for x, y in self.comparisons)

    def missing_from(self, conditions: Conditions) -> list[str]:
        artifacts = dict.fromkeys(artifact for pair in self.comparisons for artifact in pair)
        return unmatched({"artifact": tuple(artifacts)}, conditions)

    @property
    def factors_named(self) -> tuple[str, ...]:
        return ("artifact", "bucket")


class NoTreatmentRule(DecisionRule):
    """Whether tau covers the run-to-run difference of the two channels for the same input (paper S1)."""

    cases_at: ClassVar[str] = f"{_CASES}:no_treatment_cases"
    kind: Literal["no-treatment"]
    tau0: float = Field(default=0.02, gt=0)
    sum_size: int = Field(default=3, ge=1)
    tau0_grid: tuple[float, ...] = (0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.045, 0.05)


class InterferenceRule(DecisionRule):
    """Injected prefill against background sessions (paper 3-3): existence, simultaneity, growth with length.

    control: the condition without an injection. A control that crosses the threshold makes existence PARTIAL.
    """

    cases_at: ClassVar[str] = f"{_CASES}:interference_cases"
    kind: Literal["interference"]
    control: str = "control"
    threshold: float = Field(default=5.0, gt=1, description="spike / baseline interval")
    background_group: str = "background"
    injected_group: str = "injected"

    def has_subject_in(self, conditions: Conditions) -> bool:
        return self.control in conditions and len(conditions) > 1

    @model_validator(mode="after")
    def _distinct(self) -> InterferenceRule:
        if self.background_group == self.injected_group:
            raise ValueError("background_group and injected_group are the same")
        return self
