"""How predictions are drawn: how many draws, and how far these lie from the nominal simulation.

Nothing is drawn here. ``harness.sim.perturbation`` fills in what is left out.
"""

from __future__ import annotations

from pydantic import Field

from harness.spec.base import Spec


class PerturbationSpec(Spec):
    """Perturbations of predicted runs; one standard deviation each, means for delays, which are exponential.

    A size that is left out comes from the calibration in the cost file. Without one it is assumed, and reports say so.
    """

    draws: int = Field(default=20, ge=1, le=100_000, description="simulations of each run; 1: a single, nominal one")
    level: float = Field(default=0.9, gt=0, lt=1, description="share of outcomes that an interval is to hold")
    seed: int = Field(default=20261201, ge=0)
    start_ms: float | None = Field(default=None, ge=0, description="mean delay of a session's start")
    lag_ms: float | None = Field(default=None, ge=0, description="mean delay of a re-arrival")
    step_sd: float | None = Field(default=None, ge=0, lt=0.25, description="relative, each step on its own")
    decode_sd: float | None = Field(default=None, ge=0, lt=0.5, description="relative, all decode steps of a device")
    bucket_sd: float | None = Field(default=None, ge=0, lt=0.5, description="relative, f(b) of each bucket")
    prefill_sd: float | None = Field(default=None, ge=0, lt=0.5, description="relative, all prefills")
    artifact_sd: float | None = Field(default=None, ge=0, lt=0.5, description="relative, all steps of a compilation")
