"""The goal "sessions": the most agents at a time whose targets in [slo] hold, predicted by bisection and then measured.

A number of agents holds where the wanted share of requests meets every target of a request, and the same share of
sessions the target of a session. Nothing is run here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import tomli_w

from harness.errors import PlanError, SpecError
from harness.model.engine.config import EngineConfig
from harness.model.plan.build import derive_seed
from harness.model.sim.draws import nominal, simulator_of
from harness.model.sim.kernel import arrays as layout
from harness.model.spec import ExperimentSpec, SloSpec, WorkloadSpec
from harness.tune.confirm import BASE, base_condition, plain_table, server_of, unchanged
from harness.tune.explore import Chosen, Effort, Explored, concluded, space_of
from harness.tune.plans import SEED_RANGE, Question, agents_key, agents_of, at_a_time, drawn_plans
from harness.tune.setups import Setup
from harness.tune.targets import ALPHA, PROPOSED, Capacity, Counts, Targets, counts_of, share_met

PLANS, SEARCHED_PLANS, LEAST_SEARCHED = 96, 48, 6
"""Simulated plans of each number of agents, in the end and in the search."""
MOST_AGENTS = 512
NEARLY = 0.999
"""How near a number that does not hold can come to one that does."""
LEAST_PLANS, MOST_PLANS = 12, 1_000
"""Measured plans of each number of agents."""
ROUNDS = 6
"""Measurements at most: the boundary and one step beyond, further out where these did not decide, then between."""
STEP_SHARE = 0.1


def most_held(holds: Callable[[int], bool], start: int, most: int) -> int:
    """The largest number that holds, 0 where none does, by growing steps from ``start`` and then bisection.

    holds: true up to a number and false beyond it.
    """
    low, high, step = 0, most + 1, 1
    probe = max(1, min(start, most))
    while low < probe < high:
        low, high = (probe, high) if holds(probe) else (low, probe)
        if low and high <= most:
            probe = (low + high) // 2
        else:
            probe, step = (min(low + step, most) if low else max(high - step, 1)), 2 * step
    return low


def most_agents(workload: WorkloadSpec) -> int:
    """The largest number that is tried: sessions that follow one another are not more than there are."""
    return MOST_AGENTS if workload.concurrency is None else min(MOST_AGENTS, workload.num_sessions or MOST_AGENTS)


class Simulated:
    """What meets the targets under any number of agents, on the same plans for every configuration.

    most_plans: of each number of agents; fewer where they have more than ``num_requests``, LEAST_SEARCHED at least.
    """

    close = 1.0

    def __init__(
        self, question: Question, targets: Targets, part: str, most_plans: int, num_requests: int = 1 << 62
    ) -> None:
        self.question, (self.slo, self.share) = question, targets
        self.seed = derive_seed(question.seed, part) % SEED_RANGE
        self.most = most_agents(question.workload)
        self.num_simulated = 0
        self._sizes = (most_plans, num_requests)
        self._arrays: dict[int, layout.PlanArrays] = {}
        self._best = 1

    def counts(self, setup: Setup, agents: int) -> list[Counts]:
        """Of each plan; PlanError where a request does not fit."""
        arrays, outcome = self._played(setup, agents)
        return counts_of(arrays, outcome, self.slo, setup.on(self.question.server), self.question.model)

    def _plans(self, agents: int) -> layout.PlanArrays:
        if agents not in self._arrays:
            workload, treatment = at_a_time(self.question.workload, agents), self.question.treatment
            most, num_requests = self._sizes
            one = len(drawn_plans(workload, treatment, self.seed, 1).requests)
            count = min(most, max(LEAST_SEARCHED, num_requests // one))
            self._arrays[agents] = drawn_plans(workload, treatment, self.seed, count)
        return self._arrays[agents]

    def _played(self, setup: Setup, agents: int) -> tuple[layout.PlanArrays, layout.SimOutcome]:
        arrays, server = self._plans(agents), setup.on(self.question.server)
        self.num_simulated += len(arrays.plans)
        draws = nominal(arrays, self.question.model)
        return arrays, simulator_of(server)(draws, EngineConfig.from_server(server.replica))

    def met(self, setup: Setup, agents: int) -> float:
        """The least share that meets a target, of requests and of sessions; 0 where a request does not fit."""
        try:
            return share_met(self.counts(setup, agents))
        except PlanError:
            return 0.0

    def holds(self, setup: Setup, agents: int) -> bool:
        return self.met(setup, agents) >= self.share

    def most_of(self, setup: Setup, start: int) -> int:
        """The most agents that this configuration holds."""
        return most_held(lambda agents: self.holds(setup, agents), start, self.most)

    def value(self, setup: Setup) -> float:
        """The most agents that hold and how near the next number comes to it, negative, so that less is better.

        Of what holds fewer than the best so far, how near it comes to that: its own number is not looked for.
        """
        if self.holds(setup, self._best):
            self._best = self.most_of(setup, self._best)
            beyond = self._best + 1
        else:
            beyond = self._best
        near = min(self.met(setup, beyond) / self.share, NEARLY) if beyond <= self.most else 0.0
        return 1 - beyond - near

    def steps(self, setup: Setup) -> Iterator[npt.NDArray[np.int64]]:
        """At the first number of agents that no configuration was seen to hold."""
        _, outcome = self._played(setup, min(self._best + 1, self.most))
        yield outcome.histogram.sum(axis=0)


def boundary(simulated: Simulated, capacity: Capacity) -> Iterator[str]:
    """What is predicted, and how to check it: its plans, and what met the targets at that number and at one more."""
    key = agents_key(simulated.question.workload)
    held = f"predicted to hold {capacity.predicted} agents at a time"
    yield f"{capacity.name}, {capacity.setup.label}: {held}"
    yield f"  plans: base_seed = {simulated.seed}, replicates 0 to {PLANS - 1}, one simulation of each without jitter"
    for agents in (capacity.predicted, capacity.predicted + 1):
        if not 1 <= agents <= simulated.most:
            continue
        try:
            counts = simulated.counts(capacity.setup, agents)
        except PlanError as error:
            yield f"  workload.{key} = {agents}: {error}"
            continue
        sums = {
            name: [sum(part) for part in zip(*pairs, strict=True)]
            for name, pairs in zip(Counts._fields, zip(*counts, strict=True), strict=True)
            if None not in pairs
        }
        met = "; ".join(f"{name}: {good:,} of {of:,} within the targets" for name, (good, of) in sums.items())
        yield f"  workload.{key} = {agents}: {met}"


def final(question: Question, targets: Targets) -> Simulated:
    """On the plans by which numbers of agents are predicted."""
    return Simulated(question, targets, "tune/sessions", PLANS)


def explore_agents(
    question: Question, targets: Targets, effort: Effort, on_progress: Callable[[float], None] = lambda _share: None
) -> tuple[Explored, list[Capacity]]:
    """Search the space of a question for the most agents: what was searched, and today's server beside the smallest
    change that is predicted to hold most, where one holds more."""
    part, base = "tune/sessions/search", Setup.of(question.server)
    coarse, last = Simulated(question, targets, part, LEAST_SEARCHED), final(question, targets)
    today = last.most_of(base, agents_of(question.workload) or 1)
    agents = max(8, 2 * today)
    while True:
        # As many requests at once as agents are enough, so what could hold at most bounds the space.
        agents = min(agents, coarse.most)
        space, _ = space_of(replace(question, workload=at_a_time(question.workload, agents)), (0,))
        if agents == coarse.most or not any(coarse.holds(end, agents) for end in space.ends):
            break
        agents *= 2
    num_requests = effort.screening // (4 * space.num_setups(effort.space) * question.slowness)
    judge = Simulated(question, targets, part, SEARCHED_PLANS, num_requests)
    values = space.search(judge, effort.space, on_progress)
    ranked = sorted(values, key=lambda setup: (values[setup], space.base.size_of(setup)))
    near = [setup for setup in ranked if values[setup] <= values[ranked[0]] + judge.close]
    finalists = [*near[: effort.few], *sorted(near, key=space.base.size_of)[: effort.few]]
    best, most = base, today
    for setup in sorted(dict.fromkeys(finalists), key=space.base.size_of):
        if most < last.most and last.holds(setup, most + 1):
            best, most = setup, last.most_of(setup, most + 1)
    found = concluded(space, Chosen(best, best), effort)
    simulated = found.num_simulated + coarse.num_simulated + judge.num_simulated + last.num_simulated
    found = replace(found, num_simulated=simulated, ceiling=None, best=None, smallest=None)
    capacities = [Capacity(BASE, base, today), Capacity(PROPOSED, best, most)]
    return found, capacities[: 1 + (most > today)]


def check_goal(spec: ExperimentSpec) -> None:
    """SpecError where the goal cannot be searched for this experiment."""
    slo, server = spec.slo, server_of(spec)
    workload = spec.workload_of(base_condition(spec))
    if not (slo.is_set or slo.session_s):
        raise SpecError(
            "no target is set that could hold", where="tune.goal", hint="Set slo.ttft_ms, slo.itl_ms or slo.session_s"
        )
    if server.is_routed:
        raise SpecError("is searched for one server, not behind a router", where="tune.goal", hint='Say goal = "cost"')
    if agents_of(workload) is None:
        raise SpecError(
            "this workload has no number of agents at a time",
            where="tune.goal",
            hint="Set workload.concurrency, or workload.num_sessions of sessions that start together",
        )


def plans_needed(slo: SloSpec, share: float) -> int:
    """Plans by which a number of agents that misses no target is shown to hold, and half as many again."""
    alpha = ALPHA / (1 + bool(slo.is_set and slo.session_s))
    return max(LEAST_PLANS, math.ceil(1.5 * math.log(alpha) / math.log(share)))


def next_points(capacity: Capacity, most: int) -> list[int]:
    """The numbers of agents to measure next: the predicted boundary and one step beyond, then further out, until a
    number holds and a number fails; then between these, from both sides towards what is not told.

    Empty where nothing is left to measure.
    """
    start, step = max(capacity.predicted, 1), max(1, round(STEP_SHARE * capacity.predicted))
    known = {point.agents for point in capacity.points}
    if not known:
        return sorted({start, min(start + step, most)})
    wider = step * 2 ** (len(known) // 2)
    wanted: list[int] = []
    if capacity.high is not None and 0 < capacity.low < capacity.high:
        wanted = _between(capacity.low, capacity.high, sorted(known))
    if not capacity.low:
        wanted.append(max(1, min(known) - wider))
    if capacity.high is None:
        wanted.append(min(most, max(known) + wider))
    return [agents for agents in wanted if agents not in known]


def _between(low: int, high: int, known: Sequence[int]) -> list[int]:
    """Numbers that narrow an interval: in its thirds, else half way to those within it that are not told."""
    if within := [agents for agents in known if low < agents < high]:
        return [(low + within[0]) // 2, (within[-1] + high + 1) // 2]
    third = round((high - low) / 3)
    return sorted({low + third, high - third})


def round_text(
    spec: ExperimentSpec, wanted: Mapping[str, tuple[Mapping[str, Any], Sequence[int]]], plans: int, number: int
) -> str:
    """The experiment file of one measurement. wanted: by name the changed keys of [server] and numbers of agents."""
    own = spec.workload_of(base_condition(spec))
    conditions: list[dict[str, Any]] = [
        {
            **unchanged(spec, f"{name}-{agents}"),
            "server": keys,
            "workload": {agents_key(own): agents},
        }
        for name, (keys, points) in wanted.items()
        for agents in points
    ]
    table = plain_table(spec)
    table |= {
        "name": f"{spec.name[:52]}-agents-{number}",
        "title": f"{spec.title or spec.name}: agents at a time",
        "question": "How many agents at a time meet their targets?",
        "replicates": plans,
        "base_seed": derive_seed(spec.base_seed, f"tune/agents/{number}") % SEED_RANGE,
        "condition": conditions,
    }
    return "# Written by `harness tune`: new plans at these numbers of agents.\n" + tomli_w.dumps(table)
