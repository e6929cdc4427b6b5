"""How sure a predicted ratio is: new plan draws, arrival order, the client's jitter, and what calibration leaves open.

Both configurations of a pair see the same plans and the same true costs; each has its own jitter, as two runs have.
Every draw has a seed of its own, apart from the search's and the evaluation's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from harness.compiled.records import IntArray
from harness.engine.config import EngineConfig
from harness.engine.cost import CostModel, load_cost_model
from harness.engine.memory import new_state
from harness.engine.steps import FAR
from harness.errors import PlanError, SpecError
from harness.sim import memory
from harness.sim.ablations import Ablation
from harness.sim.calibrated import calibrated_uncertainty
from harness.sim.draws import Draws, artifact_key, jitter, noise_seeds, noise_table, perturbed
from harness.sim.inputs import Input, input_arrays, joined
from harness.sim.kernel import arrays as layout
from harness.sim.kernel import events as kernel
from harness.sim.search.space import Candidate, InputSpec, SpaceSpec, UncertaintySpec, candidate_of
from harness.sim.simulate import check_slots, is_rearrival
from harness.sim.windows import median_of_paired_ratios, ratio_of_sums, window_figures
from harness.spec import Treatment

FloatArray = npt.NDArray[np.float64]

BOOTSTRAPS = 2000
PLAIN = Ablation("", "")


@dataclass(frozen=True)
class Prediction:
    """A predicted cost ratio, candidate over reference.

    ratio_of_sums, median_of_pairs: nominal costs, no jitter, on the space's evaluation plans (its search plans when it
    has none). median_low, median_high: bootstrap interval of that median. mean, low, high: mean and ``level`` of the
    ratios of sums that an experiment of ``replicates`` runs per condition would give, see UncertaintySpec.
    """

    candidate: Candidate
    reference: Candidate
    users: tuple[int, ...]
    rules: str
    ratio_of_sums: float
    median_of_pairs: float
    median_low: float
    median_high: float
    mean: float
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
    return Prediction(
        candidate,
        base,
        chosen,
        rules,
        ratio_of_sums(nominal[0].tolist(), nominal[1].tolist()),
        median_of_paired_ratios(nominal[0].tolist(), nominal[1].tolist()),
        low_median,
        high_median,
        float(np.mean(ratios)),
        *interval(ratios, space.uncertainty.level),
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


class Sampled(NamedTuple):
    """One condition of as many imagined experiments as ``uncertainty.samples``, in their order.

    cost: device ns, summed over the runs; with a window, per completed request. reuse: share of the re-arrivals, all
    or those in the window, that reused anything.
    """

    cost: FloatArray
    reuse: FloatArray


def interval(values: FloatArray, level: float) -> tuple[float, float]:
    """Where one more exchangeable value would lie, whatever their distribution: between two order statistics."""
    tail = (1 - level) / 2
    low, high = np.quantile(values, [tail, 1 - tail], method="weibull")
    return float(low), float(high)


def sampled_ratios(
    space: SpaceSpec, candidate: Candidate, reference: Candidate, users: Sequence[int], changed: Ablation = PLAIN
) -> FloatArray:
    """Cost ratios of as many imagined experiments as ``uncertainty.samples``, in their order."""
    own, base = sampled(space, (candidate, reference), users, changed)
    return own.cost / base.cost


def sampled(
    space: SpaceSpec, pair: Sequence[Candidate], users: Sequence[int], changed: Ablation = PLAIN
) -> list[Sampled]:
    """Imagined experiments of several configurations, which see the same plans and the same true costs."""
    if space.uncertainty.is_calibrated:
        known = calibrated_uncertainty(space.uncertainty, space.cost_model)
        space = space.model_copy(update={"uncertainty": known})
    # The model as it is now: its file may have been fitted again since.
    asked = space.model_dump_json(), repr(load_cost_model(space.cost_model)), tuple(users), changed
    return [_imagined(*asked, each, role) for role, each in enumerate(pair)]


# The reference of many predictions one after another is the same, and as dear as the candidate.
@lru_cache(maxsize=4)
def _imagined(
    space_json: str,
    model_read: str,  # noqa: ARG001
    users: tuple[int, ...],
    changed: Ablation,
    each: Candidate,
    role: int,
) -> Sampled:
    """One configuration's part of every imagined experiment; role: its place among those compared."""
    space = SpaceSpec.model_validate_json(space_json)
    uncertainty = space.uncertainty
    drawn = _drawn(space.model_dump_json(include={"inputs", "uncertainty"}), users, _treatment(space, changed))
    model, plans_each = load_cost_model(space.cost_model), len(drawn.plans) // uncertainty.samples
    config = each.config(changed.rules or space.rules)
    truths = [perturbed(model, uncertainty, sample, artifact_key(config)) for sample in range(uncertainty.samples)]
    draws = Draws(
        _pin(jitter(drawn, uncertainty, role), candidate_of(space.baseline), space, changed),
        tuple(truth for truth in truths for _plan in range(plans_each)),
        noise_seeds(uncertainty, len(drawn.plans), role),
        noise_table(uncertainty.step_relative),
    )
    runner = _Runner(draws.arrays, config, changed, space)
    return runner.sampled(draws.costs(config, chunked_prefill_calls=changed.chunked_prefill_calls), plans_each)


@lru_cache(maxsize=8)
def _drawn(space_json: str, users: tuple[int, ...], treatment: Treatment) -> layout.PlanArrays:
    """The plans behind the samples, sample after sample: new draws for each, or the space's own for all."""
    space = _SampledSpace.model_validate_json(space_json)
    uncertainty, inputs = space.uncertainty, space.inputs
    if uncertainty.seed in (*inputs.search_seeds, *inputs.evaluation_seeds):
        raise SpecError(
            f"the seed {uncertainty.seed} is also one of the search or the evaluation",
            where="uncertainty.seed",
            hint="Choose another seed",
        )
    if uncertainty.draws == "given":
        # Once per sample: each has a jitter of its own.
        return joined([input_arrays(_own_inputs(inputs, users), treatment)] * uncertainty.samples)
    workloads = [inputs.workload_of(n) for n in users]
    each = uncertainty.replicates
    return input_arrays(
        [
            Input(workload, uncertainty.seed, replicate)
            for sample in range(uncertainty.samples)
            for workload in workloads
            for replicate in range(sample * each, (sample + 1) * each)
        ],
        treatment,
    )


def _own_inputs(inputs: InputSpec, users: Sequence[int]) -> list[Input]:
    """The evaluation plans of a space, its search plans where it has none."""
    workloads = [inputs.workload_of(n) for n in users]
    seeds = inputs.evaluation_seeds or inputs.search_seeds
    return [Input(workload, seed, k) for workload in workloads for seed in seeds for k in range(inputs.replicates)]


class _SampledSpace(SpaceSpec):
    """The part of a space that decides its samples."""

    name: str = "sampled"
    limits: tuple[int, ...] = (8,)


class _Runner:
    """One condition: its memory, and what any of its plans costs."""

    def __init__(self, arrays: layout.PlanArrays, config: EngineConfig, changed: Ablation, space: SpaceSpec) -> None:
        check_slots(arrays, config)
        self.config = config
        self._arrays, self._changed, self._window = arrays, changed, space.window
        most_requests = int(arrays.plans["num_requests"].max())
        self._state = new_state(config, most_requests, evicts_by_last_use=changed.is_lru_slots)
        self._scratch = memory.new_scratch(arrays)
        self._outcome = memory.new_outcome(arrays, config)

    def sampled(self, costs: layout.CostArrays, plans_each: int) -> Sampled:
        """Cost and reuse of each ``plans_each`` plans."""
        plans = range(len(self._arrays.plans))
        if self._window is None:
            again = is_rearrival(self._arrays)
            device_ns, owner = self.device_ns(costs), np.repeat(plans, self._arrays.plans["num_requests"])
            is_reused = again & (self._outcome.requests["cached_tokens"] > 0)
            figures = [(device_ns, np.ones_like(device_ns)), (np.bincount(owner, is_reused), np.bincount(owner, again))]
        else:
            found = [
                window_figures(self._arrays, plan, self.config, memory.costs_of_plan(costs, plan), self._window)
                for plan in plans
            ]
            names = (("device_ns", "completed"), ("reused", "rearrivals"))
            figures = [tuple(np.array([getattr(one, name) for one in found]) for name in pair) for pair in names]
        (cost, per), (reused, again) = ((part.reshape(-1, plans_each).sum(axis=1) for part in pair) for pair in figures)
        per = np.ones_like(per) if self._window is None else np.maximum(per, 1)
        return Sampled(cost / per, np.where(again > 0, reused / np.maximum(again, 1), 1.0))

    def nominal(self, model: CostModel) -> layout.CostArrays:
        """Costs without noise, the same for every plan."""
        return memory.cost_arrays(self.config, model, self._changed.chunked_prefill_calls)

    def device_ns(self, costs: layout.CostArrays) -> IntArray:
        """Device ns of each plan."""
        num_plans = len(self._arrays.plans)
        kernel.run_plans(self._arrays, 0, num_plans, self._state, costs, self._scratch, self._outcome, FAR)
        totals = self._outcome.totals
        if totals["stuck_session"].max() >= 0:
            raise PlanError("a request can never be admitted", where=f"{self.config.kv_slots} slots")
        return totals["decode_ns"] + totals["prefill_ns"]

    def arrivals(self, model: CostModel) -> IntArray:
        """When every request arrives, all plans."""
        self.device_ns(self.nominal(model))
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
    plans = input_arrays(_own_inputs(space.inputs, users), _treatment(space, changed))
    pinned = _pin(plans, candidate_of(space.baseline), space, changed)
    model = load_cost_model(space.cost_model)
    costs: list[FloatArray] = []
    for each in pair:
        runner = _Runner(pinned, each.config(changed.rules or space.rules), changed, space)
        costs.append(runner.sampled(runner.nominal(model), 1).cost)
    return costs[0], costs[1]
