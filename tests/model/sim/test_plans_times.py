"""An experiment whose times no integer holds is refused, with slots and with blocks."""

from __future__ import annotations

from typing import Any

import pytest

from harness.errors import PlanError
from harness.model.engine.config import EngineConfig
from harness.model.experiment import resolve
from harness.model.sim.draws import nominal, simulator_of
from harness.model.sim.plans import plan_arrays
from tests.support.experiments import small_experiment

PAGED = {"rules": "vllm-paged", "cost_model": "emulated-gpu", "num_gpu_blocks": 4000, "block_size": 16}


@pytest.mark.parametrize("server", [{}, PAGED], ids=["slots", "paged"])
def test_an_experiment_whose_times_no_integer_holds_is_refused(server: dict[str, Any]) -> None:
    spec = small_experiment(backend="sim", server=server, workload={"num_sessions": 3, "start_offset_s": 4e9})
    run = next(iter(resolve(spec)))
    with pytest.raises(PlanError, match=r"its waits and steps could take 38\d years, more than .* integers hold"):
        simulator_of(run.server)(nominal(plan_arrays([run.plan]), run.cost_model), EngineConfig.from_server(run.server))
