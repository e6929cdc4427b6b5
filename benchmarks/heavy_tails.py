"""Whether intervals, stopping rules and tunes hold the true ratio of sums where a few plans carry most of the cost.

Workloads are drawn with log-normal lengths; every sequence draws its blocks from thousands of simulated ones, whose
ratio of sums is known. No server runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from benchmarks.figure import Figure
from benchmarks.stopping import cost_pairs, ended
from benchmarks.tuning import confirmed_of
from harness.analysis.compare.rare import UNSEEN_CHANCE
from harness.analysis.compare.ratio import BlockCosts, Verdict
from harness.analysis.compare.stopping import Look, bonferroni, looks_at
from harness.analysis.stats import FloatArray, t_quantile
from harness.judge.planning.rare_plans import PAIRS, fewest_plans
from harness.model.spec import StopSpec, parse_experiment
from harness.tune.confirm import ALPHA, BEST, MOST_BLOCKS, SMALLEST, looks_within
from harness.tune.plans import MARGIN

SEQUENCES, BLOCKS, WORKLOADS, SEED = 300, 4_000, 12, 20261129
SIGMAS = (1.0, 1.5, 1.8, 2.2)
EVERY = StopSpec(margin=0.02, budget=60)
BUDGETS = (4, 6, 12, MOST_BLOCKS)
FIXED = (3, 4, 5, 6, 12, 24)


class Counts(NamedTuple):
    """What sequences of one workload and condition end with. excess: printed less true saving where less is shown."""

    name: str
    true: float
    held: float
    false_equal: float
    wrong_side: float
    excess: tuple[float, ...]


def drawn_pairs(number: int, num_blocks: int) -> dict[str, FloatArray]:
    """Costs of blocks of a drawn workload, by condition: other sizes, more memory, and fewer requests at once."""
    rng = np.random.default_rng([SEED, number])
    sigma = SIGMAS[number % len(SIGMAS)]
    workload: dict[str, Any] = {
        "num_sessions": int(rng.choice([4, 6, 8])),
        "requests_per_session": int(rng.integers(2, 4)),
        "wait_cap_s": float(rng.choice([2.0, 10.0])),
        "generate_tokens": {
            "distribution": "lognormal",
            "median": int(rng.choice([24, 60, 120])),
            "sigma": sigma,
            "low": 4,
            "high": 4000,
        },
    }
    conditions = [
        {"name": "today"},
        {"name": "other-sizes", "server": {"decode_buckets": [3, 6, 8], "kv_slots": 16}},
        {"name": "more-sizes", "server": {"decode_buckets": [1, 2, 3, 4, 6, 8]}},
        {"name": "more-memory", "server": {"kv_slots": 24}},
        {"name": "fewer-at-once", "server": {"max_num_seqs": 4, "decode_buckets": [1, 2, 3, 4]}},
    ]
    table = {
        "name": f"heavy-{number}",
        "backend": "sim",
        "base_seed": SEED % 1_000_000 + number,
        "workload": workload,
        "server": {"cost_model": "paper", "slot_tokens": 16384, "max_num_seqs": 8, "decode_buckets": [1, 2, 4, 8]},
        "condition": conditions,
    }
    pairs = cost_pairs(parse_experiment(table, where="heavy tails"), num_blocks)
    return {f"sigma {sigma:g}, {name}": pair for name, pair in pairs.items()}


def sequences_of(name: str, pair: FloatArray, stop: StopSpec, num: int) -> Counts:
    """Sequences of one comparison under a rule, with their last look."""
    rng, true = np.random.default_rng([SEED, stop.budget]), float(pair[0].sum() / pair[1].sum())
    looks: list[Look] = []
    for _ in range(num):
        own, base = pair[:, rng.integers(0, pair.shape[1], size=stop.budget)]
        looks.append(ended(looks_at([*map(BlockCosts, own, base)], stop)))
    is_equal = 1 / (1 + stop.margin) < true < 1 + stop.margin
    verdicts = [look.verdict for look in looks]
    wrong = Verdict.LOWER if true >= 1 else Verdict.HIGHER
    return Counts(
        name,
        true,
        sum(look.low <= true <= look.high for look in looks) / num,
        0.0 if is_equal else verdicts.count(Verdict.EQUIVALENT) / num,
        verdicts.count(wrong) / num,
        tuple(100 * (true - look.ratio) for look in looks if look.verdict is Verdict.LOWER),
    )


def fixed_held(pair: FloatArray, num_blocks: int, num: int) -> tuple[float, float]:
    """Shares of experiments of so many plans whose interval holds the true ratio: Fieller's, and by t of its log."""
    rng, true = np.random.default_rng([SEED, num_blocks, 3]), float(pair[0].sum() / pair[1].sum())
    own, base = pair[:, rng.integers(0, pair.shape[1], size=(num, num_blocks))]
    relative = own / own.mean(axis=1, keepdims=True) - base / base.mean(axis=1, keepdims=True)
    errors = {
        "ratio": (own - true * base, (own - true * base).mean(axis=1)),
        "log": (relative, np.log(own.mean(axis=1) / base.mean(axis=1) / true)),
    }
    limit = t_quantile(0.95, num_blocks - 1) / math.sqrt(num_blocks)
    by_ratio, by_log = (np.abs(off) <= limit * each.std(axis=1, ddof=1) for each, off in errors.values())
    return float(by_ratio.mean()), float(by_log.mean())


def false_cheaper(pair: FloatArray, num_blocks: int, num: int) -> float:
    """Share of experiments whose interval lies below 1, the true ratio being 1."""
    rng = np.random.default_rng([SEED, num_blocks, 5])
    left = (pair[0] - pair[0].sum() / pair[1].sum() * pair[1])[rng.integers(0, pair.shape[1], size=(num, num_blocks))]
    limit = t_quantile(0.95, num_blocks - 1) / math.sqrt(num_blocks)
    return float(np.mean(-left.mean(axis=1) > limit * left.std(axis=1, ddof=1)))


def _rare_plans(drawn: Mapping[str, FloatArray], num: int) -> Iterator[Figure]:
    """False "cheaper" with six plans, and with as many as the first pairs ask for; on the other pairs."""
    asked = {name: fewest_plans(*pair[:, :PAIRS]) for name, pair in drawn.items()}
    for what, plans in {"6 plans": dict.fromkeys(drawn, 6), "as many as asked": asked}.items():
        shares = {name: false_cheaper(pair[:, PAIRS:], max(6, plans[name]), num) for name, pair in drawn.items()}
        most = max(shares, key=shares.__getitem__)
        more = sum(share > UNSEEN_CHANCE for share in shares.values())
        note = (
            f"{most}, {plans[most]} plans; above .05 in {more} of {len(shares)}; mean {np.mean([*shares.values()]):.3f}"
        )
        yield Figure(f'false "cheaper", {what}, most', f"{shares[most]:.3f}", "<= .05", note)
    some = sorted(asked.values())
    yield Figure("plans asked for", f"{some[0]} to {some[-1]}", "", f"median {some[len(some) // 2]}; {num} experiments")
    for one_in, more in ((10, 0.1), (20, 0.2)):
        own = np.full(PAIRS, 100.0)
        own[::one_in] *= 1 + more
        pair = np.array([own + np.random.default_rng(SEED).normal(0, 0.05, PAIRS), np.full(PAIRS, own.mean())])
        plans = fewest_plans(*pair)
        few, enough = (false_cheaper(pair, each, num) for each in (6, plans))
        name = f'false "cheaper", one plan in {one_in} costs {more:.0%} more'
        yield Figure(name, f"{few:.3f} with 6, {enough:.3f} with {plans}", "<= .05")


def tunes_of(pairs: dict[str, FloatArray], budget: int, num: int) -> list[float]:
    """Printed less true savings, in points, of confirmed tunes whose candidates are the two best conditions."""
    rng = np.random.default_rng([SEED, budget, 7])
    true = {name: float(pair[0].sum() / pair[1].sum()) for name, pair in pairs.items()}
    first, second = sorted(true, key=true.__getitem__)[:2]
    excess: list[float] = []
    if true[first] > 1 - MARGIN:
        return excess
    for _ in range(num):
        places = rng.integers(0, pairs[first].shape[1], size=budget)
        named = {SMALLEST: second, BEST: first}
        blocks = {name: [*map(BlockCosts, *pairs[of][:, places])] for name, of in named.items()}
        name, look = confirmed_of(blocks, budget)
        if look is not None:
            excess.append(100 * (true[named[name]] - look.ratio))
    return excess


def bench_heavy_tails(num: int = SEQUENCES, workloads: int = WORKLOADS, blocks: int = BLOCKS) -> Iterator[Figure]:
    """Coverage, false equivalences and wrong sides of both rules; what printed gains exceed true ones by."""
    drawn = [drawn_pairs(number, blocks) for number in range(workloads)]
    every = {f"{number}: {name}": pair for number, pairs in enumerate(drawn) for name, pair in pairs.items()}
    for plans in FIXED:
        held = np.array([fixed_held(pair, plans, num) for pair in every.values()])
        (by_ratio, by_log), (mean, mean_of_log) = held.min(axis=0), held.mean(axis=0)
        note = f"mean {mean:.3f}; by t of the log {by_log:.3f}, mean {mean_of_log:.3f}"
        yield Figure(f"held, least, {plans} plans without a rule", f"{by_ratio:.3f}", "", note)
    yield from _rare_plans(every, 5 * num)
    tune = StopSpec(margin=MARGIN, alpha=ALPHA, budget=MOST_BLOCKS, looks=tuple(looks_within(MOST_BLOCKS)))
    for rule, stop in {"[stop], every block": EVERY, "tune, of two candidates": bonferroni(tune, 2)}.items():
        counts = [sequences_of(name, pair, stop, num) for pairs in drawn for name, pair in pairs.items()]
        least = min(counts, key=lambda each: each.held)
        where = f"{least.name}, true ratio {least.true:.4f}; mean {np.mean([each.held for each in counts]):.3f}"
        yield Figure(f"held, least, {rule}", f"{least.held:.3f}", ">= .93", f"{where}; {num} sequences each")
        equal = max(counts, key=lambda each: each.false_equal)
        yield Figure(f"called equal beyond the margin, most, {rule}", f"{equal.false_equal:.3f}", "<= .05", equal.name)
        side = max(counts, key=lambda each: each.wrong_side)
        yield Figure(f"wrong side, most, {rule}", f"{side.wrong_side:.3f}", "<= .05", side.name)
    for budget in BUDGETS:
        excess = [one for pairs in drawn for one in tunes_of(pairs, budget, num)]
        mean = f"{np.mean(excess):+.2f}" if excess else "none"
        wanted = "within .2" if budget == MOST_BLOCKS else "said beside the answer"
        yield Figure(
            f"gains of confirmed tunes above the truth, {budget} plans", mean, wanted, f"points; {len(excess)}"
        )
