"""Intervals for predicted cost ratios: drawn plans, arrival order, the client's jitter and uncertain costs.

Both configurations of a pair have the same plans and the same true costs, and each has its own jitter, as two runs do.
The draws never use a seed of the search or of the evaluation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np

from harness.analysis.stats import FloatArray
from harness.errors import SpecError, unknown_name
from harness.extras.search.space import SpaceSpec
from harness.extras.search.windows import window_figures
from harness.judge.planning.deciding import (
    NO_CHANGE,
    BreakEven,
    CostChange,
    break_even,
    deciding_sizes,
    unmeasured_in_words,
)
from harness.model.engine.config import EngineConfig
from harness.model.engine.cost import CostModel, load_cost_model
from harness.model.sim.draws import Draws, artifact_key, jittered_draw, nominal, perturbation_of, perturbed
from harness.model.sim.kernel import arrays as layout
from harness.model.sim.plans import Input, input_arrays, joined
from harness.model.sim.simulate import run_batch
from harness.model.spec import ServerShape, Treatment

LABEL = "computed, not measured"
"""Of figures under an ablation: no released server behaves so, and none is compared with a measurement."""


@dataclass(frozen=True)
class Ablation:
    """One changed rule.

    rules: other KV rules. treatment: other waits. is_fixed_arrivals: re-arrivals come when they came in the baseline
    configuration, but not before their session's completion (Table XI). is_lru_slots: KV slots are evicted by last
    use (filled, read by a look-up, or finished) instead of by allocation.
    """

    name: str
    meaning: str
    rules: str = ""
    treatment: Treatment = "as-drawn"
    is_fixed_arrivals: bool = False
    is_lru_slots: bool = False


UNCHANGED = Ablation("", "")


ABLATIONS = {
    ablation.name: ablation
    for ablation in (
        Ablation("fixed-arrivals", "re-arrivals come when they came under the baseline", is_fixed_arrivals=True),
        Ablation("paper+dummy", "the paper's rules with its dummy slot", rules="paper+dummy"),
        Ablation("equal-waits", "every wait is the mean of its plan", treatment="equal-waits"),
        Ablation("no-waits", "nobody waits for a tool", treatment="no-waits"),
        Ablation("lru-slots", "KV slots are evicted by last use", is_lru_slots=True),
    )
}


def ablation(name: str) -> Ablation:
    """A shipped ablation; raises SpecError listing the names."""
    if name not in ABLATIONS:
        raise unknown_name("ablation", name, ABLATIONS)
    return ABLATIONS[name]


def with_arrivals_of(plans: layout.PlanArrays, baseline: EngineConfig, model: CostModel) -> layout.PlanArrays:
    """The plans with each request at the instant at which it arrives under the baseline without an ablation."""
    outcome = run_batch(plans, baseline, model)
    return layout.with_column(plans, "pinned_ns", np.ascontiguousarray(outcome.requests["arrival_ns"]))


@dataclass(frozen=True)
class PredictedRatio:
    """A predicted cost ratio, candidate over reference.

    ratio_of_sums, median_of_pairs: at nominal costs and without jitter, on the space's evaluation plans (its search
    plans when it has none). mean, low, high: mean and ``level`` interval of the ratio of sums in an experiment of
    ``replicates`` runs per condition, see DrawsSpec. error: half width of the 95 % Monte Carlo interval of ``mean``.
    """

    rules: str
    ratio_of_sums: float
    median_of_pairs: float
    mean: float
    low: float
    high: float
    level: float
    error: float = math.nan

    @property
    def shows_difference(self) -> bool:
        """Whether the interval excludes 1."""
        return not self.low <= 1.0 <= self.high


def interval(values: FloatArray, level: float) -> tuple[float, float]:
    """PredictedRatio interval for one more exchangeable value of any distribution: between two order statistics."""
    tail = (1 - level) / 2
    low, high = np.quantile(values, [tail, 1 - tail], method="weibull")
    return float(low), float(high)


class SpacePredictor:
    """Predictions in a space; what several of them have in common is drawn and simulated once."""

    def __init__(self, space: SpaceSpec) -> None:
        self.space = space
        self._model = load_cost_model(space.cost_model)
        self._drawn_plans = lru_cache(maxsize=8)(self._draw_plans)
        # Many predictions in a row have the same reference, which takes as long as the candidate.
        self._experiments = lru_cache(maxsize=4)(self._simulate_experiments)

    def predict(
        self,
        candidate: ServerShape,
        users: int | Sequence[int],
        changed: Ablation = UNCHANGED,
        reference: ServerShape | None = None,
    ) -> PredictedRatio:
        """The cost ratio to a reference (default: the space's baseline), for one N or summed over several.

        changed: an ablation of both; computed, not measured. Raises SpecError when the seed of the draws is also a seed
        of the search or the evaluation, PlanError when a request does not fit.
        """
        space = self.space
        if space.is_paged:
            raise SpecError(
                f"intervals are not predicted under the rules {space.rules!r}",
                where=space.name,
                hint="Run the configurations as conditions of an experiment with replicates",
            )
        chosen = (users,) if isinstance(users, int) else tuple(users)
        base = space.baseline.shape if reference is None else reference
        costs, base_costs = self._nominal((candidate, base), chosen, changed)
        ratios = self._ratios((candidate, base), chosen, changed)
        error = NormalDist().inv_cdf(0.975) * float(ratios.std(ddof=1)) / math.sqrt(len(ratios))
        return PredictedRatio(
            changed.rules or space.rules,
            float(costs.sum() / base_costs.sum()),
            float(np.median(costs / base_costs)),
            float(np.mean(ratios)),
            *interval(ratios, space.prediction.level),
            space.prediction.level,
            error,
        )

    def break_even(self, candidate: ServerShape, users: Sequence[int]) -> BreakEven:
        """The change of the deciding costs at which the mean of the same draws against the baseline is 1."""
        pair = (candidate, self.space.baseline.shape)
        sizes = deciding_sizes(*(shape.decode_buckets for shape in pair))

        def mean_at(change: float) -> float:
            return float(np.mean(self._ratios(pair, users, UNCHANGED, CostChange(sizes, change))))

        return BreakEven(sizes, break_even(mean_at))

    def unmeasured(self, *shapes: ServerShape) -> str:
        """Which sizes of these configurations have no measured cost, in words; "" where all have."""
        return unmeasured_in_words(self._model, [size for shape in shapes for size in shape.decode_buckets])

    def _ratios(
        self,
        pair: tuple[ServerShape, ServerShape],
        users: Sequence[int],
        changed: Ablation,
        costs: CostChange = NO_CHANGE,
    ) -> FloatArray:
        """The cost ratio of each simulated experiment."""
        own, base = self.sampled(pair, users, changed, costs)
        return own / base

    def sampled(
        self,
        pair: Sequence[ServerShape],
        users: Sequence[int],
        changed: Ablation = UNCHANGED,
        costs: CostChange = NO_CHANGE,
    ) -> list[FloatArray]:
        """Costs of several configurations in simulated experiments of the same plans and the same true costs."""
        return [
            self._experiments(shape, role, tuple(users), changed, costs.seen_by(shape.decode_buckets))
            for role, shape in enumerate(pair)
        ]

    def _simulate_experiments(
        self, shape: ServerShape, role: int, users: tuple[int, ...], changed: Ablation, costs_change: CostChange
    ) -> FloatArray:
        """One configuration's costs in every simulated experiment; role: its place among those compared."""
        space = self.space
        perturbation, num_draws = perturbation_of(space.prediction, space.cost_model), space.prediction.draws
        drawn = self._drawn_plans(users, self._treatment(changed))
        plans_each = len(drawn.plans) // num_draws
        config = EngineConfig.of_shape(shape, changed.rules or space.rules)
        model = costs_change.of(self._model)
        truths = [perturbed(model, perturbation, number, artifact_key(config)) for number in range(num_draws)]
        draws = jittered_draw(drawn, [truth for truth in truths for _plan in range(plans_each)], perturbation, role)
        return self._simulate(draws, config, changed, plans_each=plans_each)

    def _draw_plans(self, users: tuple[int, ...], treatment: Treatment) -> layout.PlanArrays:
        """The plans of the draws, draw after draw: new plans for each draw, or the space's evaluation plans for all."""
        prediction, inputs = self.space.prediction, self.space.inputs
        if prediction.seed in (*inputs.search_seeds, *inputs.evaluation_seeds):
            raise SpecError(
                f"the seed {prediction.seed} is also one of the search or the evaluation",
                where="prediction.seed",
                hint="Choose another seed",
            )
        if prediction.plans == "given":
            # Once per draw, because each draw has its own jitter.
            return joined([self._evaluation_plans(users, treatment)] * prediction.draws)
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

    def _evaluation_plans(self, users: Sequence[int], treatment: Treatment) -> layout.PlanArrays:
        """The evaluation plans of the space, its search plans where it has none."""
        inputs = self.space.inputs
        workloads = [inputs.workload_of(n) for n in users]
        seeds = inputs.evaluation_seeds or inputs.search_seeds
        replicates = range(inputs.replicates)
        return input_arrays(
            [Input(each, seed, k) for each in workloads for seed in seeds for k in replicates], treatment
        )

    def _nominal(self, pair: Sequence[ServerShape], users: Sequence[int], changed: Ablation) -> list[FloatArray]:
        """Cost of each evaluation plan for each of a pair, at nominal costs and without jitter."""
        space, costs = self.space, list[FloatArray]()
        plans = self._evaluation_plans(users, self._treatment(changed))
        for shape in pair:
            config = EngineConfig.of_shape(shape, changed.rules or space.rules)
            costs.append(self._simulate(nominal(plans, self._model), config, changed, plans_each=1))
        return costs

    def _pinned(self, arrays: layout.PlanArrays, changed: Ablation) -> layout.PlanArrays:
        """The plans with re-arrivals at the baseline's times, if that is the ablation."""
        if not changed.is_fixed_arrivals:
            return arrays
        baseline = EngineConfig.of_shape(self.space.baseline.shape, changed.rules or self.space.rules)
        return with_arrivals_of(arrays, baseline, self._model)

    def _treatment(self, changed: Ablation) -> Treatment:
        return self.space.inputs.treatment if changed.treatment == "as-drawn" else changed.treatment

    def _simulate(self, draws: Draws, config: EngineConfig, changed: Ablation, *, plans_each: int) -> FloatArray:
        """Device ns, summed over every ``plans_each`` plans; with a window, per request that completed in it."""
        draws, window = draws._replace(arrays=self._pinned(draws.arrays, changed)), self.space.window
        if window is None:
            outcome = run_batch(
                draws.arrays,
                config,
                draws.models,
                draws.noise_seeds,
                draws.noise,
                evicts_by_last_use=changed.is_lru_slots,
            )
            return outcome.device_ns.reshape(-1, plans_each).sum(axis=1).astype(np.float64)
        of_plans = [window_figures(draws.alone(plan), config, window, plan) for plan in range(len(draws.arrays.plans))]
        sums = np.array([(each.device_ns, each.completed) for each in of_plans]).reshape(-1, plans_each, 2).sum(axis=1)
        return sums[:, 0] / np.maximum(sums[:, 1], 1)
