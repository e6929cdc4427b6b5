"""Figures of a candidate: every plan of every N, simulated in compiled code, and its row of the ledger.

Candidates that cannot differ on a set of plans are simulated once. With at most w requests at a time, only the costs of
steps of up to w requests, the slots, and whether max_num_seqs exceeds w can matter. Sharing never changes a figure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from harness.analysis.stats import quantile
from harness.compiled import bind
from harness.compiled.records import IntArray, Records, sums
from harness.errors import PlanError, SpecError
from harness.extras.search.space import InputSpec, SpaceSpec
from harness.extras.search.windows import window_figures
from harness.model.engine.config import EngineConfig, new_state
from harness.model.engine.cost import load_cost_model
from harness.model.engine.steps import FAR
from harness.model.experiment import build_plan
from harness.model.plan.model import Plan
from harness.model.sim.draws import nominal
from harness.model.sim.kernel import arrays as layout
from harness.model.sim.kernel.arrivals import SlotRun
from harness.model.sim.kernel.loop import run_plans
from harness.model.sim.plans import check_slots, check_times, most_sessions_at_once, plan_arrays, sharing_key
from harness.model.sim.simulate import run_batch
from harness.model.spec import ServerShape, WindowSpec

MOST_STATES = 64
MOST_SHARED = 200_000

LEDGER_SCHEMA = pa.schema(
    [
        pa.field("index", pa.int32(), nullable=False),
        pa.field("max_num_seqs", pa.int32(), nullable=False),
        pa.field("decode_buckets", pa.list_(pa.int32()), nullable=False),
        pa.field("kv_slots", pa.int32(), nullable=False),
        pa.field("slot_tokens", pa.int32(), nullable=False),
        # Null where admission goes to max_num_seqs.
        pa.field("max_active_seqs", pa.int32()),
        # Null under rules with KV slots.
        pa.field("num_gpu_blocks", pa.int32()),
        pa.field("memory_gib", pa.float64(), nullable=False),
        pa.field("compile_s", pa.float64(), nullable=False),
        pa.field("artifact_gib", pa.float64(), nullable=False),
        pa.field("excluded", pa.string(), nullable=False),
        # Per N, in the order of inputs.users; null where nothing was simulated.
        pa.field("search_device_ns", pa.list_(pa.int64())),
        pa.field("search_completed", pa.list_(pa.int64())),
        pa.field("evaluation_device_ns", pa.list_(pa.int64())),
        pa.field("evaluation_completed", pa.list_(pa.int64())),
        pa.field("wait_ns", pa.int64()),
        pa.field("p99_completion_ns", pa.int64()),
        pa.field("cached_tokens", pa.int64()),
        pa.field("evictions", pa.int64()),
    ]
)
Row = dict[str, Any]
"""A row of the ledger; or the figures of the baseline, which has those columns only."""


class PlanGroup(NamedTuple):
    """Plans [first, last) of all the plans: one N, for the search or for the evaluation.

    first_request, last_request: of these plans, the last one exclusive. width: most sessions at once in any plan.
    """

    users: int
    role: str
    first: int
    last: int
    first_request: int
    last_request: int
    width: int


class GroupFigures(NamedTuple):
    """Sums over the plans of one group. p99_ns: of request latency, arrival to completion, pooled over the plans."""

    device_ns: int
    wait_ns: int
    p99_ns: int
    completed: int
    cached_tokens: int
    evictions: int


_Memory = tuple[Callable[..., None], SlotRun]
"""The kernel bound to the tables of one size of server, and these tables."""


def build_plans(inputs: InputSpec) -> tuple[list[Plan], list[tuple[int, str, int, int]]]:
    """Every plan of a search, drawn once, and (N, role, first, last) of its groups, by N, then role.

    Within a group: by replicate, then seed, so that a prefix is a fair part of it. Raises SpecError when a plan of the
    evaluation is one of the search's.
    """
    plans: list[Plan] = []
    groups: list[tuple[int, str, int, int]] = []
    hashes: dict[str, set[str]] = {"search": set(), "evaluation": set()}
    for users in inputs.users:
        workload = inputs.workload_of(users)
        for role, seeds in (("search", inputs.search_seeds), ("evaluation", inputs.evaluation_seeds)):
            first = len(plans)
            for replicate in range(inputs.replicates):
                for seed in seeds:
                    plan = build_plan(workload, seed, replicate)
                    hashes[role].add(plan.hash)
                    plans.append(plan if inputs.treatment == "as-drawn" else plan.with_treatment(inputs.treatment))
            if len(plans) > first:
                groups.append((users, role, first, len(plans)))
    if hashes["search"] & hashes["evaluation"]:
        raise SpecError("search and evaluation would use the same plan", where="inputs", hint="Choose other seeds")
    return plans, groups


class Evaluator:
    """Figures of the candidates of a space on its plans, with a bounded cache; built once per process.

    is_sharing=False simulates everything anew, for benchmarks and to check that sharing changes nothing.
    """

    def __init__(self, space: SpaceSpec, *, is_sharing: bool = True) -> None:
        self.space = space
        self.plans, groups = build_plans(space.inputs)
        self.num_simulated = 0
        self._arrays = plan_arrays(self.plans)
        self._cost_model = load_cost_model(space.cost_model)
        self._is_sharing = is_sharing
        self._states: dict[tuple[int, ...], _Memory] = {}
        self._shared: dict[tuple[object, ...], GroupFigures] = {}
        plans, requests = self._arrays.plans, self._arrays.requests
        self._most_requests = int(plans["num_requests"].max())
        self._longest = int((requests["keep"] + requests["new"] + requests["generate"]).max())
        self.groups = [self._group(*group) for group in groups]

    def _group(self, users: int, role: str, first: int, last: int) -> PlanGroup:
        plans = self._arrays.plans
        first_request = int(plans["first_request"][first])
        last_request = first_request + int(plans["num_requests"][first:last].sum())
        width = most_sessions_at_once(self._arrays, first, last)
        return PlanGroup(users, role, first, last, first_request, last_request, width)

    @cached_property
    def candidates(self) -> list[ServerShape]:
        return list(self.space.candidates())

    def single_plans(self) -> list[PlanGroup]:
        """Each plan of the search as a group of its own: all of the first N, then all of the next."""
        return [
            self._group(group.users, group.role, place, place + 1)
            for group in self.groups
            if group.role == "search"
            for place in range(group.first, group.last)
        ]

    def rows(self, indices: Sequence[int]) -> list[Row]:
        """Rows of the ledger: candidates by their index, on all plans."""
        rows: list[Row] = []
        for index in indices:
            row = self._row_without_figures(index)
            rows.append(row)
            if not row["excluded"]:
                try:
                    row |= self.figures_row(self.candidates[index], self.groups)
                except PlanError as error:
                    row["excluded"] = str(error)
        return rows

    def _row_without_figures(self, index: int) -> Row:
        space, candidate = self.space, self.candidates[index]
        return {
            "index": index,
            **candidate._asdict(),
            "memory_gib": space.device.memory_gib(candidate),
            "compile_s": space.device.compile_s(candidate),
            "artifact_gib": space.device.artifact_gib(candidate),
            "excluded": space.constraints.violated(space.device, candidate),
        }

    def figures_row(self, candidate: ServerShape, groups: Sequence[PlanGroup]) -> Row:
        """The columns of the ledger that are simulated; raises PlanError when a request does not fit."""
        by_role: dict[str, list[GroupFigures]] = {"search": [], "evaluation": []}
        for group, figures in zip(groups, self.evaluate(candidate, groups), strict=True):
            by_role[group.role].append(figures)
        search = by_role["search"]
        row: Row = {
            "wait_ns": sum(figures.wait_ns for figures in search),
            "p99_completion_ns": max(figures.p99_ns for figures in search),
            "cached_tokens": sum(figures.cached_tokens for figures in search),
            "evictions": sum(figures.evictions for figures in search),
        }
        for role, figures_of_role in by_role.items():
            if figures_of_role:
                row[f"{role}_device_ns"] = [figures.device_ns for figures in figures_of_role]
                row[f"{role}_completed"] = [figures.completed for figures in figures_of_role]
        return row

    def evaluate(self, candidate: ServerShape, groups: Sequence[PlanGroup]) -> list[GroupFigures]:
        """The figures of a candidate on ``groups``; raises PlanError when a request does not fit its slots."""
        config = EngineConfig.of_shape(candidate, self.space.rules)
        if self._longest > config.slot_tokens:
            check_slots(self._arrays, config)
        keys = self.share_keys(config, groups) if self._is_sharing else []
        figures: list[GroupFigures | None] = [self._shared.get(key) for key in keys] or [None] * len(groups)
        missing = [place for place, known in enumerate(figures) if known is None]
        for run in _runs_of(groups, missing):
            simulated = self._simulate(config, [groups[place] for place in run])
            for place, of_group in zip(run, simulated, strict=True):
                figures[place] = of_group
                if self._is_sharing:
                    if len(self._shared) >= MOST_SHARED:
                        self._shared.clear()
                    self._shared[keys[place]] = of_group
        return [of_group for of_group in figures if of_group is not None]

    def share_keys(self, config: EngineConfig, groups: Sequence[PlanGroup]) -> list[tuple[object, ...]]:
        """One key per group: candidates with equal keys give equal figures on it."""
        if config.rule_set.is_paged:
            return [(group, config) for group in groups]
        by_width = {width: sharing_key(config, width) for width in {group.width for group in groups}}
        return [(group, *by_width[group.width]) for group in groups]

    def _simulate(self, config: EngineConfig, groups: Sequence[PlanGroup]) -> list[GroupFigures]:
        """The figures on adjacent groups."""
        first, last = groups[0].first, groups[-1].last
        self.num_simulated += last - first
        if config.rule_set.is_paged:
            return [self._paged(config, group) for group in groups]
        if self.space.window is not None:
            return [self._windows(config, group, self.space.window) for group in groups]
        check_times(self._arrays, config, [self._cost_model])
        run_plans, tables = self._memory(config)
        layout.copy_costs(layout.cost_arrays(config, [self._cost_model]), tables.cost)
        run_plans(first, last, FAR)
        outcome = tables.outcome
        if outcome.totals["stuck_session"][first:last].max() >= 0:
            raise PlanError("its KV memory is too small for a request of the inputs", where=str(config.kv_slots))
        latencies_ns = outcome.requests["completed_ns"] - outcome.requests["arrival_ns"]
        return [
            _sums(outcome.totals[group.first : group.last], latencies_ns[group.first_request : group.last_request])
            for group in groups
        ]

    def _paged(self, config: EngineConfig, group: PlanGroup) -> GroupFigures:
        arrays = self._arrays._replace(plans=self._arrays.plans[group.first : group.last])
        outcome = run_batch(arrays, config, self._cost_model)
        requests = outcome.requests[group.first_request : group.last_request]
        return _sums(outcome.totals, requests["completed_ns"] - requests["arrival_ns"])

    def _windows(self, config: EngineConfig, group: PlanGroup, window: WindowSpec) -> GroupFigures:
        draws = nominal(self._arrays, self._cost_model)
        of_plans = [window_figures(draws.alone(plan), config, window, plan) for plan in range(group.first, group.last)]
        latencies = np.concatenate([figures.latencies_ns for figures in of_plans])
        return GroupFigures(
            device_ns=sum(figures.device_ns for figures in of_plans),
            wait_ns=sum(figures.wait_session_ns for figures in of_plans),
            p99_ns=p99_of(latencies),
            completed=sum(figures.completed for figures in of_plans),
            cached_tokens=sum(figures.cached_tokens for figures in of_plans),
            evictions=sum(figures.evictions for figures in of_plans),
        )

    def _memory(self, config: EngineConfig) -> _Memory:
        """The memory for servers of this size; those of the sizes used last are kept."""
        key = (config.max_num_seqs, config.active_limit, config.kv_slots, config.slot_tokens)
        memory = self._states.pop(key, None)
        if memory is None:
            if len(self._states) >= MOST_STATES:
                del self._states[next(iter(self._states))]
            state, scratch = new_state(config, self._most_requests), layout.new_scratch(self._arrays)
            outcome, cost = layout.new_outcome(self._arrays, config), layout.cost_arrays(config, [self._cost_model])
            tables = SlotRun(self._arrays, state, scratch, outcome, cost)
            memory = bind(run_plans, tables), tables
        self._states[key] = memory
        return memory


def _sums(of_plans: Records[layout.PlanTotals], latencies_ns: IntArray) -> GroupFigures:
    """Figures of a group from the totals of its plans and the latencies of their requests."""
    totals = sums(layout.PlanTotals, of_plans)
    return GroupFigures(
        device_ns=totals["decode_ns"] + totals["prefill_ns"],
        wait_ns=totals["wait_ns"],
        p99_ns=p99_of(latencies_ns),
        completed=len(latencies_ns),
        cached_tokens=totals["cached_tokens"],
        evictions=totals["evictions"],
    )


def p99_of(values: IntArray) -> int:
    """The 99th percentile as every other figure has it, in whole ns; 0 without a value."""
    return round(quantile(values, 0.99)) if values.size else 0


def _runs_of(groups: Sequence[PlanGroup], places: Sequence[int]) -> list[list[int]]:
    """Places of groups, joined where a group begins at the plan at which the group before ends."""
    runs: list[list[int]] = []
    for place in places:
        if runs and groups[runs[-1][-1]].last == groups[place].first:
            runs[-1].append(place)
        else:
            runs.append([place])
    return runs
