"""Whether the interval of `harness tune` with goal = "sessions" holds the true number of agents at a time.

Servers, sessions and targets are drawn; the truth is known from many simulated plans. No server runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import numpy as np

from benchmarks.figure import Figure
from harness.model.engine.config import EngineConfig
from harness.model.engine.cost import load_cost_model
from harness.model.sim.draws import Perturbation
from harness.model.sim.simulate import run_batch
from harness.model.spec import ServerSpec, SloSpec, WorkloadSpec
from harness.tune.plans import Question, drawn_plans
from harness.tune.sessions import PLANS, ROUNDS, Simulated, most_held, next_points, plans_needed
from harness.tune.setups import Setup
from harness.tune.targets import ALPHA, Capacity, Counts, Targets, point_of, share_of

CASES, TUNES, SEED = 6, 240, 20261128
BANK = 300
"""Plans of each number of agents. A tune draws its own from them, so that their share is the true one."""
EDGE_PLANS, EDGE_DRAWS = 3_000, 4_000
"""Plans of a workload that just fails, and measurements that are drawn from them."""
SHARES = (0.8, 0.9, 0.95)
MOST = 64
SETUP = Setup(8, (8,), 8, None)


class Case(NamedTuple):
    """A drawn server and its sessions, with targets that hold for some agents and not for more."""

    question: Question
    targets: Targets


def drawn_case(number: int) -> Case:
    """A case by number: KV slots, targets of TTFT between what one and what many agents see."""
    rng = np.random.default_rng([SEED, number])
    limit = int(rng.choice([4, 8, 16]))
    sizes = [size for size in (1, 2, 4, 8, 16) if size <= limit]
    table = {"max_num_seqs": limit, "decode_buckets": sizes, "kv_slots": limit * int(rng.integers(1, 3))}
    low = int(rng.integers(128, 600))
    workload = WorkloadSpec.model_validate(
        {
            "num_sessions": 4,
            "requests_per_session": int(rng.integers(2, 4)),
            "wait_cap_s": float(rng.choice([2.0, 5.0, 10.0, 20.0])),
            "prompt_tokens": {"distribution": "uniform", "low": low, "high": low + int(rng.integers(200, 1000))},
            "generate_tokens": {"distribution": "uniform", "low": 16, "high": int(rng.integers(48, 160))},
        }
    )
    server = ServerSpec.model_validate(table)
    model = load_cost_model(server.cost_model)
    question = Question(server, model, workload, "as-drawn", Perturbation(1), ("kv_slots",), seed=SEED + number)
    slo = SloSpec(ttft_ms=float(rng.choice([400.0, 700.0, 1200.0, 2000.0])))
    return Case(question, Targets(slo, float(rng.choice(SHARES))))


class Bank:
    """The plans of a case by number of agents: what met the targets on each, so that the share of all is known."""

    def __init__(self, case: Case) -> None:
        self.case, self._setup = case, Setup.of(case.question.server)
        self._simulated = Simulated(case.question, case.targets, "bank", BANK)
        self._known: dict[int, list[Counts]] = {}

    def counts(self, agents: int) -> list[Counts]:
        """Those of BANK plans."""
        if agents not in self._known:
            self._known[agents] = self._simulated.counts(self._setup, agents)
        return self._known[agents]

    def holds(self, agents: int, places: Sequence[int] = range(BANK)) -> bool:
        """Whether the wanted share of requests meets the target on these plans."""
        met, of = np.array([self.counts(agents)[place].requests for place in places]).sum(axis=0)
        return bool(met >= self.case.targets.share * of)


def tuned(bank: Bank, rng: np.random.Generator) -> list[Capacity]:
    """What a tune knows after each round: predicted by PLANS plans, measured on new ones."""
    share = bank.case.targets.share
    few: list[list[int]] = [rng.integers(0, BANK, PLANS).tolist() for _ in range(MOST + 1)]
    known = Capacity("today", SETUP, most_held(lambda agents: bank.holds(agents, few[agents]), 4, MOST))
    plans, rounds = plans_needed(bank.case.targets.slo, share), list[Capacity]()
    for _ in range(ROUNDS):
        if not (points := next_points(known, MOST)):
            break
        drawn = [(each, [bank.counts(each)[place] for place in rng.integers(0, BANK, plans)]) for each in points]
        more = tuple(point_of(each, counts, share) for each, counts in drawn)
        known = replace(known, points=(*known.points, *more))
        rounds.append(known)
    return rounds


class Edge(NamedTuple):
    """A workload whose share lies just below the wanted one, so that "holds" is wrong. name: what it is.

    counts: of many plans, what met the target. share: the wanted one.
    """

    name: str
    counts: list[tuple[int, int]]
    share: float


def edges() -> Iterator[Edge]:
    """Eight heavy-tailed workloads with the target at which they just fail, and plans of which some fail whole."""
    for number, (agents, what, share) in enumerate(product((8, 16), ("requests", "sessions"), (0.9, 0.95))):
        lengths = {"distribution": "lognormal", "sigma": 1.5, "low": 4, "high": 4000}
        workload = WorkloadSpec.model_validate(
            {
                "num_sessions": agents,
                "requests_per_session": 3,
                "prompt_tokens": {**lengths, "median": 200},
                "generate_tokens": {**lengths, "median": 40},
            }
        )
        server = ServerSpec(max_num_seqs=8, kv_slots=16, slot_tokens=32768)
        arrays = drawn_plans(workload, "as-drawn", SEED + number, EDGE_PLANS)
        made = run_batch(arrays, EngineConfig.from_server(server), load_cost_model(server.cost_model)).requests
        took_ns = made["first_token_ns"] - made["arrival_ns"]
        if what == "sessions":
            first = np.repeat(arrays.plans["first_session"], arrays.plans["num_requests"])
            took_ns = np.bincount(first + arrays.requests["session"], weights=made["completed_ns"] - made["arrival_ns"])
        # The least target that too few meet.
        met = (took_ns < np.quantile(took_ns, share, method="lower")).reshape(EDGE_PLANS, -1)
        yield Edge(f"{agents} agents, {what}, {share}", [(int(each.sum()), len(each)) for each in met], share)
    for one_in, share in ((10, 0.95), (20, 0.99), (19, 0.95)):
        whole = [(0 if place % one_in == 0 else 48, 48) for place in range(EDGE_PLANS // one_in * one_in)]
        yield Edge(f"one plan in {one_in} fails whole, {share}", whole, share)


def _wrongly_held(edge: Edge, rng: np.random.Generator) -> float:
    """How often so many plans as are measured call this "holds"."""
    num = plans_needed(SloSpec(ttft_ms=1.0), edge.share)
    drawn = rng.integers(0, len(edge.counts), (EDGE_DRAWS, num))
    held = [share_of([edge.counts[place] for place in places], ALPHA).low >= edge.share for places in drawn]
    return float(np.mean(held))


def bench_agents(num_cases: int = CASES, num_tunes: int = TUNES) -> Iterator[Figure]:
    """How often the interval holds the true number, and how far later rounds narrow it."""
    rng = np.random.default_rng([SEED, 2])
    for edge in edges():
        yield Figure('wrongly "holds": ' + edge.name, f"{_wrongly_held(edge, rng):.4f}", f"<= .03 of {EDGE_DRAWS}")
    held: Counter[str] = Counter()
    first: list[int] = []
    last: list[int] = []
    for number in range(num_cases):
        bank = Bank(drawn_case(number))
        true = most_held(bank.holds, 4, MOST)
        rng = np.random.default_rng([SEED, 1, number])
        for _ in range(num_tunes // num_cases):
            rounds = tuned(bank, rng)
            low, high = rounds[-1].low, rounds[-1].high
            held[_verdict(low, high, true)] += 1
            if closed := [
                each.high - each.low for each in rounds if each.high is not None and 0 < each.low < each.high
            ]:
                first.append(closed[0])
                last.append(closed[-1])
    total = held.total()
    wrong = ", ".join(f"{name} {held[name]}" for name in ("too high", "too low", "no single boundary"))
    yield Figure(
        "intervals of agents that hold the true number", f"{held['holds'] / total:.4f}", f">= .93 of {total}: {wrong}"
    )
    mean = f"{np.mean(first):.2f} at the first round that has one, {np.mean(last):.2f} at the last"
    yield Figure("numbers in such an interval, mean", mean, "", f"of {len(last)} tunes with both ends")


def _verdict(low: int, high: int | None, true: int) -> str:
    if high is not None and high <= low:
        return "no single boundary"
    return "too high" if low > true else "too low" if high is not None and high <= true else "holds"
