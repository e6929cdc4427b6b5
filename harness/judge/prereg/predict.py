"""Predictions of planned runs by the simulator, before anything is measured: means over perturbed draws.

The same experiment, server and perturbation give the same prediction on every machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from harness.analysis.compare.drawn import DrawnCosts, DrawnFigures, DrawnRatio, Prediction, Predictions
from harness.analysis.stats import grouped
from harness.clock import NS_PER_S, Clock, MonotonicClock
from harness.compiled.records import IntArray
from harness.judge.planning.deciding import BreakEven, CostChange, break_even, deciding_sizes
from harness.judge.prereg.frozen import Preregistration
from harness.measure.records.run import SealedRun
from harness.model.engine import CostModel, EngineConfig
from harness.model.experiment import PlannedRun, PlannedRuns
from harness.model.sim.draws import draw, nominal, perturbation_of_run, simulator_of
from harness.model.sim.kernel.arrays import PlanArrays, SimOutcome
from harness.model.sim.plans import is_rearrival, plan_arrays
from harness.model.spec import ExperimentSpec, RulesName

MOST_DRAWS, MOST_NS = 4_000, 20 * NS_PER_S
"""Most draws of a run, and most time, to make the error of a prediction small."""
FROZEN_DRAWS = 200
"""Draws of a frozen prediction, unless the experiment sets their number: a 90 % interval over 20 of them holds .76 to
.98 of the outcomes in 19 of 20 cases, one over 200 .86 to .93."""
BREAK_EVEN_DRAWS, PAGED_BREAK_EVEN_DRAWS = 100, 4
"""Most draws of a break-even, which are simulated again for each change that is tried; paged memory is slower."""
# Limit of requests, over all draws, of a simulator call: it bounds the memory for a long trace.
MOST_REQUESTS = 500_000


def predict_run(
    run: PlannedRun | SealedRun,
    rules: RulesName | None = None,
    num_draws: int | None = None,
    cost_model: CostModel | None = None,
) -> Prediction:
    """The prediction of one run, planned or sealed: the mean of its draws.

    rules: KV rules to predict with; default: the rules of its server. num_draws: default: what its experiment sets. A
    single draw is the nominal simulation. The draws of each run have their own jitter, and draw k is the same however
    many there are. cost_model: default: that of its server. Replicas behind a router that is modelled are simulated
    together, and their figures are sums.
    """
    server = run.simulated_server if isinstance(run, SealedRun) else run.server
    if rules is not None:
        server = server.model_copy(update={"rules": rules})
    config, cost_model = EngineConfig.from_server(server.replica), cost_model or run.cost_model
    simulate = simulator_of(server)
    num_draws = run.spec.prediction.draws if num_draws is None else num_draws
    arrays = plan_arrays([run.plan])
    interpolated = cost_model.unmeasured_of(config)
    if num_draws == 1:
        figures = _figures(arrays, config, simulate(nominal(arrays, cost_model), config))
        return Prediction.model_validate(
            {name: int(values[0]) for name, values in figures.items()} | {"interpolated_buckets": interpolated}
        )
    perturbation = perturbation_of_run(run.spec, run.cost_file, run.plan, run.label)
    at_once = max(MOST_REQUESTS // run.plan.num_requests, 1)
    parts = [
        _figures(arrays, config, simulate(draw(arrays, config, cost_model, perturbation, numbers), config))
        for numbers in (range(first, min(first + at_once, num_draws)) for first in range(0, num_draws, at_once))
    ]
    figures = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    means = {name: round(float(values.mean())) for name, values in figures.items()}
    return Prediction.model_validate(
        means
        | {
            "device_ns": means["decode_ns"] + means["prefill_ns"],
            "interpolated_buckets": interpolated,
            "draws": {name: figures[name].tolist() for name in DrawnFigures.model_fields},
            "level": perturbation.level,
        }
    )


def _figures(arrays: PlanArrays, config: EngineConfig, outcome: SimOutcome) -> dict[str, IntArray]:
    """Figures of a prediction for each of several simulations of one plan, by name."""
    totals = outcome.totals
    number = np.arange(config.max_num_seqs + 1)
    buckets = np.array([0, *(config.bucket_of(num_seqs) for num_seqs in number[1:])])
    is_again = is_rearrival(arrays)
    is_reused = outcome.requests["cached_tokens"].reshape(len(totals), -1)[:, is_again] > 0
    same = {
        "waiting_session_ns": "wait_ns",
        "num_decode_steps": "decode_steps",
        "num_evictions": "evictions",
        **{name: name for name in ("decode_ns", "prefill_ns", "end_ns", "cached_tokens", "computed_tokens")},
    }
    return {
        "device_ns": outcome.device_ns,
        "padded_slots": outcome.histogram @ (buckets - number),
        "bucket_slots": outcome.histogram @ buckets,
        "num_rearrivals": np.full(len(totals), is_again.sum()),
        "num_reused": is_reused.sum(axis=1),
        **{name: totals[field] for name, field in same.items()},
    }


def predict_experiment(
    planned: PlannedRuns,
    rules: RulesName | None = None,
    on_progress: Callable[[float], None] = lambda _share: None,
    num_draws: int | None = None,
) -> dict[str, dict[int, Prediction]]:
    """Predictions of every planned run of an experiment, by condition and replicate.

    on_progress: receives the share of runs that are predicted. num_draws: default: what the experiment sets.
    """
    predictions: dict[str, dict[int, Prediction]] = {name: {} for name in planned.by_condition}
    runs = [(name, run) for name, of_condition in planned.by_condition.items() for run in of_condition]
    for count, (name, run) in enumerate(runs, 1):
        predictions[name][run.replicate] = predict_run(run, rules, num_draws)
        on_progress(count / len(runs))
    return predictions


def predict_until_sure(
    planned: PlannedRuns,
    margin: float,
    on_progress: Callable[[float], None] = lambda _share: None,
    clock: Clock | None = None,
    on_more: Callable[[int, float], None] = lambda _draws, _seconds: None,
) -> dict[str, dict[int, Prediction]]:
    """Predictions with as many draws as make the Monte Carlo error of every ratio small enough.

    on_more: receives the number of draws that are made next, and how many seconds they will take.

    At least the draws that the experiment sets; at most MOST_DRAWS, and those for which MOST_NS are enough. Small
    enough: a tenth of the effect, or of the margin where that is larger. A single draw stays a nominal simulation.
    """
    clock = clock or MonotonicClock()
    num_draws, began_ns = planned.spec.prediction.draws, clock.now_ns()
    predictions = predict_experiment(planned, on_progress=on_progress)
    while num_draws > 1:
        each_ns = max((clock.now_ns() - began_ns) / num_draws, 1)
        needed = max((ratio.draws_needed(margin) for _, ratio in drawn_ratios(planned.spec, predictions)), default=0)
        more = min(needed, max(MOST_DRAWS, num_draws), int(MOST_NS / each_ns))
        if more <= num_draws:
            break
        on_more(more, more * each_ns / NS_PER_S)
        num_draws, began_ns = more, clock.now_ns()
        predictions = predict_experiment(planned, on_progress=on_progress, num_draws=num_draws)
    return predictions


def drawn_ratios(spec: ExperimentSpec, predictions: Predictions) -> Iterator[tuple[str, DrawnRatio]]:
    """Each condition with its predicted ratio to its baseline and its Monte Carlo error, where draws were made."""
    for condition in spec.condition:
        if (baseline := spec.baseline_of(condition)) != condition.name:
            own, base = (DrawnCosts.of(list(predictions[name].values())) for name in (condition.name, baseline))
            if (ratio := own.ratio_to(base)) is not None:
                yield condition.name, ratio


def planned_break_even(own: Sequence[PlannedRun], base: Sequence[PlannedRun], num_draws: int) -> BreakEven | None:
    """The break-even of a predicted ratio, by the draws that predict these runs; at most BREAK_EVEN_DRAWS of them.

    own, base: the runs of a condition and of its baseline; of paged memory or of replicas at most
    PAGED_BREAK_EVEN_DRAWS. None where both have the same server, so that no cost of a configuration decides.
    """
    configs = [EngineConfig.from_server(runs[0].server.replica) for runs in (own, base)]
    if configs[0] == configs[1]:
        return None
    sizes = deciding_sizes(*(config.decode_buckets for config in configs))
    is_slow = any(runs[0].server.is_paged or runs[0].server.is_routed for runs in (own, base))
    draws = min(num_draws, PAGED_BREAK_EVEN_DRAWS if is_slow else BREAK_EVEN_DRAWS)

    def ratio_at(change: float) -> float:
        costs = CostChange(sizes, change)
        own_ns, base_ns = (
            sum(predict_run(run, num_draws=draws, cost_model=costs.of(run.cost_model)).device_ns for run in runs)
            for runs in (own, base)
        )
        return own_ns / base_ns

    return BreakEven(sizes, break_even(ratio_at), draws if is_slow and draws < num_draws else 0)


def predict_runs(runs: Sequence[SealedRun], rules: RulesName | None = None) -> Predictions:
    """Predictions of sealed runs, from their plans; each is made when it is first read."""
    return {name: _PredictedRuns(group, rules) for name, group in grouped(runs, lambda run: run.condition).items()}


class _PredictedRuns(Mapping[int, Prediction]):
    """Predictions of the runs of a condition, each made when it is first read: most analyses use few of them."""

    def __init__(self, runs: Sequence[SealedRun], rules: RulesName | None) -> None:
        self._runs, self._rules = {run.replicate: run for run in runs}, rules
        self._predicted: dict[int, Prediction] = {}

    def __getitem__(self, replicate: int) -> Prediction:
        if replicate not in self._predicted:
            self._predicted[replicate] = predict_run(self._runs[replicate], self._rules)
        return self._predicted[replicate]

    def __iter__(self) -> Iterator[int]:
        return iter(self._runs)

    def __len__(self) -> int:
        return len(self._runs)


def predictions_for(runs: Sequence[SealedRun], frozen: Preregistration | None) -> Predictions:
    """The frozen predictions of an experiment; without a freeze, predictions of its valid runs."""
    return predict_runs([run for run in runs if run.is_valid]) if frozen is None else frozen.predictions
