"""Predictions of several replicas behind a router: perturbed plans in virtual time, in the tables of one server."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from harness.extras.replicas.policies import policy_named
from harness.extras.replicas.simulated import check_simulated_router
from harness.extras.replicas.virtual import ReplicaRun
from harness.measure.records.schema import values_of
from harness.model.compiled.records import records_from
from harness.model.engine import EngineConfig
from harness.model.sim.kernel import arrays as layout
from harness.model.sim.paged import NOT_YET, noisy, result_row
from harness.model.sim.plans import check_slots, plans_of
from harness.model.sim.predict.draws import Draws
from harness.model.spec import ServerSpec


@dataclass(frozen=True, slots=True)
class DrawsOnReplicas:
    """Simulates draws on the replicas of a server, as ``run_draws`` does on one; SpecError for a router of its own."""

    server: ServerSpec

    def __post_init__(self) -> None:
        check_simulated_router(self.server)

    def __call__(self, draws: Draws, config: EngineConfig) -> layout.Outcome:
        """Sums over all replicas, and the requests of each plan, in the order of ``draws.arrays``."""
        check_slots(draws.arrays, config)
        played = [self._played(draws, place, seed) for place, seed in enumerate(draws.noise_seeds)]
        return layout.Outcome(
            requests=records_from(layout.RequestResult, [row for run in played for row in _requests(run)]),
            histogram=np.array([_histogram(run, config) for run in played], dtype=np.int64),
            totals=records_from(layout.PlanTotals, [_totals(run, config) for run in played]),
            steps=records_from(layout.StepRecord, []),
            evictions=records_from(layout.EvictionRecord, []),
        )

    def _played(self, draws: Draws, place: int, seed: int) -> ReplicaRun:
        (plan,) = plans_of(draws.arrays._replace(plans=draws.arrays.plans[place : place + 1]))
        count = self.server.num_replicas
        # Each replica has noise of its own.
        each = [noisy(draws.noise, seed + replica) for replica in range(count)]
        router = policy_named(self.server.door.policy, count)
        run = ReplicaRun(
            plan, self.server.replica, draws.models[place], router, [one for one in each if one is not None]
        )
        run.play()
        return run


def _requests(run: ReplicaRun) -> list[tuple[int, ...]]:
    rows: list[tuple[int, ...]] = []
    for session, request, done_ns, status in values_of(run.requests_table(), "session", "request", "done_ns", "status"):
        sent = run.requests.get((session, request))
        left_after = NOT_YET if sent is None or status == "ok" else sent.num_generated
        rows.append(result_row(sent, NOT_YET if done_ns is None else done_ns, left_after))
    return rows


def _histogram(run: ReplicaRun, config: EngineConfig) -> list[int]:
    """Decode steps of all replicas by n."""
    counts = [0] * (config.max_num_seqs + 1)
    for replica in run.replicas:
        for (num_seqs, _bucket), count in replica.batches.items():
            counts[num_seqs] += count
    return counts


def _totals(run: ReplicaRun, config: EngineConfig) -> tuple[int, ...]:
    """The fields of ``PlanTotals``, in its order."""
    replicas = run.replicas
    num_decode_steps = sum(replica.batches.total() for replica in replicas)
    others = [step for replica in replicas for step in replica.others if step.num_seqs]
    evicted = sum(replica.num_evicted for replica in replicas)
    return (
        sum(replica.decode_ns for replica in replicas),
        sum(replica.prefill_ns for replica in replicas),
        sum(replica.wait_ns for replica in replicas),
        run.end_ns,
        num_decode_steps,
        len(others),
        evicted,
        sum(step.computed_tokens for step in others),
        # With slots a prompt that is computed again reuses again.
        sum(each.cached_tokens for each in (run.requests.values() if config.rule_set.is_paged else others)),
        sum(request.num_preemptions for request in run.requests.values()),
        0,
        0,
        NOT_YET,
    )
