"""How fast servers with paged KV memory, and replicas, are simulated on one core; what a request takes of memory.

Counts CPU time of this process, since machines are shared. Judges nothing.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any, cast

import numpy as np

from benchmarks.figure import Figure, cpu_s, in_turns, per_cpu_s
from benchmarks.simulator import REPEATS, SIZES, TRACE_REQUESTS, closed_population, made_up_arrival, trace_of
from harness.extras.replicas.policies import policy_named
from harness.judge.prereg import predict_experiment
from harness.model.engine.config import EngineConfig
from harness.model.engine.cost import CostModel, load_cost_model
from harness.model.engine.paged_state import new_paged_state
from harness.model.experiment import build_plan, resolve
from harness.model.plan.model import Plan
from harness.model.sim.kernel.arrays import new_outcome, new_scratch
from harness.model.sim.plans import plan_arrays
from harness.model.sim.simulate import run_batch
from harness.model.spec import ServerSpec, load_experiment
from harness.model.traces.lower import Lowering, sessions_of
from harness.shipped import find_shipped
from harness.stacks.rbln.rules.kv_rules import PAGED
from tests.support.naive_replicas import NaiveReplicas

GPU_EXPERIMENTS = ("gpu-capture-sizes", "gpu-prefix-caching", "gpu-kv-memory", "gpu-max-num-seqs")
DRAWS = 20
MOST_BYTES, MOST_BLOCK_BYTES = 300, 64
COSTS = "emulated-gpu"
# So many sessions of a recorded trace the naive walk takes: it needs milliseconds for each.
NAIVE_SESSIONS = 60
STARTS = """
import time
from harness.model.sim.simulate import run_batch
from harness.runner import machine_code
began = time.process_time()
machine_code.PARTS["paged simulator"].warm_up()
print(time.process_time() - began)
"""


def naive_walk(plan: Plan, server: ServerSpec, costs: CostModel) -> int:
    """The second opinion on a server without a router; when its last step ended, ns."""
    return NaiveReplicas(plan, server, costs, policy_named("round-robin", 1)).play()


def bench_paged() -> Iterator[Figure]:
    """Everything this file measures; about 90 s of one core."""
    yield from experiments()
    yield replicas()
    yield recorded()
    yield linearity()
    yield from machine_code()


def experiments() -> Iterator[Figure]:
    """Requests a CPU second over all draws of the shipped experiments, predictions and their figures included."""
    for name in GPU_EXPERIMENTS:
        planned = resolve(load_experiment(find_shipped("experiments", name, what="experiment")))
        requests = sum(run.plan.num_requests for run in planned)

        def draw(planned: Any = planned, requests: int = requests) -> float:
            return DRAWS * requests / cpu_s(lambda: predict_experiment(planned, num_draws=DRAWS))

        def naive(first: Any = planned.runs[0]) -> float:
            return first.plan.num_requests / cpu_s(lambda: naive_walk(first.plan, first.server, first.cost_model))

        draw()
        measured = in_turns(draw, naive, REPEATS, "the naive walk of its first run", "more")
        note = f"{len(planned)} runs, {DRAWS} draws of each, {requests // len(planned)} requests a run"
        yield Figure(name, f"{max(measured.samples):,.0f} requests/s", ">= 20,000 /s", note, measured)


def replicas() -> Figure:
    """The same of two replicas behind four policies."""
    planned = resolve(load_experiment(find_shipped("experiments", "does-affinity-pay", what="experiment")))
    requests = sum(run.plan.num_requests for run in planned)

    def draw() -> float:
        return DRAWS * requests / cpu_s(lambda: predict_experiment(planned, num_draws=DRAWS))

    draw()
    rate = max(draw() for _ in range(REPEATS))
    return Figure(
        "does-affinity-pay", f"{rate:,.0f} requests/s", "", "replicas with slots, 4 policies, 20 draws of each"
    )


def recorded() -> Figure:
    """A made-up production trace of as many requests as Mooncake's conversation trace."""
    rng = random.Random(20260910)
    recordings = [made_up_arrival(rng, place) for place in range(TRACE_REQUESTS)]
    how = Lowering(shrink=4, max_context_tokens=30_000, arrivals="recorded")
    sessions, block_tokens, _ = sessions_of(recordings, 512, how, rng)
    server = ServerSpec(rules=PAGED, cost_model=COSTS, max_num_seqs=64, slot_tokens=32_768, num_gpu_blocks=20_000)
    plan, head = trace_of(sessions, block_tokens), trace_of(sessions[:NAIVE_SESSIONS], block_tokens)
    arrays, config, costs = plan_arrays([plan]), EngineConfig.from_server(server), load_cost_model(COSTS)
    outcome = run_batch(arrays, config, costs)
    steps = int(outcome.totals["decode_steps"][0] + outcome.totals["prefills"][0])
    measured = in_turns(
        lambda: plan.num_requests / cpu_s(lambda: run_batch(arrays, config, costs)),
        lambda: head.num_requests / cpu_s(lambda: naive_walk(head, server, costs)),
        REPEATS,
        f"the naive walk of its first {head.num_requests} requests",
        "more",
    )
    rate = max(measured.samples)
    note = f"{plan.num_requests:,} requests, {steps:,} steps, {1e9 * plan.num_requests / rate / steps:.0f} ns a step"
    return Figure("a recorded trace, paged", f"{rate:,.0f} requests/s", ">= 100,000 /s", note, measured)


def linearity() -> Figure:
    """Time per request in one plan of up to a million requests of ten users, and the memory that each takes."""
    server = ServerSpec(rules=PAGED, cost_model=COSTS, max_num_seqs=8, num_gpu_blocks=4_000)
    config, costs = EngineConfig.from_server(server), load_cost_model(COSTS)
    arrays = [plan_arrays([build_plan(closed_population(size), 1, 0)]) for size in SIZES]
    spent_s = np.array(
        [
            [1 / per_cpu_s(lambda plans=plans: len(run_batch(plans, config, costs).requests), 0.02) for plans in arrays]
            for _ in range(REPEATS)
        ]
    )
    slopes = 1 + np.polyfit(np.log(SIZES), np.log(spent_s.T), 1)[0]
    error = slopes.std(ddof=1) / REPEATS**0.5
    state = new_paged_state(config, SIZES[-1])
    of_requests = (state.rows, *new_scratch(arrays[-1]), *new_outcome(arrays[-1], config))
    of_blocks = (state.blocks, state.buckets)
    bytes_each = sum(cast("Any", table).nbytes for table in of_requests) / SIZES[-1]
    block_bytes = sum(cast("Any", table).nbytes for table in of_blocks) / len(state.blocks)
    return Figure(
        "us per request, paged",
        ", ".join(f"{each * 1e6:.2f}" for each in np.median(spent_s, axis=0)),
        "exponent <= 1",
        f"plans of {', '.join(f'{size:,}' for size in SIZES)} requests; exponent {slopes.mean():.3f} +- {error:.3f}"
        f" (standard error of {REPEATS}); {bytes_each:.0f} bytes a request beside the plan (mark: <= {MOST_BYTES}),"
        f" {block_bytes:.0f} a block (mark: <= {MOST_BLOCK_BYTES})",
    )


def machine_code() -> Iterator[Figure]:
    """CPU seconds of a process that compiles simulator and scheduler, and of one that finds the machine code."""
    with TemporaryDirectory() as folder:
        start = partial(
            subprocess.run,
            [sys.executable, "-c", STARTS],
            env={**os.environ, "NUMBA_CACHE_DIR": folder},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            check=True,
            text=True,
        )
        made_s = float(start().stdout)
        yield Figure("machine code of paged rules, made", f"{made_s:.1f} s", "<= 20 s")
        found_s = min(float(start().stdout) for _ in range(REPEATS))
        yield Figure("machine code of paged rules, found", f"{found_s:.2f} s", "<= 0.3 s")
