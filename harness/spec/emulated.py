"""``[fleet.emulated]``: how emulated and simulated devices differ, so that a fleet's analysis is shown without an NPU.

Shares of every step's time; an emulated fleet without it has equal devices. Nothing is timed here.
"""

from __future__ import annotations

import math

from pydantic import Field

from harness.spec.base import Spec


class EmulatedDevice(Spec):
    """One emulated device: its own speed, drift and noise, and what busy neighbours cost it."""

    slower: float = Field(default=0.0, gt=-0.9, le=9, description="share by which each step lasts longer")
    drift_per_hour: float = Field(default=0.0, ge=-1, le=1, description="share that each model hour adds to that")
    noise: float = Field(default=0.0, ge=0, le=0.5, description="standard deviation of a run's log step time")
    neighbour_cost: float = Field(default=0.0, ge=0, le=1, description="share that each busy neighbour adds")

    def factor(self, hours: float, neighbours: int, normal: float) -> float:
        """What a step's time is multiplied by in a run.

        hours: of its device's clock. neighbours: devices busy beside it. normal: a standard normal draw of this run.
        """
        level = 1 + self.slower + self.drift_per_hour * hours + self.neighbour_cost * neighbours
        return max(0.05, level) * math.exp(self.noise * normal)
