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

from harness.engine.config import EngineConfig
from harness.engine.cost import load_cost_model
from harness.errors import SpecError
from harness.sim import memory
from harness.sim.ablations import Ablation, run_ablated, with_arrivals_of
from harness.sim.draws import Draws, artifact_key, jitter, noise_seeds, noise_table, perturbed
from harness.sim.inputs import Input, input_arrays, joined
from harness.sim.kernel import arrays as layout
from harness.sim.perturbation import perturbation_of
from harness.sim.search.space import DrawsSpec, InputSpec, SpaceSpec
from harness.sim.simulate import check_slots, is_rearrival
from harness.sim.windows import median_of_paired_ratios, ratio_of_sums, window_figures
from harness.spec import ServerShape, Treatment, WindowSpec

FloatArray = npt.NDArray[np.float64]

BOOTSTRAPS = 2000
PLAIN = Ablation("", "")


@dataclass(frozen=True)
class Prediction:
    """A predicted cost ratio, candidate over reference.

    ratio_of_sums, median_of_pairs: nominal costs, no jitter, on the space's evaluation plans (its search plans when it
    has none). median_low, median_high: bootstrap interval of that median. mean, low, high: mean and ``level`` of the
    ratios of sums that an experiment of ``replicates`` runs per condition would give, see DrawsSpec.
    """

    candidate: ServerShape
    reference: ServerShape
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
    candidate: ServerShape,
    users: int | Sequence[int],
    changed: Ablation | None = None,
    reference: ServerShape | None = None,
) -> Prediction:
    """The cost ratio of a candidate to a reference (default: the space's baseline) over one N, or several summed.

    changed: one rule changed for both; computed, not measured. Raises SpecError when the uncertainty's seed is one of
    the search's or the evaluation's, PlanError when a request does not fit.
    """
    chosen = (users,) if isinstance(users, int) else tuple(users)
    base = space.baseline.shape if reference is None else reference
    ablated = changed or PLAIN
    rules = ablated.rules or space.rules
    nominal = _nominal(space, (candidate, base), chosen, ablated)
    low_median, high_median = bootstrap_median(nominal[0] / nominal[1], space.prediction)
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
        *interval(ratios, space.prediction.level),
        space.prediction.level,
        len(ratios),
    )


def bootstrap_median(ratios: FloatArray, prediction: DrawsSpec) -> tuple[float, float]:
    """Percentile bootstrap interval of the median of paired ratios."""
    generator = np.random.default_rng([prediction.seed, len(ratios)])
    drawn = generator.integers(0, len(ratios), size=(BOOTSTRAPS, len(ratios)))
    medians = np.median(ratios[drawn], axis=1)
    tail = (1 - prediction.level) / 2
    return float(np.quantile(medians, tail)), float(np.quantile(medians, 1 - tail))


class Sampled(NamedTuple):
    """One condition of as many imagined experiments as ``prediction.draws``, in their order.

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
    space: SpaceSpec, candidate: ServerShape, reference: ServerShape, users: Sequence[int], changed: Ablation = PLAIN
) -> FloatArray:
    """Cost ratios of as many imagined experiments as ``prediction.draws``, in their order."""
    own, base = sampled(space, (candidate, reference), users, changed)
    return own.cost / base.cost


def sampled(
    space: SpaceSpec, pair: Sequence[ServerShape], users: Sequence[int], changed: Ablation = PLAIN
) -> list[Sampled]:
    """Imagined experiments of several configurations, which see the same plans and the same true costs."""
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
    each: ServerShape,
    role: int,
) -> Sampled:
    """One configuration's part of every imagined experiment; role: its place among those compared."""
    space = SpaceSpec.model_validate_json(space_json)
    perturbation, num_draws = perturbation_of(space.prediction, space.cost_model), space.prediction.draws
    drawn = _drawn(space.model_dump_json(include={"inputs", "prediction"}), users, _treatment(space, changed))
    model, plans_each = load_cost_model(space.cost_model), len(drawn.plans) // num_draws
    config = EngineConfig.of_shape(each, changed.rules or space.rules)
    truths = [perturbed(model, perturbation, number, artifact_key(config)) for number in range(num_draws)]
    draws = Draws(
        _pin(jitter(drawn, perturbation, role), space, changed),
        tuple(truth for truth in truths for _plan in range(plans_each)),
        noise_seeds(perturbation, len(drawn.plans), role),
        noise_table(perturbation.step_sd),
    )
    costs = draws.costs(config, chunked_prefill_calls=changed.chunked_prefill_calls)
    return _sampled_from(draws.arrays, config, costs, changed, space.window, plans_each)


@lru_cache(maxsize=8)
def _drawn(space_json: str, users: tuple[int, ...], treatment: Treatment) -> layout.PlanArrays:
    """The plans behind the draws, draw after draw: new ones for each, or the space's own for all."""
    space = _DrawnSpace.model_validate_json(space_json)
    prediction, inputs = space.prediction, space.inputs
    if prediction.seed in (*inputs.search_seeds, *inputs.evaluation_seeds):
        raise SpecError(
            f"the seed {prediction.seed} is also one of the search or the evaluation",
            where="prediction.seed",
            hint="Choose another seed",
        )
    if prediction.plans == "given":
        # Once per draw: each has a jitter of its own.
        return joined([input_arrays(_own_inputs(inputs, users), treatment)] * prediction.draws)
    workloads = [inputs.workload_of(n) for n in users]
    each = prediction.replicates
    return input_arrays(
        [
            Input(workload, prediction.seed, replicate)
            for number in range(prediction.draws)
            for workload in workloads
            for replicate in range(number * each, (number + 1) * each)
        ],
        treatment,
    )


def _own_inputs(inputs: InputSpec, users: Sequence[int]) -> list[Input]:
    """The evaluation plans of a space, its search plans where it has none."""
    workloads = [inputs.workload_of(n) for n in users]
    seeds = inputs.evaluation_seeds or inputs.search_seeds
    return [Input(workload, seed, k) for workload in workloads for seed in seeds for k in range(inputs.replicates)]


class _DrawnSpace(SpaceSpec):
    """The part of a space that decides its draws."""

    name: str = "drawn"
    max_num_seqs: tuple[int, ...] = (8,)


def _sampled_from(
    arrays: layout.PlanArrays,
    config: EngineConfig,
    costs: layout.CostArrays,
    changed: Ablation,
    window: WindowSpec | None,
    plans_each: int,
) -> Sampled:
    """Cost and reuse of each ``plans_each`` plans."""
    if window is None:
        outcome = run_ablated(arrays, config, costs, changed)
        again = is_rearrival(arrays)
        is_reused = again & (outcome.requests["cached_tokens"] > 0)
        owner = np.repeat(range(len(arrays.plans)), arrays.plans["num_requests"])
        device_ns = outcome.totals["decode_ns"] + outcome.totals["prefill_ns"]
        figures = [(device_ns, np.ones_like(device_ns)), (np.bincount(owner, is_reused), np.bincount(owner, again))]
    else:
        check_slots(arrays, config)
        found = [
            window_figures(arrays, plan, config, memory.costs_of_plan(costs, plan), window)
            for plan in range(len(arrays.plans))
        ]
        names = (("device_ns", "completed"), ("reused", "rearrivals"))
        figures = [tuple(np.array([getattr(one, name) for one in found]) for name in pair) for pair in names]
    (cost, per), (reused, again) = ((part.reshape(-1, plans_each).sum(axis=1) for part in pair) for pair in figures)
    per = np.ones_like(per) if window is None else np.maximum(per, 1)
    return Sampled(cost / per, np.where(again > 0, reused / np.maximum(again, 1), 1.0))


def _pin(arrays: layout.PlanArrays, space: SpaceSpec, changed: Ablation) -> layout.PlanArrays:
    """The plans with re-arrivals at the baseline's times, if that is the rule changed."""
    if not changed.is_fixed_arrivals:
        return arrays
    baseline = EngineConfig.of_shape(space.baseline.shape, changed.rules or space.rules)
    return with_arrivals_of(arrays, baseline, load_cost_model(space.cost_model))


def _treatment(space: SpaceSpec, changed: Ablation) -> Treatment:
    return space.inputs.treatment if changed.treatment == "as-drawn" else changed.treatment


def _nominal(
    space: SpaceSpec, pair: Sequence[ServerShape], users: Sequence[int], changed: Ablation
) -> tuple[FloatArray, FloatArray]:
    """Cost of each evaluation plan (search plan without any) under both of a pair, nominal costs and no jitter."""
    plans = input_arrays(_own_inputs(space.inputs, users), _treatment(space, changed))
    pinned = _pin(plans, space, changed)
    model = load_cost_model(space.cost_model)
    costs: list[FloatArray] = []
    for each in pair:
        config = EngineConfig.of_shape(each, changed.rules or space.rules)
        nominal = memory.cost_arrays(config, model, changed.chunked_prefill_calls)
        costs.append(_sampled_from(pinned, config, nominal, changed, space.window, 1).cost)
    return costs[0], costs[1]
