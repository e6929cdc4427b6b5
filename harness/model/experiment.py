"""An experiment resolved: a specification becomes planned runs, once, with the server, plan and order of each.

A PlannedRun is already validated, and its files are read. Nothing is started, simulated or written.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from harness.clock import NS_PER_S
from harness.errors import SpecError
from harness.kinds import kind_named
from harness.model.engine import CostModel, load_cost_model
from harness.model.engine.cost import find_cost_file
from harness.model.plan.build import check_fits, derive_seed, draw_plan, requested_keys
from harness.model.plan.event_queue import STEADY_START
from harness.model.plan.model import Plan
from harness.model.spec import (
    ConditionSpec,
    DeviceSlot,
    ExperimentSpec,
    OrderName,
    RequestSpec,
    ServerSpec,
    Treatment,
    WorkloadSpec,
)
from harness.model.spec.workload import MOST_SESSIONS
from harness.model.traces.lower import Lowering, sessions_of
from harness.model.traces.recording import load_trace
from harness.run_key import RunKey


def order_of_block(order: OrderName, num_conditions: int, block: int) -> list[int]:
    """Indices of the experiment's conditions in the order in which ``block`` runs them.

    rotation: over as many blocks as there are conditions, each condition has every position once. abba: every second
    block runs backwards, so that a linear drift cancels in each pair of blocks; pairs rotate. latin: Williams' square,
    in which each condition also follows each other one equally often; two squares for an odd number of conditions.
    Source: Williams (1949), Experimental designs balanced for the estimation of residual effects of treatments.
    """
    if order == "abba":
        forward = _rotated(list(range(num_conditions)), block // 2)
        return forward if block % 2 == 0 else forward[::-1]
    if order == "latin":
        # 0, 1, k - 1, 2, k - 2, ...: each difference of neighbours occurs once.
        first = [
            (place + 1) // 2 if place % 2 else (num_conditions - place // 2) % num_conditions
            for place in range(num_conditions)
        ]
        row = [(condition + block) % num_conditions for condition in first]
        is_second_square = num_conditions % 2 == 1 and (block // num_conditions) % 2 == 1
        return row[::-1] if is_second_square else row
    return _rotated(list(range(num_conditions)), block)


def unbalanced_order(spec: ExperimentSpec) -> str:
    """Which condition of a server that is not restarted runs earlier than another, on average; "" for none.

    What such a server keeps, and how it drifts, is then in the difference of the two.
    """
    if kind_named(spec.backend).is_restarted:
        return ""
    orders = [order_of_block(spec.order, len(spec.condition), block) for block in range(spec.replicates)]
    by_server: dict[str, list[int]] = {}
    for place, condition in enumerate(spec.condition):
        by_server.setdefault(spec.server_of(condition).url, []).append(place)
    for places in by_server.values():
        positions = {place: sum(order.index(place) for order in orders) / len(orders) for place in places}
        first, last = min(places, key=positions.__getitem__), max(places, key=positions.__getitem__)
        if positions[first] < positions[last]:
            names = spec.condition[first].name, spec.condition[last].name
            return f"{names[0]} ran earlier than {names[1]} on average, in {spec.replicates} replicates of one server"
    return ""


def _rotated(places: list[int], by: int) -> list[int]:
    shift = by % len(places)
    return places[shift:] + places[:shift]


class Period(NamedTuple):
    """Runs of a fleet that start together; the next period starts when all of them are sealed.

    number: from 0, in the order of time. devices: those of each host that are busy in it.
    """

    number: int
    devices: tuple[int, ...]


def period_of(spec: ExperimentSpec, replicate: int, order_index: int) -> Period | None:
    """The period of a run; None where every device of the fleet works through its runs by itself.

    A round is a block on every device. Its runs of equal order_index are one period; where their condition limits the
    neighbours, groups of devices take a period each.
    """
    fleet = spec.fleet
    if fleet is None or not spec.keeps_step:
        return None
    order = order_of_block(spec.order, len(spec.condition), spec.turn_of(replicate))
    sizes = [spec.num_at_once(spec.condition[place]) for place in order]
    groups = [-(-len(fleet.devices) // size) for size in sizes]
    group = fleet.devices.index(fleet.place_of(replicate).device) // sizes[order_index]
    number = replicate // len(fleet.places) * sum(groups) + sum(groups[:order_index]) + group
    first = group * sizes[order_index]
    return Period(number, fleet.devices[first : first + sizes[order_index]])


def build_plan(workload: WorkloadSpec, base_seed: int, replicate: int) -> Plan:
    """The input of one replicate (for the source "paper": of one block).

    Raises SpecError when the wait distribution or the trace is unknown, or its file is wrong.
    """
    if base_seed < 0 or replicate < 0:
        raise SpecError(
            f"base seed {base_seed} and replicate {replicate} must not be negative", where="plan", hint="Give 0 or more"
        )
    build = traced_plan if workload.source == "trace" else draw_plan
    return build(workload, base_seed, replicate)


def traced_plan(workload: WorkloadSpec, base_seed: int, replicate: int) -> Plan:
    """A recorded trace, or a sample of its sessions. The provenance counts what was left out."""
    trace = load_trace(workload.trace)
    if len(trace.recordings) < workload.num_sessions != MOST_SESSIONS:
        raise SpecError(
            f"is {workload.num_sessions}, and the trace {workload.trace!r} has {len(trace.recordings)} recordings",
            where="workload.num_sessions",
            hint=f"Give at most {len(trace.recordings)}, or leave it out to take them all",
        )
    is_whole = workload.num_sessions >= len(trace.recordings)
    is_steady = workload.start == "steady"
    how = Lowering(
        shrink=workload.length_divisor,
        max_context_tokens=workload.max_context_tokens,
        stretch_ns=round(workload.stretch_s * NS_PER_S),
        agents=workload.agents,
        num_recordings=0 if is_whole else workload.num_sessions,
        concurrency=workload.concurrency,
        arrivals=workload.arrivals or ("together" if is_steady or workload.agents else trace.head.arrivals),
        human_waits=workload.human_waits,
        wait_cap_ns=round(workload.wait_cap_s * NS_PER_S),
        human_wait_cap_ns=round(workload.human_wait_cap_s * NS_PER_S),
        is_steady=is_steady,
    )
    rng = random.Random(derive_seed(base_seed, f"trace/r{replicate}/sample"))
    sessions, block_tokens, left = sessions_of(trace.recordings, trace.head.block_tokens, how, rng)
    if not sessions:
        raise SpecError(
            f"no request of the trace fits ({_counted(left.counts)})",
            where=workload.trace,
            hint="Raise max_context_tokens, or shrink the lengths: scale = '1/4'",
        )
    provenance: dict[str, str | int | float] = {
        "workload": requested_keys(workload),
        "trace": trace.head.name,
        "trace_sha256": trace.sha256,
        "trace_format": trace.head.source_format,
        "trace_arrivals": how.arrivals,
        "left_out": _counted(left.counts),
        "dropped_at_import": _counted(trace.head.dropped),
        "assumed_at_import": "; ".join(trace.head.labels),
    }
    if is_steady:
        provenance[STEADY_START] = left.num_warm_ups
    return Plan(
        source="trace",
        seed=base_seed,
        replicate=replicate,
        treatment="as-drawn",
        shared_prefix_tokens=0,
        token_id_range=workload.token_id_range,
        sessions=sessions,
        provenance=provenance,
        prompt_form=workload.prompt_form,
        block_tokens=block_tokens,
    )


def _counted(counts: Mapping[str, int]) -> str:
    return "; ".join(f"{count} {what}" for what, count in sorted(counts.items()))


@dataclass(frozen=True, slots=True, eq=False)
class PlannedRun:
    """Everything that determines a run: a condition in a replicate.

    position: place in the experiment's order, from 0. server: the condition's changes applied. plan: what is sent, the
    treatment applied; its ``drawn_hash`` is equal for all conditions of a replicate that share a workload.
    cost_file: of ``cost_model``. period: of a fleet whose devices start their runs together.
    """

    spec: ExperimentSpec
    condition: ConditionSpec
    replicate: int
    position: int
    server: ServerSpec
    plan: Plan
    cost_file: Path
    cost_model: CostModel = field(repr=False)
    period: Period | None = None

    @property
    def key(self) -> RunKey:
        return RunKey(self.spec.name, self.condition.name, self.replicate)

    @property
    def label(self) -> str:
        return f"{self.condition.name}/{self.replicate}"

    @property
    def place(self) -> DeviceSlot | None:
        """The device that performs it; None outside a fleet."""
        return None if self.spec.fleet is None else self.spec.fleet.place_of(self.replicate)

    @property
    def neighbours(self) -> tuple[int, ...]:
        """Devices of the same host that are to be busy at the same time."""
        place, fleet = self.place, self.spec.fleet
        if place is None or fleet is None:
            return ()
        busy = fleet.devices if self.period is None else self.period.devices
        return tuple(device for device in busy if device != place.device)

    @property
    def order_index(self) -> int:
        """Position within the replicate's order."""
        return self.position % len(self.spec.condition)


@dataclass(frozen=True, slots=True, eq=False)
class PlannedRuns:
    """All runs of an experiment in the order of their execution."""

    spec: ExperimentSpec
    runs: tuple[PlannedRun, ...]

    def __iter__(self) -> Iterator[PlannedRun]:
        return iter(self.runs)

    def __len__(self) -> int:
        return len(self.runs)

    @property
    def by_condition(self) -> dict[str, tuple[PlannedRun, ...]]:
        """The runs of each condition, sorted by replicate; conditions in the order of the experiment."""
        return {
            condition.name: tuple(run for run in self.runs if run.condition is condition)
            for condition in self.spec.condition
        }


def resolve(spec: ExperimentSpec) -> PlannedRuns:
    """Every run of an experiment: replicate by replicate, the conditions of each in the experiment's order.

    Source: docs/reference/method.md, "A run and its invariants"; docs/reference/method-planning.md, "Orders and drift".

    Conditions with the same workload and treatment share one plan object in each replicate. Raises SpecError for an
    unknown cost model or wait distribution, and for a request that no KV slot of its server holds.
    """
    resolved: dict[str, tuple[ServerSpec, WorkloadSpec, Path, CostModel]] = {}
    for condition in spec.condition:
        server = spec.server_of(condition)
        cost_file = find_cost_file(server.cost_model)
        # What a request carries besides its prompt changes no plan.
        drawn_from = spec.workload_of(condition).model_copy(update={"request": RequestSpec()})
        resolved[condition.name] = server, drawn_from, cost_file, load_cost_model(cost_file)
    plans: dict[tuple[WorkloadSpec, int, Treatment], Plan] = {}

    def plan_of(workload: WorkloadSpec, block: int, treatment: Treatment) -> Plan:
        if (key := (workload, block, treatment)) not in plans:
            is_drawn = treatment == "as-drawn"
            drawn = build_plan(workload, spec.base_seed, block) if is_drawn else plan_of(workload, block, "as-drawn")
            plans[key] = drawn.with_treatment(treatment)
        return plans[key]

    runs: list[PlannedRun] = []
    for replicate in range(spec.replicates):
        for order_index, place in enumerate(order_of_block(spec.order, len(spec.condition), spec.turn_of(replicate))):
            condition = spec.condition[place]
            server, drawn_from, cost_file, costs = resolved[condition.name]
            plan = plan_of(drawn_from, spec.input_of(replicate), condition.treatment)
            check_fits(plan, server)
            _check_stream(plan, spec)
            period = period_of(spec, replicate, order_index)
            runs.append(PlannedRun(spec, condition, replicate, len(runs), server, plan, cost_file, costs, period))
    return PlannedRuns(spec, tuple(runs))


def _check_stream(plan: Plan, spec: ExperimentSpec) -> None:
    if not spec.client.stream and any(request.abort_after_tokens for request in plan.requests):
        raise SpecError(
            "the plan aborts requests after some tokens, and without streaming no token arrives before the end",
            where="client.stream",
            hint="Set client.stream = true",
        )
