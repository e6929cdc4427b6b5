"""Checks predicted intervals: how often they contain the outcomes of emulated experiments; that should be their level.

The emulator's core runs on a virtual clock with plans, jitter and true costs that the interval never used. This checks
how the interval is computed, not how well the model describes a real server: ``python -m benchmarks.prediction``.
``python -m benchmarks prediction`` counts the same for what `simulate` and `freeze` predict of one experiment.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
import typer

from benchmarks.figure import Figure
from harness.analysis.stats import FloatArray, binomial_cdf, prediction_interval
from harness.clock import NS_PER_MS
from harness.errors import HarnessError, SpecError
from harness.extras.search.intervals import SpacePredictor, interval
from harness.extras.search.space import SpaceSpec, load_space
from harness.judge.prereg.predict import FROZEN_DRAWS, predict_experiment
from harness.model.engine import CostModel, EngineConfig, load_cost_model
from harness.model.experiment import PlannedRuns, build_plan, resolve
from harness.model.plan.build import derive_seed
from harness.model.plan.event_queue import UserTimelines, users_of
from harness.model.plan.model import Plan
from harness.model.sim.draws import ORDER_NS, Perturbation, artifact_key, perturbation_of, perturbed
from harness.model.sim.plans import plan_arrays
from harness.model.spec import ServerShape, ServerSpec, load_experiment
from harness.stacks.rbln.rules.kv_rules import NEWEST_STABLE, rule_set
from tests.support.virtual_emulator import run_virtually

SEED_RANGE = 2**31
EXPERIMENTS = 400


@dataclass(frozen=True)
class Coverage:
    """How many cost ratios of emulated experiments predicted intervals hold.

    new: one interval for any new inputs; None in a window. given: an interval for the plans of each experiment.
    """

    name: str
    users: int
    level: float
    ratios: tuple[float, ...]
    new: int | None
    given: int

    def lines(self) -> Iterator[str]:
        """The counts as lines of text."""
        trials = len(self.ratios)
        how = "on the emulator's core in virtual time; inputs, jitter, noise of steps and true costs drawn anew"
        yield f"{self.name}, N={self.users}: {trials} experiments {how}"
        for inputs, held in (("the given inputs", self.given), ("new inputs", self.new)):
            if held is not None:
                ratios = f"cost ratio ({min(self.ratios):.4f} to {max(self.ratios):.4f})"
                yield f"  intervals for {inputs}, {ratios}: hold {held} of {trials} ({held / trials:.0%})"
        low, high = expected_range(trials, self.level)
        yield f"  a true {self.level:.0%} interval would hold {low} to {high} of them in 95 of 100 such checks"


def check_coverage(
    space: SpaceSpec,
    trials: int,
    *,
    users: int | None = None,
    name: str = "",
) -> Coverage:
    """Emulate ``trials`` experiments of a named configuration of the space beside its baseline.

    users: default, the first N. name: default, the first named configuration.
    Raises SpecError when the space names no configuration, or the emulator does not run its rules.
    """
    if not space.named:
        raise SpecError("the space names no configuration", where="coverage", hint="Add a [named.<name>] table")
    if not rule_set(space.rules).has_inner_blocks:
        raise SpecError(
            f"the emulator does not run the rules {space.rules!r}",
            where="coverage",
            hint=f"Say --set rules={NEWEST_STABLE}",
        )
    chosen = name or next(iter(space.named))
    count = space.inputs.users[0] if users is None else users
    candidate = space.named[chosen].shape
    new = None if space.window is not None else predicted(space, candidate, count)
    ratios: list[float] = []
    given: list[FloatArray] = []
    for trial in range(trials):
        seed = derive_seed(space.prediction.seed, f"coverage/{count}/{trial}") % SEED_RANGE
        ratios.append(emulated(space, candidate, count, seed))
        given.append(predicted(_given(space, seed), candidate, count))
    level = space.prediction.level
    anew = None if new is None else _held([new] * trials, ratios, level)
    return Coverage(chosen, count, level, tuple(ratios), anew, _held(given, ratios, level))


def predicted(space: SpaceSpec, candidate: ServerShape, users: int) -> FloatArray:
    """Draws of the cost ratio of one experiment."""
    own, base = SpacePredictor(space).sampled((candidate, space.baseline.shape), (users,))
    return own / base


def _held(drawn: Sequence[FloatArray], ratios: Sequence[float], level: float) -> int:
    ends = [interval(draws, level) for draws in drawn]
    return sum(low <= ratio <= high for (low, high), ratio in zip(ends, ratios, strict=True))


def emulated(space: SpaceSpec, candidate: ServerShape, users: int, seed: int) -> float:
    """The cost ratio of one emulated experiment: plans, jitters, noise of steps and true costs drawn from ``seed``."""
    perturbation = perturbation_of(space.prediction, space.cost_model)
    truth = replace(perturbation, seed=seed)
    model, workload = load_cost_model(space.cost_model), space.inputs.workload_of(users)
    # By role, candidate and baseline.
    runs: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])
    for replicate in range(space.prediction.replicates):
        plan = build_plan(workload, seed, replicate)
        if space.inputs.treatment != "as-drawn":
            plan = plan.with_treatment(space.inputs.treatment)
        for role, each in enumerate((candidate, space.baseline.shape)):
            generator = np.random.default_rng([seed, replicate, role])
            late = jittered_plan(plan, perturbation, generator)
            costs = perturbed(model, truth, 0, artifact_key(EngineConfig.of_shape(each, space.rules)))
            runs[role].append(figures(late, each, space, costs, lasting(perturbation.step_sd, generator)))
    own, base = (device_ns / max(completed, 1) for device_ns, completed in (np.sum(role, axis=0) for role in runs))
    return own / base


def lasting(step_sd: float, generator: np.random.Generator) -> Callable[[int], int]:
    """Durations of steps that deviate normally and independently."""
    return lambda step_ns: max(1, round(step_ns * (1 + step_sd * float(generator.standard_normal()))))


def figures(
    plan: Plan,
    candidate: ServerShape,
    space: SpaceSpec,
    costs: CostModel,
    lasting_ns: Callable[[int], int] = lambda step_ns: step_ns,
) -> tuple[int, int]:
    """Device ns and completed requests of an emulated run, or of the space's window in it."""
    server = ServerSpec(**candidate._asdict(), rules=space.rules)
    ends = [end for end in run_virtually(plan, server, costs, lasting_ns) if end.requests]
    done = [(int(request.engine_id.split("-")[0]), end.start.end_ns) for end in ends for request in end.finished]
    if (window := space.window) is None:
        return sum(end.start.step.duration_ns for end in ends), len(done)
    session, completed_ns = np.array(done).T
    timelines = UserTimelines.of(users_of(plan_arrays([plan]).sessions["after"])[session], completed_ns)
    start_ns, end_ns = window.bounds_ns(0, timelines.window_start(window.after_requests))
    if window.measure_s is None:
        end_ns = timelines.last_full_ns()
    inside = (min(end.start.end_ns, end_ns) - max(end.start.start_ns, start_ns) for end in ends)
    return sum(max(0, each) for each in inside), int(np.sum((start_ns <= completed_ns) & (completed_ns < end_ns)))


def jittered_plan(plan: Plan, perturbation: Perturbation, generator: np.random.Generator) -> Plan:
    """The plan as a client with random delays plays it."""

    def late(mean_ms: float) -> int:
        return int(generator.exponential(mean_ms * NS_PER_MS)) if mean_ms else 0

    sessions = tuple(
        replace(
            session,
            start_offset_ns=session.start_offset_ns + int(generator.integers(ORDER_NS)) + late(perturbation.start_ms),
            requests=tuple(
                replace(request, wait_after_ns=request.wait_after_ns + late(perturbation.lag_ms))
                for request in session.requests
            ),
        )
        for session in plan.sessions
    )
    return replace(plan, sessions=sessions)


def expected_range(trials: int, level: float) -> tuple[int, int]:
    """Smallest central range of counts that a Binomial(trials, level) falls into with 95 %."""
    below = [binomial_cdf(most, trials, level) for most in range(trials + 1)]
    return int(np.searchsorted(below, 0.025)), int(np.searchsorted(below, 0.975))


def _given(space: SpaceSpec, seed: int) -> SpaceSpec:
    """The space with the plans of one experiment."""
    inputs = space.inputs.model_copy(update={"evaluation_seeds": (seed,), "replicates": space.prediction.replicates})
    return space.model_copy(
        update={"inputs": inputs, "prediction": space.prediction.model_copy(update={"plans": "given"})}
    )


def bench_prediction(num_experiments: int = EXPERIMENTS) -> Iterator[Figure]:
    """How often the predicted intervals of `demo` hold the outcome of one more simulated experiment, on new plans."""
    spec = load_experiment("demo").model_copy(update={"backend": "sim"})
    planned = [resolve(spec.model_copy(update={"base_seed": seed})) for seed in range(num_experiments)]
    outcomes = [dict(_drawn(_as_another(each), 2)) for each in planned]
    drawn = [dict(_drawn(each, FROZEN_DRAWS)) for each in planned]
    for num_draws in (spec.prediction.draws, FROZEN_DRAWS):
        for name in drawn[0]:
            # The first draws are those of a prediction that makes no more.
            ends = [prediction_interval(ratios[name][:num_draws], spec.prediction.level) for ratios in drawn]
            held = [
                each is not None and each.contains(float(one[name][0]))
                for each, one in zip(ends, outcomes, strict=True)
            ]
            yield Figure(
                f"{name}: {spec.prediction.level:.0%} interval of {num_draws} draws holds",
                f"{np.mean(held):.3f}",
                ".87 to .93",
                f"{num_experiments:,} experiments",
            )


def _as_another(planned: PlannedRuns) -> PlannedRuns:
    """The same plans, with jitter, noise and true costs that no prediction has seen."""
    other = planned.spec.prediction.model_copy(update={"seed": planned.spec.prediction.seed + 1})
    return resolve(planned.spec.model_copy(update={"prediction": other}))


def _drawn(planned: PlannedRuns, num_draws: int) -> Iterator[tuple[str, FloatArray]]:
    """Each condition with its cost ratio in each draw, over all replicates."""
    sums = {
        name: np.sum([run.draws.device_ns for run in runs.values() if run.draws is not None], axis=0)
        for name, runs in predict_experiment(planned, num_draws=num_draws).items()
    }
    for condition in planned.spec.condition:
        if (baseline := planned.spec.baseline_of(condition)) != condition.name:
            yield condition.name, sums[condition.name] / sums[baseline]


def main(
    space: Annotated[str, typer.Argument(help="A search space by its name or file.")] = "paper",
    trials: Annotated[int, typer.Option(help="Emulated experiments on the virtual clock.")] = 100,
    changes: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change the space.")] = None,
) -> None:
    """Check that 90 % intervals contain 90 % of emulated outcomes, for every N, of the cost ratio.

    Example: `python -m benchmarks.prediction paper --trials 100 --set rules=vendor-0.11.1`
    """
    spec = load_space(space, changes or ())
    if not rule_set(spec.rules).has_inner_blocks and not any(change.startswith("rules=") for change in changes or []):
        print(f"rules: {NEWEST_STABLE}, since the emulator does not run those of the space ({spec.rules})")
        spec = spec.model_copy(update={"rules": NEWEST_STABLE})
    for users in spec.inputs.users:
        for line in check_coverage(spec, trials, users=users).lines():
            print(line, flush=True)


if __name__ == "__main__":
    try:
        typer.run(main)
    except HarnessError as error:
        sys.stderr.write(f"benchmarks.prediction: {error}\n")
        sys.exit(int(error.exit_code))
