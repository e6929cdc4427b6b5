"""Draws of simulations: the same plans again, with starts, lags, steps and costs a little different each time.

A server is chaotic, so that one simulation is one draw. Every draw has a seed; its result is that of simulating its
perturbed plan alone. All draws are one call into compiled code.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from harness.clock import NS_PER_MS
from harness.compiled.records import IntArray, record_as_dict
from harness.engine.config import EngineConfig
from harness.engine.cost import CostModel
from harness.sim import memory
from harness.sim.inputs import joined
from harness.sim.kernel import arrays as layout
from harness.sim.perturbation import Perturbation
from harness.sim.simulate import run_with_costs

FloatArray = npt.NDArray[np.float64]
ORDER_NS = 1000
NOISE_PLACES = 4096
# A cost model has one number for each bucket from 0 to 1024.
NUM_BUCKETS = 1025
LEAST_FACTOR = 0.05
"""A drawn cost is never below this share of the nominal one, however wide it is drawn."""


class Draws(NamedTuple):
    """Perturbed plans, draw after draw, all plans of a draw together; models and noise_seeds: one per plan of these."""

    arrays: layout.PlanArrays
    models: tuple[CostModel, ...]
    noise_seeds: tuple[int, ...]
    noise: IntArray

    def costs(self, config: EngineConfig, *, chunked_prefill_calls: int = 0) -> layout.CostArrays:
        """The costs of each plan, as the compiled simulator reads them."""
        return memory.drawn_cost_arrays(
            config, self.models, self.noise_seeds, self.noise, chunked_prefill_calls=chunked_prefill_calls
        )


def draw(
    arrays: layout.PlanArrays,
    config: EngineConfig,
    model: CostModel,
    perturbation: Perturbation,
    numbers: Sequence[int],
    *,
    role: str = "",
) -> Draws:
    """The perturbations of these numbers; each is the same whichever others are asked for.

    role: whose jitter it is. Draw k has the same true costs in every role, as one device has, and its own jitter.
    """
    key = zlib.crc32(role.encode())
    num_plans = len(arrays.plans)
    truths = [perturbed(model, perturbation, number, artifact_key(config)) for number in numbers]
    return Draws(
        joined([jitter(arrays, perturbation, key, number) for number in numbers]),
        tuple(truth for truth in truths for _plan in range(num_plans)),
        tuple(seed for number in numbers for seed in noise_seeds(perturbation, num_plans, key, number)),
        noise_table(perturbation.step_sd),
    )


def run_draws(draws: Draws, config: EngineConfig) -> layout.Outcome:
    """Simulate all draws in one call: sums and requests of each plan, in the order of ``draws.arrays``.

    Raises PlanError when a request does not fit a slot or can never be admitted.
    """
    return run_with_costs(draws.arrays, config, draws.costs(config))


def outcome_of_plan(arrays: layout.PlanArrays, outcome: layout.Outcome, plan: int) -> layout.Outcome:
    """The results of one of several plans, alone."""
    one = record_as_dict(arrays.plans, plan)
    first, last = one["first_request"], one["first_request"] + one["num_requests"]
    return outcome._replace(
        requests=outcome.requests[first:last],
        histogram=outcome.histogram[plan : plan + 1],
        totals=outcome.totals[plan : plan + 1],
    )


def jitter(arrays: layout.PlanArrays, perturbation: Perturbation, *key: int) -> layout.PlanArrays:
    """The plans as one condition's client would really play them: starts spread out, re-arrivals late.

    key: names the draw, beside the perturbation's seed. Starts get at least ORDER_NS of spread, so that simultaneous
    arrivals come in any order.
    """
    generator = np.random.default_rng([perturbation.seed, *key, zlib.crc32(b"jitter")])
    starts = generator.integers(0, ORDER_NS, size=len(arrays.sessions))
    starts += generator.exponential(perturbation.start_ms * NS_PER_MS, size=len(starts)).astype(np.int64)
    waits = generator.exponential(perturbation.lag_ms * NS_PER_MS, size=len(arrays.requests)).astype(np.int64)
    late = layout.with_column(arrays, "wait_ns", arrays.requests["wait_ns"] + waits)
    sessions = arrays.sessions.copy()
    sessions["start_ns"][:] += starts
    return late._replace(sessions=sessions)


def artifact_key(config: EngineConfig) -> int:
    """Names a compiled configuration: all plans on it meet the same deviation of it."""
    return zlib.crc32(repr((config.max_num_seqs, config.decode_buckets, config.kv_slots, config.slot_tokens)).encode())


def perturbed(model: CostModel, perturbation: Perturbation, sample: int, artifact: int = 0) -> CostModel:
    """A cost model that calibration could as well have found: all steps, each bucket and prefill moved on their own.

    artifact: names the compiled configuration, whose steps deviate together.
    """
    of_costs = _normals(2 + NUM_BUCKETS, perturbation.seed, sample, zlib.crc32(b"cost"))
    common = of_costs[:2] * (perturbation.decode_sd, perturbation.prefill_sd)
    own = _normals(1, perturbation.seed, sample, artifact)[0] * perturbation.artifact_sd
    decode, prefill = np.maximum((1 + common) * (1 + own), LEAST_FACTOR).tolist()
    buckets = np.maximum(1 + of_costs[2:] * perturbation.bucket_sd, LEAST_FACTOR)
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


@lru_cache(maxsize=256)
def _normals(count: int, *key: int) -> FloatArray:
    """Standard normal numbers, kept: the runs of an experiment meet the same devices."""
    return np.random.default_rng(key).normal(size=count)


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


def noise_seeds(perturbation: Perturbation, num_plans: int, *key: int) -> tuple[int, ...]:
    """Where the steps of each plan begin to draw their noise."""
    generator = np.random.default_rng([perturbation.seed, *key, zlib.crc32(b"steps")])
    return tuple(generator.integers(0, 1 << 32, size=num_plans).tolist())


@lru_cache(maxsize=8)
def noise_table(step_sd: float) -> IntArray:
    """Normal deviations of a step's time, in millionths, every one as likely; without noise a single 0."""
    if step_sd == 0:
        return memory.NO_NOISE
    normal = NormalDist(0, step_sd * 1e6)
    return np.array([round(normal.inv_cdf((i + 0.5) / NOISE_PLACES)) for i in range(NOISE_PLACES)], dtype=np.int64)
