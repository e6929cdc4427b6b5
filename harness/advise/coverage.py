"""Whether predicted intervals keep their word: experiments emulated with jitter and unknown true costs, and a count.

The emulator's own core runs on a virtual clock, on plans, jitter and costs that the interval never saw. That it checks
the interval's bookkeeping and not a real server is said with the count. Next: ``harness coverage`` prints it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from harness.clock import NS_PER_MS
from harness.emulator.virtual import run_virtually
from harness.engine import CostModel, load_cost_model
from harness.errors import SpecError
from harness.kv_rules import NEWEST_STABLE, rule_set
from harness.plan import Plan, build_plan
from harness.plan.build import derive_seed
from harness.sim.draws import ORDER_NS, perturbed
from harness.sim.interval import predict
from harness.sim.search.rank import FloatArray
from harness.sim.search.space import Candidate, SpaceSpec, UncertaintySpec, candidate_of

SEED_RANGE = 2**31


@dataclass(frozen=True)
class Coverage:
    """Counts of emulated ratios inside the predicted intervals.

    new: one interval for any new inputs. given: an interval per experiment, for its very plans. ratios: emulated.
    """

    name: str
    users: int
    level: float
    trials: int
    new: int
    given: int
    ratios: tuple[float, ...]
    low: float
    high: float

    def lines(self) -> Iterator[str]:
        """The count for people."""
        how = "on the emulator's core in virtual time; inputs, jitter and true costs drawn anew"
        yield f"{self.name}, N={self.users}: {self.trials} experiments {how}"
        share = f"{self.new} of {self.trials} ({self.new / self.trials:.0%})"
        yield f"  interval for new inputs, {self.low:.4f} to {self.high:.4f}: holds {share}"
        yield f"  intervals for the given inputs: hold {self.given} of {self.trials} ({self.given / self.trials:.0%})"
        low, high = expected_range(self.trials, self.level)
        yield f"  a true {self.level:.0%} interval would hold {low} to {high} of them in 95 of 100 such checks"


def check_coverage(space: SpaceSpec, trials: int, *, users: int | None = None, name: str = "") -> Coverage:
    """Emulate ``trials`` experiments of one of the space's named configurations beside its baseline.

    users: default, the first N. name: default, the first named configuration. Raises SpecError when the space names
    none, or its rules are not those of the emulator.
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
    candidate = candidate_of(space.named[chosen])
    new = predict(space, candidate, count)
    ratios: list[float] = []
    given = 0
    for trial in range(trials):
        seed = derive_seed(space.uncertainty.seed, f"coverage/{trial}") % SEED_RANGE
        ratio = emulated_ratio(space, candidate, count, seed)
        interval = predict(_given(space, seed), candidate, count)
        given += interval.low <= ratio <= interval.high
        ratios.append(ratio)
    inside = sum(new.low <= ratio <= new.high for ratio in ratios)
    return Coverage(chosen, count, new.level, trials, inside, given, tuple(ratios), new.low, new.high)


def emulated_ratio(space: SpaceSpec, candidate: Candidate, users: int, seed: int) -> float:
    """Ratio of sums of one emulated experiment: plans, jitters and true costs drawn from ``seed``."""
    uncertainty = space.uncertainty
    truth = perturbed(load_cost_model(space.cost_model), uncertainty.model_copy(update={"seed": seed}), 0)
    workload = space.inputs.workload_of(users)
    sums = [0, 0]
    for replicate in range(uncertainty.replicates):
        plan = build_plan(workload, seed, replicate)
        if space.inputs.treatment != "as-drawn":
            plan = plan.with_treatment(space.inputs.treatment)
        for role, each in enumerate((candidate, candidate_of(space.baseline))):
            generator = np.random.default_rng([seed, replicate, role])
            sums[role] += device_ns(jittered_plan(plan, uncertainty, generator), each, space, truth)
    return sums[0] / sums[1]


def device_ns(plan: Plan, candidate: Candidate, space: SpaceSpec, costs: CostModel) -> int:
    """Device time of one emulated run: the sum of its steps."""
    steps = run_virtually(plan, candidate.server(space.rules), costs)
    return sum(end.start.step.duration_ns for end in steps if end.requests)


def jittered_plan(plan: Plan, uncertainty: UncertaintySpec, generator: np.random.Generator) -> Plan:
    """The plan as a late client plays it."""

    def late(mean_ms: float) -> int:
        return int(generator.exponential(mean_ms * NS_PER_MS)) if mean_ms else 0

    sessions = tuple(
        replace(
            session,
            start_offset_ns=session.start_offset_ns
            + int(generator.integers(ORDER_NS))
            + late(uncertainty.start_jitter_ms),
            requests=tuple(
                replace(request, wait_after_ns=request.wait_after_ns + late(uncertainty.rearrival_lag_ms))
                for request in session.requests
            ),
        )
        for session in plan.sessions
    )
    return replace(plan, sessions=sessions)


def expected_range(trials: int, level: float) -> tuple[int, int]:
    """Smallest central range of counts that a Binomial(trials, level) falls into with 95 %."""
    counts = np.arange(trials + 1)
    logs = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, trials + 1)))])
    chance: FloatArray = np.exp(
        logs[trials]
        - logs[counts]
        - logs[trials - counts]
        + counts * np.log(level)
        + (trials - counts) * np.log1p(-level)
    )
    below = np.cumsum(chance)
    return int(np.searchsorted(below, 0.025)), int(np.searchsorted(below, 0.975))


def _given(space: SpaceSpec, seed: int) -> SpaceSpec:
    """The space with the very plans of one experiment."""
    inputs = space.inputs.model_copy(update={"evaluation_seeds": (seed,), "replicates": space.uncertainty.replicates})
    return space.model_copy(
        update={"inputs": inputs, "uncertainty": space.uncertainty.model_copy(update={"draws": "given"})}
    )
