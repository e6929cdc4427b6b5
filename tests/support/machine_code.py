"""Machine code made before the tests, once: else every test process, and every child that it starts, makes all of it.

    python -m tests.support.machine_code

Next: ``make pytest`` runs it; with the code at hand it is done in seconds.
"""

from __future__ import annotations

import subprocess
import sys

from harness.engine import EngineConfig, load_cost_model
from harness.engine.scheduler import warm_up
from harness.plan import Plan, RequestPlan, SessionPlan
from harness.sim.simulate import plan_arrays, run_batch
from harness.spec import ServerSpec


def main() -> int:
    """The loop of the client in a process of its own; engine and simulator meanwhile here."""
    loop = subprocess.Popen([sys.executable, "-m", "harness.live.client.wire.core"])
    warm_up()
    session = SessionPlan(0, 0, None, None, (RequestPlan(0, 20, 4, 0),))
    plan = Plan("warm-up", 7, 0, "as-drawn", 0, (1000, 60_000), (session,))
    run_batch(plan_arrays([plan]), EngineConfig.from_server(ServerSpec()), load_cost_model("paper"))
    return loop.wait()


if __name__ == "__main__":
    sys.exit(main())
