"""Coverage of intervals with the device as a block, over simulated experiments of a fleet that is not equal.

Every run is simulated with drawn plans and jitter, its costs those of its device at that time. No server runs, and only
device time counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks import SIX_SESSIONS
from benchmarks.figure import Figure
from harness.analysis.cost.devices import BlockRatio, device_effect
from harness.analysis.stats import FloatArray, Interval, mean_interval
from harness.model.engine.config import EngineConfig
from harness.model.experiment import PlannedRun, resolve
from harness.model.sim.draws import Perturbation, jittered_draw, run_draws
from harness.model.sim.plans import plan_arrays
from harness.model.spec import ExperimentSpec, load_experiment
from harness.model.spec.sections import EmulatedDevice

EXPERIMENTS, ROUNDS, LEVEL = 200, 6, 0.95
CONDITION, BASELINE = "bucket6-nowaits", "base-nowaits"
# One device is 3 % slow, one drifts, and each of three busy neighbours costs a third of a per cent.
NEIGHBOUR, HOURS_OF_RUN = 0.01 / 3, 0.05
FLEET = (
    EmulatedDevice(neighbour_cost=NEIGHBOUR, noise=0.002),
    EmulatedDevice(neighbour_cost=NEIGHBOUR, noise=0.002),
    EmulatedDevice(neighbour_cost=NEIGHBOUR, noise=0.002, speed_offset=0.03),
    EmulatedDevice(neighbour_cost=NEIGHBOUR, noise=0.002, drift_per_hour=0.05),
)
INTERACTION_SD = 0.01
SEED = 20261123


class Costs(NamedTuple):
    """Log device times of the baseline's and the condition's runs, shape (experiments, blocks, 2)."""

    log: FloatArray

    @property
    def ratios(self) -> FloatArray:
        """ln ratio of each block, shape (experiments, blocks)."""
        return self.log[:, :, 1] - self.log[:, :, 0]


def factors(num_experiments: int, num_blocks: int, devices: NDArray[np.int64]) -> FloatArray:
    """What each run's steps are multiplied by; devices: shape (experiments, blocks, 2), the device that made it.

    A block runs its two conditions one after the other, backwards every second time on each device.
    """
    rng = np.random.default_rng(SEED)
    normals = rng.standard_normal((num_experiments, num_blocks, 2))
    factors_of_runs = np.ones_like(normals)
    for place in np.ndindex(factors_of_runs.shape):
        block, condition = place[1:]
        turn, number = divmod(block, len(FLEET))
        later = condition if (turn + number) % 2 == 0 else 1 - condition
        factors_of_runs[place] = FLEET[int(devices[place])].factor(
            HOURS_OF_RUN * (2 * turn + later), len(FLEET) - 1, float(normals[place])
        )
    return factors_of_runs


def simulated(runs: Mapping[str, Sequence[PlannedRun]], of_run: FloatArray) -> Costs:
    """Device time of every run with its own factor; shape of the factors: (experiments, blocks, 2)."""
    logs = [_log_times(runs[name], of_run[:, :, role].ravel(), role) for role, name in enumerate((BASELINE, CONDITION))]
    return Costs(np.stack([values.reshape(of_run.shape[:2]) for values in logs], axis=2))


def _log_times(runs: Sequence[PlannedRun], of_run: FloatArray, role: int) -> FloatArray:
    """ln of the device time of each run; every one with a jitter of its own."""
    first, perturbation = runs[0], Perturbation(seed=SEED)
    arrays, config = plan_arrays([run.plan for run in runs]), EngineConfig.from_server(first.server)
    models = [first.cost_model.scaled(float(factor)) for factor in of_run]
    drawn = jittered_draw(arrays, models, perturbation, role)
    return np.log(run_draws(drawn, config).device_ns.astype(np.float64))


def as_block(ratios: FloatArray) -> Interval | None:
    """The interval of mean log ratio over devices; block i ran on device i mod 4."""
    blocks = [BlockRatio(float(value), f"dev{k % len(FLEET)}", k) for k, value in enumerate(ratios)]
    estimate = device_effect(blocks).estimate
    return None if estimate is None else estimate.interval(level=LEVEL)


def pooled(ratios: FloatArray) -> Interval | None:
    """The interval that ignores devices."""
    logs = mean_interval(ratios.tolist(), unit="blocks", level=LEVEL)
    if logs is None:
        return None
    return replace(logs, estimate=math.exp(logs.estimate), low=math.exp(logs.low), high=math.exp(logs.high))


def covered(name: str, intervals: Sequence[Interval | None], truth: FloatArray | float, note: str) -> Figure:
    """How many intervals hold the true ratio, and how wide they are."""
    truths = np.broadcast_to(np.exp(truth), len(intervals))
    known = [(each, float(ratio)) for each, ratio in zip(intervals, truths, strict=True) if each is not None]
    share = sum(interval.contains(ratio) for interval, ratio in known) / len(known)
    bias = np.mean([math.log(interval.estimate / ratio) for interval, ratio in known])
    half = np.median([interval.width / 2 for interval, _ in known])
    error = math.sqrt(LEVEL * (1 - LEVEL) / len(known))
    details = f"bias {100 * bias:+.2f} %, half width {100 * half:.2f} %, Monte Carlo error {error:.3f}; {note}"
    return Figure(f"coverage, {name}", f"{share:.3f}", "", details)


def bench_devices(num_experiments: int = EXPERIMENTS, rounds: int = ROUNDS) -> Iterator[Figure]:
    """Coverage of 95 % intervals with the device as a block and without, on the same simulated experiments."""
    num_blocks = rounds * len(FLEET)
    runs = planned(load_experiment(SIX_SESSIONS), num_experiments * num_blocks)
    shape = (num_experiments, num_blocks, 2)
    nominal = simulated(runs, np.ones(shape))
    truth = float(nominal.ratios.mean())
    of_block = np.broadcast_to(np.arange(num_blocks)[None, :, None] % len(FLEET), shape)
    fleet = simulated(runs, factors(num_experiments, num_blocks, of_block)).ratios
    yield covered("device as a block", [as_block(ratios) for ratios in fleet], truth, "a block stays on its device")
    yield covered(
        "paired, devices pooled", [pooled(ratios) for ratios in fleet], truth, "the same runs; no interaction"
    )

    apart = np.broadcast_to(np.arange(num_blocks)[None, :, None] % 2 + np.array([0, 2]), shape)
    split = simulated(runs, factors(num_experiments, num_blocks, apart)).ratios
    yield covered(
        "pooled, a device pair per condition",
        [pooled(ratios) for ratios in split],
        truth,
        "the baseline on devices 0 and 1, the condition on 2 and 3",
    )
    free = np.random.default_rng(SEED + 1).integers(0, len(FLEET), shape)
    queued = simulated(runs, factors(num_experiments, num_blocks, free)).ratios
    yield covered(
        "pooled, any free device", [pooled(ratios) for ratios in queued], truth, "each run where chance had it"
    )

    own_effect = np.random.default_rng(SEED + 2).normal(0, INTERACTION_SD, (num_experiments, len(FLEET)))
    differing = fleet + own_effect[:, np.arange(num_blocks) % len(FLEET)]
    note = f"each device has an effect of its own, sd {INTERACTION_SD:.0%}"
    yield covered("device as a block, interaction", [as_block(ratios) for ratios in differing], truth, note)
    yield covered("paired, devices pooled, interaction", [pooled(ratios) for ratios in differing], truth, note)


def planned(spec: ExperimentSpec, num_blocks: int) -> Mapping[str, Sequence[PlannedRun]]:
    """Runs of both conditions, each block with a plan draw of its own."""
    kept = tuple(condition for condition in spec.condition if condition.name in (BASELINE, CONDITION))
    return resolve(
        spec.model_copy(update={"replicates": num_blocks, "condition": kept, "baseline": BASELINE})
    ).by_condition
