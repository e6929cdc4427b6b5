"""What steps cost on today's server: costs that are named, a quick calibration, or none, so that time in flight counts.

Nothing is run here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from harness.kinds import kind_named
from harness.measure.records.run import SealedRun
from harness.model.spec import ExperimentSpec, ServerSpec
from harness.model.spec.sections import Basis
from harness.runner.calibrate import QUICK_SWEEPS, CalibrationSpec, calibration_experiment, fit_runs, write_cost_file
from harness.tune.confirm import base_condition
from harness.tune.diagnose import Diagnosis

COSTS = "costs"
"""Folder of a tune with the cost file of its calibration."""
ASSUMED, ASSUMED_PAGED = "paper", "emulated-gpu"
SEED = 20261117


class Price(NamedTuple):
    """The costs that a search takes. is_assumed: nobody measured them for this server. channel: what a measurement
    counts, "a" modelled device time, "b" time in flight."""

    cost_model: str
    is_assumed: bool
    channel: Basis
    words: str


def needs_calibration(spec: ExperimentSpec) -> bool:
    """Whether no costs are named and the backend can start servers of which none is known."""
    kind = kind_named(spec.backend)
    return kind.is_restarted and kind.has_device is True and not names_costs(spec)


def names_costs(spec: ExperimentSpec) -> bool:
    """Whether the file names the costs of the server that runs today."""
    return "cost_model" in spec.server.model_fields_set or "cost_model" in base_condition(spec).server


def calibration_of(spec: ExperimentSpec, server: ServerSpec) -> ExperimentSpec:
    """The quick sweeps of today's server, as an experiment."""
    if server.is_paged:
        server = server.model_copy(update={"cost_model": ASSUMED_PAGED})
    sweeps = CalibrationSpec(
        name=f"{spec.name[:52]}-calibrate",
        backend=spec.backend,
        server=server.replica,
        base_seed=SEED,
        time_scale=spec.time_scale,
        **QUICK_SWEEPS,
    )
    return calibration_experiment(sweeps)


def fitted(folder: Path, runs: Sequence[SealedRun]) -> Path:
    """The cost file of these sweeps, written once; SpecError where they determine no costs."""
    place = folder / COSTS
    if known := sorted(place.glob("*.toml")):
        return known[0]
    return write_cost_file(fit_runs(runs, seed=SEED), place, "calibrated")


def price_of(server: ServerSpec, diagnosis: Diagnosis) -> Price:
    """The costs of today's server, by what its runs showed."""
    if diagnosis.has_costs:
        channel = "b" if diagnosis.unknown else "a"
        words = f"the costs of {server.cost_model!r}"
        if diagnosis.unknown:
            words += f"; time in flight alone is measured: {diagnosis.unknown}"
        return Price(server.cost_model, False, channel, words)
    costs = ASSUMED_PAGED if server.is_paged else ASSUMED
    words = (
        f"no costs of this server are known; the search assumes those of {costs!r}, which nobody measured on it, and "
        "the measurement counts time in flight alone"
    )
    return Price(costs, True, "b", words)
