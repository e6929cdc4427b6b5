"""The plans of a question: new draws of its workload, and what each configuration costs on them.

Nothing is run here.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from harness.clock import NS_PER_MS
from harness.errors import HarnessError
from harness.model.engine.config import EngineConfig
from harness.model.engine.cost import CostModel
from harness.model.experiment import PlannedRun, build_plan
from harness.model.plan.build import derive_seed
from harness.model.sim.draws import Perturbation, jitter, nominal, perturbation_of, simulator_of
from harness.model.sim.kernel import arrays as layout
from harness.model.sim.plans import Input, input_arrays, joined, most_sessions_at_once, plan_arrays, sharing_key
from harness.model.sim.simulate import run_batch
from harness.model.spec import ServerSpec, Treatment, WorkloadSpec
from harness.tune.setups import Setup, checked_levers
from harness.tune.targets import Counts, Targets, counts_of, parts_of, share_met

FloatArray = npt.NDArray[np.float64]
SEED_RANGE = 2**31
PAGED_SLOWNESS, ROUTED_SLOWNESS, GAPS_SLOWNESS = 5, 3, 3
MARGIN = 0.01
"""A saving below this share is none."""
AS_GOOD = 0.0075
"""What a change may cost more than the best to be as good, its error counted in; below MARGIN."""
SURE = 2.5
"""Standard errors by which a predicted share lies above the wanted one."""
LEAST_PLANS, MOST_PLANS = 4, 400
"""Plans of a round."""


@dataclass(frozen=True)
class Question:
    """What is searched: a server with its costs, the sessions it serves, and what may change.

    perturbation: sizes of what repeats differ in. agents: numbers of sessions at a time that sizes are chosen for, the
    workload's own first. memory_gib: of one device, None: no limit. seed: of all plans. targets: what a configuration
    has to meet to be proposed.
    """

    server: ServerSpec
    model: CostModel
    workload: WorkloadSpec
    treatment: Treatment
    perturbation: Perturbation
    levers: tuple[str, ...]
    agents: tuple[int, ...] = ()
    memory_gib: float | None = None
    most_sizes: int = 0
    seed: int = 1
    targets: Targets | None = None

    @property
    def slowness(self) -> int:
        """How many times as long its simulator takes for a request as that of KV slots."""
        of_server = ROUTED_SLOWNESS if self.server.is_routed else PAGED_SLOWNESS if self.server.is_paged else 1
        has_gaps = self.targets is not None and self.targets.slo.itl_ms is not None
        return of_server * (GAPS_SLOWNESS if has_gaps else 1)


class _Played(NamedTuple):
    """One configuration on the plans of a group, in sums of each plan. met: what met the targets, none without them.
    ttft_p99_ms: over all requests."""

    device_ns: FloatArray
    histogram: npt.NDArray[np.int64]
    met: list[Counts]
    ttft_p99_ms: float


class Plans:
    """The plans of a question in groups by agents at a time, each with the client's jitter, and what was played."""

    def __init__(self, question: Question, part: str, count: int, agents: Sequence[int]) -> None:
        self.question, self.base = question, Setup.of(question.server)
        seed = derive_seed(question.seed, f"tune/{part}") % SEED_RANGE
        key = zlib.crc32(part.encode())
        self.groups = [
            jitter(
                drawn_plans(at_a_time(question.workload, number), question.treatment, seed, count),
                question.perturbation,
                key,
                place,
            )
            for place, number in enumerate(agents)
        ]
        self.num_requests = sum(len(group.requests) for group in self.groups)
        self._widths = [most_sessions_at_once(group) for group in self.groups]
        self.num_simulated = 0
        self._played: dict[tuple[object, ...], _Played] = {}

    @property
    def width(self) -> int:
        """Most sessions at once in any plan."""
        return max(self._widths)

    def played(self, setup: Setup, group: int = 0) -> _Played:
        """One configuration on one group; PlanError where a request does not fit."""
        if (group, setup) in self._played:
            return self._played[group, setup]
        server = setup.on(self.question.server)
        config = EngineConfig.from_server(server.replica)
        # Of KV slots, configurations that agree in what decides on these plans give equal figures.
        is_shared = self.question.slowness == 1
        key = (group, *(sharing_key(config, self._widths[group]) if is_shared else (setup,)))
        if key not in self._played:
            arrays = self.groups[group]
            self.num_simulated += len(arrays.plans)
            if is_shared:
                outcome = run_batch(arrays, config, self.question.model)
            else:
                outcome = simulator_of(server)(nominal(arrays, self.question.model), config)
            device_ns = outcome.device_ns.astype(np.float64)
            targets, model = self.question.targets, self.question.model
            met = [] if targets is None else counts_of(arrays, outcome, targets.slo, server, model)
            ttft_ns = outcome.requests["first_token_ns"] - outcome.requests["arrival_ns"]
            p99_ms = float(np.quantile(ttft_ns, 0.99)) / NS_PER_MS
            self._played[key] = _Played(device_ns, outcome.histogram.sum(axis=0), met, p99_ms)
        self._played[group, setup] = self._played[key]
        return self._played[key]

    def device_ns(self, setup: Setup, num_groups: int | None = None) -> FloatArray:
        """Device time of each plan; shape (numbers of agents, plans). num_groups: of the first ones alone."""
        return np.array([self.played(setup, group).device_ns for group in range(len(self.groups))[:num_groups]])

    def met(self, setup: Setup, num_groups: int | None = None) -> list[Counts]:
        """What met the targets in each plan of the first groups."""
        return [each for group in range(len(self.groups))[:num_groups] for each in self.played(setup, group).met]


def drawn_plans(workload: WorkloadSpec, treatment: Treatment, seed: int, count: int) -> layout.PlanArrays:
    """New plans of a workload; a recording that is replayed whole gives the same plan each time."""
    if workload.source == "trace":
        first, second = (build_plan(workload, seed, replicate) for replicate in (0, 1))
        if first.hash == second.hash:
            return joined([plan_arrays([first.with_treatment(treatment)])] * count)
    return input_arrays([Input(workload, seed, replicate) for replicate in range(count)], treatment)


def agents_of(workload: WorkloadSpec) -> int | None:
    """Sessions at a time, where a number in the workload says it."""
    is_plain = workload.source in ("drawn", "paper") and not workload.group and not workload.start_offset_s
    has_number = workload.agents or workload.concurrency is not None or is_plain
    return getattr(workload, agents_key(workload)) if has_number else None


def agents_key(workload: WorkloadSpec) -> str:
    """The key of [workload] with the number of sessions at a time."""
    return "agents" if workload.agents else "num_sessions" if workload.concurrency is None else "concurrency"


def nearby_agents(workload: WorkloadSpec) -> tuple[int, ...]:
    """The sessions at a time, and a quarter less and more: what is compiled serves other hours too."""
    number = agents_of(workload)
    if number is None:
        return (0,)
    around = {number, max(1, number - round(number / 4)), number + round(number / 4)}
    return (number, *sorted(around - {number}))


def at_a_time(workload: WorkloadSpec, agents: int) -> WorkloadSpec:
    """The workload with so many sessions at a time; 0: as it is."""
    own = agents_of(workload)
    if agents in (0, own) or own is None:
        return workload
    return workload.model_copy(update={agents_key(workload): agents})


def most_at_once(workload: WorkloadSpec, agents: Sequence[int]) -> int:
    """Most sessions of a plan that may run at once, with any of these numbers at a time."""
    tried = (build_plan(at_a_time(workload, number), 1, 0) for number in agents)
    return max(most_sessions_at_once(plan_arrays([plan])) for plan in tried)


class Rounds:
    """Configurations on plans that grow: each round has new ones, the same for all configurations that take part."""

    def __init__(self, question: Question, agents: Sequence[int], num_deciding: int, num_requests: int) -> None:
        """num_deciding: of the numbers of agents, the first ones. num_requests: of one plan for each number."""
        self._question, self._agents, self._num_deciding, self._one = question, agents, num_deciding, num_requests
        self._rounds: list[Plans] = []

    @property
    def targets(self) -> Targets | None:
        return self._question.targets

    @property
    def num_simulated(self) -> int:
        return sum(plans.num_simulated for plans in self._rounds)

    def play(self, setups: Sequence[Setup], num_requests: int) -> list[Setup]:
        """One more round of about so many simulated requests; the configurations that hold its requests."""
        count = max(LEAST_PLANS, min(num_requests // (self._one * (len(setups) + 1)), MOST_PLANS))
        plans = Plans(self._question, f"choice-{len(self._rounds) + 1}", count, self._agents)
        self._rounds.append(plans)
        held: list[Setup] = []
        for setup in setups:
            with suppress(HarnessError):
                plans.device_ns(setup)
                held.append(setup)
        return held

    def _shares(self, setup: Setup, num_groups: int | None = None) -> FloatArray:
        """Device time of each plan, in means of what runs today; shape (numbers of agents, plans)."""
        own = np.concatenate([plans.device_ns(setup, num_groups) for plans in self._rounds], axis=1)
        base = np.concatenate([plans.device_ns(plans.base, num_groups) for plans in self._rounds], axis=1)
        return own / base.mean(axis=1, keepdims=True)

    def ratio(self, setup: Setup) -> float:
        """To what runs today, of each number of agents alike."""
        return float(self._shares(setup).mean())

    def own_ratio(self, setup: Setup) -> float:
        """That of the numbers of agents that decide."""
        return float(self._shares(setup, self._num_deciding).mean())

    def _behind(self, setup: Setup, least: Setup) -> tuple[float, float]:
        """How much more than the least it costs, as a share, and its standard error; of the numbers that decide."""
        spent = self._shares(least, self._num_deciding)
        more = (self._shares(setup, self._num_deciding) - spent) / spent.mean()
        return float(more.mean()), math.sqrt(more.var(axis=1, ddof=1).sum() / more.shape[1]) / len(more)

    def is_close(self, setup: Setup, least: Setup) -> bool:
        """Whether it can still be as good."""
        more, error = self._behind(setup, least)
        return more - 2 * error <= AS_GOOD

    def is_as_good(self, setup: Setup, least: Setup) -> bool:
        """Whether it costs little more, its standard error counted in."""
        return sum(self._behind(setup, least)) <= AS_GOOD

    def share(self, setup: Setup) -> float:
        """The share that meets the targets, of the numbers of agents that decide."""
        return share_met(self._met(setup))

    def _met(self, setup: Setup) -> list[Counts]:
        return [each for plans in self._rounds for each in plans.met(setup, self._num_deciding)]

    def meets(self, setup: Setup, sure: float = SURE) -> bool:
        """Whether its share lies above the wanted one, by so many standard errors over plans; with none below zero."""
        if (targets := self._question.targets) is None:
            return True
        for part in parts_of(self._met(setup)):
            met, of = np.array(part, dtype=np.float64).T
            share = met.sum() / of.sum()
            error = math.sqrt(((met - share * of) ** 2).sum()) / of.sum()
            # Plans of which none misses leave as much open as one that misses once.
            if share - sure * max(error, 1 / of.sum()) < targets.share:
                return False
        return True

    def is_alike(self, setup: Setup, best: Setup) -> bool:
        """Whether it costs the same on every plan of the first number of agents."""
        return all(
            np.array_equal(plans.played(setup).device_ns, plans.played(best).device_ns) for plans in self._rounds
        )


def question_of_run(run: PlannedRun, levers: Sequence[str]) -> Question:
    """The question of a run that is planned, on new plans of its workload."""
    perturbation = perturbation_of(run.spec.prediction, run.cost_file)
    seed = derive_seed(run.spec.base_seed, "tune") % SEED_RANGE
    workload, treatment = run.spec.workload_of(run.condition), run.condition.treatment
    levers = checked_levers(levers, run.server)
    return Question(run.server, run.cost_model, workload, treatment, perturbation, levers, seed=seed)
