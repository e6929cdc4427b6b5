"""How sure a predicted ratio is: new plan draws, arrival order, the client's jitter, and what calibration leaves open.

Both configurations of a pair see the same plans and the same true costs; each has its own jitter, as two runs have.
Every draw has a seed of its own, apart from the search's and the evaluation's.
Next: ``search.report`` says which candidates are not told apart; ``harness predict`` prints intervals.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from harness.clock import NS_PER_MS
from harness.compiled.records import IntArray
from harness.engine.config import EngineConfig
from harness.engine.cost import CostModel, load_cost_model
from harness.engine.memory import new_state
from harness.engine.steps import FAR
from harness.errors import PlanError, SpecError
from harness.plan import Plan, build_plan
from harness.sim import memory
from harness.sim.ablations import Ablation
from harness.sim.calibrated import calibrated_uncertainty
from harness.sim.kernel import arrays as layout
from harness.sim.kernel import events as kernel
from harness.sim.search.space import Candidate, SpaceSpec, UncertaintySpec, candidate_of
from harness.sim.simulate import check_slots, plan_arrays
from harness.sim.windows import median_of_paired_ratios, ratio_of_sums, window_figures
from harness.spec import Treatment

FloatArray = npt.NDArray[np.float64]

BOOTSTRAPS = 2000
ORDER_NS = 1000
PLAIN = Ablation("", "")


@dataclass(frozen=True)
class Prediction:
    """A predicted cost ratio, candidate over reference.

    ratio_of_sums, median_of_pairs: nominal costs, no jitter, on the space's evaluation plans (its search plans when it
    has none). median_low, median_high: bootstrap interval of that median. low, high: ``level`` of the ratios of sums
    that an experiment of ``replicates`` runs per condition would give, see UncertaintySpec.
    """

    candidate: Candidate
    reference: Candidate
    users: tuple[int, ...]
    rules: str
    ratio_of_sums: float
    median_of_pairs: float
    median_low: float
    median_high: float
    low: float
    high: float
    level: float
    samples: int

    @property
    def is_told_apart(self) -> bool:
        """Whether the paired interval leaves 1 out."""
        return not self.low <= 1.0 <= self.high


def predict(
    space: SpaceSpec,
    candidate: Candidate,
    users: int | Sequence[int],
    changed: Ablation | None = None,
    reference: Candidate | None = None,
) -> Prediction:
    """The cost ratio of a candidate to a reference (default: the space's baseline) over one N, or several summed.

    changed: one rule changed for both; computed, not measured. Raises SpecError when the uncertainty's seed is one of
    the search's or the evaluation's, PlanError when a request does not fit.
    """
    chosen = (users,) if isinstance(users, int) else tuple(users)
    base = candidate_of(space.baseline) if reference is None else reference
    ablated = changed or PLAIN
    rules = ablated.rules or space.rules
    nominal = _nominal(space, (candidate, base), chosen, ablated)
    low_median, high_median = bootstrap_median(nominal[0] / nominal[1], space.uncertainty)
    ratios = sampled_ratios(space, candidate, base, chosen, ablated)
    tail = (1 - space.uncertainty.level) / 2
    return Prediction(
        candidate,
        base,
        chosen,
        rules,
        ratio_of_sums(nominal[0].tolist(), nominal[1].tolist()),
        median_of_paired_ratios(nominal[0].tolist(), nominal[1].tolist()),
        low_median,
        high_median,
        float(np.quantile(ratios, tail)),
        float(np.quantile(ratios, 1 - tail)),
        space.uncertainty.level,
        len(ratios),
    )


def bootstrap_median(ratios: FloatArray, uncertainty: UncertaintySpec) -> tuple[float, float]:
    """Percentile bootstrap interval of the median of paired ratios."""
    generator = np.random.default_rng([uncertainty.seed, len(ratios)])
    drawn = generator.integers(0, len(ratios), size=(BOOTSTRAPS, len(ratios)))
    medians = np.median(ratios[drawn], axis=1)
    tail = (1 - uncertainty.level) / 2
    return float(np.quantile(medians, tail)), float(np.quantile(medians, 1 - tail))


def sampled_ratios(
    space: SpaceSpec, candidate: Candidate, reference: Candidate, users: Sequence[int], changed: Ablation = PLAIN
) -> FloatArray:
    """Ratios of sums of as many imagined experiments as ``uncertainty.samples``, in their order."""
    uncertainty = space.uncertainty
    if uncertainty.is_calibrated:
        uncertainty = calibrated_uncertainty(uncertainty, space.cost_model)
    drawn = _drawn(space.model_dump_json(include={"inputs", "uncertainty"}), tuple(users), _treatment(space, changed))
    models = [
        perturbed(load_cost_model(space.cost_model), uncertainty, sample) for sample in range(uncertainty.samples)
    ]
    costs: list[FloatArray] = []
    for role, each in enumerate((candidate, reference)):
        config = each.config(changed.rules or space.rules)
        jittered = jitter(drawn.arrays, uncertainty, role)
        pinned = _pin(jittered, candidate_of(space.baseline), space, changed)
        runner = _Runner(pinned, config, changed, space)
        costs.append(
            np.array(
                [runner.cost(drawn.first[sample], drawn.last[sample], model) for sample, model in enumerate(models)]
            )
        )
    return costs[0] / costs[1]


@dataclass(frozen=True)
class _Drawn:
    """Plans of all samples end to end; sample i has plans [first[i], last[i])."""

    arrays: layout.PlanArrays
    first: tuple[int, ...]
    last: tuple[int, ...]


@lru_cache(maxsize=8)
def _drawn(space_json: str, users: tuple[int, ...], treatment: Treatment) -> _Drawn:
    """The plans behind the samples: new draws for each, or the space's own for all."""
    space = _SampledSpace.model_validate_json(space_json)
    uncertainty, inputs = space.uncertainty, space.inputs
    if uncertainty.seed in (*inputs.search_seeds, *inputs.evaluation_seeds):
        raise SpecError(
            f"the seed {uncertainty.seed} is also one of the search or the evaluation",
            where="uncertainty.seed",
            hint="Choose another seed",
        )
    plans: list[Plan] = []
    if uncertainty.draws == "given":
        seeds = inputs.evaluation_seeds or inputs.search_seeds
        once = [
            build_plan(inputs.workload_of(n), seed, k)
            for n in users
            for seed in seeds
            for k in range(inputs.replicates)
        ]
        # Once per sample: each has a jitter of its own.
        plans = once * uncertainty.samples
    else:
        for sample in range(uncertainty.samples):
            for n in users:
                workload = inputs.workload_of(n)
                start = sample * uncertainty.replicates
                plans += [build_plan(workload, uncertainty.seed, start + k) for k in range(uncertainty.replicates)]
    size = len(plans) // uncertainty.samples
    first = tuple(sample * size for sample in range(uncertainty.samples))
    last = tuple(place + size for place in first)
    treated = [plan if treatment == "as-drawn" else plan.with_treatment(treatment) for plan in plans]
    return _Drawn(plan_arrays(treated), first, last)


class _SampledSpace(SpaceSpec):
    """The part of a space that decides its samples."""

    name: str = "sampled"
    limits: tuple[int, ...] = (8,)


def jitter(arrays: layout.PlanArrays, uncertainty: UncertaintySpec, role: int) -> layout.PlanArrays:
    """The plans as one condition's client would really play them: starts spread out, re-arrivals late.

    Starts get at least ORDER_NS of spread, so that simultaneous arrivals come in any order.
    """
    generator = np.random.default_rng([uncertainty.seed, role, zlib.crc32(b"jitter")])
    starts = generator.integers(0, ORDER_NS, size=len(arrays.sessions))
    starts += generator.exponential(uncertainty.start_jitter_ms * NS_PER_MS, size=len(starts)).astype(np.int64)
    waits = generator.exponential(uncertainty.rearrival_lag_ms * NS_PER_MS, size=len(arrays.requests)).astype(np.int64)
    late = layout.with_column(arrays, "wait_ns", arrays.requests["wait_ns"] + waits)
    sessions = arrays.sessions.copy()
    sessions["start_ns"][:] += starts
    return late._replace(sessions=sessions)


def perturbed(model: CostModel, uncertainty: UncertaintySpec, sample: int) -> CostModel:
    """A cost model that calibration could as well have found: all steps, each bucket and prefill moved on their own."""
    generator = np.random.default_rng([uncertainty.seed, sample, zlib.crc32(b"cost")])
    decode, prefill = 1 + generator.normal(size=2) * (uncertainty.decode_relative, uncertainty.prefill_relative)
    buckets = 1 + generator.normal(size=1025) * uncertainty.bucket_relative
    return replace(
        model,
        f_fs=_ScaledBuckets(model, decode * buckets),
        alpha_fs=round(model.alpha_fs * decode),
        beta_fs=round(model.beta_fs * decode),
        context_fs=round(model.context_fs * decode),
        call_fs=round(model.call_fs * prefill),
        token_fs=round(model.token_fs * prefill),
        position_fs=round(model.position_fs * prefill),
        _filled_fs={},
    )


class _ScaledBuckets(dict[int, int]):
    """f of every bucket, scaled on first use; filled-in ones count as measured, so that they are not filled in anew."""

    def __init__(self, model: CostModel, factors: FloatArray) -> None:
        super().__init__()
        self._model, self._factors = model, factors

    def __contains__(self, bucket: object) -> bool:
        return True

    def __missing__(self, bucket: int) -> int:
        self[bucket] = round(self._model.bucket_fs(bucket) * float(self._factors[min(bucket, 1024)]))
        return self[bucket]


class _Runner:
    """One condition: its memory, and the cost of any of its plans under any cost model."""

    def __init__(self, arrays: layout.PlanArrays, config: EngineConfig, changed: Ablation, space: SpaceSpec) -> None:
        check_slots(arrays, config)
        self._arrays, self._config, self._changed, self._window = arrays, config, changed, space.window
        most_requests = int(arrays.plans["num_requests"].max())
        self._state = new_state(config, most_requests, evicts_by_last_use=changed.is_lru_slots)
        self._scratch = memory.new_scratch(config, arrays)
        self._outcome = memory.new_outcome(arrays, config)

    def cost(self, first: int, last: int, model: CostModel) -> float:
        """Device ns of plans [first, last); with a window, per completed request."""
        if self._window is not None:
            found = [
                window_figures(self._arrays, plan, self._config, model, self._window) for plan in range(first, last)
            ]
            return sum(figures.device_ns for figures in found) / max(sum(figures.completed for figures in found), 1)
        return float(self.device_ns(first, last, model).sum())

    def device_ns(self, first: int, last: int, model: CostModel) -> IntArray:
        """Device ns of each of plans [first, last)."""
        cost = memory.cost_arrays(self._config, model, self._changed.chunked_prefill_calls)
        kernel.run_plans(self._arrays, first, last, self._state, cost, self._scratch, self._outcome, FAR)
        totals = self._outcome.totals[first:last]
        if totals["stuck_session"].max() >= 0:
            raise PlanError("a request can never be admitted", where=f"{self._config.kv_slots} slots")
        return totals["decode_ns"] + totals["prefill_ns"]

    def arrivals(self, model: CostModel) -> IntArray:
        """When every request arrives, all plans."""
        self.device_ns(0, len(self._arrays.plans), model)
        return self._outcome.requests["arrival_ns"].copy()


def _pin(arrays: layout.PlanArrays, baseline: Candidate, space: SpaceSpec, changed: Ablation) -> layout.PlanArrays:
    """The plans with re-arrivals at the baseline's times, if that is the rule changed."""
    if not changed.is_fixed_arrivals:
        return arrays
    runner = _Runner(arrays, baseline.config(changed.rules or space.rules), PLAIN, space)
    return layout.with_column(arrays, "pinned_ns", runner.arrivals(load_cost_model(space.cost_model)))


def _treatment(space: SpaceSpec, changed: Ablation) -> Treatment:
    return space.inputs.treatment if changed.treatment == "as-drawn" else changed.treatment


def _nominal(
    space: SpaceSpec, pair: Sequence[Candidate], users: Sequence[int], changed: Ablation
) -> tuple[FloatArray, FloatArray]:
    """Cost of each evaluation plan (search plan without any) under both of a pair, nominal costs and no jitter."""
    inputs = space.inputs
    seeds = inputs.evaluation_seeds or inputs.search_seeds
    drawn = [
        build_plan(inputs.workload_of(n), seed, k) for n in users for seed in seeds for k in range(inputs.replicates)
    ]
    treatment = _treatment(space, changed)
    plans = plan_arrays([plan if treatment == "as-drawn" else plan.with_treatment(treatment) for plan in drawn])
    pinned = _pin(plans, candidate_of(space.baseline), space, changed)
    model = load_cost_model(space.cost_model)
    costs: list[FloatArray] = []
    for each in pair:
        runner = _Runner(pinned, each.config(changed.rules or space.rules), changed, space)
        costs.append(np.array([runner.cost(plan, plan + 1, model) for plan in range(len(drawn))]))
    return costs[0], costs[1]
