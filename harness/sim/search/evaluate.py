"""Figures of a candidate: every plan of every N, simulated in compiled code.

Candidates that cannot differ on a set of plans are simulated once. With at most w requests at a time, only the costs of
steps of up to w requests, the slots, and whether max_num_seqs exceeds w can matter. Sharing never changes a figure.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from harness.compiled.records import IntArray, Records, sums
from harness.engine.config import EngineConfig, new_state
from harness.engine.cost import load_cost_model
from harness.engine.state import EngineState
from harness.engine.steps import FAR
from harness.errors import PlanError, SpecError
from harness.experiment import build_plan
from harness.plan import Plan
from harness.sim.kernel import arrays as layout
from harness.sim.kernel import events as kernel
from harness.sim.paged import run_paged
from harness.sim.plans import check_slots, plan_arrays
from harness.sim.predict.windows import window_figures
from harness.sim.search.space import InputSpec, SpaceSpec
from harness.spec import ServerShape, WindowSpec

MOST_STATES = 64
MOST_SHARED = 200_000


class Group(NamedTuple):
    """Plans [first, last) of all the plans: one N, for the search or for the evaluation, one step of the schedule."""

    users: int
    role: str
    first: int
    last: int


class GroupFigures(NamedTuple):
    """Sums over the plans of one group. p99_ns: of request latency, arrival to completion, pooled over the plans."""

    device_ns: int
    wait_ns: int
    p99_ns: int
    completed: int
    cached_tokens: int
    evictions: int


@dataclass(frozen=True)
class Inputs:
    """All plans of a search, end to end. Groups go by N, then role."""

    arrays: layout.PlanArrays
    groups: tuple[Group, ...]
    plans: tuple[Plan, ...]


def build_inputs(inputs: InputSpec) -> Inputs:
    """Draw every plan once. Within a group: by replicate, then seed, so that a prefix is a fair part of it.

    Raises SpecError when a plan of the evaluation is one of the search's.
    """
    plans: list[Plan] = []
    groups: list[Group] = []
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
            groups.append(Group(users, role, first, len(plans)))
    if hashes["search"] & hashes["evaluation"]:
        raise SpecError("search and evaluation would use the same plan", where="inputs", hint="Choose other seeds")
    return Inputs(plan_arrays(plans), tuple(groups), tuple(plans))


def most_at_once(arrays: layout.PlanArrays, group: Group) -> int:
    """Most concurrent sessions of any plan of the group: the leaves of its "after" forest."""
    most = 0
    for plan in range(group.first, group.last):
        first = int(arrays.plans["first_session"][plan])
        children = arrays.sessions["num_followers"][first : first + int(arrays.plans["num_sessions"][plan])]
        most = max(most, int((children == 0).sum()))
    return most


class Evaluator:
    """Figures of the candidates of a space on its inputs, with a bounded cache.

    is_sharing=False simulates everything anew, for benchmarks and to check that sharing changes nothing.
    """

    def __init__(self, space: SpaceSpec, inputs: Inputs, *, is_sharing: bool = True) -> None:
        self.inputs = inputs
        self.num_simulated = 0
        self._cost_model = load_cost_model(space.cost_model)
        self._rules = space.rules
        self._window = space.window
        self._is_sharing = is_sharing
        self._widths: dict[Group, int] = {}
        self._requests: dict[Group, tuple[int, int]] = {}
        self._states: OrderedDict[tuple[int, ...], tuple[EngineState, layout.Scratch, layout.Outcome]] = OrderedDict()
        self._shared: dict[tuple[object, ...], GroupFigures] = {}
        arrays = inputs.arrays
        self._most_requests = int(arrays.plans["num_requests"].max())
        self._longest = int((arrays.requests["keep"] + arrays.requests["new"] + arrays.requests["generate"]).max())

    def evaluate(self, candidate: ServerShape, groups: Sequence[Group]) -> list[GroupFigures]:
        """The figures of a candidate on ``groups``; raises PlanError when a request does not fit its slots."""
        config = EngineConfig.of_shape(candidate, self._rules)
        if self._longest > config.slot_tokens:
            check_slots(self.inputs.arrays, config)
        keys = self.share_keys(config, groups) if self._is_sharing else []
        figures: list[GroupFigures | None] = [None] * len(groups)
        if self._is_sharing:
            figures = [self._shared.get(key) for key in keys]
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

    def share_keys(self, config: EngineConfig, groups: Sequence[Group]) -> list[tuple[object, ...]]:
        """One key per group: candidates with equal keys give equal figures on it."""
        if config.rule_set.is_paged:
            return [(group, config) for group in groups]
        server = (config.num_usable_slots, config.is_full, config.slot_tokens)
        # The dummy rule goes by the compiled limit, admission by the lowered one.
        parts: dict[int, tuple[object, ...]] = {}
        keys: list[tuple[object, ...]] = []
        for group in groups:
            width = self._widths.get(group)
            if width is None:
                width = self._widths[group] = most_at_once(self.inputs.arrays, group)
            if width not in parts:
                limit = min(config.max_num_seqs, width + 1)
                # No step has more requests, so no step uses a bucket beyond the first that holds so many.
                largest = bisect_left(config.decode_buckets, min(limit, width))
                buckets = config.decode_buckets[: largest + 1]
                parts[width] = (limit, min(config.active_limit, width + 1), *server, buckets)
            keys.append((group, *parts[width]))
        return keys

    def _simulate(self, config: EngineConfig, groups: Sequence[Group]) -> list[GroupFigures]:
        arrays = self.inputs.arrays
        self.num_simulated += groups[-1].last - groups[0].first
        if config.rule_set.is_paged:
            return [self._paged(config, group) for group in groups]
        if self._window is not None:
            return [self._windows(config, group, self._window) for group in groups]
        cost = layout.cost_arrays(config, self._cost_model)
        state, scratch, outcome = self._memory(config)
        kernel.run_plans(arrays, groups[0].first, groups[-1].last, state, cost, scratch, outcome, FAR)
        stuck = outcome.totals["stuck_session"][groups[0].first : groups[-1].last]
        if stuck.max() >= 0:
            raise PlanError("its KV memory is too small for a request of the inputs", where=str(config.kv_slots))
        latencies_ns = outcome.requests["completed_ns"] - outcome.requests["arrival_ns"]
        return [
            _sums(outcome.totals[group.first : group.last], latencies_ns[slice(*self._requests_of(group))])
            for group in groups
        ]

    def _paged(self, config: EngineConfig, group: Group) -> GroupFigures:
        plans = self.inputs.plans[group.first : group.last]
        outcome = run_paged(plans, config, [self._cost_model] * len(plans))
        return _sums(outcome.totals, outcome.requests["completed_ns"] - outcome.requests["arrival_ns"])

    def _requests_of(self, group: Group) -> tuple[int, int]:
        """The first request of a group, and the one after its last."""
        if group not in self._requests:
            plans = self.inputs.arrays.plans
            first = int(plans["first_request"][group.first])
            self._requests[group] = (first, first + int(plans["num_requests"][group.first : group.last].sum()))
        return self._requests[group]

    def _windows(self, config: EngineConfig, group: Group, window: WindowSpec) -> GroupFigures:
        of_plans = [
            window_figures(self.inputs.arrays, plan, config, self._cost_model, window)
            for plan in range(group.first, group.last)
        ]
        latencies = np.concatenate([figures.latencies_ns for figures in of_plans])
        return GroupFigures(
            device_ns=sum(figures.device_ns for figures in of_plans),
            wait_ns=sum(figures.wait_session_ns for figures in of_plans),
            p99_ns=nearest_rank(latencies, 0.99),
            completed=sum(figures.completed for figures in of_plans),
            cached_tokens=sum(figures.cached_tokens for figures in of_plans),
            evictions=sum(figures.evictions for figures in of_plans),
        )

    def _memory(self, config: EngineConfig) -> tuple[EngineState, layout.Scratch, layout.Outcome]:
        key = (config.max_num_seqs, config.active_limit, config.kv_slots, config.slot_tokens)
        if key not in self._states:
            if len(self._states) >= MOST_STATES:
                self._states.popitem(last=False)
            self._states[key] = (
                new_state(config, self._most_requests),
                layout.new_scratch(self.inputs.arrays),
                layout.new_outcome(self.inputs.arrays, config),
            )
        self._states.move_to_end(key)
        return self._states[key]


def _sums(of_plans: Records[layout.PlanTotals], latencies_ns: IntArray) -> GroupFigures:
    """Figures of a group from the totals of its plans and the latencies of their requests."""
    totals = sums(layout.PlanTotals, of_plans)
    return GroupFigures(
        device_ns=totals["decode_ns"] + totals["prefill_ns"],
        wait_ns=totals["wait_ns"],
        p99_ns=nearest_rank(latencies_ns, 0.99),
        completed=len(latencies_ns),
        cached_tokens=totals["cached_tokens"],
        evictions=totals["evictions"],
    )


def nearest_rank(values: IntArray, share: float) -> int:
    """The smallest value that at least ``share`` of all values do not exceed; 0 when there are none."""
    if values.size == 0:
        return 0
    place = max(-(-int(values.size * share * 1_000_000) // 1_000_000), 1) - 1
    return int(np.partition(values, place)[place])


def _runs_of(groups: Sequence[Group], places: Sequence[int]) -> list[list[int]]:
    """Places of groups, joined where a group begins at the plan at which the group before ends."""
    runs: list[list[int]] = []
    for place in places:
        if runs and groups[runs[-1][-1]].last == groups[place].first:
            runs[-1].append(place)
        else:
            runs.append([place])
    return runs
