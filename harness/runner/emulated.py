"""How an emulated device of a fleet differs in one run: one factor on the time of each step, by ``[fleet.emulated]``.

The same run always gets the same factor, resumed or not. Channel A goes on pricing steps by the cost model, as on a
real device that is slower than its calibration.
"""

from __future__ import annotations

import random

from harness.clock import NS_PER_S
from harness.experiment import PlannedRun
from harness.sim import simulate


def emulated_factor(run: PlannedRun) -> float:
    """What this run's step times are multiplied by; 1 outside a fleet and on a device like its model.

    The device's clock counts each run that it has to make before this one as long as this one is by the model.
    """
    fleet, place = run.spec.fleet, run.place
    traits = None if fleet is None or place is None else fleet.emulated.get(place.device)
    if fleet is None or traits is None:
        return 1.0
    earlier = run.replicate // len(fleet.places) * len(run.spec.condition) + run.order_index
    run_ns = simulate(run.plan, run.server, run.cost_model).end_ns if traits.drift_per_hour else 0
    normal = random.Random(f"{run.spec.base_seed}/{place}/{run.label}").gauss(0, 1)
    return traits.factor(earlier * run_ns / NS_PER_S / 3600, len(run.neighbours), normal)
