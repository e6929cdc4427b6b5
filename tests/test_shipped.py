"""What ships with the harness says what it promises."""

from __future__ import annotations

import numpy as np
import pytest

from harness.analysis.compare.answer import result_of
from harness.analysis.compare.pairs import num_comparisons
from harness.analysis.compare.ratio import Family, Ratio, Verdict
from harness.analysis.stats import of_blocks
from harness.model.engine.config import EngineConfig
from harness.model.experiment import PlannedRun, resolve
from harness.model.sim.draws import FloatArray, Perturbation, draw, run_draws
from harness.model.sim.plans import plan_arrays
from harness.model.spec import load_experiment

TRIES = 200


def costs_of_tries(run: PlannedRun, lag_ms: float) -> FloatArray:
    """Device time of one run in each try, whose sessions start late and return late at random, with the same costs."""
    config = EngineConfig.from_server(run.server)
    jitter = Perturbation(
        771, start_ms=lag_ms, lag_ms=lag_ms, decode_sd=0, bucket_sd=0, prefill_sd=0, artifact_sd=0, role=run.label
    )
    outcome = run_draws(draw(plan_arrays([run.plan]), config, run.cost_model, jitter, range(TRIES)), config)
    return outcome.device_ns.astype(np.float64)


# In ms of model time, eight times what the client and the emulator are really late by.
@pytest.mark.parametrize("lag_ms", [1.0, 10.0, 30.0])
def test_the_demo_gives_the_same_answers_in_19_of_20_tries_however_late_requests_are(lag_ms: float) -> None:
    spec = load_experiment("demo")
    costs = {run.label: costs_of_tries(run, lag_ms) for run in resolve(spec)}
    for condition in spec.condition:
        if (base := spec.baseline_of(condition)) != condition.name:
            pairs = [(costs[f"{condition.name}/{k}"], costs[f"{base}/{k}"]) for k in range(spec.replicates)]
            logs = np.array([np.log(treated / baseline) for treated, baseline in pairs]).T.tolist()
            family = Family(num_comparisons(spec))
            said = [
                result_of(Ratio(ratio=1.0, values=tuple(each), blocks=of_blocks(each)), spec.replicates, family).verdict
                for each in logs
            ]
            assert said.count(Verdict.LOWER) >= 0.95 * TRIES, condition.name
