"""Perturbed simulations of plans: how large the perturbations are, and the drawn starts, lags, step times and costs.

A server is chaotic: a small delay changes who is admitted next, so a prediction needs many draws. The result of a draw
is that of simulating its perturbed plan alone. All draws are simulated in one compiled call.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache, partial
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, Field, ValidationError

from harness.clock import NS_PER_MS
from harness.compiled.records import IntArray
from harness.errors import SpecError
from harness.model.engine.config import EngineConfig
from harness.model.engine.cost import FS_PER_MS, CostModel, find_cost_file
from harness.model.plan.build import derive_seed
from harness.model.plan.model import Plan
from harness.model.sim.kernel import arrays as layout
from harness.model.sim.plans import joined, one_plan
from harness.model.sim.simulate import run_batch
from harness.model.spec import ExperimentSpec, PerturbationSpec, ServerSpec, load_toml
from harness.plugins import service

FloatArray = npt.NDArray[np.float64]
ORDER_NS = 1000
"""Least spread of the starts, so that sessions that start together arrive in any order."""
NOISE_PLACES = 4096
# A cost model has one number for each bucket from 0 to 1024.
NUM_BUCKETS = 1025
LEAST_FACTOR = 0.05
"""A drawn cost is never below this share of the nominal cost."""


class StoredInterval(BaseModel):
    """A confidence interval in a cost file: its ends, in the unit of the coefficient, and its level."""

    low: float
    high: float
    level: float = Field(gt=0, lt=1)

    def relative_deviation(self, value: float) -> float:
        """Standard deviation relative to ``value``, for an estimate with a normal distribution."""
        return (self.high - self.low) / 2 / NormalDist().inv_cdf((1 + self.level) / 2) / value


class StoredFit(BaseModel):
    """The intervals of a fit by the name of their coefficient."""

    intervals: dict[str, StoredInterval] = {}


class StoredCalibration(BaseModel):
    """What predictions read of [calibration] in a cost file."""

    decode: StoredFit = StoredFit()
    prefill: StoredFit = StoredFit()


@dataclass(frozen=True, slots=True)
class Perturbation:
    """Sizes of the perturbations; see PerturbationSpec for the meaning of each.

    assumed: names of the sizes that neither the specification nor a calibration gave. role: whose jitter is drawn. Draw
    k has the same true costs in every role, because they run on the same device, and its own jitter. draws_errors: true
    costs are drawn from the errors that the cost file states, in place of bucket_sd and prefill_sd.
    """

    seed: int
    level: float = 0.9
    start_ms: float = 1.0
    lag_ms: float = 1.0
    step_sd: float = 0.002
    decode_sd: float = 0.02
    bucket_sd: float = 0.005
    prefill_sd: float = 0.02
    artifact_sd: float = 0.004
    assumed: tuple[str, ...] = ()
    role: str = ""
    draws_errors: bool = False

    @property
    def sizes(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in SIZES}

    def line(self) -> str:
        """The sizes in words, and which of them are known."""
        sizes = {key: value for key, value in self.sizes.items() if not (self.draws_errors and key in OF_COSTS)}
        known = [f"{key} {value:g}" for key, value in sizes.items() if key not in self.assumed]
        assumed = [f"{key} {value:g}" for key, value in sizes.items() if key in self.assumed]
        fit = ["drawn from the covariance of their fit"] if self.draws_errors else []
        parts = (("costs", fit), ("calibrated or given", known), ("assumed, not calibrated", assumed))
        return "; ".join(f"{what}: {', '.join(sizes)}" for what, sizes in parts if sizes)


def if_assumed(is_assumed: bool) -> str:
    """What an interval over draws rests on, after its ends, where some of their sizes were assumed."""
    return " if the assumed sizes are right" if is_assumed else ""


OF_COSTS = {"bucket_sd", "prefill_sd"}
SIZES = tuple(field.name for field in fields(Perturbation) if field.name.endswith(("_ms", "_sd")))


def perturbation_of(given: PerturbationSpec, cost_model: str | Path) -> Perturbation:
    """The sizes from the specification, else from the calibration in the cost file, else assumed.

    bucket_sd: root mean square over the f(b). prefill_sd: of the cost per device call. A calibration's intervals do not
    give decode_sd, which all decode steps have in common. A cost file that states the errors of its fit gives both,
    unless the specification gives one of them. Raises SpecError for an interval that cannot be read.
    """
    written = {name: size for name in SIZES if (size := getattr(given, name)) is not None}
    path = find_cost_file(cost_model)
    table = load_toml(path)
    draws_errors = bool(table.get("errors")) and not written.keys() & OF_COSTS
    known = (dict.fromkeys(OF_COSTS, 0.0) if draws_errors else _calibrated(table, path)) | written
    assumed = tuple(name for name in SIZES if name not in known)
    return Perturbation(given.seed, given.level, assumed=assumed, role="", draws_errors=draws_errors, **known)


def perturbation_of_run(spec: ExperimentSpec, cost_file: Path, plan: Plan, label: str) -> Perturbation:
    """The perturbation that predicts the run ``label`` of a plan, with seeds of its own experiment and plan.

    The runs of an experiment share the true costs of a draw, those of another experiment have others: draws that all
    experiments shared would make the same intervals wrong for all of them.
    """
    seed = derive_seed(spec.prediction.seed, f"prediction/{spec.name}/{spec.base_seed}")
    return replace(perturbation_of(spec.prediction, cost_file), seed=seed, role=f"{label}/{plan.drawn_hash}")


def _calibrated(table: Mapping[str, Any], path: Path) -> dict[str, float]:
    try:
        known = StoredCalibration.model_validate(table.get("calibration", {}))
    except ValidationError as error:
        raise SpecError(
            f"its interval of {error.errors()[0]['loc'][:3][-1]} cannot be read",
            where=str(path),
            hint="Write low, high and level as numbers, or leave [calibration] out",
        ) from error
    f_ms = {f"f({bucket})": float(value) for bucket, value in table["decode"]["f_ms"].items()}
    decode, prefill = known.decode.intervals, known.prefill.intervals
    buckets = [decode[name].relative_deviation(value) for name, value in f_ms.items() if name in decode and value > 0]
    sizes: dict[str, float] = {}
    if buckets:
        sizes["bucket_sd"] = math.sqrt(sum(each * each for each in buckets) / len(buckets))
    # A vLLM computes many tokens in a step; on a compiled NPU the call itself takes most of the time.
    name = "per_call_us_per_token" if "chunked_prefill" in table else "per_call_ms"
    value = float(table["prefill"].get(name, 0.0))
    if name in prefill and value > 0:
        sizes["prefill_sd"] = prefill[name].relative_deviation(value)
    return {name: min(size, 0.49) for name, size in sizes.items()}


class Draws(NamedTuple):
    """Perturbed plans, draw after draw, all plans of a draw together.

    models, noise_seeds: one for each plan. noise_seeds: where in the noise table the steps of a plan begin to draw.
    """

    arrays: layout.PlanArrays
    models: Sequence[CostModel]
    noise_seeds: Sequence[int]
    noise: IntArray

    def alone(self, plan: int) -> Draws:
        """One of the plans by itself, with its costs and noise."""
        models, seeds = self.models[plan : plan + 1], self.noise_seeds[plan : plan + 1]
        return Draws(one_plan(self.arrays, plan), models, seeds, self.noise)


def nominal(arrays: layout.PlanArrays, model: CostModel) -> Draws:
    """The plans as they are, with these costs, and steps without noise."""
    count = len(arrays.plans)
    return Draws(arrays, [model] * count, [0] * count, layout.NO_NOISE)


def draw(
    arrays: layout.PlanArrays,
    config: EngineConfig,
    model: CostModel,
    perturbation: Perturbation,
    numbers: Sequence[int],
) -> Draws:
    """The draws with these numbers; a draw does not depend on which others are made."""
    key = zlib.crc32(perturbation.role.encode())
    parts = [
        jittered_draw(
            arrays,
            [perturbed(model, perturbation, number, artifact_key(config))] * len(arrays.plans),
            perturbation,
            key,
            number,
        )
        for number in numbers
    ]
    return Draws(
        joined([part.arrays for part in parts]),
        [truth for part in parts for truth in part.models],
        [seed for part in parts for seed in part.noise_seeds],
        noise_table(perturbation.step_sd),
    )


def jittered_draw(
    arrays: layout.PlanArrays, models: Sequence[CostModel], perturbation: Perturbation, *key: int
) -> Draws:
    """The plans with jitter and noise; models: the costs of each plan. key: identifies the draw, beside the seed."""
    seeds = np.random.default_rng([perturbation.seed, *key, zlib.crc32(b"steps")])
    return Draws(
        jitter(arrays, perturbation, *key),
        models,
        seeds.integers(0, 1 << 32, size=len(arrays.plans)).tolist(),
        noise_table(perturbation.step_sd),
    )


def run_draws(draws: Draws, config: EngineConfig, *, with_records: bool = False) -> layout.SimOutcome:
    """Simulate all draws in one call: sums and requests of each plan, in the order of ``draws.arrays``.

    with_records: steps and evictions of the last plan. Raises PlanError when a request does not fit a slot or can never
    be admitted.
    """
    return run_batch(draws.arrays, config, draws.models, draws.noise_seeds, draws.noise, with_records=with_records)


def simulator_of(server: ServerSpec) -> Callable[[Draws, EngineConfig], layout.SimOutcome]:
    """What simulates draws on a server: ``run_draws``, or for replicas behind a router what the plug-in offers.

    Raises SpecError for a server whose acceptance of drafts is not known.
    """
    if server.has_drafts:
        raise SpecError(
            "asks for speculative decoding, and nothing says how many drafts are accepted: nothing is predicted",
            where="server.extra_args",
            hint="Write server.num_speculative_tokens, speculative_method and synthetic_acceptance_rates in its place",
        )
    return service("replicas", where="server.replicas").drawn(server) if server.is_routed else run_draws


def jitter(arrays: layout.PlanArrays, perturbation: Perturbation, *key: int) -> layout.PlanArrays:
    """The plans as a real client plays them: starts are spread out, re-arrivals are late.

    key: identifies the draw, together with the perturbation's seed.
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
    """Identifies a compiled configuration: every plan that runs on it has the same deviation."""
    return zlib.crc32(repr((config.max_num_seqs, config.decode_buckets, config.kv_slots, config.slot_tokens)).encode())


def perturbed(model: CostModel, perturbation: Perturbation, sample: int, artifact: int = 0) -> CostModel:
    """A cost model that fits the calibration as well: all decode steps, each bucket and prefill deviate independently.

    artifact: see ``artifact_key``; all steps of a compiled configuration deviate together.
    """
    of_costs = _normals(2 + NUM_BUCKETS, perturbation.seed, sample, zlib.crc32(b"cost"))
    common = of_costs[:2] * (perturbation.decode_sd, perturbation.prefill_sd)
    of_artifact = _normals(1, perturbation.seed, sample, artifact)[0] * perturbation.artifact_sd
    decode, prefill = np.maximum((1 + common) * (1 + of_artifact), LEAST_FACTOR).tolist()
    buckets = np.maximum(1 + of_costs[2:] * perturbation.bucket_sd, LEAST_FACTOR)
    changes = _drawn_errors(model, perturbation.seed, sample) if perturbation.draws_errors else {}
    places = partial(_place_in_gap, perturbation.seed, sample)
    change_ms = partial(model.change_ms, changes=changes, place_of=places) if perturbation.draws_errors else None
    truth = model.moved(changes, LEAST_FACTOR).scaled(decode, prefill)
    query_fs = {query: _ScaledBuckets(model.of_query(query), decode * buckets, None) for query in model.query_fs}
    f_fs = _ScaledBuckets(model, decode * buckets, change_ms)
    return replace(truth, f_fs=f_fs, query_fs=query_fs, errors=(), _filled_fs={})


def _drawn_errors(model: CostModel, seed: int, sample: int) -> dict[str, float]:
    """Changes of the coefficients of each fit, drawn from its covariance."""
    changes: dict[str, float] = {}
    for place, fit in enumerate(model.errors):
        values, vectors = np.linalg.eigh(np.array(fit.correlations))
        normals = _normals(len(fit.names), seed, sample, zlib.crc32(b"fit"), place)
        drawn = vectors @ (np.sqrt(np.maximum(values, 0.0)) * normals) * np.array(fit.standard_errors)
        changes |= dict(zip(fit.names, drawn.tolist(), strict=True))
    return changes


def _place_in_gap(seed: int, sample: int, gap: tuple[int, int]) -> float:
    """Where in its spread the cost of sizes lies that were not measured, -1 to 1: those of one gap move together."""
    return float(np.random.default_rng([seed, sample, zlib.crc32(b"gap"), *gap]).uniform(-1, 1))


@lru_cache(maxsize=256)
def _normals(count: int, *key: int) -> FloatArray:
    """Standard normal numbers, cached because the runs of an experiment share their devices."""
    return np.random.default_rng(key).normal(size=count)


class _ScaledBuckets(dict[int, int]):
    """f of every bucket, scaled on first use.

    It holds every bucket: values that the model interpolates are scaled, not interpolated again.
    """

    def __init__(self, model: CostModel, factors: FloatArray, change_ms: Callable[[int], float] | None) -> None:
        super().__init__()
        self._model, self._factors, self._change_ms = model, factors, change_ms

    def __contains__(self, bucket: object) -> bool:
        return True

    def __missing__(self, bucket: int) -> int:
        f_fs: float = self._model.bucket_fs(bucket)
        if self._change_ms is not None:
            f_fs = max(f_fs + self._change_ms(bucket) * FS_PER_MS, LEAST_FACTOR * f_fs)
        self[bucket] = round(f_fs * float(self._factors[min(bucket, 1024)]))
        return self[bucket]


@lru_cache(maxsize=8)
def noise_table(step_sd: float) -> IntArray:
    """Normal deviations of a step's time in millionths, equally likely; a single 0 without noise."""
    if step_sd == 0:
        return layout.NO_NOISE
    normal = NormalDist(0, step_sd * 1e6)
    return np.array([round(normal.inv_cdf((i + 0.5) / NOISE_PLACES)) for i in range(NOISE_PLACES)], dtype=np.int64)
