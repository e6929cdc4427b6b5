"""Simulates a plan on a server with paged KV memory, step by step in plain Python.

Exact integers, no randomness, no I/O. Raises PlanError when a request does not fit the server.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from itertools import repeat

import numpy as np

from harness.model.compiled.records import IntArray, records_from
from harness.model.engine import DECODE, CostModel, EngineConfig, Step
from harness.model.engine.paged import PagedScheduler
from harness.model.engine.scheduler import CALLERS, STEP_KINDS
from harness.model.plan import BlockKeys, Plan
from harness.model.plan.event_queue import ClientEvent, VirtualClients
from harness.model.sim.kernel import arrays as layout

NOT_YET = -1
_BY_REQUEST = CALLERS.index("request")


@dataclass(slots=True, eq=False)
class _Row:
    """One request of the plan: the fields of ``RequestResult``, in its order."""

    cached_tokens: int = 0
    arrival_ns: int = NOT_YET
    admitted_ns: int = NOT_YET
    first_token_ns: int = NOT_YET
    completed_ns: int = NOT_YET
    hash_hit_tokens: int = 0
    preemptions: int = 0
    aborted_tokens: int = NOT_YET


class _Run(VirtualClients):
    """A plan on a server, and what it did.

    rows: in the order of the plan, a request's handle is its place. steps: the fields of ``StepRecord``, one row a
    step. evicted: blocks with content that were used again, by start of the step. chunk_wait_ns: time that parts of
    prompts added to steps, once for each request that decoded in them.
    """

    def __init__(self, plan: Plan, config: EngineConfig, cost_model: CostModel, noise: Iterator[int]) -> None:
        super().__init__(plan)
        self._costs, self._noise = cost_model, noise
        self._scheduler = PagedScheduler(config.paged, cost_model)
        self._keys = BlockKeys(plan, config.block_tokens)
        self._names = [(session.index, place) for session in plan.sessions for place in range(len(session.requests))]
        self._handles = {name: handle for handle, name in enumerate(self._names)}
        self._num_tokens = Counter[int]()
        self.rows = [_Row() for _ in self._names]
        self.histogram = [0] * (config.max_num_seqs + 1)
        self.steps: list[tuple[int, ...]] = []
        self.evicted = Counter[int]()
        self.decode_ns = self.other_ns = self.chunk_wait_ns = self.computed_tokens = self.end_ns = 0

    @property
    def totals(self) -> tuple[int, ...]:
        """The fields of ``PlanTotals``, in its order."""
        num_decode_steps = sum(self.histogram)
        return (
            self.decode_ns,
            self.other_ns,
            self.chunk_wait_ns,
            self.end_ns,
            num_decode_steps,
            len(self.steps) - num_decode_steps,
            self.evicted.total(),
            self.computed_tokens,
            sum(row.cached_tokens for row in self.rows),
            sum(row.preemptions for row in self.rows),
            len(self.steps),
            self.evicted.total(),
            -1,
        )

    def play(self) -> _Run:
        now_ns, scheduler = 0, self._scheduler
        while True:
            self.act_until(now_ns)
            if not scheduler.has_work:
                if self.client_events.next_ns is None:
                    break
                now_ns = max(now_ns, self.client_events.next_ns)
                continue
            evicted = scheduler.pool.num_evicted
            step = scheduler.schedule()
            duration_ns = step.duration_ns + step.duration_ns * next(self._noise) // 1_000_000
            step = step._replace(duration_ns=duration_ns)
            self._record(step, now_ns, scheduler.pool.num_evicted - evicted)
            now_ns += step.duration_ns
            # Clients that leave during the step get none of its tokens.
            self.act_until(now_ns, is_step_over=True)
            self._finish(step, now_ns)
        self.end_ns = now_ns
        return self

    def send(self, event: ClientEvent) -> None:
        name = (event.session, event.request)
        handle, planned = self._handles[name], self.plan.request(*name)
        self.rows[handle].arrival_ns = event.at_ns
        self._scheduler.submit(handle, planned.prompt_tokens, planned.generate_tokens, self._keys.stream(*name))

    def leave(self, key: tuple[int, int], at_ns: int) -> None:
        handle = self._handles[key]
        self._scheduler.abort(handle)
        row = self.rows[handle]
        row.completed_ns, row.aborted_tokens = at_ns, self._num_tokens[handle]

    def num_tokens(self, key: tuple[int, int]) -> int:
        return self._num_tokens[self._handles[key]]

    def _record(self, step: Step, start_ns: int, num_evicted: int) -> None:
        for admission in step.admissions:
            row = self.rows[admission.request]
            if row.admitted_ns == NOT_YET:
                row.admitted_ns, row.cached_tokens = start_ns, admission.cached_tokens
                # With paged memory a hash that is found is a block that is there.
                row.hash_hit_tokens = admission.cached_tokens
        for handle in step.preempted:
            self.rows[handle].preemptions += 1
        if num_evicted:
            self.evicted[start_ns] += num_evicted
        is_decode = step.kind == DECODE
        computed_tokens = NOT_YET if is_decode else step.computed_tokens
        kind, place = STEP_KINDS.index(step.kind), (step.num_seqs, step.bucket, 1, -1, -1)
        self.steps.append((start_ns, kind, *place, computed_tokens, step.duration_ns))
        if is_decode:
            self.decode_ns += step.duration_ns
            self.histogram[step.num_seqs] += 1
            return
        self.other_ns += step.duration_ns
        self.computed_tokens += step.computed_tokens
        num_decoding = sum(step.tokens) - step.computed_tokens
        chunk_ns = self._costs.chunked_step_ns(0, 0, 0, step.computed_tokens, step.attended_tokens)
        self.chunk_wait_ns += num_decoding * chunk_ns

    def _finish(self, step: Step, end_ns: int) -> None:
        finished = self._scheduler.finish_step()
        received: list[int] = []
        for handle in step.requests:
            row = self.rows[handle]
            if handle in step.unfinished or row.completed_ns != NOT_YET:
                continue
            self._num_tokens[handle] += 1
            received.append(handle)
            if row.first_token_ns == NOT_YET:
                row.first_token_ns = end_ns
        for handle in finished:
            self.rows[handle].completed_ns = end_ns
        self.step_ended([self._names[handle] for handle in finished], (self._names[each] for each in received), end_ns)


def run_paged(
    plans: Iterable[Plan],
    config: EngineConfig,
    cost_models: Sequence[CostModel],
    noise_seeds: Sequence[int] = (),
    noise: IntArray = layout.NO_NOISE,
) -> layout.Outcome:
    """Each plan on a fresh server, at its own costs: the tables that the compiled simulator gives of other rules.

    noise_seeds: one for each plan, see ``CostArrays``; default: no noise.
    """
    places, played = noise.tolist(), list[_Run]()
    for place, (plan, cost_model) in enumerate(zip(plans, cost_models, strict=True)):
        chosen = random.Random(noise_seeds[place] if noise_seeds else 0)
        played.append(_Run(plan, config, cost_model, (chosen.choice(places) for _ in repeat(None))).play())
    last = played[-1]
    # A block belongs to no request.
    evictions = [(at_ns, -1, _BY_REQUEST, -1, -1) for at_ns in last.evicted.elements()]
    return layout.Outcome(
        requests=records_from(layout.RequestResult, [astuple(row) for run in played for row in run.rows]),
        histogram=np.array([run.histogram for run in played], dtype=np.int64),
        totals=records_from(layout.PlanTotals, [run.totals for run in played]),
        steps=records_from(layout.StepRecord, last.steps),
        evictions=records_from(layout.EvictionRecord, evictions),
    )
