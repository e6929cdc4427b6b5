"""Tables I and II over many drawn plans: which printed sign belongs to the method, and which to three plans.

Simulated with the same plans, rules and costs as the experiments ``alignment`` and ``bucket-intervention``. Nothing is
measured. Printed values are compared with, never used. Every number of the page is computed when it is written.
Definitions: docs/reference/method.md, "Padding"; Tables I and II.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from harness.analysis.stats import FloatArray, IntArray
from harness.extras.paper.printed import PRINTED, rendered
from harness.model.engine.config import EngineConfig
from harness.model.engine.cost import load_cost_model
from harness.model.sim.kernel.arrays import PlanArrays, with_column
from harness.model.sim.plans import Input, input_arrays
from harness.model.sim.simulate import run_batch
from harness.model.spec import RulesName, Treatment, WorkloadSpec
from harness.processes import parallel_map

GRID = (1, 2, 4, 8)
WIDER_GRID = (1, 2, 4, 6, 8)
LIMIT, SLOT_TOKENS = 8, 8192
PLANS_IN_A_SUM = 3
# That of the shipped experiment `alignment`, whose first plans these are.
BASE_SEED = 20261201
RESAMPLES, INTERVAL_SEED = 2000, 20261121


class Printed(NamedTuple):
    """One row of Table I. A: with tool waits, C: without."""

    p_a: float
    p_c: float
    delta_p: float
    decode_ratio: float


TABLE_I: Mapping[int, Printed] = {int(users): Printed(*row) for users, row in PRINTED["table_i"].items()}
TABLE_II: Mapping[tuple[int, tuple[int, ...]], float | None] = {
    (users, tuple(grid)): delta_p[0] if delta_p else None for users, grid, *delta_p in PRINTED["table_ii"]["rows"]
}
"""Delta p; None: below 0."""
PUBLISHED_SEEDS: Mapping[int, tuple[int, ...]] = {
    int(seed): tuple(users) for seed, users in PRINTED["published_seeds"].items()
}
PAPER_SOURCE = {"source": "paper"}


@dataclass(frozen=True, slots=True, eq=False)
class Variant:
    """One way to define the workload or the rules. workload: keys of a WorkloadSpec beside the number of sessions."""

    name: str
    meaning: str
    workload: Mapping[str, Any] = field(default_factory=dict[str, Any])
    rules: RulesName = "vendor-0.11.1"
    costs: str = "paper"
    treatment: Treatment = "as-drawn"


SHIPPED = Variant("shipped", "vendor-0.11.1 rules, the paper's costs")
ALTERNATIVES = (
    Variant("paper rules", "the paper's own KV rules", rules="paper"),
    Variant("paper+dummy", "its rules with the dummy slot (S9)", rules="paper+dummy"),
    Variant("paper source", "plans drawn in the paper's own order, of the same seed", PAPER_SOURCE),
    Variant("start spread", "sessions start 1.5 ms apart (2-12 ms in all, 2-3)", {"start_offset_s": 0.0015}),
    Variant("context costs", "decode cost grows with context", costs="context-1-2-4-8"),
    Variant("three requests", "three requests per session, two waits", {"requests_per_session": 3}),
    Variant("waits up to 10 s", "waits cut at 10 s instead of 60 s", {"wait_cap_s": 10.0}),
    Variant("equal waits", "every wait is the mean of its plan", treatment="equal-waits"),
)


@dataclass(frozen=True, slots=True)
class DrawnCounts:
    """Counts of many plans. padded, slots: bucket positions, shape (2, plans), first with waits, then without.

    decode_ns: decode device time, the same shape. plans_in_a_sum: how many plans make one sum; sums do not overlap.
    """

    padded: IntArray
    slots: IntArray
    decode_ns: IntArray
    plans_in_a_sum: int = PLANS_IN_A_SUM

    @property
    def num_plans(self) -> int:
        return int(self.slots.shape[1])

    def grouped(self, plans_in_a_sum: int, num_sums: int | None = None) -> DrawnCounts:
        """The same plans in sums of another size, or the first of these; plans that fill no sum are left out."""
        last = (num_sums or self.num_plans // plans_in_a_sum) * plans_in_a_sum
        return DrawnCounts(self.padded[:, :last], self.slots[:, :last], self.decode_ns[:, :last], plans_in_a_sum)

    def sums_p(self) -> FloatArray:
        """Padding ratio of every sum, shape (2, sums): numerators and denominators are summed first."""
        return self._sums(self.padded) / self._sums(self.slots)

    def sums_delta_p(self) -> FloatArray:
        """p_C - p_A of every sum."""
        with_waits, without = self.sums_p()
        return without - with_waits

    def sums_decode_ratio(self) -> FloatArray:
        """Decode time with waits over without, of every sum."""
        with_waits, without = self._sums(self.decode_ns)
        return with_waits / without

    def pooled_p(self) -> tuple[float, float]:
        """(p_A, p_C) over all plans."""
        with_waits, without = self.padded.sum(axis=1) / self.slots.sum(axis=1)
        return float(with_waits), float(without)

    @property
    def delta_p(self) -> float:
        with_waits, without = self.pooled_p()
        return without - with_waits

    @property
    def decode_ratio(self) -> float:
        with_waits, without = self.decode_ns.sum(axis=1)
        return float(with_waits / without)

    def has_sign_of(self, printed: float | None) -> bool:
        """Whether the pooled delta p has the sign of a printed one; None stands for a value below 0."""
        return bool(np.sign(self.delta_p) == np.sign(-1 if printed is None else printed))

    def share_with_sign_of(self, printed: float | None) -> float:
        """The share of sums whose delta p has that sign."""
        return float(np.mean(np.sign(self.sums_delta_p()) == np.sign(-1 if printed is None else printed)))

    def delta_p_interval(self) -> tuple[float, float]:
        """95 % percentile bootstrap of the pooled delta p: plans are drawn again, 2,000 resamples, seed 20261121."""
        rng = np.random.default_rng(INTERVAL_SEED)
        picked = rng.integers(0, self.num_plans, size=(RESAMPLES, self.num_plans))
        with_waits, without = (
            padded[picked].sum(axis=1) / slots[picked].sum(axis=1)
            for padded, slots in zip(self.padded, self.slots, strict=True)
        )
        low, high = np.quantile(without - with_waits, (0.025, 0.975))
        return float(low), float(high)

    def _sums(self, values: IntArray) -> FloatArray:
        return values.reshape(2, -1, self.plans_in_a_sum).sum(axis=2).astype(np.float64)


def draw(
    users: int, num_plans: int, variant: Variant = SHIPPED, buckets: tuple[int, ...] = GRID, base_seed: int = BASE_SEED
) -> DrawnCounts:
    """``num_plans`` plans of ``users`` sessions, each simulated with waits and without."""
    config = EngineConfig(LIMIT, buckets, LIMIT, SLOT_TOKENS, rules=variant.rules)
    model = load_cost_model(variant.costs)
    n = np.arange(LIMIT + 1)
    bucket_of = np.array([0, *(config.bucket_of(seqs) for seqs in n[1:].tolist())])
    counts: list[tuple[IntArray, IntArray, IntArray]] = []
    keys = tuple(variant.workload.items())
    for arrays in drawn_inputs(users, num_plans, keys, base_seed, variant.treatment):
        outcome = run_batch(arrays, config, model)
        slots = outcome.histogram @ bucket_of
        counts.append((slots - outcome.histogram @ n, slots, outcome.totals["decode_ns"]))
    padded, slots, decode_ns = (np.stack(pair) for pair in zip(*counts, strict=True))
    return DrawnCounts(padded, slots, decode_ns).grouped(PLANS_IN_A_SUM)


@lru_cache(maxsize=64)
def drawn_inputs(
    users: int, num_plans: int, keys: tuple[tuple[str, Any], ...], base_seed: int, treatment: Treatment
) -> tuple[PlanArrays, PlanArrays]:
    """The plans of a draw with waits and without; drawn once for all rules, costs and buckets.

    keys: keys of a WorkloadSpec beside the number of sessions. No start of these is a wait, so that without waits
    is with waits of nothing.
    """
    workload = WorkloadSpec(num_sessions=users, **dict(keys))
    arrays = input_arrays([Input(workload, base_seed, block) for block in range(num_plans)], treatment)
    return arrays, with_column(arrays, "wait_ns", np.zeros_like(arrays.requests["wait_ns"]))


def draw_published(users: int) -> tuple[DrawnCounts, ...]:
    """The sums of three published blocks of ``users`` sessions, one per base seed."""
    variant = Variant("published", "", PAPER_SOURCE)
    return tuple(
        draw(users, PLANS_IN_A_SUM, variant, base_seed=seed) for seed, ns in PUBLISHED_SEEDS.items() if users in ns
    )


class SignRow:
    """The figures of one N over its drawn plans.

    share: of sums with the printed sign; at_delta_p, at_p_c, at_ratio: of sums at or below the printed value. interval:
    of the pooled delta p.
    """

    def __init__(self, users: int, draws: DrawnCounts) -> None:
        self.users, self.printed = users, TABLE_I[users]
        self.p_a, self.p_c = draws.pooled_p()
        self.delta_p, self.interval = draws.delta_p, draws.delta_p_interval()
        self.share = draws.share_with_sign_of(self.printed.delta_p)
        self.at_delta_p = float(np.mean(draws.sums_delta_p() <= self.printed.delta_p))
        self.at_p_c = float(np.mean(draws.sums_p()[1] <= self.printed.p_c))
        self.decode_ratio = draws.decode_ratio
        self.at_ratio = float(np.mean(draws.sums_decode_ratio() <= self.printed.decode_ratio))

    @property
    def is_clear(self) -> bool:
        """Whether the interval of the pooled difference leaves 0 out."""
        return self.interval[0] > 0 or self.interval[1] < 0


def share_by_decode_ratio(draws: DrawnCounts) -> Iterator[tuple[float, float, float]]:
    """(least, largest decode ratio, share of sums with delta p > 0) of sums in four equal parts by that ratio."""
    ratios, delta_p = draws.sums_decode_ratio(), draws.sums_delta_p()
    for part in np.array_split(np.argsort(ratios, kind="stable"), 4):
        yield float(ratios[part].min()), float(ratios[part].max()), float(np.mean(delta_p[part] > 0))


def reversal_share(own: DrawnCounts, wider: DrawnCounts) -> float:
    """Share of sums in which every plan's delta p is above 0 on its grid and below 0 on the wider one (Table II)."""
    flips = (own.grouped(1).sums_delta_p() > 0) & (wider.grouped(1).sums_delta_p() < 0)
    return float(np.mean(flips.reshape(-1, own.plans_in_a_sum).all(axis=1)))


DEFAULT_SUMS = 400
# Alternatives are compared among themselves: a quarter of the sums tells them apart.
ALTERNATIVE_PART = 4
AT_THE_EDGE = 0.01
Draw = tuple[str, tuple[int, ...]]
"""A variant's name and the buckets."""


def page(num_sums: int = DEFAULT_SUMS, on_progress: Callable[[float], None] = lambda _share: None) -> str:
    """The whole page as Markdown. num_sums: sums of three plans per N. on_progress: takes the share of plans drawn."""
    # A small N tells whether sharing is worth it; then those of most sessions, so that the last is a short one.
    first, *others = sorted(TABLE_I)
    users = [first, *reversed(others)]
    drawn: dict[int, dict[Draw, DrawnCounts]] = {}
    for place, of_users in parallel_map(lambda each, _on_progress: _draws(each, num_sums), users):
        drawn[users[place]] = of_users
        on_progress(sum(drawn) / sum(users))
    return rendered("signs.md.j2", **_facts(num_sums, {each: drawn[each] for each in TABLE_I}))


def _draws(users: int, num_sums: int) -> dict[Draw, DrawnCounts]:
    """Everything that the page draws of one N."""
    num_plans = num_sums * PLANS_IN_A_SUM
    num_others = max(2, num_sums // ALTERNATIVE_PART) * PLANS_IN_A_SUM
    drawn = {(SHIPPED.name, GRID): draw(users, num_plans)}
    drawn |= {(SHIPPED.name, grid): draw(users, num_plans, buckets=grid) for n, grid in TABLE_II if n == users}
    drawn |= {(variant.name, GRID): draw(users, num_others, variant) for variant in ALTERNATIVES}
    return drawn


def _facts(num_sums: int, drawn: Mapping[int, Mapping[Draw, DrawnCounts]]) -> dict[str, object]:
    """Everything that the page shows, by its name there."""
    draws = {users: of_users[SHIPPED.name, GRID] for users, of_users in drawn.items()}
    rows = [SignRow(users, of_users) for users, of_users in draws.items()]
    decided = [row for row in rows if row.is_clear]
    same = [row for row in decided if np.sign(row.delta_p) == np.sign(row.printed.delta_p)]
    ratios = np.concatenate([of_users.sums_decode_ratio() for of_users in draws.values()])
    num_others = max(2, num_sums // ALTERNATIVE_PART)
    alternatives = {
        variant: {
            users: of_users[variant.name, GRID].grouped(PLANS_IN_A_SUM, num_others) for users, of_users in drawn.items()
        }
        for variant in (SHIPPED, *ALTERNATIVES)
    }
    turned = [variant.name for variant, by_users in alternatives.items() if by_users[4].delta_p > 0]
    on_grids = {(users, grid): drawn[users][SHIPPED.name, grid] for users, grid in TABLE_II}
    grid, wider = on_grids[6, GRID], on_grids[6, WIDER_GRID]
    published = {users: draw_published(users) for users in (6, 8, 10)}
    single = draws[4].grouped(1)
    near = single.sums_decode_ratio() >= TABLE_I[4].decode_ratio
    return {
        "num_plans": num_sums * PLANS_IN_A_SUM,
        "num_sums": num_sums,
        "base_seed": BASE_SEED,
        "table_i": TABLE_I,
        "rows": rows,
        "same": _users(same),
        "opposite": _users([row for row in decided if row not in same]),
        "neither": _users([row for row in rows if not row.is_clear]),
        "all_signs": float(np.prod([row.share for row in rows])),
        "above_one": np.mean(ratios > 1),
        "num_figures": len(ratios),
        "least_ratio": ratios.min(),
        "edge": AT_THE_EDGE,
        "edges": _edges(rows),
        "single_edges": _edges([SignRow(users, of_users.grouped(1)) for users, of_users in draws.items()]),
        "quarters": list(share_by_decode_ratio(single)),
        "num_single": single.num_plans,
        "num_near": int(near.sum()),
        "near_share": float(np.mean(single.sums_delta_p()[near] > 0)) if near.any() else None,
        "num_others": num_others,
        "alternatives": alternatives,
        "turning": f"Only {', '.join(turned)} gives" if turned else "None of these gives",
        "published": published,
        "published_same": {
            users: sum(each.has_sign_of(TABLE_I[users].delta_p) for each in sums) for users, sums in published.items()
        },
        "table_ii": TABLE_II,
        "on_grids": on_grids,
        "reversed": np.mean((grid.sums_delta_p() > 0) & (wider.sums_delta_p() < 0)),
        "reversed_in_each": reversal_share(grid, wider),
    }


def _edges(rows: Sequence[SignRow]) -> list[str]:
    """N at which the printed delta p, decode ratio and p_C are at the edge of these figures."""
    names = ("at_delta_p", "at_ratio", "at_p_c")
    return [_users([row for row in rows if not AT_THE_EDGE < getattr(row, name) < 1 - AT_THE_EDGE]) for name in names]


def _users(rows: Sequence[SignRow]) -> str:
    return ", ".join(str(row.users) for row in rows) or "none"
