"""The engine loop of a server: drain the inbox, schedule, run the step, process aborts, finish, hand out tokens.

It has no clock and no sockets: a driver starts and ends the steps. The order of events is that of vLLM 0.22's
EngineCore (``run_busy_loop``, ``step``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from harness.compiled.records import IntArray
from harness.model.engine.paged import AnyScheduler, PagedScheduler
from harness.model.engine.scheduler import DECODE, Admission, KvEvent, Scheduler, Step, StepPart

TokenArray = npt.NDArray[np.int32]
FinishReason = Literal["length", "stop", "abort"]
UNREAD: Iterator[int] = iter(())
"""The answer of a request whose tokens nobody reads."""


@dataclass(slots=True, eq=False)
class EngineRequest:
    """One prompt on its way through the engine; times are model ns, -1 until they happen.

    planned_tokens: the tokens that it will generate, at most ``max_tokens``. answer: gives them one by one.
    keep_ns: how long its KV is to be kept once it has ended, where the server pins.
    kv_blocks: the inner block ids that it held when it was admitted, then when it ended.
    """

    handle: int
    engine_id: str
    external_id: str
    prompt: TokenArray
    max_tokens: int
    block_keys: IntArray
    planned_tokens: int
    planned_reason: FinishReason = "length"
    answer: Iterator[int] = UNREAD
    keep_ns: int = 0
    arrival_ns: int = -1
    queued_ns: int = -1
    scheduled_ns: int = -1
    first_token_ns: int = -1
    last_token_ns: int = -1
    cached_tokens: int = 0
    num_generated: int = 0
    num_preemptions: int = 0
    kv_blocks: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None

    def draw_tokens(self, num_tokens: int = 1) -> list[int]:
        """The next tokens of the answer."""
        self.num_generated += num_tokens
        return list(islice(self.answer, num_tokens))


class StepStart(NamedTuple):
    """A running step: the decision, its requests, its end. flushed: requests that finished before it.

    lookups: admissions of requests that were never preempted. aborted: dropped since the step before, so that this one
    is without them. when_decided: requests that ran, and blocks that were free.
    """

    number: int
    start_ns: int
    end_ns: int
    step: Step
    requests: tuple[EngineRequest, ...]
    arrivals: tuple[EngineRequest, ...]
    flushed: tuple[EngineRequest, ...]
    preempted: tuple[EngineRequest, ...]
    kv_events_before: tuple[KvEvent, ...]
    num_waiting: int
    lookups: tuple[Admission, ...] = ()
    aborted: tuple[EngineRequest, ...] = ()
    when_decided: tuple[int, int] = (0, 0)


class StepEnd(NamedTuple):
    """An ended step: requests that get tokens, finished requests, and what the KV pool logged while freeing.

    ends_ns: the end of the step, or of each of several equal decode steps taken together. num_tokens: that each of
    ``requests`` gets: one a step, and with each what it accepts of its drafts. parts: with drafts, see
    ``PagedScheduler.parts``. used_blocks: inner KV blocks that running requests hold. aborted: dropped while it ran,
    before its tokens.
    """

    start: StepStart
    ends_ns: Sequence[int]
    requests: tuple[EngineRequest, ...]
    finished: tuple[EngineRequest, ...]
    kv_events: tuple[KvEvent, ...]
    num_running: int
    num_waiting: int
    used_blocks: int
    aborted: tuple[EngineRequest, ...] = ()
    num_tokens: tuple[int, ...] = ()
    parts: tuple[StepPart, ...] = ()


@dataclass(slots=True)
class EngineCore:
    """The engine core: requests go in with ``submit`` and ``abort``, steps come out of ``start_step`` and ``end_step``.

    An arrival joins a step only if its ``arrival_ns`` is not later than the step's start, so the steps are a function
    of arrival instants alone, however late the host is. failing_copy: the number of the KV copy, since the start, that
    fails; None: none. lasting_ns: how long a step of so many ns really lasts; None: as long.
    """

    scheduler: AnyScheduler
    failing_copy: int | None = None
    lasting_ns: Callable[[int], int] | None = None
    requests: dict[int, EngineRequest] = field(default_factory=dict)
    running_step: StepStart | None = None
    num_steps: int = 0
    num_copies: int = 0
    _inbox: deque[EngineRequest] = field(default_factory=deque)
    _aborts: list[tuple[int, int]] = field(default_factory=list)
    _unflushed: list[EngineRequest] = field(default_factory=list)
    _next_handle: int = 0

    def new_handle(self) -> int:
        """A handle no other request has."""
        self._next_handle += 1
        return self._next_handle - 1

    def submit(self, request: EngineRequest) -> None:
        """Put a request, stamped with its ``arrival_ns``, in the inbox; arrivals come in time order."""
        self._inbox.append(request)

    def abort(self, handle: int, at_ns: int) -> None:
        """Drop a request as of ``at_ns``: before the tokens of the step that then runs, or before the next step."""
        self._aborts.append((at_ns, handle))

    def reset_prefix_cache(self) -> bool:
        """Forget the content of all blocks; False, and nothing happens, while a request holds some.

        Source: vLLM 0.30.0, v1/core/block_pool.py, reset_prefix_cache().
        """
        return isinstance(self.scheduler, PagedScheduler) and self.scheduler.reset_prefix_cache()

    @property
    def next_arrival_ns(self) -> int | None:
        """When the oldest request still in the inbox arrived."""
        return self._inbox[0].arrival_ns if self._inbox else None

    @property
    def has_work(self) -> bool:
        """Whether a step started now would do anything (an idle step that flushes counts)."""
        return self.scheduler.has_work or bool(self._unflushed)

    @property
    def num_unfinished(self) -> int:
        """Requests submitted and neither finished nor aborted."""
        return len(self.requests) + len(self._inbox)

    def start_step(self, start_ns: int) -> StepStart | None:
        """Drain the inbox up to ``start_ns``, schedule, and return the step that runs; None without work."""
        assert self.running_step is None, "a step is already running"
        self._tell_time(start_ns)
        arrivals = self._drain(start_ns)
        aborted = self._apply_aborts(start_ns)
        kv_events_before = self.scheduler.take_kv_events() if aborted else ()
        if not self.has_work:
            return None
        flushed = tuple(self._unflushed)
        self._unflushed.clear()
        step = self._copied(self.scheduler.schedule())
        if self.lasting_ns is not None and step.num_seqs:
            step = step._replace(duration_ns=self.lasting_ns(step.duration_ns))
        requests = self._named(step.requests)
        for admission in step.admissions:
            request = self.requests[admission.request]
            # vLLM reports the first admission; after a preemption a prompt is looked up again.
            if request.scheduled_ns < 0 or not step.tokens:
                request.cached_tokens = admission.cached_tokens
            request.kv_blocks = self.scheduler.inner_blocks(request.handle)
            if request.scheduled_ns < 0:
                request.scheduled_ns = start_ns
        self.running_step = StepStart(
            self.num_steps,
            start_ns,
            start_ns + step.duration_ns,
            step,
            requests,
            arrivals,
            flushed,
            self._named(step.preempted),
            kv_events_before,
            self.scheduler.num_waiting,
            self._lookups(step) if step.admissions else (),
            aborted,
            self.scheduler.when_decided if isinstance(self.scheduler, PagedScheduler) else (0, 0),
        )
        for request in self.running_step.preempted:
            request.num_preemptions += 1
        self.num_steps += 1
        return self.running_step

    def equal_ends_ns(self) -> list[int]:
        """When the running step ends, and each equal decode step that must follow while no request arrives or leaves.

        A waiting request that lacks only memory is refused anew before each step, and logged each time: then the
        running step alone.
        """
        start, scheduler = self.running_step, self.scheduler
        assert start is not None, "no step is running"
        refuses = scheduler.num_waiting > 0 and scheduler.num_running < scheduler.config.active_limit
        if start.step.kind != DECODE or refuses:
            return [start.end_ns]
        durations_ns: Iterable[int] = scheduler.equal_durations_ns(start.step)[1:]
        if self.lasting_ns is not None:
            durations_ns = map(self.lasting_ns, durations_ns)
        return list(accumulate(durations_ns, initial=start.end_ns))

    def end_step(self, ends_ns: Sequence[int] = ()) -> StepEnd:
        """End the running step: process aborts that arrived meanwhile, then tokens, finishes and freed slots.

        ends_ns: the first entries of ``equal_ends_ns``, to take as many steps at once; default: the running step alone.
        """
        start = self.running_step
        assert start is not None, "no step is running"
        self.running_step = None
        ends_ns = ends_ns or (start.end_ns,)
        self.num_steps += len(ends_ns) - 1
        self._tell_time(ends_ns[-1])
        aborted = self._apply_aborts(ends_ns[-1])
        abort_events = self.scheduler.take_kv_events() if aborted else ()
        unfinished = start.step.unfinished
        receivers: list[EngineRequest] = []
        # What of its drafts is accepted may end any of them.
        has_drafts = bool(start.step.drafts)
        for request in start.requests:
            if request.finish_reason is not None or request.handle in unfinished:
                continue
            receivers.append(request)
            if has_drafts or request.num_generated + len(ends_ns) == request.planned_tokens:
                request.kv_blocks = self.scheduler.inner_blocks(request.handle)
            if request.first_token_ns < 0:
                request.first_token_ns = start.end_ns
        finished: list[EngineRequest] = []
        over = self.scheduler.finish_step(len(ends_ns))
        parts = self.scheduler.parts if isinstance(self.scheduler, PagedScheduler) else ()
        accepted = {part.handle: part.accepted for part in parts}
        num_tokens = tuple(
            min(len(ends_ns) + accepted.get(request.handle, 0), request.planned_tokens - request.num_generated)
            for request in receivers
        )
        for handle in over:
            request = self.requests.pop(handle)
            request.finish_reason = request.planned_reason
            finished.append(request)
        self._unflushed.extend(finished)
        return StepEnd(
            start,
            ends_ns,
            tuple(receivers),
            tuple(finished),
            (*abort_events, *self.scheduler.take_kv_events()),
            self.scheduler.num_running,
            self.scheduler.num_waiting,
            self.scheduler.num_blocks - self.scheduler.free_blocks,
            aborted,
            num_tokens,
            parts,
        )

    def _tell_time(self, now_ns: int) -> None:
        if isinstance(self.scheduler, PagedScheduler):
            self.scheduler.tell_time(now_ns)

    def _named(self, handles: Sequence[int]) -> tuple[EngineRequest, ...]:
        return tuple(map(self.requests.__getitem__, handles))

    def _lookups(self, step: Step) -> tuple[Admission, ...]:
        return tuple(
            admission
            for admission in step.admissions
            if not (admission.request in step.preempted or self.requests[admission.request].num_preemptions)
        )

    def _copied(self, step: Step) -> Step:
        """The step after its KV copies; copies after a failed copy are not tried."""
        if not step.cached_slots:
            return step
        first = self.num_copies
        self.num_copies += len(step.cached_slots)
        if self.failing_copy is None or not first <= self.failing_copy < self.num_copies:
            return step
        self.num_copies = self.failing_copy + 1
        assert isinstance(self.scheduler, Scheduler), "paged KV memory is never copied"
        return self.scheduler.recomputed(step, self.failing_copy - first)

    def _drain(self, until_ns: int) -> tuple[EngineRequest, ...]:
        if not self._inbox:
            return ()
        arrivals: list[EngineRequest] = []
        while self._inbox and self._inbox[0].arrival_ns <= until_ns:
            request = self._inbox.popleft()
            request.queued_ns = until_ns
            self.requests[request.handle] = request
            stop_tokens = request.planned_tokens if request.planned_tokens < request.max_tokens else None
            self.scheduler.submit(
                request.handle, len(request.prompt), request.max_tokens, request.block_keys, stop_tokens
            )
            if request.keep_ns and isinstance(self.scheduler, PagedScheduler):
                self.scheduler.keep(request.handle, request.keep_ns)
            arrivals.append(request)
        return tuple(arrivals)

    def _apply_aborts(self, until_ns: int) -> tuple[EngineRequest, ...]:
        """Drop what was aborted by then; returns those that were not over before."""
        if not self._aborts:
            return ()
        due = [handle for at_ns, handle in self._aborts if at_ns <= until_ns]
        if not due:
            return ()
        self._aborts = [later for later in self._aborts if later[0] > until_ns]
        aborted: list[EngineRequest] = []
        for handle in due:
            request = self.requests.pop(handle, None)
            if request is not None:
                request.kv_blocks = self.scheduler.inner_blocks(handle)
                self.scheduler.abort(handle)
                self._unflushed.append(request)
            else:
                request = next((waiting for waiting in self._inbox if waiting.handle == handle), None)
                if request is None:
                    continue  # it finished before the abort was seen
                self._inbox.remove(request)
                self._unflushed.append(request)
            request.finish_reason = "abort"
            aborted.append(request)
        return tuple(aborted)
