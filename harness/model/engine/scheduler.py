"""The engine as one object: submit, schedule, finish the step, take its KV events. No clock and no arrivals.

Scheduler is a thin shell over the compiled functions of ``steps``: it maps callers' handles to rows and numbers to
named values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from harness.compiled import bind, compiled
from harness.compiled.records import IntArray, new_records, record_as_dict, record_fields
from harness.errors import PlanError
from harness.model.engine import steps
from harness.model.engine.config import PREFILL_CHUNK_TOKENS, EngineConfig, new_state
from harness.model.engine.cost import CostModel, fs_to_ns
from harness.model.engine.paged_state import PagedRow, PagedState
from harness.model.engine.state import (
    EV_CACHE_HIT,
    EV_CACHE_PARTIAL,
    EV_EVICTION,
    EV_FREE_REQUEST,
    EV_MAPPING_SEARCH,
    EV_PREEMPT,
    EVENT_HEADER,
    QUEUED,
    ROW_GONE,
    STEP_DECODE,
    STEP_IDLE,
    EngineState,
    Row,
)

PREFILL = "PREFILL"
DECODE = "DECODE"
IDLE = "IDLE"
MIXED = "MIXED"
"""Decodes and parts of prompts in one step: paged rules only."""
STEP_KINDS = (IDLE, PREFILL, DECODE, MIXED)
EVENT_KINDS = (
    "ALLOC",
    "EVICTION",
    "CACHE_HIT",
    "CACHE_PARTIAL",
    "FREE_REQUEST",
    "MAPPING_REMOVE",
    "MAPPING_SEARCH",
    "PREEMPT",
)
CALLERS = ("", "request", "dummy", "preempt")
FIRST_ROWS = 64

ENTRYPOINTS = (compiled(steps.submit), compiled(steps.schedule), compiled(steps.finish_steps), compiled(steps.abort))


class KvEvent(NamedTuple):
    """One thing that happened to KV memory, with what the vendor's log line of it needs.

    slots: ALLOC given; EVICTION, MAPPING_REMOVE the one slot; CACHE_HIT matched; FREE_REQUEST left; MAPPING_SEARCH the
    slot found, or none. blocks: inner ids of ALLOC, MAPPING_REMOVE, MAPPING_SEARCH (the segment), PREEMPT (freed) and
    CACHE_HIT (hit prefix). num_blocks: IB_COUNT (CACHE_HIT: summed over slots). block_counts: CACHE_HIT, per slot, how
    many leading ``blocks`` its length covers. free_slots, inactive_slots: EVICTION, afterwards. reused_tokens,
    hit_tokens: CACHE_HIT, CACHE_PARTIAL. is_preemption: FREE_REQUEST. output_tokens: PREEMPT.
    """

    kind: str
    request: int = -1
    slots: tuple[int, ...] = ()
    blocks: tuple[int, ...] = ()
    caller: str = ""
    num_blocks: int = 0
    block_counts: tuple[int, ...] = ()
    free_slots: int = 0
    inactive_slots: tuple[int, ...] = ()
    reused_tokens: int = 0
    hit_tokens: int = 0
    is_preemption: bool = False
    output_tokens: int = 0


class Admission(NamedTuple):
    """A request that a step admits: prompt tokens reused from KV memory, and tokens that are left to compute."""

    request: int
    cached_tokens: int
    computed_tokens: int


class StepPart(NamedTuple):
    """What a step that is over was for a request: the tokens that it computed, drafts among them, and accepted ones."""

    handle: int
    tokens: int
    drafts: int
    accepted: int


class Step(NamedTuple):
    """What one engine step does, decided before it runs.

    kind: PREFILL, DECODE, MIXED or IDLE. requests: handles in batch order. bucket: 0 unless DECODE. hash_hit_tokens:
    what the hash map promised (the vendor's prefix_cache_hits), cached_tokens what is really reused. context_tokens:
    summed sequence lengths. dummy_slot: -1 when none was needed. cached_slots, cached_lengths: source of the reuse.
    failed_copy: which of these could not be copied, -1 for none; computed_tokens is then the whole prompt.
    admissions: requests that start to run. Paged rules only: tokens, that each of ``requests`` computes; unfinished,
    requests whose prompt is not computed at the end of the step, which get no token; attended_tokens, of the parts of
    prompts (``harness.model.engine.cost``); external_queries, external_hits, tokens that a second memory was asked for,
    and had. With asynchronous scheduling a request that ended after the decision is not in ``requests``, and still in
    num_seqs and tokens. drafts: (request, tokens that were drafted for it) of those of ``requests`` that have some; the
    drafts that pad a request are not among them.
    """

    kind: str
    num_seqs: int = 0
    bucket: int = 0
    requests: tuple[int, ...] = ()
    cached_tokens: int = 0
    computed_tokens: int = 0
    hash_hit_tokens: int = 0
    context_tokens: int = 0
    duration_ns: int = 0
    preempted: tuple[int, ...] = ()
    dummy_slot: int = -1
    kv_events: tuple[KvEvent, ...] = ()
    cached_slots: tuple[int, ...] = ()
    cached_lengths: tuple[int, ...] = ()
    evicted_slots: tuple[int, ...] = ()
    failed_copy: int = -1
    admissions: tuple[Admission, ...] = ()
    tokens: tuple[int, ...] = ()
    unfinished: tuple[int, ...] = ()
    attended_tokens: int = 0
    external_queries: int = 0
    external_hits: int = 0
    drafts: tuple[tuple[int, int], ...] = ()


class KvCopyError(RuntimeError):
    """Reused KV could not be copied, and the server's rules have no way on: its engine ends."""


_State = TypeVar("_State", EngineState, PagedState)


class SchedulerRows(Generic[_State]):
    """The rows of a server's tables by the handles of its requests; there are twice as many where none is left."""

    def __init__(self, row: type[Row | PagedRow], state: _State) -> None:
        self._row = row
        self._bind(state)
        self._rows: dict[int, int] = {}
        self._handles: list[int] = [-1] * FIRST_ROWS
        self._keys: list[IntArray] = [np.zeros(0, dtype=np.int64)] * FIRST_ROWS
        self._free_rows: list[int] = list(range(FIRST_ROWS - 1, -1, -1))

    @property
    def num_running(self) -> int:
        return int(self._state.server["num_running"][0])

    @property
    def num_waiting(self) -> int:
        return int(self._state.server["num_waiting"][0])

    @property
    def running(self) -> tuple[int, ...]:
        """Running requests in admission order."""
        return tuple(self._handles[row] for row in self._state.places["running"][: self.num_running].tolist())

    @property
    def waiting(self) -> tuple[int, ...]:
        """Waiting requests, head first."""
        return self._queued(QUEUED)

    def output_tokens(self, request: int) -> int:
        """Tokens generated so far by a request that waits or runs."""
        return int(self._state.rows["output"][self._rows[request]])

    def _queued(self, queue: int) -> tuple[int, ...]:
        """The requests of a queue in their order."""
        rows: list[int] = []
        row = int(self._state.queues["head"][queue])
        while row >= 0:
            rows.append(row)
            row = int(self._state.rows["next"][row])
        return tuple(self._handles[row] for row in rows)

    def _bind(self, state: _State) -> None:
        """Take these tables for those of the compiled functions."""
        self._state = state

    def _new_row(self, request: int) -> int:
        """A row for a request; PlanError where its handle is negative or in use."""
        if request < 0 or request in self._rows:
            raise PlanError("request handle is negative or in use", where=f"request {request}")
        if not self._free_rows:
            old = len(self._handles)
            rows = new_records(self._row, 2 * old)
            for name in record_fields(self._row):
                rows[name][:old] = self._state.rows[name]
            self._bind(self._state._replace(rows=rows))
            self._handles += [-1] * old
            self._keys += [np.zeros(0, dtype=np.int64)] * old
            self._free_rows = list(range(2 * old - 1, old - 1, -1))
        row = self._free_rows.pop()
        self._rows[request] = row
        self._handles[row] = request
        return row


class Scheduler(SchedulerRows[EngineState]):
    """One server's scheduler and KV pools, from its start on.

    Call order: any number of submit / abort, then schedule, then (after the step ran; aborts may come between)
    finish_step. Handles are the caller's own non-negative ints and may be used again once finished or aborted.
    """

    def __init__(self, config: EngineConfig, cost_model: CostModel, *, with_events: bool = True) -> None:
        self.config = config
        self.cost_model = cost_model
        super().__init__(Row, new_state(config, FIRST_ROWS, with_events=with_events))
        self._block_tokens = int(self._state.server["block_tokens"][0])
        self._base_fs = [int(value) for value in cost_model.decode_base_fs(config)]
        self._batch: tuple[int, ...] = ()
        self._late_events: list[KvEvent] = []

    def submit(
        self,
        request: int,
        prompt_tokens: int,
        max_tokens: int,
        block_keys: IntArray | Sequence[int],
        stop_tokens: int | None = None,
    ) -> None:
        """Queue a request at the tail.

        block_keys: shape (>= floor(prompt_tokens / block),), chain keys of the prompt's full blocks, int64.
        stop_tokens: the true output length when the model stops before max_tokens; admission never reads it.
        Raises PlanError when the prompt does not fit a slot or a handle is in use.
        """
        if not 1 <= prompt_tokens < self.config.slot_tokens or max_tokens < 1:
            raise PlanError(
                f"{prompt_tokens} prompt and {max_tokens} output tokens do not fit a slot of "
                f"{self.config.slot_tokens} (a prompt may fill all but one)",
                where=f"request {request}",
            )
        keys = np.asarray(block_keys, dtype=np.int64)
        if self.config.prefix_caching and len(keys) < prompt_tokens // self._block_tokens:
            raise PlanError(
                f"{len(keys)} block keys for {prompt_tokens} prompt tokens, one per {self._block_tokens} needed",
                where=f"request {request}",
            )
        row = self._new_row(request)
        self._keys[row] = keys
        # Only the paper's rules ask for the session: its first block stands for it, where there is a block.
        session = int(keys[0]) if len(keys) else -2 - request
        self._submit(row, prompt_tokens, max_tokens, max_tokens if stop_tokens is None else stop_tokens, session)

    def append_block_key(self, request: int, key: int) -> None:
        """A block of generated text became full; needed only where the request may be preempted and re-prefilled."""
        row = self._rows[request]
        self._keys[row] = np.append(self._keys[row], np.int64(key))

    def abort(self, request: int) -> None:
        """Drop a request, waiting or running, at any time; unknown or finished handles are ignored."""
        row = self._rows.get(request)
        if row is None:
            return
        # An abort inside a step must not lose the step's own batch.
        self._abort(row)
        self._late_events.extend(self._read_events())
        self._drop_row(request)

    def schedule(self) -> Step:
        """Decide the next step. Its requests stay in it until finish_step()."""
        state = self._state
        head = int(state.queues["head"][QUEUED])
        if head >= 0 and self.config.prefix_caching:
            self._load_keys(head)
        kind = self._schedule()
        last = record_as_dict(state.server, 0)
        events = self._read_events() if last["events_len"] else ()
        preempted = tuple(self._handles[row] for row in state.places["preempted"][: last["num_preempted"]].tolist())
        evicted = tuple(state.evicted["slot"][: last["num_evicted"]].tolist()) if last["num_evicted"] else ()
        if kind == STEP_IDLE:
            self._batch = ()
            return Step(IDLE, preempted=preempted, kv_events=events, evicted_slots=evicted)
        count = last["num_batch"]
        self._batch = tuple(self._handles[row] for row in state.places["batch"][:count].tolist())
        if kind == STEP_DECODE:
            duration_ns = fs_to_ns(self._base_fs[count] + self.cost_model.context_fs * last["context_tokens"])
            return Step(
                DECODE,
                num_seqs=count,
                bucket=self.config.bucket_of(count),
                requests=self._batch,
                context_tokens=last["context_tokens"],
                duration_ns=duration_ns,
                preempted=preempted,
                dummy_slot=last["dummy_slot"],
                kv_events=events,
                evicted_slots=evicted,
            )
        matched = last["num_cached_slots"]
        return Step(
            PREFILL,
            num_seqs=1,
            requests=self._batch,
            cached_tokens=last["cached_tokens"],
            computed_tokens=last["computed_tokens"],
            hash_hit_tokens=last["hit_tokens"],
            context_tokens=last["context_tokens"],
            duration_ns=self.cost_model.prefill_ns(last["computed_tokens"], last["cached_tokens"]),
            kv_events=events,
            cached_slots=tuple(state.prefix["cached_slot"][:matched].tolist()),
            cached_lengths=tuple(state.prefix["cached_tokens"][:matched].tolist()),
            evicted_slots=evicted,
            admissions=(Admission(self._batch[0], last["cached_tokens"], last["computed_tokens"]),),
        )

    def recomputed(self, step: Step, failed_copy: int) -> Step:
        """The prefill ``step`` when the copy of reused slot number ``failed_copy`` fails: all of it is computed.

        What is counted as reused stays so, because only the model runner hears of the failure. Raises KvCopyError where
        the rules end the engine instead. Source: vllm-rbln 0.12.0, optimum_model_runner.py, try_copy_prefix_cached_kv.
        """
        if not self.config.rule_set.survives_copy_failure:
            raise KvCopyError(f"KV of slot {step.cached_slots[failed_copy]} could not be copied")
        return step._replace(
            failed_copy=failed_copy,
            computed_tokens=step.context_tokens,
            duration_ns=self.cost_model.prefill_ns(step.context_tokens),
        )

    def equal_durations_ns(self, step: Step) -> list[int]:
        """How long the decode step just scheduled lasts, and each step exactly like it that can follow.

        Valid as long as nobody is submitted or aborted and no head of the queue is waiting for memory. The durations
        differ where costs depend on the context, which grows by a token.
        """
        base_fs, model = self._base_fs[step.num_seqs], self.cost_model
        return [
            fs_to_ns(base_fs + model.context_fs * (step.context_tokens + place * step.num_seqs))
            for place in range(int(self._state.server["equal_steps"][0]))
        ]

    def finish_step(self, num_steps: int = 1) -> tuple[int, ...]:
        """The step ran: give everyone in it a token, free the finished, return their handles in batch order.

        num_steps: more than 1 takes as many equal decode steps at once, see ``equal_durations_ns``.
        """
        state = self._state
        count = self._finish_steps(num_steps)
        self._batch = ()
        if count == 0:
            return ()
        finished = tuple(self._handles[row] for row in state.places["finished"][:count].tolist())
        if state.server["events_len"][0]:
            self._late_events.extend(self._read_events())
        for request in finished:
            self._drop_row(request)
        return finished

    def take_kv_events(self) -> tuple[KvEvent, ...]:
        """FREE_REQUEST events of requests that finished or were aborted since the last call."""
        events = tuple(self._late_events)
        self._late_events.clear()
        return events

    @property
    def has_work(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._rows)

    @property
    def free_slots(self) -> int:
        """Slots that hold nothing."""
        return int(self._state.server["free_slots"][0])

    @property
    def free_blocks(self) -> int:
        """Inner blocks that no running request holds."""
        return int(self._state.server["free_blocks"][0])

    @property
    def num_blocks(self) -> int:
        """Inner blocks in all (the vendor's num_gpu_blocks - 1)."""
        return len(self._state.blocks) - 1

    def block_table(self, request: int) -> tuple[int, ...]:
        """Slots of a running request in order (prefix caching off: its block ids less one, as the runner sees them)."""
        seat = int(self._state.rows["seat"][self._rows[request]])
        if seat < 0:
            return ()
        if not self.config.prefix_caching:
            return tuple(block - 1 for block in self.inner_blocks(request))
        return tuple(self._state.seat_slots[seat, : self._state.places["num_slots"][seat]].tolist())

    def inner_blocks(self, request: int) -> tuple[int, ...]:
        """Inner block ids of a running request in order."""
        seat = int(self._state.rows["seat"][self._rows[request]])
        if seat < 0:
            return ()
        return tuple(self._state.seat_blocks[seat, : self._state.places["num_blocks"][seat]].tolist())

    def _bind(self, state: EngineState) -> None:
        super()._bind(state)
        submit, schedule, finish_steps, abort = ENTRYPOINTS
        self._submit, self._schedule = bind(submit, state), bind(schedule, state)
        self._finish_steps, self._abort = bind(finish_steps, state), bind(abort, state)

    def _drop_row(self, request: int) -> None:
        row = self._rows.pop(request)
        self._state.rows["status"][row] = ROW_GONE
        self._free_rows.append(row)

    def _load_keys(self, row: int) -> None:
        num_tokens = int(self._state.rows["prompt"][row] + self._state.rows["output"][row])
        needed = num_tokens // self._block_tokens
        keys = self._keys[row]
        if len(keys) < needed:
            raise PlanError(
                f"preempted with {num_tokens} tokens but only {len(keys)} block keys",
                where=f"request {self._handles[row]}",
                hint="Call append_block_key for every full block of generated text",
            )
        self._state.prefix["key"][:needed] = keys[:needed]

    def _read_events(self) -> tuple[KvEvent, ...]:
        length = int(self._state.server["events_len"][0])
        numbers: list[int] = self._state.events[:length].tolist()
        events: list[KvEvent] = []
        at = 0
        while at < length:
            num_slots, num_blocks = numbers[at + 3], numbers[at + 4]
            end = at + EVENT_HEADER + num_slots + num_blocks
            events.append(self._event(numbers[at:end], num_slots))
            at = end
        return tuple(events)

    def _event(self, record: list[int], num_slots: int) -> KvEvent:  # noqa: PLR0911  # one return per kind of event
        code, row, caller, _, num_blocks, x, y = record[:EVENT_HEADER]
        slots = tuple(record[EVENT_HEADER : EVENT_HEADER + num_slots])
        blocks = tuple(record[EVENT_HEADER + num_slots :])
        event = KvEvent(
            kind=EVENT_KINDS[code],
            request=self._handles[row] if row >= 0 else -1,
            slots=slots,
            blocks=blocks,
            caller=CALLERS[caller],
            num_blocks=num_blocks,
        )
        if code == EV_EVICTION:
            return event._replace(slots=slots[:1], inactive_slots=slots[1:], free_slots=x, num_blocks=y)
        if code == EV_FREE_REQUEST:
            return event._replace(is_preemption=x == 1)
        if code == EV_CACHE_HIT:
            counts = blocks[:num_slots]
            return event._replace(
                block_counts=counts, blocks=blocks[num_slots:], num_blocks=sum(counts), reused_tokens=x, hit_tokens=y
            )
        if code == EV_CACHE_PARTIAL:
            return event._replace(reused_tokens=x, hit_tokens=y)
        if code == EV_MAPPING_SEARCH:
            return event._replace(slots=tuple(slot for slot in slots if slot >= 0))
        if code == EV_PREEMPT:
            return event._replace(output_tokens=x)
        return event


def warm_up() -> None:
    """Compile everything a Scheduler calls, or load it from the cache, so that no first step pays for it (seconds)."""
    block = PREFILL_CHUNK_TOKENS
    config = EngineConfig(2, (1, 2), 2, slot_tokens=2 * block)
    scheduler = Scheduler(config, CostModel("warm-up", "none", {1: 1, 2: 1}))
    for request in range(2):
        scheduler.submit(request, block, 4, [request])
        scheduler.schedule()
        scheduler.finish_step()
    scheduler.schedule()
    scheduler.abort(0)
    scheduler.finish_step()
