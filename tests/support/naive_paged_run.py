"""A plan on the engine loop with the naive scheduler of paged KV memory, read into the simulator's tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import count

import numpy as np

from harness.compiled.records import IntArray, records_from
from harness.extras.replicas.plans import plans_of
from harness.model.engine import DECODE, CostModel, EngineConfig, Step
from harness.model.engine.core import EngineCore, EngineRequest, StepEnd, StepStart
from harness.model.engine.scheduler import CALLERS, STEP_KINDS
from harness.model.plan.event_queue import ClientEvent
from harness.model.plan.model import Plan
from harness.model.sim.driver import UnreadRequests, VirtualDriver
from harness.model.sim.kernel import arrays as layout
from tests.support.naive_paged import NaivePagedScheduler

_BY_REQUEST = CALLERS.index("request")


NOT_YET = -1


def result_row(request: EngineRequest | None, over_ns: int, left_after: int) -> tuple[int, ...]:
    """The fields of ``RequestResult``, in its order. left_after: tokens that a client had when it left."""
    if request is None:
        return (0, NOT_YET, NOT_YET, NOT_YET, NOT_YET, 0, 0, NOT_YET)
    return (
        request.cached_tokens,
        request.arrival_ns,
        request.scheduled_ns,
        request.first_token_ns,
        over_ns,
        # With paged memory a hash that is found is a block that is there; of slots no figure asks for it.
        request.cached_tokens,
        request.num_preemptions,
        left_after,
    )


def noisy(noise: IntArray, seed: int) -> Callable[[int], int] | None:
    """How long a step of so many ns lasts: longer by one of these millionths, drawn by a hash of the step's number.

    The same as ``events.noisy_ns``, for steps that follow each other.
    """
    if len(noise) == 1:
        return None
    millionths, numbers = noise.tolist(), count(seed)

    def lasting_ns(duration_ns: int) -> int:
        millionth = millionths[layout.noise_place(next(numbers), len(millionths))]
        return duration_ns + duration_ns * millionth // 1_000_000

    return lasting_ns


class NaiveRun(VirtualDriver):
    """A plan on a server, and what it did.

    A request's handle is its place in the plan. steps: the fields of ``StepRecord``, one row a step. evicted: blocks
    with content that were used again, by start of the step. chunk_wait_ns: time that parts of prompts added to steps,
    once for each request that decoded in them. lasting_ns: see ``EngineCore``.
    """

    def __init__(
        self, plan: Plan, config: EngineConfig, costs: CostModel, lasting_ns: Callable[[int], int] | None
    ) -> None:
        scheduler = NaivePagedScheduler(config.paged, costs)
        super().__init__(plan, [EngineCore(scheduler, lasting_ns=lasting_ns)])
        self._costs, self._pool = costs, scheduler.pool
        self._unread = UnreadRequests(plan, config)
        names = [(session.index, place) for session in plan.sessions for place in range(len(session.requests))]
        self._places = {name: place for place, name in enumerate(names)}
        self._requests = dict[int, EngineRequest]()
        self._over_ns, self._left_after = dict[int, int](), dict[int, int]()
        self._num_evicted = 0
        self.histogram = [0] * (config.max_num_seqs + 1)
        self.steps: list[tuple[int, ...]] = []
        self.evicted = Counter[int]()
        self.decode_ns = self.other_ns = self.chunk_wait_ns = self.computed_tokens = 0

    @property
    def rows(self) -> list[tuple[int, ...]]:
        """The fields of ``RequestResult``, in its order; one row a request, in the order of the plan."""
        return [self._row(place) for place in self._places.values()]

    def _row(self, place: int) -> tuple[int, ...]:
        over_ns, left_after = (of.get(place, NOT_YET) for of in (self._over_ns, self._left_after))
        return result_row(self._requests.get(place), over_ns, left_after)

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
            sum(request.cached_tokens for request in self._requests.values()),
            sum(request.num_preemptions for request in self._requests.values()),
            len(self.steps),
            self.evicted.total(),
            -1,
        )

    def request_of(self, event: ClientEvent) -> EngineRequest:
        place = self._places[event.session, event.request]
        self._requests[place] = self._unread.request_of(event, place)
        return self._requests[place]

    def left(self, key: tuple[int, int], at_ns: int) -> None:
        place = self._places[key]
        self._over_ns[place], self._left_after[place] = at_ns, self._requests[place].num_generated

    def num_tokens(self, key: tuple[int, int]) -> int:
        return self._requests[self._places[key]].num_generated

    def started(self, _server: int, start: StepStart, /) -> None:
        if self._pool.num_evicted > self._num_evicted:
            self.evicted[start.start_ns] += self._pool.num_evicted - self._num_evicted
            self._num_evicted = self._pool.num_evicted
        if start.step.num_seqs:
            self._add(start.step, start.start_ns)

    def _add(self, step: Step, start_ns: int) -> None:
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

    def ended(self, _server: int, end: StepEnd, /) -> None:
        (end_ns,) = end.ends_ns
        for request in end.requests:
            request.num_generated += 1
        for request in end.finished:
            self._over_ns[request.handle] = end_ns


def run_naively(
    arrays: layout.PlanArrays,
    config: EngineConfig,
    cost_models: Sequence[CostModel],
    noise_seeds: Sequence[int],
    noise: IntArray,
) -> layout.SimOutcome:
    """What ``run_paged`` is held to: each plan on a fresh server, at its own costs; records of the last plan."""
    played = list[NaiveRun]()
    for place, (plan, cost_model) in enumerate(zip(plans_of(arrays), cost_models, strict=True)):
        played.append(NaiveRun(plan, config, cost_model, noisy(noise, noise_seeds[place] if noise_seeds else 0)))
        played[-1].play()
    last = played[-1]
    # A block belongs to no request.
    evictions = [(at_ns, -1, _BY_REQUEST, -1, -1) for at_ns in last.evicted.elements()]
    return layout.SimOutcome(
        requests=records_from(layout.RequestResult, [row for run in played for row in run.rows]),
        histogram=np.array([run.histogram for run in played], dtype=np.int64),
        totals=records_from(layout.PlanTotals, [run.totals for run in played]),
        steps=records_from(layout.StepRecord, last.steps),
        evictions=records_from(layout.EvictionRecord, evictions),
    )
