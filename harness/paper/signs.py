"""Tables I and II over many drawn plans: which printed sign belongs to the method, and which to three plans.

Simulated with the same plans, rules and costs as the experiments ``alignment`` and ``bucket-intervention``; nothing is
measured, and no printed value is used but to be compared.
Definitions: docs/method.md, "Padding"; Tables I and II.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from harness.engine.config import EngineConfig
from harness.engine.cost import load_cost_model
from harness.sim.inputs import Input, input_arrays
from harness.sim.kernel.arrays import PlanArrays, with_column
from harness.sim.simulate import run_batch
from harness.spec import RulesName, Treatment, WorkloadSpec

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
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


TABLE_I: Mapping[int, Printed] = {
    3: Printed(0.118, 0.198, 0.080, 1.43),
    4: Printed(0.035, 0.061, 0.026, 1.78),
    5: Printed(0.171, 0.268, 0.098, 1.27),
    6: Printed(0.120, 0.235, 0.115, 1.51),
    7: Printed(0.158, 0.180, 0.022, 1.38),
    8: Printed(0.163, 0.090, -0.072, 1.39),
    10: Printed(0.152, 0.069, -0.084, 1.23),
    12: Printed(0.098, 0.019, -0.079, 1.05),
    16: Printed(0.039, 0.033, -0.005, 1.07),
}
"""Source: the paper, Table I. N = 3 and 7 are sums of six plans (S4), the others of three as far as it says."""

TABLE_II: Mapping[tuple[int, tuple[int, ...]], float | None] = {
    (6, GRID): 0.065,
    (6, WIDER_GRID): -0.040,
    (8, GRID): None,
    (8, WIDER_GRID): None,
}
"""Source: the paper, Table II; delta p; None: the text of 3-1 says only that it is below 0."""


PUBLISHED_SEEDS: Mapping[int, tuple[int, ...]] = {
    20260910: (6, 8, 10),
    20260921: (6, 8, 10),
    20260932: (6, 8, 10),
    20260943: (6, 8, 10),
    20260954: (6, 8, 10),
    20260965: (6, 8, 10),
    20261000: (6, 8, 10),
    20261100: (6,),
    20261200: (6, 8, 10),
}
"""Base seed -> N of the paper's later inputs (search, evaluation, validation, saturation), three blocks each; those of
Tables I and II are not among them. The same list keeps them from being frozen again: plans/published-seeds.toml."""
PAPER_SOURCE = {"source": "paper"}


@dataclass(frozen=True, slots=True)
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
class Draws:
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

    def grouped(self, plans_in_a_sum: int) -> Draws:
        """The same plans in sums of another size; plans that fill no sum are left out."""
        whole = self.num_plans // plans_in_a_sum * plans_in_a_sum
        return Draws(self.padded[:, :whole], self.slots[:, :whole], self.decode_ns[:, :whole], plans_in_a_sum)

    def first(self, num_sums: int) -> Draws:
        """The first sums alone."""
        last = num_sums * self.plans_in_a_sum
        return Draws(self.padded[:, :last], self.slots[:, :last], self.decode_ns[:, :last], self.plans_in_a_sum)

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
) -> Draws:
    """``num_plans`` plans of ``users`` sessions, each simulated with waits and without."""
    config = EngineConfig(LIMIT, buckets, LIMIT, SLOT_TOKENS, rules=variant.rules)
    model = load_cost_model(variant.costs)
    n = np.arange(LIMIT + 1)
    bucket_of = np.array([0, *(config.bucket_of(seqs) for seqs in n[1:].tolist())])
    counts: list[tuple[IntArray, IntArray, IntArray]] = []
    asked = tuple(variant.workload.items())
    for arrays in drawn_inputs(users, num_plans, asked, base_seed, variant.treatment):
        outcome = run_batch(arrays, config, model)
        slots = outcome.histogram @ bucket_of
        counts.append((slots - outcome.histogram @ n, slots, outcome.totals["decode_ns"]))
    padded, slots, decode_ns = (np.stack(pair) for pair in zip(*counts, strict=True))
    return Draws(padded, slots, decode_ns).grouped(PLANS_IN_A_SUM)


@lru_cache(maxsize=64)
def drawn_inputs(
    users: int, num_plans: int, asked: tuple[tuple[str, Any], ...], base_seed: int, treatment: Treatment
) -> tuple[PlanArrays, PlanArrays]:
    """The plans of a draw with waits and without; drawn once for all rules, costs and buckets.

    asked: keys of a WorkloadSpec beside the number of sessions. No start of these is a wait, so that without waits
    is with waits of nothing.
    """
    workload = WorkloadSpec(num_sessions=users, **dict(asked))
    arrays = input_arrays([Input(workload, base_seed, block) for block in range(num_plans)], treatment)
    return arrays, with_column(arrays, "wait_ns", np.zeros_like(arrays.requests["wait_ns"]))


def draw_published(users: int) -> tuple[Draws, ...]:
    """The sums of three published blocks of ``users`` sessions, one per base seed."""
    variant = Variant("published", "", PAPER_SOURCE)
    return tuple(
        draw(users, PLANS_IN_A_SUM, variant, base_seed=seed) for seed, ns in PUBLISHED_SEEDS.items() if users in ns
    )


class SignRow(NamedTuple):
    """One N. share: of sums with the printed sign; at_delta_p, at_p_c, at_ratio: of sums at or below the printed value.

    interval: of the pooled delta p. least_ratio, largest_ratio: decode time ratios of the sums.
    """

    users: int
    p_a: float
    p_c: float
    delta_p: float
    interval: tuple[float, float]
    share: float
    at_delta_p: float
    at_p_c: float
    decode_ratio: float
    least_ratio: float
    largest_ratio: float
    at_ratio: float

    @property
    def is_told(self) -> bool:
        """Whether the interval of the pooled difference leaves 0 out."""
        return self.interval[0] > 0 or self.interval[1] < 0


def sign_row(users: int, draws: Draws) -> SignRow:
    """What the drawn plans of one N say beside its printed row."""
    printed = TABLE_I[users]
    delta_p, ratios = draws.sums_delta_p(), draws.sums_decode_ratio()
    p_a, p_c = draws.pooled_p()
    return SignRow(
        users,
        p_a,
        p_c,
        p_c - p_a,
        draws.delta_p_interval(),
        float(np.mean(np.sign(delta_p) == np.sign(printed.delta_p))),
        float(np.mean(delta_p <= printed.delta_p)),
        float(np.mean(draws.sums_p()[1] <= printed.p_c)),
        draws.decode_ratio,
        float(ratios.min()),
        float(ratios.max()),
        float(np.mean(ratios <= printed.decode_ratio)),
    )


def share_by_decode_ratio(draws: Draws, parts: int = 4) -> Iterator[tuple[float, float, float]]:
    """(least, largest decode ratio, share of sums with delta p > 0) of sums in ``parts`` equal parts by that ratio."""
    ratios, delta_p = draws.sums_decode_ratio(), draws.sums_delta_p()
    for part in np.array_split(np.argsort(ratios, kind="stable"), parts):
        yield float(ratios[part].min()), float(ratios[part].max()), float(np.mean(delta_p[part] > 0))


def reversal_share(own: Draws, wider: Draws) -> float:
    """Share of sums in which every plan's delta p is above 0 on its grid and below 0 on the wider one (Table II)."""
    flips = (own.grouped(1).sums_delta_p() > 0) & (wider.grouped(1).sums_delta_p() < 0)
    return float(np.mean(flips.reshape(-1, own.plans_in_a_sum).all(axis=1)))
