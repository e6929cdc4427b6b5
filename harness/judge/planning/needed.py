"""How many blocks an experiment needs, from spreads measured on sealed runs or simulated.

Every spread states whether it was measured, simulated or assumed. Nothing is run. Definitions:
docs/reference/method-planning.md,
"Power".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from harness.analysis.compare.stopping import bonferroni, compared_blocks
from harness.analysis.cost.devices import DeviceEffect
from harness.analysis.stats import FloatArray, log_mean_values, t_quantile
from harness.clock import NS_PER_S
from harness.errors import SpecError
from harness.judge.planning.power import (
    LEAST_SD,
    MOST_BLOCKS,
    PlannedTest,
    blocks_for_precision,
    blocks_until_decided,
    variance_components,
)
from harness.kinds import kind_named
from harness.measure.records.run import SealedRun
from harness.model.engine.config import EngineConfig
from harness.model.experiment import PlannedRun, resolve
from harness.model.sim.draws import draw, perturbation_of, simulator_of
from harness.model.sim.plans import plan_arrays
from harness.model.spec import ExperimentSpec, StopSpec
from harness.model.spec.rules import SuperiorityRule

RESTARTS = 4
MIN_BLOCKS = 3
# The runs of both conditions share the uncertainty of the device's costs; a restart changes only client and host.
SHARED = {"decode_sd": 0.0, "bucket_sd": 0.0, "prefill_sd": 0.0, "artifact_sd": 0.0, "draws_errors": False}
FIRST_BUDGET = 60


@dataclass(frozen=True, slots=True)
class Goal:
    """What is wanted. precision: half width of a t interval, as a share of the cost.

    alpha: over all comparisons that are judged together. rule: the superiority rule that will decide each by its own
    alpha, which then proposes the number of blocks.
    """

    margin: float = 0.02
    alpha: float = 0.05
    power: float = 0.9
    precision: float = 0.01
    rule: SuperiorityRule | None = None

    @property
    def log_margin(self) -> float:
        return math.log1p(self.margin)


@dataclass(frozen=True, slots=True)
class Components:
    """Where one comparison's log ratio scatters. plan, restart, device: None where they cannot be separated.

    mean: ln of the ratio of sums; sd: of one block on whichever device; device: between devices, beyond that of their
    own blocks, ``within`` them. restarts: of each plan.
    is_observed: from sealed runs, so that the mean is no prediction.
    """

    condition: str
    baseline: str
    mean: float
    sd: float
    plan: float | None
    restart: float | None
    num_blocks: int
    device: float | None = None
    within: float = 0.0
    num_devices: int = 1
    restarts: int = 1
    is_observed: bool = False

    @property
    def error(self) -> float:
        """Half width of the 95 % interval of ``mean`` over the plan draws; restarts of a plan are averaged."""
        restart = 0.0 if self.restart is None else self.restart
        within = restart / math.sqrt(self.restarts)
        between = self.sd if self.plan is None else self.plan
        return t_quantile(0.95, self.num_blocks - 1) * math.hypot(between, within) / math.sqrt(self.num_blocks)


@dataclass(frozen=True, slots=True)
class Needed:
    """Blocks that one comparison needs for each aim; None: more than an experiment can have.

    as_predicted: until any verdict, should the true ratio be the one that
    was found. proposed: for both verdicts at the margin; as_predicted where a predicted ratio lies beyond twice the
    margin, as it is not in doubt there. proposed_power: of the verdict that needs most, with the proposed blocks.
    looked_50, looked_90: within which half, and nine of ten, sequential experiments end in the worse of these cases.
    superiority: to be shown cheaper by the goal's rule, should the true log ratio be ``planned_effect``.
    """

    components: Components
    precision: int | None
    equivalence: int | None
    difference: int | None
    as_predicted: int | None
    proposed: int | None
    looked_50: int | None
    looked_90: int | None
    superiority: int | None
    planned_effect: float
    proposed_power: float
    plan: PlannedTest
    num_together: int

    @property
    def at_margin(self) -> float:
        """A true log ratio as large as the margin, on the side that was found."""
        return math.copysign(self.plan.log_margin, self.components.mean)

    def at_least(self, num_plans: int) -> Needed:
        """With so many plans proposed at least, where a number is proposed."""
        if self.proposed is None or self.proposed >= num_plans:
            return self
        looked = (None if each is None else max(each, num_plans) for each in (self.looked_50, self.looked_90))
        half, most = looked
        return replace(self, proposed=num_plans, looked_50=half, looked_90=most)


def measured_components(spec: ExperimentSpec, sealed: Sequence[SealedRun]) -> list[Components]:
    """Spreads over the sealed blocks of an experiment; SpecError below MIN_BLOCKS."""
    channel = "a" if spec.stop is None else spec.stop.channel
    components = [
        replace(
            _on_devices(_components(one.condition, one.baseline, np.array(one.values)[:, None], spec), one.devices),
            is_observed=True,
        )
        for one in compared_blocks(spec, sealed, channel)
        if len(one.values) >= MIN_BLOCKS
    ]
    if not components:
        raise SpecError(
            f"no comparison has {MIN_BLOCKS} valid blocks, from which to estimate a spread",
            where=sealed[0].experiment,
            hint="Run more blocks, or plan from the simulator: --simulate",
        )
    return components


def simulated_components(spec: ExperimentSpec, num_blocks: int) -> tuple[list[Components], float]:
    """Spreads over fresh plan draws and restarts with the client's jitter; and wall seconds of a block's replays."""
    pairs, block_s = simulated_pairs(spec, num_blocks, RESTARTS)
    return [_components(*names, log_ratio_values(own, base), spec) for names, (own, base) in pairs.items()], block_s


def log_ratio_values(costs: FloatArray, baseline_costs: FloatArray) -> FloatArray:
    """One value a block, as in decisions: their mean is ln of the ratio of sums, their spread gives its error."""
    values = log_mean_values(costs.ravel().tolist()) - log_mean_values(baseline_costs.ravel().tolist())
    return values.reshape(costs.shape)


def simulated_pairs(
    spec: ExperimentSpec, num_blocks: int, restarts: int
) -> tuple[dict[tuple[str, str], tuple[FloatArray, FloatArray]], float]:
    """Device times of (condition, baseline) on the same plan draws, each of shape (blocks, restarts), in model ns.

    And the wall seconds of the replays of a block, predicted.
    """
    planned = resolve(spec.model_copy(update={"replicates": num_blocks})).by_condition
    costs_ns = {name: _costs_ns(runs, restarts) for name, runs in planned.items()}
    pairs = [(one.name, spec.baseline_of(one)) for one in spec.condition if spec.baseline_of(one) != one.name]
    if not pairs:
        raise SpecError("compares no condition with another", where=spec.name, hint="Give it a second condition")
    scale = spec.time_scale if kind_named(spec.backend).scales_time else 1.0
    block_s = sum(replay_ns for _, replay_ns in costs_ns.values()) / NS_PER_S / scale
    found = {(name, base): (costs_ns[name][0], costs_ns[base][0]) for name, base in pairs}
    return found, block_s


def _costs_ns(runs: Sequence[PlannedRun], restarts: int) -> tuple[FloatArray, float]:
    """Device time of each plan under each restart, shape (plans, restarts), and the mean replay, both model ns."""
    first = runs[0]
    arrays, config = plan_arrays([run.plan for run in runs]), EngineConfig.from_server(first.server.replica)
    perturbation = perturbation_of(first.spec.prediction, first.cost_file)
    of_restarts = replace(perturbation, **SHARED, role=first.condition.name)
    drawn = draw(arrays, config, first.cost_model, of_restarts, range(restarts))
    outcome = simulator_of(first.server)(drawn, config)
    device_ns = outcome.device_ns.astype(np.float64)
    return device_ns.reshape(restarts, len(runs)).T, float(outcome.totals["end_ns"].mean())


def _components(condition: str, baseline: str, values: FloatArray, spec: ExperimentSpec) -> Components:
    """values: log ratios, shape (blocks, restarts). With one restart, plan and restart cannot be separated."""
    mean, (num_blocks, restarts) = float(values.mean()), values.shape
    if restarts == 1:
        return Components(condition, baseline, mean, float(values.std(ddof=1)), None, None, num_blocks)
    plan, restart = variance_components(values)
    plan = 0.0 if spec.same_input else plan
    sd = math.hypot(plan, restart)
    return Components(condition, baseline, mean, sd, plan, restart, num_blocks, restarts=restarts)


def _on_devices(components: Components, effect: DeviceEffect | None) -> Components:
    """The components with those of the devices, where several devices made the blocks."""
    if effect is None or effect.interaction is None:
        return components
    between, within = effect.interaction.sd, effect.interaction.within
    return replace(components, device=between, within=within, num_devices=len(effect.devices))


def devices_for_equivalence(components: Components, goal: Goal, blocks: int) -> int | None:
    """Fewest devices with ``blocks`` each whose means show equivalence at the margin with the required power.

    A device mean is one observation, so more blocks on few devices do not help where devices differ.
    """
    sd = math.hypot(components.device or 0.0, components.within / math.sqrt(blocks))
    return PlannedTest(sd, goal.alpha, goal.log_margin).blocks(0.0, "equivalence", goal.power)


def needed_together(components: Sequence[Components], goal: Goal) -> list[Needed]:
    """Blocks for every aim of comparisons that are judged together, each at one artifact.

    The power of a comparison is that of its adjusted verdict, for Gaussian log ratios.
    """
    return [_needed(one, goal, len(components)) for one in components]


def _needed(parts: Components, goal: Goal, num_together: int) -> Needed:
    margin, wanted = goal.log_margin, goal.power
    plan = PlannedTest(parts.sd, goal.alpha / num_together, margin, parts.num_blocks - 1)
    at_margin = math.copysign(margin, parts.mean)
    difference, equivalence = plan.blocks(at_margin, "difference", wanted), plan.blocks(0.0, "equivalence", wanted)
    both = None if difference is None or equivalence is None else max(difference, equivalence)
    verdicts = (plan.blocks(parts.mean, "difference", wanted), plan.blocks(parts.mean, "equivalence", wanted))
    as_predicted = min((blocks for blocks in verdicts if blocks is not None), default=None)
    # An observed ratio is no plan: a chance excess of the first runs would ask for too few.
    is_clear = abs(parts.mean) > 2 * margin and not parts.is_observed
    planned_effect = _limit(goal) - margin if parts.is_observed else parts.mean
    superiority = _superiority(parts, goal, planned_effect)
    proposed = superiority if goal.rule is not None else as_predicted if is_clear else both
    power = math.nan
    if proposed is not None and goal.rule is None:
        shown = plan.power(proposed, parts.mean if is_clear else at_margin, "difference")
        power = shown if is_clear else min(shown, plan.power(proposed, 0.0, "equivalence"))
    effects = (parts.mean,) if is_clear else (0.0, margin)
    return Needed(
        parts,
        blocks_for_precision(max(parts.sd, LEAST_SD), math.log1p(goal.precision), goal.alpha),
        equivalence,
        difference,
        as_predicted,
        proposed,
        *_looked(parts, goal, effects, proposed or MOST_BLOCKS, num_together),
        superiority,
        planned_effect,
        power,
        plan,
        num_together,
    )


def _limit(goal: Goal) -> float:
    """ln of the ratio below which the goal's rule calls a condition cheaper; 0 without a rule."""
    return 0.0 if goal.rule is None else math.log(goal.rule.limit)


def _superiority(components: Components, goal: Goal, effect: float) -> int | None:
    """Blocks that show the condition cheaper by the goal's rule, should its true log ratio be ``effect``."""
    if goal.rule is None:
        return None
    plan = PlannedTest(components.sd, goal.rule.alpha, degrees=components.num_blocks - 1)
    blocks = plan.blocks(effect - _limit(goal), "superiority", goal.power)
    return None if blocks is None else max(blocks, goal.rule.min_replicates)


def _looked(
    parts: Components, goal: Goal, effects: Sequence[float], fixed: int, family_size: int
) -> tuple[int | None, int | None]:
    """Blocks within which half and ``goal.power`` of sequential experiments end, at the worst of ``effects``."""
    if 4 * fixed > MOST_BLOCKS:
        return None, None
    stop = bonferroni(StopSpec(margin=goal.margin, alpha=goal.alpha, budget=max(FIRST_BUDGET, 4 * fixed)), family_size)
    sd = max(parts.sd, 1e-9)
    ends = [blocks_until_decided(sd, effect, stop, degrees=parts.num_blocks - 1) for effect in effects]
    median, most = (max(int(np.quantile(end, q, method="higher")) for end in ends) for q in (0.5, goal.power))
    return (median if median <= stop.budget else None), (most if most <= stop.budget else None)
