"""Simulates a plan on a server with paged KV memory, step by step in plain Python.

Exact integers, no randomness, no I/O. Raises PlanError when a request does not fit the server.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, field
from itertools import repeat

import numpy as np

from harness.compiled.records import IntArray, record_as_dict, records_from
from harness.engine import DECODE, CostModel, EngineConfig, Step
from harness.engine.paged import PagedScheduler
from harness.engine.scheduler import CALLERS, STEP_KINDS
from harness.plan import BlockKeys, Plan, RequestPlan, SessionPlan
from harness.plan.event_queue import LEAVES, EventQueue
from harness.sim.kernel import arrays as layout

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


@dataclass
class PagedOutcome:
    """What a plan did on a server. rows: in the order of the plan. steps: the fields of ``StepRecord``, one row a step.

    evicted: blocks with content that were used again, by start of the step. chunk_wait_ns: time that parts of prompts
    added to steps, once for each request that decoded in them.
    """

    rows: dict[tuple[int, int], _Row]
    histogram: list[int]
    steps: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])
    evicted: Counter[int] = field(default_factory=Counter[int])
    decode_ns: int = 0
    other_ns: int = 0
    chunk_wait_ns: int = 0
    computed_tokens: int = 0
    end_ns: int = 0

    @property
    def totals(self) -> tuple[int, ...]:
        """The fields of ``PlanTotals``, in its order."""
        rows, num_decode_steps = self.rows.values(), sum(self.histogram)
        return (
            self.decode_ns,
            self.other_ns,
            self.chunk_wait_ns,
            self.end_ns,
            num_decode_steps,
            len(self.steps) - num_decode_steps,
            self.evicted.total(),
            self.computed_tokens,
            sum(row.cached_tokens for row in rows),
            sum(row.preemptions for row in rows),
            len(self.steps),
            self.evicted.total(),
            -1,
        )


class _Run:
    def __init__(self, plan: Plan, config: EngineConfig, cost_model: CostModel, noise: Iterator[int]) -> None:
        self._plan, self._client_events, self._costs, self._noise = plan, EventQueue(plan), cost_model, noise
        self._scheduler = PagedScheduler(config.paged, cost_model)
        self._keys = BlockKeys(plan, config.block_tokens)
        self._names = [(session.index, place) for session in plan.sessions for place in range(len(session.requests))]
        self._handles = {name: handle for handle, name in enumerate(self._names)}
        self._num_tokens = Counter[tuple[int, int]]()
        self._leaves_by_tokens = any(request.abort_after_tokens for request in plan.requests)
        self.outcome = PagedOutcome({name: _Row() for name in self._names}, [0] * (config.max_num_seqs + 1))

    def play(self) -> PagedOutcome:
        now_ns, scheduler = 0, self._scheduler
        while True:
            self._act_until(now_ns)
            if not scheduler.has_work:
                if self._client_events.next_ns is None:
                    break
                now_ns = max(now_ns, self._client_events.next_ns)
                continue
            evicted = scheduler.pool.num_evicted
            step = scheduler.schedule()
            duration_ns = step.duration_ns + step.duration_ns * next(self._noise) // 1_000_000
            step = step._replace(duration_ns=duration_ns)
            self._record(step, now_ns, scheduler.pool.num_evicted - evicted)
            now_ns += step.duration_ns
            # Clients that leave during the step get none of its tokens.
            self._act_until(now_ns, is_step_over=True)
            self._finish(step, now_ns)
        self.outcome.end_ns = now_ns
        return self.outcome

    def _act_until(self, now_ns: int, *, is_step_over: bool = False) -> None:
        for event in self._client_events.events(now_ns, is_step_over=is_step_over):
            name = (event.session, event.request)
            if event.what == LEAVES:
                self._leave(name, event.at_ns)
                continue
            planned = self._plan.request(*name)
            self.outcome.rows[name].arrival_ns = event.at_ns
            keys = self._keys.stream(*name)
            self._scheduler.submit(self._handles[name], planned.prompt_tokens, planned.generate_tokens, keys)

    def _record(self, step: Step, start_ns: int, num_evicted: int) -> None:
        outcome, rows = self.outcome, self.outcome.rows
        for admission in step.admissions:
            row = rows[self._names[admission.request]]
            if row.admitted_ns == NOT_YET:
                row.admitted_ns, row.cached_tokens = start_ns, admission.cached_tokens
                # With paged memory a hash that is found is a block that is there.
                row.hash_hit_tokens = admission.cached_tokens
        for handle in step.preempted:
            rows[self._names[handle]].preemptions += 1
        if num_evicted:
            outcome.evicted[start_ns] += num_evicted
        is_decode = step.kind == DECODE
        computed_tokens = NOT_YET if is_decode else step.computed_tokens
        kind, place = STEP_KINDS.index(step.kind), (step.num_seqs, step.bucket, 1, -1, -1)
        outcome.steps.append((start_ns, kind, *place, computed_tokens, step.duration_ns))
        if is_decode:
            outcome.decode_ns += step.duration_ns
            outcome.histogram[step.num_seqs] += 1
            return
        outcome.other_ns += step.duration_ns
        outcome.computed_tokens += step.computed_tokens
        num_decoding = sum(step.tokens) - step.computed_tokens
        outcome.chunk_wait_ns += num_decoding * self._costs.chunked_step_ns(0, 0, 0, step.computed_tokens)

    def _finish(self, step: Step, end_ns: int) -> None:
        rows = self.outcome.rows
        finished = self._scheduler.finish_step()
        received: list[tuple[int, int]] = []
        for handle in step.requests:
            name = self._names[handle]
            row = rows[name]
            if handle in step.unfinished or row.completed_ns != NOT_YET:
                continue
            self._num_tokens[name] += 1
            received.append(name)
            if row.first_token_ns == NOT_YET:
                row.first_token_ns = end_ns
        for handle in finished:
            rows[self._names[handle]].completed_ns = end_ns
            self._client_events.over(*self._names[handle], end_ns)
        if self._leaves_by_tokens:
            self._leave_with_enough(received, end_ns)

    def _leave_with_enough(self, received: Iterable[tuple[int, int]], end_ns: int) -> None:
        for name in self._client_events.with_enough((*name, self._num_tokens[name]) for name in received):
            self._leave(name, end_ns)
            self._client_events.over(*name, end_ns)

    def _leave(self, name: tuple[int, int], at_ns: int) -> None:
        row = self.outcome.rows[name]
        self._scheduler.abort(self._handles[name])
        row.completed_ns, row.aborted_tokens = at_ns, self._num_tokens[name]


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
    places, played = noise.tolist(), list[PagedOutcome]()
    for place, (plan, cost_model) in enumerate(zip(plans, cost_models, strict=True)):
        chosen = random.Random(noise_seeds[place] if noise_seeds else 0)
        played.append(_Run(plan, config, cost_model, (chosen.choice(places) for _ in repeat(None))).play())
    last = played[-1]
    # A block belongs to no request.
    evictions = [(at_ns, -1, _BY_REQUEST, -1, -1) for at_ns in last.evicted.elements()]
    return layout.Outcome(
        requests=records_from(
            layout.RequestResult, [astuple(row) for outcome in played for row in outcome.rows.values()]
        ),
        histogram=np.array([outcome.histogram for outcome in played], dtype=np.int64),
        totals=records_from(layout.PlanTotals, [outcome.totals for outcome in played]),
        steps=records_from(layout.StepRecord, last.steps),
        evictions=records_from(layout.EvictionRecord, evictions),
    )


def plans_of(arrays: layout.PlanArrays) -> list[Plan]:
    """The plans in these tables. Names of blocks are the numbers of their chains, which are equal where those are."""
    return [_plan_of(arrays, place) for place in range(len(arrays.plans))]


def _plan_of(arrays: layout.PlanArrays, place: int) -> Plan:
    plan = record_as_dict(arrays.plans, place)
    first = plan["first_session"]
    rows = [record_as_dict(arrays.sessions, first + session) for session in range(plan["num_sessions"])]
    before: list[list[int]] = [[] for _ in rows]
    for session, row in enumerate(rows):
        for follower in arrays.followers[row["first_follower"] :][: row["num_followers"]].tolist():
            before[follower].append(session)
    return Plan(
        source="simulated",
        seed=0,
        replicate=0,
        treatment="as-drawn",
        shared_prefix_tokens=plan["shared_prefix"],
        token_id_range=(0, 2),
        sessions=tuple(_session_of(arrays, session, row, before[session]) for session, row in enumerate(rows)),
        block_tokens=plan["named_tokens"],
    )


def _session_of(arrays: layout.PlanArrays, index: int, row: dict[str, int], before: Sequence[int]) -> SessionPlan:
    after = row["after"]
    requests = arrays.requests[row["first_request"] :][: row["num_requests"]]
    columns = ("keep", "new", "generate", "wait_ns", "abort_ns", "abort_tokens")
    return SessionPlan(
        index,
        row["start_ns"],
        None if after < 0 else after,
        None if row["continues"] < 0 else row["continues"],
        tuple(
            RequestPlan(keep, new, generate, wait_ns, abort_after_ns=abort_ns, abort_after_tokens=abort_tokens)
            for keep, new, generate, wait_ns, abort_ns, abort_tokens in zip(
                *(requests[name].tolist() for name in columns), strict=True
            )
        ),
        also_after=tuple(session for session in before if session != after),
        blocks=tuple(arrays.names[row["first_name"] :][: row["num_names"]].tolist()),
    )
