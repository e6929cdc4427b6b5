"""Whether `harness tune` keeps its promises: what it proposes, where it keeps, and the intervals of confirmed gains.

Workloads and servers are drawn; every configuration is held to new plans that the search has not seen. No server runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from benchmarks.figure import Figure
from harness.analysis.compare.stopping import bonferroni, looks_at
from harness.errors import HarnessError
from harness.model.engine.cost import find_cost_file, load_cost_model
from harness.model.sim.draws import perturbation_of
from harness.model.spec import PerturbationSpec, ServerSpec, StopSpec, WorkloadSpec
from harness.stacks.rbln.rules.kv_rules import PAGED
from harness.tune.confirm import ALPHA, BEST, MOST_BLOCKS, SMALLEST, candidates_of, looks_within
from harness.tune.explore import MARGIN, POLICIES, Effort, Plans, Question, explore
from harness.tune.setups import Baseline, Setup, checked_levers, ladder, limits_up_to

WORKLOADS, TUNES, SEED = 60, 400, 20261128
EFFORT = Effort(1_200_000, 900_000, 400_000, pairs=4, sets=200, few=8)
QUICKER = Effort(400_000, 300_000, 150_000, pairs=2, sets=60, few=4)
STACKS = ("slots", "paged", "replicas")
NEW_PLANS = {"slots": 64, "paged": 32, "replicas": 12}
OTHERS = {"slots": 150, "paged": 60, "replicas": 12}
"""Configurations of the space that are drawn beside those that the search scored."""
TRUE_PLANS = 1_500


class Case(NamedTuple):
    """A drawn workload on a server."""

    stack: str
    question: Question


def drawn_case(number: int, *, has_losses: bool) -> Case:
    """A workload and a server by number. has_losses: with memory and sizes that lose, else with all it can use."""
    rng = np.random.default_rng([SEED, number, has_losses])
    stack = STACKS[number % len(STACKS)]
    sessions = int(rng.integers(3, 9))
    low = int(rng.integers(128, 800))
    workload = WorkloadSpec.model_validate(
        {
            "num_sessions": sessions,
            "requests_per_session": int(rng.integers(2, 5)),
            "wait_cap_s": float(rng.choice([2.0, 5.0, 10.0, 20.0])),
            "prompt_tokens": {"distribution": "uniform", "low": low, "high": low + int(rng.integers(200, 1200))},
            "generate_tokens": {"distribution": "uniform", "low": 16, "high": int(rng.integers(48, 200))},
        }
    )
    limit = int(rng.choice([2, 4, 8]))
    # Where nothing is lost, one size is missing, so that a little can be saved.
    missing = int(rng.integers(2, 8))
    sizes = [1, 2, 4, 8][: limit.bit_length()] if has_losses else [size for size in range(1, 9) if size != missing]
    table: dict[str, Any] = {"max_num_seqs": limit if has_losses else 8, "decode_buckets": sizes}
    if not has_losses:
        table["kv_slots"] = 64
    if stack == "paged":
        blocks = int(rng.integers(280, 700)) if has_losses else 20_000
        paged = {"rules": PAGED, "cost_model": "emulated-gpu", "num_gpu_blocks": blocks, "block_size": 16}
        table = {**table, **paged, "slot_tokens": 4096 if has_losses else 8192}
        table.pop("kv_slots", None)
        workload = workload.model_copy(update={"requests_per_session": 2})
    if stack == "replicas":
        policy = str(rng.choice(POLICIES)) if has_losses else "session-affinity"
        table |= {"replicas": 2, "router": {"policy": policy}}
    server = ServerSpec.model_validate(table)
    costs = find_cost_file(server.cost_model)
    question = Question(
        server,
        load_cost_model(costs),
        workload,
        "as-drawn",
        perturbation_of(PerturbationSpec(), costs),
        checked_levers((), server),
        agents=(sessions,),
        seed=SEED + number,
    )
    return Case(stack, question)


def drawn_setups(case: Case, count: int) -> Iterator[Setup]:
    """Configurations of the space of a case, whatever the search looked at."""
    question, rng = case.question, np.random.default_rng([SEED, 7, case.question.seed])
    base = Baseline(question.server)
    sessions = question.agents[0]
    limits = limits_up_to(base.setup.max_num_seqs, max(sessions, base.setup.max_num_seqs))
    for _ in range(count):
        limit = int(rng.choice(limits))
        setup = base.implied(limit)
        some = rng.choice(np.arange(1, limit + 1), size=min(limit, int(rng.integers(1, 6))), replace=False)
        setup = setup._replace(decode_buckets=tuple(sorted({1, limit, *map(int, some)})))
        if setup.kv_slots is not None:
            setup = setup._replace(kv_slots=int(rng.choice(list(ladder(setup.kv_slots, 4 * sessions + limit)))))
        elif setup.num_gpu_blocks is not None:
            setup = setup._replace(num_gpu_blocks=int(rng.choice(list(ladder(setup.num_gpu_blocks, 4_000)))))
        yield setup._replace(policy=str(rng.choice(POLICIES))) if setup.replicas > 1 else setup


class Held(NamedTuple):
    """A search held to new plans. proposed, best: ratios of the smallest change and of the best option to the baseline,
    1 where it keeps. least: the least ratio of any configuration of the space."""

    stack: str
    is_kept: bool
    proposed: float
    best: float
    least: float


def held(case: Case) -> Held:
    """Search a case, and hold what it proposes to the best of its space on new plans."""
    explored = explore(case.question, EFFORT)
    base = Setup.of(case.question.server)
    new = Plans(replace(case.question, seed=case.question.seed + 10**6), "study", NEW_PLANS[case.stack], (0,))
    today_ns = new.played(base).device_ns.sum()

    def ratio(setup: Setup) -> float:
        try:
            return float(new.played(setup).device_ns.sum() / today_ns)
        except HarnessError:
            return math.inf

    chosen = (
        {setup for setup, _ in explored.screened}
        if case.stack == "slots"
        else {setup for setup, _ in explored.screened[: 2 * OTHERS[case.stack]]}
    )
    space = {base, *chosen, *drawn_setups(case, OTHERS[case.stack]), *(option.setup for option in explored.options)}
    proposed = base if explored.smallest is None else explored.smallest.setup
    best = base if explored.best is None else explored.best.setup
    return Held(case.stack, explored.smallest is None, ratio(proposed), ratio(best), min(map(ratio, space)))


class Tuned(NamedTuple):
    """A simulated tune. name: of the candidate that is the answer, "" for keep. low, high: 95 % interval of its ratio;
    true: its ratio on many new plans."""

    name: str
    estimate: float = 1.0
    low: float = 0.0
    high: float = 2.0
    true: float = 1.0

    @property
    def holds(self) -> bool:
        return self.low <= self.true <= self.high


@cache
def true_ratio(number: int, setup: Setup) -> float:
    """A configuration of a case against today's, on many new plans."""
    case = drawn_case(number, has_losses=True)
    new = _true_plans(number)
    return float(new.played(setup).device_ns.mean() / new.played(Setup.of(case.question.server)).device_ns.mean())


@cache
def _true_plans(number: int) -> Plans:
    case = drawn_case(number, has_losses=True)
    return Plans(replace(case.question, seed=SEED + 3 * 10**6 + number), "truth", TRUE_PLANS, (0,))


def tuned(number: int, seed: int) -> Tuned:
    """One tune of a case of KV slots: search, new plans, the stopping rule, and the answer's choice."""
    case = drawn_case(number, has_losses=True)
    question = replace(case.question, seed=SEED + 7 * 10**6 + seed)
    explored = explore(question, QUICKER)
    if not (candidates := candidates_of(explored)):
        return Tuned("")
    confirm = Plans(replace(question, seed=SEED + 9 * 10**6 + seed), "confirm", MOST_BLOCKS, (0,))
    today_ns = confirm.played(Setup.of(question.server)).device_ns
    logs = {name: np.log(confirm.played(each.setup).device_ns / today_ns) for name, each in candidates.items()}
    name, look = _answer(logs)
    if not name:
        return Tuned("")
    setup = candidates[name].setup
    return Tuned(name, math.exp(look.mean), math.exp(look.low), math.exp(look.high), true_ratio(number, setup))


def _answer(logs: dict[str, Any]) -> tuple[str, Any]:
    """The candidate that is the answer, and the look that decided it, as ``harness.tune`` chooses."""
    stop = StopSpec(margin=MARGIN, alpha=ALPHA, budget=MOST_BLOCKS, looks=tuple(looks_within(MOST_BLOCKS)))
    rule = bonferroni(stop, len(logs))
    last = {name: list(looks_at(values.tolist(), rule))[-1] for name, values in logs.items()}
    taken = max(look.num_blocks for look in last.values())
    # Both are measured until both are decided.
    last = {name: list(looks_at(values[:taken].tolist(), rule))[-1] for name, values in logs.items()}
    less = [name for name in (SMALLEST, BEST) if name in last and last[name].high < 0]
    if not less:
        return "", None
    if {SMALLEST, BEST} <= last.keys() and BEST in less:
        differences = (logs[BEST] - logs[SMALLEST])[:taken]
        if list(looks_at(differences.tolist(), stop))[-1].high < 0:
            return BEST, last[BEST]
    return less[0], last[less[0]]


def bench_tuning(num_workloads: int = WORKLOADS, num_tunes: int = TUNES) -> Iterator[Figure]:
    """The three promises, each with its count."""
    losing = [held(drawn_case(number, has_losses=True)) for number in range(num_workloads)]
    yield from _proposals(losing)
    saturated = (held(drawn_case(number, has_losses=False)) for number in range(2 * num_workloads))
    without = list(islice((each for each in saturated if each.least > 1 - MARGIN), num_workloads))
    kept = sum(each.is_kept for each in without)
    most = max(1 - each.least for each in without)
    note = f"wanted: at least 57 of 60; the most that any of them could save: {100 * most:.2f} %"
    yield Figure("kept where nothing saves 1 %", f"{kept} of {len(without)}", note)
    numbers = [number for number in range(num_workloads) if STACKS[number % len(STACKS)] == "slots"][:8]
    done = [tuned(numbers[seed % len(numbers)], seed) for seed in range(num_tunes)]
    gains = [each for each in done if each.name]
    share = sum(each.holds for each in gains) / max(1, len(gains))
    yield Figure("confirmed gains whose interval holds the true ratio", f"{share:.3f}", f"of {len(gains)}; .93 to .97")
    below = sum(each.true < each.low for each in gains)
    yield Figure("true ratio below, above the interval", f"{below}, {sum(each.true > each.high for each in gains)}")
    bias = float(np.mean([math.log(each.estimate / each.true) for each in gains])) if gains else 0.0
    yield Figure("mean of log(measured / true)", f"{bias:+.4f}", "below 0: gains are too large")


def _proposals(losing: Sequence[Held]) -> Iterator[Figure]:
    for stack in ("all", *STACKS):
        some = [each for each in losing if stack in ("all", each.stack)]
        good = sum(each.proposed <= each.least * (1 + MARGIN) for each in some)
        best = sum(each.best <= each.least * (1 + MARGIN) for each in some)
        worst = max((each.proposed / each.least - 1 for each in some), default=0.0)
        note = f"the best option: {best}; farthest {100 * worst:.2f} %; kept {sum(each.is_kept for each in some)}"
        yield Figure(f"proposed within 1 % of the best of its space, {stack}", f"{good} of {len(some)}", note)
