"""Whether anything within the bounds that a search prints is better than what it proposes.

Small spaces are drawn: every lever, both goals. Each is searched as `harness tune` does it, its printed bounds are read
back, and every configuration within them is simulated on new plans. No server runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import reduce
from itertools import combinations, product
from typing import Any, NamedTuple

import numpy as np

from benchmarks.figure import Figure
from harness.errors import HarnessError
from harness.model.engine.cost import find_cost_file, load_cost_model
from harness.model.sim.draws import perturbation_of
from harness.model.spec import PerturbationSpec, ServerSpec, SloSpec, Treatment, WorkloadSpec
from harness.model.spec.server import ROUTER_POLICIES
from harness.stacks.rbln.rules.kv_rules import PAGED
from harness.tune.explore import FULL, Effort, explore
from harness.tune.plans import Plans, Question, agents_of
from harness.tune.sessions import Simulated, explore_agents
from harness.tune.setups import Baseline, Setup, checked_levers, default_levers
from harness.tune.targets import Targets, share_met

SPACES, SEED = 60, 20261129
ROUGH_PLANS, EXACT_PLANS, BEST_OF_SPACE = 40, 1_500, 20
"""New plans on which the space is sorted, those on which its best are compared, and how many of them."""
MORE = 1.5
"""Memory beyond the printed rungs, which is said to change nothing, is tried up to this."""
WORSE, FEWER = 0.01, 1
AIMED, AIMED_PLANS, JUDGED_PLANS, SURELY = 20, 600, 100, 0.01
"""Spaces with targets, new plans of their best, those on which a proposal is judged, and by how much a share has to
exceed the wanted one to count as within the targets."""


class Case(NamedTuple):
    """A drawn space. targets: of the goal "sessions"; None: the goal is cost."""

    question: Question
    targets: Targets | None


def drawn_case(number: int) -> Case:
    """A space by number: one in three for the goal "sessions", one in five under paged rules, one in ten routed."""
    rng = np.random.default_rng([SEED, number])
    limit, sessions, low = int(rng.integers(2, 7)), int(rng.integers(2, 7)), int(rng.integers(100, 600))
    for_agents, is_paged, is_routed = number % 3 == 2, number % 5 == 4, number % 10 == 6
    workload = WorkloadSpec.model_validate(
        {
            "num_sessions": sessions,
            "requests_per_session": int(rng.integers(2, 5)),
            "wait_cap_s": float(rng.choice([2.0, 5.0, 10.0])),
            "prompt_tokens": {"distribution": "uniform", "low": low, "high": low + int(rng.integers(100, 800))},
            "generate_tokens": {"distribution": "uniform", "low": 16, "high": int(rng.integers(40, 160))},
        }
    )
    others = [size for size in range(1, limit) if rng.random() < 0.4]
    table: dict[str, Any] = {"max_num_seqs": limit, "decode_buckets": [*others, limit]}
    table["prefix_caching"] = bool(rng.random() < 0.6)
    if is_paged:
        table |= {"rules": PAGED, "cost_model": "emulated-gpu", "slot_tokens": 4096, "block_size": 16}
        table["num_gpu_blocks"] = int(rng.integers(280, 700))
    elif rng.random() < 0.6:
        table["kv_slots"] = limit + int(rng.integers(0, 2 * limit))
    if is_routed and not for_agents:
        table |= {"replicas": 2, "router": {"policy": str(rng.choice(ROUTER_POLICIES))}}
    server = ServerSpec.model_validate(table)
    every = list(dict.fromkeys([*default_levers(server), "prefix_caching"]))
    levers = [lever for lever in every if rng.random() < 0.75] or every
    costs = find_cost_file(server.cost_model)
    treatment: Treatment = "no-waits" if rng.random() < 0.3 else "as-drawn"
    question = Question(
        server,
        load_cost_model(costs),
        workload,
        treatment,
        perturbation_of(PerturbationSpec(), costs),
        checked_levers(levers, server),
        agents=(sessions,) if rng.random() < 0.5 else (),
        most_sizes=int(rng.integers(1, 5)) if rng.random() < 0.6 else 0,
        seed=SEED + number,
    )
    if for_agents:
        # At most so many agents, so that the space is small.
        question = replace(question, workload=workload.model_copy(update={"concurrency": sessions, "num_sessions": 8}))
    slo = SloSpec(ttft_ms=float(rng.choice([300.0, 500.0, 800.0, 1200.0])))
    if rng.random() < 0.5:
        slo = slo.model_copy(
            update={"tpot_ms": question.model.decode_step_ns(limit, limit) / 1e6 * rng.uniform(0.7, 2)}
        )
    return Case(question, Targets(slo, float(rng.choice([0.8, 0.9, 0.95]))) if for_agents else None)


def within(question: Question, bounds: Iterable[str]) -> Iterator[Setup]:
    """Every configuration within the bounds, as they are printed."""
    text, base = "\n".join(bounds), Baseline(question.server)
    memory = "kv_slots" if base.setup.kv_slots is not None else "num_gpu_blocks"
    most = int(found[1]) if (found := re.search(r"at most (\d+) (?:compiled|captured) sizes", text)) else 0
    kept = re.search(r"the largest (\d+) for another max_num_seqs", text)
    policies = ROUTER_POLICIES if "router.policy:" in text else [base.setup.policy]
    cachings = [True, False] if "prefix_caching: on and off" in text else [base.setup.prefix_caching]
    others = {key: numbers(text, key) or [base.setup.value_of(key)] for key, _ in base.setup.others}
    for limit in numbers(text, "max_num_seqs") or [base.setup.max_num_seqs]:
        start = base.implied(limit)
        if (most or kept) and start != base.setup:
            start = start._replace(decode_buckets=start.decode_buckets[-(most or int(kept[1] if kept else 0)) :])
        is_filled = memory == "kv_slots" and not question.server.is_routed
        memories = {getattr(start, memory), *_memories(numbers(text, memory), is_filled=is_filled)}
        every = _sizes(limit, most) if most else [start.decode_buckets]
        for each in memories:
            if memory == "kv_slots" and each < limit:
                continue
            for sizes in dict.fromkeys([start.decode_buckets, *every]):
                for caching in cachings:
                    for policy in policies:
                        changes = {memory: each, "decode_buckets": sizes}
                        setup = start._replace(**changes, prefix_caching=caching, policy=policy)
                        for values in product(*others.values()):
                            yield reduce(
                                lambda one, pair: one.with_other(*pair), zip(others, values, strict=True), setup
                            )


def numbers(text: str, key: str) -> list[int]:
    """The numbers of a key that the bounds print, "8 to 16, 20"; empty where it is not searched."""
    line = re.search(rf"^{key}: ([^;\n]*)", text, flags=re.MULTILINE)
    found: list[int] = []
    for part in line[1].split(", ") if line else []:
        first, _, last = part.partition(" to ")
        found += range(int(first), int(last or first) + 1)
    return found


def _memories(printed: list[int], *, is_filled: bool) -> list[int]:
    """The rungs and more memory than them; is_filled: and all between."""
    if not printed:
        return []
    beyond = round(MORE * printed[-1])
    return [*range(printed[0], printed[-1] + 1), beyond] if is_filled else [*printed, beyond]


def _sizes(limit: int, most: int) -> Iterator[tuple[int, ...]]:
    for others in range(min(most, limit)):
        for chosen in combinations(range(1, limit), others):
            yield (*chosen, limit)


class Held(NamedTuple):
    """A search held to its space. proposed, best, least: of what it proposes, of the best that it names, and of the
    space, on the same new plans: ratios to today's, or agents at a time, the more the better, in negative numbers."""

    number: int
    goal: str
    size: int
    proposed: float
    best: float
    least: float
    setups: tuple[Setup, Setup, Setup]

    @property
    def is_good(self) -> bool:
        """Whether nothing is more than 1 %, or one agent, better than the proposal."""
        return self.proposed <= (self.least / (1 - WORSE) if self.goal == "cost" else self.least + FEWER)


def held(number: int, effort: Effort = FULL, rough: int = ROUGH_PLANS, exact: int = EXACT_PLANS) -> Held:
    """Search a drawn space, and hold the proposal to every configuration within the printed bounds."""
    case = drawn_case(number)
    return (
        _held_agents(case, number, effort, rough, exact)
        if case.targets
        else _held_costs(case, number, effort, rough, exact)
    )


def _held_costs(case: Case, number: int, effort: Effort, rough: int, exact: int) -> Held:
    question, base = case.question, Setup.of(case.question.server)
    explored = explore(question, effort)
    new = replace(question, seed=question.seed + 10**6)

    def ratios(setups: Iterable[Setup], part: str, count: int) -> dict[Setup, float]:
        plans, found = Plans(new, part, count, (agents_of(question.workload) or 0,)), dict[Setup, float]()
        for setup in setups:
            with suppress(HarnessError):
                found[setup] = float(plans.played(setup).device_ns.sum() / plans.played(base).device_ns.sum())
        return found

    sorted_by = ratios([base, *within(question, explored.bounds)], "space", rough)
    best, proposed = (base if each is None else each.setup for each in (explored.best, explored.smallest))
    first = sorted(sorted_by, key=sorted_by.__getitem__)[:BEST_OF_SPACE]
    exactly = ratios({base, best, proposed, *first}, "best", exact)
    least = min(exactly, key=exactly.__getitem__)
    figures = (exactly[proposed], exactly[best], exactly[least])
    return Held(number, "cost", len(sorted_by), *figures, (proposed, best, least))


def _held_agents(case: Case, number: int, effort: Effort, rough: int, exact: int) -> Held:
    assert case.targets is not None
    question, targets = case.question, case.targets
    explored, capacities = explore_agents(question, targets, effort)
    new, last = (
        Simulated(replace(question, seed=question.seed + 10**6), targets, part, count)
        for part, count in (("space", rough), ("best", exact // 5))
    )
    proposed = capacities[-1].setup
    number_held, least, size = last.most_of(proposed, capacities[-1].predicted), proposed, 0
    most = number_held
    for setup in within(question, explored.bounds):
        size += 1
        # What does not come near one more on few plans does not hold more on many.
        if most < last.most and new.met(setup, most + 1) >= targets.share - 0.02 and last.holds(setup, most + 1):
            most, least = last.most_of(setup, most + 1), setup
    return Held(number, "sessions", size, -number_held, -number_held, -most, (proposed, proposed, least))


def bench_spaces(count: int = SPACES) -> Iterator[Figure]:
    """How many of the drawn spaces hold nothing that is more than 1 %, or one agent, better than the proposal."""
    done = [held(number) for number in range(count)]
    bad = [
        f"space {each.number} ({each.goal}): {each.proposed:.4f}, {each.least:.4f}" for each in done if not each.is_good
    ]
    yield Figure("spaces with nothing better within their bounds", f"{count - len(bad)} of {count}", "; ".join(bad))
    behind = [1 - each.least / each.proposed for each in done if each.goal == "cost"]
    agents = [round(each.proposed - each.least) for each in done if each.goal == "sessions"]
    yield Figure("behind the best of the space, cost", f"{max(behind):.4f} at most, {np.mean(behind):.4f} in the mean")
    yield Figure("behind the best of the space, agents", f"{max(agents)} at most, {np.mean(agents):.2f} in the mean")
    yield Figure("configurations of a space, mean", f"{np.mean([each.size for each in done]):,.0f}")


class Aimed(NamedTuple):
    """A search under targets held to its space. proposed, least: ratios to today's on new plans, of the proposal and of
    the best that surely meets the targets; None where nothing does. share: of the proposal on JUDGED_PLANS new plans.
    """

    number: int
    size: int
    wanted: float
    proposed: float | None
    least: float | None
    share: float | None

    @property
    def is_good(self) -> bool:
        """Whether nothing that surely meets the targets is more than 1 % better."""
        return self.least is None or (self.proposed is not None and self.proposed <= self.least / (1 - WORSE))

    @property
    def is_within(self) -> bool:
        """Whether the proposal meets the targets on new plans."""
        return self.share is None or self.share >= self.wanted


def aimed_case(number: int) -> Question:
    """A paged server with the keys of a vLLM, and targets that bind: by number, one in four on gaps between tokens."""
    rng = np.random.default_rng([SEED, 1, number])
    limit, sessions, low = int(rng.integers(2, 5)), int(rng.integers(3, 6)), int(rng.integers(300, 1500))
    workload = WorkloadSpec.model_validate(
        {
            "num_sessions": sessions,
            "requests_per_session": int(rng.integers(2, 4)),
            "wait_cap_s": float(rng.choice([1.0, 3.0, 10.0])),
            "prompt_tokens": {"distribution": "uniform", "low": low, "high": low + int(rng.integers(200, 1500))},
            "generate_tokens": {"distribution": "uniform", "low": 16, "high": int(rng.integers(40, 160))},
        }
    )
    server = ServerSpec.model_validate(
        {"rules": PAGED, "cost_model": "emulated-gpu", "slot_tokens": 8192, "max_num_seqs": limit}
        | {"num_gpu_blocks": int(rng.integers(600, 1400)), "max_num_batched_tokens": int(rng.choice([512, 2048]))}
        | {"prefix_caching": bool(rng.random() < 0.7)}
    )
    every = ["max_num_seqs", "long_prefill_tokens", "max_num_batched_tokens", "prefix_caching", "block_size"]
    levers = [lever for lever in every if rng.random() < 0.75] or every
    costs = find_cost_file(server.cost_model)
    question = Question(
        server,
        load_cost_model(costs),
        workload,
        "as-drawn",
        perturbation_of(PerturbationSpec(), costs),
        checked_levers(levers, server),
        agents=(sessions,),
        seed=SEED + number,
    )
    today = Plans(question, "targets", 20, (sessions,)).played(Setup.of(server)).ttft_p99_ms
    slo = SloSpec(ttft_ms=today * float(rng.uniform(0.4, 1.1)))
    if number % 4 == 3:
        slo = SloSpec(itl_ms=float(rng.uniform(5, 40)))
    return replace(question, targets=Targets(slo, float(rng.choice([0.8, 0.9, 0.95]))))


def aimed(number: int, effort: Effort = FULL, rough: int = ROUGH_PLANS, exact: int = AIMED_PLANS) -> Aimed:
    """Search a drawn space under its targets, and hold the proposal to every configuration within the bounds."""
    question = aimed_case(number)
    assert question.targets is not None
    base, wanted = Setup.of(question.server), question.targets.share
    explored = explore(question, effort)
    new, agents = replace(question, seed=question.seed + 10**6), (agents_of(question.workload) or 0,)
    has_gaps = question.targets.slo.itl_ms is not None

    def played(setups: Iterable[Setup], part: str, count: int) -> dict[Setup, tuple[float, float]]:
        plans, found = Plans(new, part, count // 8 if has_gaps else count, agents), dict[Setup, tuple[float, float]]()
        for setup in setups:
            with suppress(HarnessError):
                ratio = float(plans.played(setup).device_ns.sum() / plans.played(base).device_ns.sum())
                found[setup] = ratio, share_met(plans.met(setup))
        return found

    roughly = played([base, *within(question, explored.bounds)], "space", rough)
    near = [setup for setup in sorted(roughly, key=roughly.__getitem__) if roughly[setup][1] >= wanted - 0.02]
    proposed = explored.smallest.setup if explored.smallest else None if explored.is_missed else base
    named = {*near[:BEST_OF_SPACE], *([proposed] if proposed else [])}
    exactly = played(named, "best", exact)
    least = min((ratio for ratio, share in exactly.values() if share >= wanted + SURELY), default=None)
    judged = played([proposed], "judged", JUDGED_PLANS * (8 if has_gaps else 1))[proposed][1] if proposed else None
    return Aimed(number, len(roughly), wanted, exactly[proposed][0] if proposed else None, least, judged)


def bench_targets(count: int = AIMED) -> Iterator[Figure]:
    """How many spaces hold nothing better within the targets, and how many proposals miss them on new plans."""
    done = [aimed(number) for number in range(count)]
    bad = [f"space {each.number}: {each.proposed}, {each.least}" for each in done if not each.is_good]
    out = [f"space {each.number}: {each.share}" for each in done if not each.is_within]
    yield Figure("spaces with nothing better within the targets", f"{count - len(bad)} of {count}", "; ".join(bad))
    yield Figure(
        "proposals outside the targets on 100 new plans", f"{len(out)} of {count}", "at most 1", "; ".join(out)
    )
    yield Figure("spaces where nothing is proposed", f"{sum(each.proposed is None for each in done)} of {count}")
    yield Figure("configurations of a space under targets", f"{np.mean([each.size for each in done]):,.0f}")
