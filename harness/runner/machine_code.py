"""Compiles simulator and engine before the first run starts, in two processes at once.

Existing machine code is kept.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from harness.children import own_command
from harness.compiled import has_machine_code
from harness.kinds import kind_named
from harness.model.engine import EngineConfig, load_cost_model
from harness.model.engine.paged import ENTRYPOINTS as PAGED_ENTRYPOINTS
from harness.model.engine.paged import warm_up as warm_up_paged_engine
from harness.model.engine.scheduler import ENTRYPOINTS
from harness.model.engine.scheduler import warm_up as warm_up_engine
from harness.model.plan.model import Plan, RequestPlan, SessionPlan
from harness.model.sim.kernel.loop import run_paged_plans, run_plans
from harness.model.sim.plans import plan_arrays
from harness.model.sim.simulate import run_batch
from harness.model.spec import ExperimentSpec, ServerSpec
from harness.plugins import plugged, service
from harness.stacks.rbln.rules.kv_rules import PAGED


class Part(NamedTuple):
    """A compiled program. entrypoints: the functions that Python calls; none: a plug-in has them, which compiles them
    at first use where the set-up has not."""

    entrypoints: Sequence[Callable[..., Any]]
    warm_up: Callable[[], None]


def _simulate_one(server: ServerSpec) -> None:
    session = SessionPlan(0, 0, None, None, (RequestPlan(0, 20, 4, 0),))
    plan = Plan("warm-up", 7, 0, "as-drawn", 0, (1000, 60_000), (session,))
    run_batch(plan_arrays([plan]), EngineConfig.from_server(server), load_cost_model(server.cost_model))


def _warm_up_paged_simulator() -> None:
    _simulate_one(ServerSpec(rules=PAGED, cost_model="emulated-gpu"))
    warm_up_paged_engine()


def _warm_up_replicas() -> None:
    if "replicas" in plugged("services"):
        service("replicas", where="server.replicas").warm_up()


# Longest first: this process compiles it, another process the rest.
PARTS = {
    "replicas": Part((), _warm_up_replicas),
    "simulator": Part((run_plans,), lambda: _simulate_one(ServerSpec())),
    "paged simulator": Part((run_paged_plans, *PAGED_ENTRYPOINTS), _warm_up_paged_simulator),
    "engine": Part(ENTRYPOINTS, warm_up_engine),
}


def parts_of(spec: ExperimentSpec, *, is_simulated: bool = False) -> list[str]:
    """The programs that its runs load, longest first: simulators for forecasts, the engine of a modelled server.

    is_simulated: simulators alone. "paged simulator" has the engine of paged KV memory too.
    """
    kind, is_paged = kind_named(spec.backend), {spec.server_of(each).is_paged for each in spec.condition}
    has_engine = kind.scales_time and not (kind.is_virtual or is_simulated) and False in is_paged
    needed = {"paged simulator": True in is_paged, "simulator": False in is_paged, "engine": has_engine}
    return [part for part in PARTS if needed.get(part)]


def missing(parts: Sequence[str]) -> list[str]:
    """The ``parts`` that are not compiled on this machine yet."""
    return [name for name in parts if not all(map(has_machine_code, PARTS[name].entrypoints))]


def make(parts: Sequence[str]) -> None:
    """Compile ``parts``, or load them: the first in this process, the others in a second one at the same time."""
    first, *others = parts
    command = own_command("harness.runner.machine_code:warm_up", *others)
    beside = subprocess.Popen(command, stderr=subprocess.DEVNULL) if others else None
    try:
        PARTS[first].warm_up()
    finally:
        failed = beside is not None and beside.wait() != 0
    for part in others if failed else ():
        # The cause of the failure, perhaps a limit, is raised here.
        PARTS[part].warm_up()


def warm_up(*parts: str) -> None:
    """Compile or load these parts, one after another, in this process."""
    for part in parts:
        PARTS[part].warm_up()


if __name__ == "__main__":
    make(list(PARTS))
