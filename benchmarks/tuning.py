"""Whether `harness tune` keeps its promises: what it proposes, where it keeps, and the intervals of confirmed gains.

Workloads and servers are drawn; every configuration is held to new plans that the search has not seen. No server runs.
"""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.figure import Figure
from benchmarks.kept import Kept
from harness.analysis.compare.ratio import BlockCosts, Verdict, estimate_of_blocks
from harness.analysis.compare.stopping import Look, bonferroni, looks_at
from harness.errors import HarnessError
from harness.model.engine.cost import find_cost_file, load_cost_model
from harness.model.sim.draws import perturbation_of
from harness.model.spec import PerturbationSpec, ServerSpec, StopSpec, WorkloadSpec
from harness.model.spec.server import ROUTER_POLICIES
from harness.stacks.rbln.rules.kv_rules import PAGED
from harness.tune.confirm import ALPHA, BEST, MOST_BLOCKS, SMALLEST, candidates_of, looks_within
from harness.tune.explore import Effort, explore
from harness.tune.plans import MARGIN, Plans, Question
from harness.tune.setups import MORE_SIZES, MOST_SIZES, Baseline, Setup, checked_levers, ladder
from harness.tune.space import Thoroughness

WORKLOADS, TUNES, SEED = 60, 400, 20261128
QUICKER = Effort(400_000, 300_000, 150_000, Thoroughness(2, 60), few=4)
STACKS = ("slots", "paged", "replicas")
NEW_PLANS, MANY_PLANS = 200, 3_000
"""New plans on which the space is sorted, and those on which the best of it and what is proposed are compared."""
OTHERS, BEST_OF_SPACE = 150, 12
"""Configurations of the space that are drawn beside those that the search scored, and how many of all are compared."""
TRUE_PLANS = 1_500
TUNE = Path(inspect.getfile(explore)).parent
DECIDES = ("confirm.py", "explore.py", "plans.py", "predict.py", "setups.py", "space.py")
"""Files of ``harness.tune`` that decide the figures."""


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
        policy = str(rng.choice(ROUTER_POLICIES)) if has_losses else "session-affinity"
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
    limits = list(ladder(base.setup.max_num_seqs, max(sessions, base.setup.max_num_seqs)))
    # The last is always there.
    most = min(len(base.setup.decode_buckets) + MORE_SIZES, MOST_SIZES) - 1
    for _ in range(count):
        limit = int(rng.choice(limits))
        setup = base.implied(limit)
        some = rng.choice(np.arange(1, limit + 1), size=min(limit, int(rng.integers(1, most + 1))), replace=False)
        setup = setup._replace(decode_buckets=tuple(sorted({limit, *map(int, some)})))
        if setup.kv_slots is not None:
            setup = setup._replace(kv_slots=int(rng.choice(list(ladder(setup.kv_slots, 4 * sessions + limit)))))
        elif setup.num_gpu_blocks is not None:
            setup = setup._replace(num_gpu_blocks=int(rng.choice(list(ladder(setup.num_gpu_blocks, 4_000)))))
        yield setup._replace(policy=str(rng.choice(ROUTER_POLICIES))) if setup.replicas > 1 else setup


class Held(NamedTuple):
    """A search held to new plans. proposed, best: ratios of the smallest change and of the best option to the baseline,
    1 where it keeps. least: the least ratio of any configuration of the space."""

    stack: str
    is_kept: bool
    proposed: float
    best: float
    least: float


def held(case: Case) -> Held:
    """Search a case, and hold what it proposes to the best of its space on new plans.

    The space is sorted on some plans, and its best are compared on many others, so that none is best by luck.
    """
    explored = explore(case.question)
    base = Setup.of(case.question.server)

    def ratios(setups: Iterable[Setup], part: str, count: int) -> dict[Setup, float]:
        new = Plans(replace(case.question, seed=case.question.seed + 10**6), part, count, (0,))
        today_ns, found = new.played(base).device_ns.sum(), dict[Setup, float]()
        for setup in setups:
            with suppress(HarnessError):
                found[setup] = float(new.played(setup).device_ns.sum() / today_ns)
        return found

    options = {option.setup for option in explored.options}
    space = {base, *(setup for setup, _ in explored.screened), *drawn_setups(case, OTHERS), *options}
    rough = ratios(space, "space", NEW_PLANS)
    proposed = base if explored.smallest is None else explored.smallest.setup
    best = base if explored.best is None else explored.best.setup
    exact = ratios({base, proposed, best, *sorted(rough, key=rough.__getitem__)[:BEST_OF_SPACE]}, "best", MANY_PLANS)
    return Held(case.stack, explored.smallest is None, exact[proposed], exact[best], min(exact.values()))


class Tuned(NamedTuple):
    """A simulated tune. name: of the candidate that is the answer, "" for keep. low, high: 95 % interval of its ratio
    at the look that ended it, after ``num_blocks`` plans; true: its ratio on many new plans. fixed_low, fixed_high:
    that of all plans of the budget without a look before, for this candidate alone."""

    name: str
    estimate: float = 1.0
    low: float = 0.0
    high: float = 2.0
    true: float = 1.0
    num_blocks: int = 0
    fixed_low: float = 0.0
    fixed_high: float = 2.0

    @property
    def holds(self) -> bool:
        return self.low <= self.true <= self.high

    @property
    def fixed_holds(self) -> bool:
        return self.fixed_low <= self.true <= self.fixed_high


@cache
def true_ratio(number: int, setup: Setup) -> float:
    """A configuration of a case against today's on many new plans."""
    new = _true_plans(number)
    spent, today = (
        new.played(each).device_ns for each in (setup, Setup.of(drawn_case(number, has_losses=True).question.server))
    )
    return float(spent.sum() / today.sum())


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
    blocks = {
        name: tuple(map(BlockCosts, confirm.played(each.setup).device_ns, today_ns))
        for name, each in candidates.items()
    }
    name, look = confirmed_of(blocks, MOST_BLOCKS)
    if look is None:
        return Tuned("")
    fixed = estimate_of_blocks(blocks[name])
    true = true_ratio(number, candidates[name].setup)
    return Tuned(
        name, look.ratio, look.low, look.high, true, look.num_blocks, math.exp(fixed.low), math.exp(fixed.high)
    )


def confirmed_of(blocks: Mapping[str, Sequence[BlockCosts]], budget: int) -> tuple[str, Look | None]:
    """The candidate that is the answer, "" for none, and the look that ended the tune, as ``harness.tune`` chooses."""
    stop = StopSpec(margin=MARGIN, alpha=ALPHA, budget=budget, looks=tuple(looks_within(budget)))
    rule = bonferroni(stop, len(blocks))
    last = dict[str, Look]()
    # Both are measured until one look decides both.
    for looks in zip(*(looks_at(each, rule) for each in blocks.values()), strict=True):
        last = dict(zip(blocks, looks, strict=True))
        if all(look.verdict.is_final for look in looks):
            break
    less = [name for name in (SMALLEST, BEST) if name in last and last[name].verdict is Verdict.LOWER]
    if not less:
        return "", None
    if {SMALLEST, BEST} <= last.keys() and BEST in less:
        taken = last[BEST].num_blocks
        beside = [best.over(small) for best, small in zip(blocks[BEST][:taken], blocks[SMALLEST], strict=False)]
        if list(looks_at(beside, stop))[-1].high < 1:
            return BEST, last[BEST]
    return less[0], last[less[0]]


def bench_tuning(num_workloads: int = WORKLOADS, num_tunes: int = TUNES, keep: Path | None = None) -> Iterator[Figure]:
    """The three promises, each with its count. keep: a folder in which what was done stays, to go on from."""
    kept = Kept(keep, [Path(__file__), *(TUNE / name for name in DECIDES)])

    def done(number: int, *, has_losses: bool) -> Held:
        key = f"{'losing' if has_losses else 'saturated'} {number}"
        return Held(*kept.value(key, lambda: list(held(drawn_case(number, has_losses=has_losses)))))

    losing = [done(number, has_losses=True) for number in range(num_workloads)]
    yield from _proposals(losing)
    saturated = (done(number, has_losses=False) for number in range(2 * num_workloads))
    without = list(islice((each for each in saturated if each.least > 1 - MARGIN), num_workloads))
    is_kept = sum(each.is_kept for each in without)
    most = max(1 - each.least for each in without)
    note = f"wanted: at least 57 of 60; the most that any of them could save: {100 * most:.2f} %"
    yield Figure("kept where nothing saves 1 %", f"{is_kept} of {len(without)}", note)
    numbers = [number for number in range(num_workloads) if STACKS[number % len(STACKS)] == "slots"][:8]
    tunes = [
        Tuned(*kept.value(f"tune {seed}", lambda seed=seed: list(tuned(numbers[seed % len(numbers)], seed))))
        for seed in range(num_tunes)
    ]
    yield from _intervals([each for each in tunes if each.name])


def _intervals(gains: Sequence[Tuned]) -> Iterator[Figure]:
    share = sum(each.holds for each in gains) / max(1, len(gains))
    stops = ", ".join(f"{num} after {plans}" for plans, num in sorted(Counter(g.num_blocks for g in gains).items()))
    yield Figure("confirmed gains whose interval holds the true ratio", f"{share:.4f}", f"of {len(gains)}: {stops}")
    fixed = sum(each.fixed_holds for each in gains) / max(1, len(gains))
    yield Figure("the same at one look, one candidate alone", f"{fixed:.4f}", f"after {MOST_BLOCKS}; .93 to .97")
    below = sum(each.true < each.low for each in gains)
    yield Figure("true ratio below, above the interval", f"{below}, {sum(each.true > each.high for each in gains)}")
    excess = np.mean([100 * (each.true - each.estimate) for each in gains] or [0.0])
    yield Figure("gains printed less the true ones, points", f"{excess:+.2f}", "within .2 in the mean")


def _proposals(losing: Sequence[Held]) -> Iterator[Figure]:
    for stack in ("all", *STACKS):
        some = [each for each in losing if stack in ("all", each.stack)]
        good = sum(each.proposed <= each.least * (1 + MARGIN) for each in some)
        best = sum(each.best <= each.least * (1 + MARGIN) for each in some)
        worst = max((each.proposed / each.least - 1 for each in some), default=0.0)
        note = f"the best option: {best}; farthest {100 * worst:.2f} %; kept {sum(each.is_kept for each in some)}"
        yield Figure(f"proposed within 1 % of the best of its space, {stack}", f"{good} of {len(some)}", note)
