"""Compiles simulator and engine before the first run starts, in two processes at once.

Existing machine code is kept.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from harness.kinds import BackendKind
from harness.model.compiled import has_machine_code
from harness.model.engine import EngineConfig, load_cost_model
from harness.model.engine.scheduler import ENTRYPOINTS
from harness.model.engine.scheduler import warm_up as warm_up_engine
from harness.model.plan.model import Plan, RequestPlan, SessionPlan
from harness.model.sim.kernel.events import run_plans
from harness.model.sim.plans import plan_arrays
from harness.model.sim.simulate import run_batch
from harness.model.spec import ServerSpec


class Part(NamedTuple):
    """A compiled program. entrypoints: the functions that Python calls."""

    entrypoints: Sequence[Callable[..., Any]]
    warm_up: Callable[[], None]


def _warm_up_simulator() -> None:
    session = SessionPlan(0, 0, None, None, (RequestPlan(0, 20, 4, 0),))
    plan = Plan("warm-up", 7, 0, "as-drawn", 0, (1000, 60_000), (session,))
    run_batch(plan_arrays([plan]), EngineConfig.from_server(ServerSpec()), load_cost_model("paper"))


# Longest first: this process compiles it, another process the rest.
PARTS = {
    "simulator": Part((run_plans,), _warm_up_simulator),
    "engine": Part(ENTRYPOINTS, warm_up_engine),
}


def parts_of(kind: BackendKind) -> list[str]:
    """The programs that runs of a kind load: the simulator for the forecast, the engine of a modelled server."""
    return ["simulator", "engine"] if kind.scales_time and not kind.is_virtual else ["simulator"]


def missing(parts: Sequence[str]) -> list[str]:
    """The ``parts`` that are not compiled on this machine yet."""
    return [name for name in parts if not all(map(has_machine_code, PARTS[name].entrypoints))]


def make(parts: Sequence[str]) -> None:
    """Compile ``parts``, or load them: the first in this process, the others in a second one at the same time."""
    first, *others = parts
    command = [sys.executable, "-m", "harness.runner.machine_code", *others]
    beside = subprocess.Popen(command, stderr=subprocess.DEVNULL) if others else None
    try:
        PARTS[first].warm_up()
    finally:
        failed = beside is not None and beside.wait() != 0
    for part in others if failed else ():
        # The cause of the failure, perhaps a limit, is raised here.
        PARTS[part].warm_up()


if __name__ == "__main__":
    # Parts by name, one after another; without a name, all of them.
    for part in sys.argv[1:]:
        PARTS[part].warm_up()
    if not sys.argv[1:]:
        make(list(PARTS))
