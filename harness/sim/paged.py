"""Simulates a plan on a server with paged KV memory, step by step in plain Python.

Exact integers, no randomness, no I/O. Raises PlanError when a request does not fit the server.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from harness.engine import DECODE, CostModel, EngineConfig, Step
from harness.engine.paged import PagedScheduler
from harness.plan import BlockKeys, Plan
from harness.plan.agenda import LEAVES, Agenda

NOT_YET = -1


@dataclass(slots=True, eq=False)
class _Row:
    """One request of the plan, as a row of the result."""

    arrival_ns: int = NOT_YET
    admitted_ns: int = NOT_YET
    first_token_ns: int = NOT_YET
    completed_ns: int = NOT_YET
    cached_tokens: int = 0
    preemptions: int = 0
    aborted_tokens: int = NOT_YET
    num_tokens: int = 0


@dataclass
class PagedOutcome:
    """What a plan did on a server. rows: in the order of the plan. steps: as in ``SimResult.steps``, one row a step.

    evicted: blocks with content that were used again, by start of the step. chunk_wait_ns: time that parts of prompts
    added to steps, once for each request that decoded in them.
    """

    rows: dict[tuple[int, int], _Row]
    histogram: list[int]
    steps: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    evicted: Counter[int] = field(default_factory=Counter[int])
    decode_ns: int = 0
    other_ns: int = 0
    chunk_wait_ns: int = 0
    end_ns: int = 0


class _Run:
    def __init__(self, plan: Plan, config: EngineConfig, cost_model: CostModel) -> None:
        self._plan, self._agenda, self._costs = plan, Agenda(plan), cost_model
        self._scheduler = PagedScheduler(config.paged, cost_model)
        self._keys = BlockKeys(plan, config.block_tokens)
        self._names = [(session.index, place) for session in plan.sessions for place in range(len(session.requests))]
        self._handles = {name: handle for handle, name in enumerate(self._names)}
        self._leaves_by_tokens = any(one.abort_after_tokens for session in plan.sessions for one in session.requests)
        self.outcome = PagedOutcome({name: _Row() for name in self._names}, [0] * (config.max_num_seqs + 1))

    def play(self) -> PagedOutcome:
        now_ns, scheduler = 0, self._scheduler
        while True:
            self._act_until(now_ns)
            if not scheduler.has_work:
                if self._agenda.next_ns is None:
                    break
                now_ns = max(now_ns, self._agenda.next_ns)
                continue
            evicted = scheduler.pool.num_evicted
            step = scheduler.schedule()
            self._record(step, now_ns, scheduler.pool.num_evicted - evicted)
            now_ns += step.duration_ns
            # Clients that leave during the step get none of its tokens.
            self._act_until(now_ns, is_step_over=True)
            self._finish(step, now_ns)
        self.outcome.end_ns = now_ns
        return self.outcome

    def _act_until(self, now_ns: int, *, is_step_over: bool = False) -> None:
        for act in self._agenda.acts(now_ns, is_step_over=is_step_over):
            name = (act.session, act.request)
            if act.what == LEAVES:
                self._leave(name, act.at_ns)
                continue
            planned = self._plan.request(*name)
            self.outcome.rows[name].arrival_ns = act.at_ns
            keys = self._keys.stream(*name)
            self._scheduler.submit(self._handles[name], planned.prompt_tokens, planned.generate_tokens, keys)

    def _record(self, step: Step, start_ns: int, num_evicted: int) -> None:
        outcome, rows = self.outcome, self.outcome.rows
        for admission in step.admissions:
            row = rows[self._names[admission.request]]
            if row.admitted_ns == NOT_YET:
                row.admitted_ns, row.cached_tokens = start_ns, admission.cached_tokens
        for handle in step.preempted:
            rows[self._names[handle]].preemptions += 1
        if num_evicted:
            outcome.evicted[start_ns] += num_evicted
        is_decode = step.kind == DECODE
        outcome.steps.append(
            {
                "start_ns": start_ns,
                "kind": step.kind.lower(),
                "n": step.num_seqs,
                "b": step.bucket if is_decode else None,
                "count": 1,
                "computed_tokens": None if is_decode else step.computed_tokens,
                "duration_ns": step.duration_ns,
            }
        )
        if is_decode:
            outcome.decode_ns += step.duration_ns
            outcome.histogram[step.num_seqs] += 1
            return
        outcome.other_ns += step.duration_ns
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
            row.num_tokens += 1
            received.append(name)
            if row.first_token_ns == NOT_YET:
                row.first_token_ns = end_ns
        for handle in finished:
            rows[self._names[handle]].completed_ns = end_ns
            self._agenda.over(*self._names[handle], end_ns)
        if self._leaves_by_tokens:
            self._leave_with_enough(received, end_ns)

    def _leave_with_enough(self, received: Iterable[tuple[int, int]], end_ns: int) -> None:
        rows = self.outcome.rows
        for name in self._agenda.with_enough((*name, rows[name].num_tokens) for name in received):
            self._leave(name, end_ns)
            self._agenda.over(*name, end_ns)

    def _leave(self, name: tuple[int, int], at_ns: int) -> None:
        row = self.outcome.rows[name]
        self._scheduler.abort(self._handles[name])
        row.completed_ns, row.aborted_tokens = at_ns, row.num_tokens


def play_paged(plan: Plan, config: EngineConfig, cost_model: CostModel) -> PagedOutcome:
    """One plan on one freshly started server with paged rules."""
    return _Run(plan, config, cost_model).play()


def request_table(plan: Plan, outcome: PagedOutcome) -> pa.Table:
    """The table ``SimResult.requests``."""
    rows = list(outcome.rows.items())
    planned = [plan.request(*name) for name, _ in rows]
    columns: dict[str, pa.Array] = {
        "session": pa.array([name[0] for name, _ in rows], pa.int32()),
        "request": pa.array([name[1] for name, _ in rows], pa.int32()),
        "prompt_tokens": pa.array([one.prompt_tokens for one in planned], pa.int32()),
        "generate_tokens": pa.array([one.generate_tokens for one in planned], pa.int32()),
        "cached_tokens": pa.array([row.cached_tokens for _, row in rows], pa.int32()),
        # With paged memory a hash that is found is a block that is there.
        "hash_hit_tokens": pa.array([row.cached_tokens for _, row in rows], pa.int32()),
    }
    for column in ("arrival_ns", "admitted_ns", "first_token_ns", "completed_ns"):
        columns[column] = pa.array([getattr(row, column) for _, row in rows], pa.int64())
    for column in ("preemptions", "aborted_tokens"):
        columns[column] = pa.array([getattr(row, column) for _, row in rows], pa.int32())
    return pa.table(columns)


STEP_SCHEMA = pa.schema(
    [
        ("start_ns", pa.int64()),
        ("kind", pa.string()),
        ("n", pa.int32()),
        ("b", pa.int32()),
        ("count", pa.int64()),
        ("session", pa.int32()),
        ("request", pa.int32()),
        ("computed_tokens", pa.int32()),
        ("duration_ns", pa.int64()),
    ]
)


def step_table(outcome: PagedOutcome) -> pa.Table:
    """The table ``SimResult.steps``; a step of several requests belongs to none of them."""
    return pa.Table.from_pylist(outcome.steps, schema=STEP_SCHEMA)


def eviction_table(outcome: PagedOutcome) -> pa.Table:
    """The table ``SimResult.evictions``: a row for each block whose content is gone; blocks belong to no request."""
    instants = list(outcome.evicted.elements())
    nothing = pa.nulls(len(instants), pa.int32())
    callers = pa.array(["request"] * len(instants), pa.string())
    return pa.table(
        {
            "at_ns": pa.array(instants, pa.int64()),
            "slot": nothing,
            "caller": callers,
            "session": nothing,
            "request": nothing,
        }
    )
