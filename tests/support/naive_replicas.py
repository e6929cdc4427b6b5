"""A second opinion on replicas behind a router: the engine loop in Python, read into the simulator's tables.

``python -m tests.support.naive_replicas STEPS [FIRST_SEED]`` compares at least so many steps; exit status 0 means no
difference.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from harness.compiled.records import records_from
from harness.extras.replicas.plans import plans_of
from harness.extras.replicas.policies import POLICIES, policy_named
from harness.extras.replicas.predicted import DrawsOnReplicas
from harness.measure.records.schema import values_of
from harness.model.engine import EngineConfig
from harness.model.sim.draws import Draws, noise_table
from harness.model.sim.kernel import arrays as layout
from harness.model.sim.plans import one_plan, plan_arrays
from harness.model.spec import ServerSpec
from harness.model.spec.server import RETENTION_KEYS
from harness.stacks.rbln.rules.kv_rules import PAGED
from tests.support.counted_replicas import CountedReplicas
from tests.support.naive_paged_run import NOT_YET, noisy, result_row
from tests.support.paged_in_steps import LONGEST, drawn_costs, drawn_plan


def replicas_naively(
    server: ServerSpec, draws: Draws, config: EngineConfig, made: type[CountedReplicas] = CountedReplicas
) -> layout.SimOutcome:
    """What ``DrawsOnReplicas`` gives: sums over all replicas, and the requests of each plan, in order."""
    played = [_played(server, draws, place, seed, made) for place, seed in enumerate(draws.noise_seeds)]
    return layout.SimOutcome(
        requests=records_from(layout.RequestResult, [row for run in played for row in _requests(run)]),
        histogram=np.array([_histogram(run, config) for run in played], dtype=np.int64),
        totals=records_from(layout.PlanTotals, [_totals(run, config) for run in played]),
        steps=records_from(layout.StepRecord, []),
        evictions=records_from(layout.EvictionRecord, []),
    )


def _played(server: ServerSpec, draws: Draws, place: int, seed: int, made: type[CountedReplicas]) -> CountedReplicas:
    (plan,) = plans_of(one_plan(draws.arrays, place))
    router = policy_named(server.routing.policy, server.num_replicas)
    run = made(plan, server.replica, draws.models[place], router)
    # Each replica has noise of its own, which is drawn by the number of the step, one by one.
    for replica, core in enumerate(run.cores):
        core.lasting_ns = noisy(draws.noise, seed + replica)
    run.takes_equal_steps = made.takes_equal_steps and len(draws.noise) == 1
    run.play()
    return run


def _requests(run: CountedReplicas) -> list[tuple[int, ...]]:
    rows: list[tuple[int, ...]] = []
    for session, request, done_ns, status in values_of(run.requests_table(), "session", "request", "done_ns", "status"):
        sent = run.requests.get((session, request))
        left_after = NOT_YET if sent is None or status == "ok" else sent.num_generated
        rows.append(result_row(sent, NOT_YET if done_ns is None else done_ns, left_after))
    return rows


def _histogram(run: CountedReplicas, config: EngineConfig) -> list[int]:
    """Decode steps of all replicas by n."""
    counts = [0] * (config.max_num_seqs + 1)
    for replica in run.replicas:
        for (num_seqs, _bucket), count in replica.batches.items():
            counts[num_seqs] += count
    return counts


def _totals(run: CountedReplicas, config: EngineConfig) -> tuple[int, ...]:
    """The fields of ``PlanTotals``, in its order."""
    replicas = run.replicas
    others = [step for replica in replicas for step in replica.others if step.num_seqs]
    return (
        sum(replica.decode_ns for replica in replicas),
        sum(replica.prefill_ns for replica in replicas),
        sum(replica.wait_ns for replica in replicas),
        run.end_ns,
        sum(replica.batches.total() for replica in replicas),
        len(others),
        sum(replica.num_evicted for replica in replicas),
        sum(step.computed_tokens for step in others),
        # With slots a prompt that is computed again reuses again.
        sum(each.cached_tokens for each in (run.requests.values() if config.rule_set.is_paged else others)),
        sum(request.num_preemptions for request in run.requests.values()),
        0,
        0,
        NOT_YET,
    )


class Case(NamedTuple):
    """Drawn plans on drawn replicas."""

    server: ServerSpec
    draws: Draws

    @property
    def config(self) -> EngineConfig:
        return EngineConfig.from_server(self.server.replica)

    def simulated(self) -> layout.SimOutcome:
        """What the compiled simulator makes of it."""
        return DrawsOnReplicas(self.server)(self.draws, self.config)


def drawn_case(seed: int) -> Case:
    """The case of a seed: both kinds of memory, all policies, clients that leave, steps with and without noise.

    Not the rules of the paper: the engine loop knows a session by its first whole block, the simulator by its number.
    """
    chosen = random.Random(f"replicas {seed}")
    is_paged, limit = chosen.random() < 0.5, chosen.choice((1, 2, 3, 6, 8))
    memory: dict[str, object] = (
        {
            "rules": chosen.choice((PAGED, "vllm-paged-0.30")),
            "cost_model": "emulated-gpu",
            "num_gpu_blocks": 1 + chosen.choice((32, 33, 40, 64, 300)),
            "async_scheduling": chosen.random() < 0.5,
            "keep_kv_s": chosen.choice((None, None, 0.001)),
            "offload_blocks": chosen.choice((None, None, 40)),
        }
        if is_paged
        else {
            "rules": chosen.choice(("vendor-0.11.1", "vendor-0.12.0", "upstream-lru")),
            "kv_slots": limit + chosen.choice((0, 0, 1, 3)),
        }
    )
    if not chosen.random() < 0.85:
        memory = {"prefix_caching": False, **{key: memory[key] for key in memory if key not in RETENTION_KEYS}}
    server = ServerSpec.model_validate(
        {
            "replicas": chosen.choice((1, 2, 2, 3)),
            "router": {"policy": chosen.choice(list(POLICIES))},
            "max_num_seqs": limit,
            "decode_buckets": sorted({1, limit}),
            "slot_tokens": LONGEST,
            **memory,
        }
    )
    costs, plans = drawn_costs(chosen), [drawn_plan(chosen) for _ in range(chosen.choice((1, 2)))]
    models = [costs.scaled(chosen.uniform(0.5, 2), 1) for _ in plans]
    seeds = [chosen.randrange(1 << 32) for _ in plans]
    return Case(server, Draws(plan_arrays(plans), models, seeds, noise_table(chosen.choice((0, 0.01)))))


def differences(case: Case, made: type[CountedReplicas] = CountedReplicas) -> Iterator[str]:
    """Where the two do not agree: table by table, the first differing row. made: the loop that is compared.

    The engine loop does not say of which tokens of a slot a hash was found.
    """
    ours, naive = case.simulated(), replicas_naively(*case, case.config, made)
    for name in ("requests", "histogram", "totals"):
        tables = [getattr(outcome, name) for outcome in (ours, naive)]
        if name == "requests":
            for table in tables:
                table["hash_hit_tokens"][:] = 0
        for place, (mine, wanted) in enumerate(zip(*(table.tolist() for table in tables), strict=True)):
            if mine != wanted:
                yield f"{name} {place}: {mine} for {wanted}"
                break


def main(num_steps: str = "100000", first_seed: str = "0") -> int:
    """Compare at least so many steps; 1 when anything differs."""
    seen, seed = Counter[str](), int(first_seed)
    while seen["steps"] < int(num_steps):
        case = drawn_case(seed)
        for difference in differences(case):
            print(f"seed {seed}: {difference}", flush=True)
            return 1
        outcome = case.simulated()
        seen["steps"] += int(outcome.totals["decode_steps"].sum() + outcome.totals["prefills"].sum())
        seen["preemptions"] += int(outcome.totals["preemptions"].sum())
        seen["evictions"] += int(outcome.totals["evictions"].sum())
        seen["left"] += int((outcome.requests["aborted_tokens"] >= 0).sum())
        seen[case.server.routing.policy] += 1
        seen["paged" if case.server.is_paged else "slots"] += 1
        seed += 1
    print(dict(seen))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
