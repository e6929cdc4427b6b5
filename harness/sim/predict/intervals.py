"""Intervals for predicted cost ratios: drawn plans, arrival order, the client's jitter and uncertain costs.

Both configurations of a pair have the same plans and the same true costs, and each has its own jitter, as two runs do.
The draws never use a seed of the search or of the evaluation.
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
from harness.engine.cost import load_cost_model
from harness.errors import SpecError
from harness.sim.kernel import arrays as layout
from harness.sim.plans import Input, check_slots, input_arrays, is_rearrival, joined
from harness.sim.predict.draws import Draws, artifact_key, jitter, noise_seeds, noise_table, perturbation_of, perturbed
from harness.sim.predict.windows import window_figures
from harness.sim.search.space import DrawsSpec, InputSpec, SpaceSpec
from harness.sim.simulate import UNCHANGED, Ablation, run_batch, with_arrivals_of
from harness.spec import ServerShape, Spec, Treatment, WindowSpec

FloatArray = npt.NDArray[np.float64]

BOOTSTRAPS = 2000


@dataclass(frozen=True)
class Prediction:
    """A predicted cost ratio, candidate over reference.

    ratio_of_sums, median_of_pairs: at nominal costs and without jitter, on the space's evaluation plans (its search
    plans when it has none). median_low, median_high: bootstrap interval of that median. mean, low, high: mean and
    ``level`` interval of the ratio of sums in an experiment of ``replicates`` runs per condition, see DrawsSpec.
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
    def shows_difference(self) -> bool:
        """Whether the interval excludes 1."""
        return not self.low <= 1.0 <= self.high


def predict(
    space: SpaceSpec,
    candidate: ServerShape,
    users: int | Sequence[int],
    changed: Ablation = UNCHANGED,
    reference: ServerShape | None = None,
) -> Prediction:
    """The cost ratio of a candidate to a reference (default: the space's baseline), for one N or summed over several.

    changed: an ablation of both; computed, not measured. Raises SpecError when the seed of the draws is also a seed of
    the search or the evaluation, PlanError when a request does not fit.
    """
    if space.is_paged:
        raise SpecError(
            f"intervals are not predicted under the rules {space.rules!r}",
            where=space.name,
            hint="Run the configurations as conditions of an experiment with replicates",
        )
    chosen = (users,) if isinstance(users, int) else tuple(users)
    base = space.baseline.shape if reference is None else reference
    costs, base_costs = _nominal(space, (candidate, base), chosen, changed)
    low_median, high_median = bootstrap_median(costs / base_costs, space.prediction)
    ours, theirs = sampled(space, (candidate, base), chosen, changed)
    ratios = ours.cost / theirs.cost
    return Prediction(
        candidate,
        base,
        chosen,
        changed.rules or space.rules,
        float(costs.sum() / base_costs.sum()),
        float(np.median(costs / base_costs)),
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
    """One configuration in ``prediction.draws`` simulated experiments, in their order.

    cost: device ns, summed over the runs; with a window, per completed request. reuse: share of the re-arrivals (with a
    window, of those in it) that reused anything.
    """

    cost: FloatArray
    reuse: FloatArray


class _PlanFigures(NamedTuple):
    """Figures of each plan of a call. per: completed requests; without a window 1, so that cost is a plain sum."""

    device_ns: IntArray
    per: IntArray
    reused: IntArray
    rearrivals: IntArray

    def summed(self, plans_each: int, *, is_windowed: bool) -> Sampled:
        """Cost and reuse of every ``plans_each`` plans."""
        cost, per, reused, rearrivals = (values.reshape(-1, plans_each).sum(axis=1) for values in self)
        per = np.maximum(per, 1) if is_windowed else 1
        return Sampled(cost / per, np.where(rearrivals > 0, reused / np.maximum(rearrivals, 1), 1.0))


def interval(values: FloatArray, level: float) -> tuple[float, float]:
    """Prediction interval for one more exchangeable value of any distribution: between two order statistics."""
    tail = (1 - level) / 2
    low, high = np.quantile(values, [tail, 1 - tail], method="weibull")
    return float(low), float(high)


def sampled(
    space: SpaceSpec, pair: Sequence[ServerShape], users: Sequence[int], changed: Ablation = UNCHANGED
) -> list[Sampled]:
    """Simulated experiments of several configurations, which have the same plans and the same true costs."""
    model = load_cost_model(space.cost_model)
    question = _Question(space.model_dump_json(), repr(model), tuple(users), changed)
    return [_experiments(question, shape, role) for role, shape in enumerate(pair)]


class _Question(NamedTuple):
    """What the simulated experiments of a configuration depend on.

    model: content of the cost model, whose file may have been fitted again since.
    """

    space_json: str
    model: str
    users: tuple[int, ...]
    changed: Ablation


# Many predictions in a row have the same reference, which takes as long as the candidate.
@lru_cache(maxsize=4)
def _experiments(question: _Question, shape: ServerShape, role: int) -> Sampled:
    """One configuration's part of every simulated experiment; role: its place among those compared."""
    space, changed = SpaceSpec.model_validate_json(question.space_json), question.changed
    perturbation, num_draws = perturbation_of(space.prediction, space.cost_model), space.prediction.draws
    inputs_json = space.model_dump_json(include={"inputs", "prediction"})
    drawn = _drawn_plans(inputs_json, question.users, _treatment(space, changed))
    model, plans_each = load_cost_model(space.cost_model), len(drawn.plans) // num_draws
    config = EngineConfig.of_shape(shape, changed.rules or space.rules)
    truths = [perturbed(model, perturbation, number, artifact_key(config)) for number in range(num_draws)]
    draws = Draws(
        _pin(jitter(drawn, perturbation, role), space, changed),
        tuple(truth for truth in truths for _plan in range(plans_each)),
        noise_seeds(perturbation, len(drawn.plans), role),
        noise_table(perturbation.step_sd),
    )
    costs = draws.costs(config, chunked_prefill_calls=changed.chunked_prefill_calls)
    figures = _plan_figures(draws.arrays, config, costs, changed, space.window)
    return figures.summed(plans_each, is_windowed=space.window is not None)


@lru_cache(maxsize=8)
def _drawn_plans(inputs_json: str, users: tuple[int, ...], treatment: Treatment) -> layout.PlanArrays:
    """The plans of the draws, draw after draw: new plans for each draw, or the space's evaluation plans for all."""
    question = _DrawnInputs.model_validate_json(inputs_json)
    prediction, inputs = question.prediction, question.inputs
    if prediction.seed in (*inputs.search_seeds, *inputs.evaluation_seeds):
        raise SpecError(
            f"the seed {prediction.seed} is also one of the search or the evaluation",
            where="prediction.seed",
            hint="Choose another seed",
        )
    if prediction.plans == "given":
        # Once per draw, because each draw has its own jitter.
        return joined([input_arrays(_evaluation_inputs(inputs, users), treatment)] * prediction.draws)
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


def _evaluation_inputs(inputs: InputSpec, users: Sequence[int]) -> list[Input]:
    """The evaluation plans of a space, its search plans where it has none."""
    workloads = [inputs.workload_of(n) for n in users]
    seeds = inputs.evaluation_seeds or inputs.search_seeds
    return [Input(workload, seed, k) for workload in workloads for seed in seeds for k in range(inputs.replicates)]


class _DrawnInputs(Spec):
    """The part of a space that decides the plans of its draws."""

    inputs: InputSpec
    prediction: DrawsSpec


def _plan_figures(
    arrays: layout.PlanArrays,
    config: EngineConfig,
    costs: layout.CostArrays,
    changed: Ablation,
    window: WindowSpec | None,
) -> _PlanFigures:
    """Simulate every plan at its costs."""
    if window is None:
        outcome = run_batch(arrays, config, costs, changed)
        again = is_rearrival(arrays)
        is_reused = again & (outcome.requests["cached_tokens"] > 0)
        owner = np.repeat(range(len(arrays.plans)), arrays.plans["num_requests"])
        device_ns = outcome.totals["decode_ns"] + outcome.totals["prefill_ns"]
        return _PlanFigures(
            device_ns, np.ones_like(device_ns), np.bincount(owner, is_reused), np.bincount(owner, again)
        )
    check_slots(arrays, config)
    of_plans = [
        window_figures(arrays, plan, config, layout.costs_of_plan(costs, plan), window)
        for plan in range(len(arrays.plans))
    ]
    names = ("device_ns", "completed", "reused", "rearrivals")
    return _PlanFigures(*(np.array([getattr(figures, name) for figures in of_plans]) for name in names))


def _pin(arrays: layout.PlanArrays, space: SpaceSpec, changed: Ablation) -> layout.PlanArrays:
    """The plans with re-arrivals at the baseline's times, if that is the ablation."""
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
    plans = input_arrays(_evaluation_inputs(space.inputs, users), _treatment(space, changed))
    pinned = _pin(plans, space, changed)
    model = load_cost_model(space.cost_model)
    costs: list[FloatArray] = []
    for shape in pair:
        config = EngineConfig.of_shape(shape, changed.rules or space.rules)
        nominal = layout.cost_arrays(config, model, changed.chunked_prefill_calls)
        figures = _plan_figures(pinned, config, nominal, changed, space.window)
        costs.append(figures.summed(1, is_windowed=space.window is not None).cost)
    return costs[0], costs[1]
