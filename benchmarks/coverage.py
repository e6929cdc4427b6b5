"""How often intervals of percentiles hold, and bounds of a typical run: closed and open workloads of simulated runs.

Runs are simulated with drawn plans and jitter; experiments are drawn from them, so that the true percentile is known.
No server runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal, NamedTuple

import numpy as np

from benchmarks import SIX_SESSIONS
from benchmarks.figure import Figure
from harness.analysis.serving import CONFIDENCE, QUANTILES, QUEUED, Percentile, percentiles_of
from harness.analysis.sessions import session_percentiles
from harness.analysis.stats import DEFAULT_LEVEL, FloatArray, quantiles
from harness.clock import NS_PER_MS, NS_PER_S
from harness.extras.cases.cases import run_draw
from harness.model.engine.config import EngineConfig
from harness.model.experiment import resolve
from harness.model.sim.draws import Draws, draw, perturbation_of, run_draws
from harness.model.sim.kernel.arrays import PlanArrays, with_column
from harness.model.sim.plans import plan_arrays
from harness.model.spec import load_experiment

EXPERIMENTS, SEED = 1_000, 20261125
NUM_RUNS = (6, 12, 100)
MANY_RUNS = 100


class Load(NamedTuple):
    """A workload of the server of six-sessions.toml. per_s: sessions that arrive a second, None: all start together.

    num_runs: simulated, from which experiments are drawn. num_itl: of how many the gaps between tokens are kept.
    heavy: of which kind one in ten generates four times as much.
    """

    name: str
    sessions: int
    requests: int
    per_s: float | None
    num_runs: int
    num_itl: int
    heavy: Literal["", "session", "plan"] = ""


LOADS = (
    Load("closed, 8 sessions of 2 requests", 8, 2, None, 4_000, 1_500),
    Load("closed, 10 sessions of 20 requests", 10, 20, None, 2_000, 300),
    Load("closed, 10 sessions of 4 requests, one session in ten long", 10, 4, None, 2_000, 0, "session"),
    Load("closed, 4 sessions of 5 requests, one session in ten long", 4, 5, None, 2_000, 0, "session"),
    Load("closed, 1 session of 6 requests, one plan in ten long", 1, 6, None, 2_000, 0, "plan"),
    Load("closed, 10 sessions of 4 requests, one plan in ten long", 10, 4, None, 2_000, 0, "plan"),
    Load("open, 350 sessions, 71 % busy", 350, 2, 0.36, 2_000, 0),
    Load("open, 350 sessions, 90 % busy", 350, 2, 0.63, 2_000, 0),
    Load("open, 60 sessions, 88 % busy", 60, 2, 0.63, 4_000, 600),
    Load("open, 350 sessions, 96 % busy", 350, 2, 0.82, 2_000, 0),
    Load("open, 350 sessions, 99 % busy", 350, 2, 1.05, 2_000, 0),
)


class Population(NamedTuple):
    """Latencies of simulated runs, in ms, by metric; and the share of the time in which the device was busy."""

    of_runs: Mapping[str, Sequence[FloatArray]]
    busy: float


def simulated(load: Load) -> Population:
    """The runs of a workload, each with a plan, arrivals and jitter of its own."""
    spec = load_experiment(SIX_SESSIONS)
    workload = spec.workload.model_copy(update={"num_sessions": load.sessions, "requests_per_session": load.requests})
    changed = {"workload": workload, "condition": spec.condition[:1], "replicates": load.num_runs}
    runs = next(iter(resolve(spec.model_copy(update=changed)).by_condition.values()))
    arrays, config = plan_arrays([run.plan for run in runs]), EngineConfig.from_server(runs[0].server)
    if load.heavy:
        arrays = longer(arrays, load)
    if load.per_s is not None:
        gaps_s = np.random.default_rng(SEED).exponential(1 / load.per_s, (load.num_runs, load.sessions))
        arrays.sessions["start_ns"][:] = (gaps_s.cumsum(axis=1) * NS_PER_S).astype(np.int64).ravel()
    of_device = perturbation_of(spec.prediction, runs[0].cost_file)
    same_costs = replace(of_device, decode_sd=0.0, bucket_sd=0.0, prefill_sd=0.0, artifact_sd=0.0)
    drawn = draw(arrays, config, runs[0].cost_model, same_costs, (0,))
    outcome = run_draws(drawn, config)
    requests, totals = outcome.requests, outcome.totals
    of_runs: dict[str, Sequence[FloatArray]] = {
        name: list(((requests[end] - requests["arrival_ns"]) / NS_PER_MS).reshape(load.num_runs, -1))
        for name, end in (("ttft", "first_token_ns"), ("e2e", "completed_ns"))
    }
    # The client is hardly late, so a session's active time is that of its answers.
    of_runs["session"] = list(np.stack(of_runs["e2e"]).reshape(load.num_runs, load.sessions, load.requests).sum(axis=2))
    if load.num_itl:
        of_runs["itl"] = [gaps_ms(drawn, config, place) for place in range(load.num_itl)]
    busy_ns = totals["decode_ns"].sum() + totals["prefill_ns"].sum()
    return Population(of_runs, float(busy_ns / totals["end_ns"].sum()))


def longer(arrays: PlanArrays, load: Load) -> PlanArrays:
    """The plans where one session in ten, or all sessions of one plan in ten, generate four times as much."""
    num_sessions = load.sessions if load.heavy == "session" else 1
    is_heavy = np.random.default_rng(SEED).random((load.num_runs, num_sessions, 1)) < 0.1
    shape = (load.num_runs, load.sessions, load.requests)
    more = np.where(is_heavy, 3 * arrays.requests["generate"].reshape(shape), 0)
    before = more.cumsum(axis=2) - more
    generate, keep = ((arrays.requests[name] + extra.ravel()) for name, extra in (("generate", more), ("keep", before)))
    return with_column(with_column(arrays, "generate", generate), "keep", keep)


def gaps_ms(drawn: Draws, config: EngineConfig, place: int) -> FloatArray:
    """The gaps between the tokens of every request of one run: each decode step gives each of its requests one."""
    _, outcome = run_draw(drawn, config, place)
    steps = outcome.steps[: int(outcome.totals["num_step_records"][0])]
    is_decode = steps["bucket"] > 0
    start, count, duration = (steps[name][is_decode] for name in ("start_ns", "count", "duration_ns"))
    row = np.repeat(np.arange(len(start)), count)
    number = np.arange(len(row)) - np.repeat(count.cumsum() - count, count)
    ends = start[row] + (number + 1) * duration[row]
    first, done = (outcome.requests[name] for name in ("first_token_ns", "completed_ns"))
    bounds = zip(
        first.tolist(), np.searchsorted(ends, first, "right"), np.searchsorted(ends, done, "right"), strict=True
    )
    gaps = [np.diff(ends[begin:end], prepend=token_ns) for token_ns, begin, end in bounds]
    return np.concatenate(gaps) / NS_PER_MS


class Held(NamedTuple):
    """What became of one percentile in many experiments: of how many an interval was shown, and held; bounds alike."""

    num_experiments: int
    shown: int
    held: int
    bounded: int
    within: int


def coverage(  # an option each
    of_runs: Sequence[FloatArray],
    num_runs: int,
    num_experiments: int,
    *,
    percentiles: Callable[[Sequence[FloatArray]], tuple[Percentile, ...]],
    seed: int = SEED,
) -> dict[float, Held]:
    """How often percentiles of experiments of so many runs hold that of all runs together; by the percentile."""
    truth = dict(zip(QUANTILES, quantiles(np.concatenate(of_runs), QUANTILES), strict=True))
    typical = dict(zip(QUANTILES, np.median([quantiles(run, QUANTILES) for run in of_runs], axis=0), strict=True))
    counts = {q: np.zeros(4, dtype=np.int64) for q in QUANTILES}
    places = np.random.default_rng(seed).integers(0, len(of_runs), (num_experiments, num_runs))
    for of_experiment in places.tolist():
        for one in percentiles([of_runs[place] for place in of_experiment]):
            shown, bound = one.interval, one.typical_bound
            counts[one.q] += (
                shown is not None,
                shown is not None and shown.contains(truth[one.q]),
                bound is not None,
                bound is not None and bound >= typical[one.q],
            )
    return {q: Held(num_experiments, *count.tolist()) for q, count in counts.items()}


def bench_coverage(num_experiments: int = EXPERIMENTS, loads: Sequence[Load] = LOADS) -> Iterator[Figure]:
    """Coverage of the intervals that are shown, and of the bounds of a typical run, by workload and number of runs."""
    for load in loads:
        population = simulated(load)
        for metric, of_runs in population.of_runs.items():
            for num_runs in NUM_RUNS[:2] if metric == "itl" else NUM_RUNS:
                # What is large is drawn less often; of gaps, which are many, what scatters is their runs.
                wanted = num_experiments if metric != "itl" and num_runs < MANY_RUNS else num_experiments // 4
                found = coverage(of_runs, num_runs, wanted, percentiles=partial(shown, load, metric))
                note = f"{num_runs} runs of {load.name} (busy {population.busy:.3f}), {wanted:,} experiments"
                for q, held in found.items():
                    yield from _lines(f"{metric} p{100 * q:.0f}", held, note)


def shown(load: Load, metric: str, samples: Sequence[FloatArray]) -> tuple[Percentile, ...]:
    """The percentiles of an experiment, as a report has them."""
    is_open = load.per_s is not None and metric in QUEUED
    if metric == "session":
        return session_percentiles(samples, "runs", is_open)
    num_sessions = load.sessions * len(samples) if metric in QUEUED else None
    return percentiles_of(samples, "runs", is_open, num_sessions)


def _lines(name: str, held: Held, note: str) -> Iterator[Figure]:
    if held.shown:
        error = math.sqrt(DEFAULT_LEVEL * (1 - DEFAULT_LEVEL) / held.shown)
        beside = f"shown in {held.shown / held.num_experiments:.1%}, Monte Carlo error {error:.3f}; {note}"
        yield Figure(f"coverage, interval of {name}", f"{held.held / held.shown:.3f}", f"{DEFAULT_LEVEL}", beside)
    else:
        yield Figure(f"coverage, interval of {name}", "not shown", "", note)
    if held.bounded:
        share = held.within / held.bounded
        yield Figure(f"coverage, typical run of {name}", f"{share:.3f}", f">= {CONFIDENCE}", note)
