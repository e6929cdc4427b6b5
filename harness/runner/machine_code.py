"""Machine code that runs need, made before the first of them starts: in two processes, since that halves the wait.

What is at hand already is left alone. No run is made here. Next: whoever needs the code finds it in its file.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from harness.compiled import has_machine_code
from harness.engine import EngineConfig, doors, load_cost_model
from harness.engine.scheduler import warm_up as warm_up_engine
from harness.kinds import BackendKind
from harness.live.client.wire import core
from harness.plan import Plan, RequestPlan, SessionPlan
from harness.sim.kernel import events
from harness.sim.simulate import plan_arrays, run_batch
from harness.spec import ServerSpec


class Part(NamedTuple):
    """One of the programs that are compiled. source: the file of its functions that Python calls."""

    source: str
    warm_up: Callable[[], None]


def _warm_up_simulator() -> None:
    session = SessionPlan(0, 0, None, None, (RequestPlan(0, 20, 4, 0),))
    plan = Plan("warm-up", 7, 0, "as-drawn", 0, (1000, 60_000), (session,))
    run_batch(plan_arrays([plan]), EngineConfig.from_server(ServerSpec()), load_cost_model("paper"))


# The one that takes longest first: it is made while another process makes all others.
PARTS = {
    "simulator": Part(str(events.__file__), _warm_up_simulator),
    "engine": Part(str(doors.__file__), warm_up_engine),
    "client": Part(str(core.__file__), core.warm_up),
}


def parts_of(kind: BackendKind, client: str) -> list[str]:
    """What runs of a kind load: the forecast the simulator, a modelled server the engine, the epoll client its loop."""
    needed = {"simulator": True, "engine": kind.scales_time and not kind.is_virtual}
    return [name for name in PARTS if needed.get(name, client == "epoll" and not kind.is_virtual)]


def missing(parts: Sequence[str]) -> list[str]:
    """Those of ``parts`` that this machine has no code of."""
    return [name for name in parts if not has_machine_code(PARTS[name].source)]


def make(parts: Sequence[str]) -> None:
    """Compile ``parts``, or load them: the first of them here, all others in a process beside."""
    first, *others = parts
    beside = subprocess.Popen([sys.executable, "-m", "harness.runner.machine_code", *others]) if others else None
    try:
        PARTS[first].warm_up()
    finally:
        if beside is not None:
            beside.wait()


if __name__ == "__main__":
    # Parts by name, one after another; without a name, all of them.
    for part in sys.argv[1:]:
        PARTS[part].warm_up()
    if not sys.argv[1:]:
        make(list(PARTS))
