"""The engine in virtual time: what a server would do with a plan, without one.

No sockets, no processes, no clock.
"""

from __future__ import annotations

from harness.model.sim.plans import plan_arrays
from harness.model.sim.simulate import SimResult, simulate
