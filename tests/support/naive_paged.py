"""A second opinion on paged KV memory: vLLM's scheduler and block pool in plain Python, one step at a time.

The compiled scheduler is held to it: ``tests/model/engine/test_paged.py``.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, islice, takewhile

import numpy as np

from harness.compiled.records import IntArray
from harness.model.engine.config import EngineConfig
from harness.model.engine.cost import CostModel, attended_tokens
from harness.model.engine.paged import PagedScheduler, PrefixCounts
from harness.model.engine.scheduler import DECODE, IDLE, MIXED, PREFILL, Admission, Step


class BlockPool:
    """KV blocks by number: who holds them, what they contain, and in which order the free ones are used again.

    Free blocks without a key are used first, the latest freed of them before all; the others by last use. A block
    keeps its key, and can be matched, until it is used again. Several blocks may have the same key. Pinned free blocks
    go after all others until their pin ends, then before them. second: keys of overwritten blocks, the least recently
    used first. now_ns: set before each call that counts on it. Source: vLLM 0.30.0, v1/core/block_pool.py.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, config.num_blocks))
        self._holders = [0] * config.num_blocks
        self._keys: list[int | None] = [None] * config.num_blocks
        self._by_key: dict[int, dict[int, None]] = {}
        self._keeps_keys = config.prefix_caching
        # Pinned free blocks, which are not among the others: when the pin ends, and which pin it is.
        self._pinned: dict[int, tuple[int, int]] = {}
        self._serial = count()
        self._most_second = config.offload_blocks
        self.second: OrderedDict[int, None] = OrderedDict()
        self.num_evicted = self.now_ns = 0

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, those with a key included."""
        return len(self._free) + len(self._pinned)

    @property
    def free_order(self) -> tuple[int, ...]:
        """Free blocks, the next to be used first."""
        pins = sorted(self._pinned, key=self._pinned.__getitem__)
        ended = [block for block in pins if self._pinned[block][0] <= self.now_ns]
        return (*ended, *self._free, *pins[len(ended) :])

    def match(self, keys: Iterable[int]) -> list[int]:
        """The longest run of blocks with these keys, from the first on; of equal blocks the one registered first."""
        return [next(iter(self._by_key[key])) for key in takewhile(self._by_key.__contains__, keys)]

    def match_second(self, keys: Iterable[int]) -> int:
        """How many of these keys are in the second memory, from the first on; they are used now."""
        found = list(takewhile(self.second.__contains__, keys))
        for key in found:
            self.second.move_to_end(key)
        return len(found)

    def num_unheld(self, blocks: Iterable[int]) -> int:
        """How many of these blocks are free."""
        return sum(self._holders[block] == 0 for block in blocks)

    def hold(self, blocks: Iterable[int]) -> None:
        """Count one more holder of each of these matched blocks; that ends its pin."""
        for block in blocks:
            self._free.pop(block, None)
            self._pinned.pop(block, None)
            self._holders[block] += 1

    def take(self, num_blocks: int) -> list[int]:
        """The first free blocks, for new content; at most ``num_free``."""
        taken = self.free_order[:num_blocks] if self._pinned else list(islice(self._free, num_blocks))
        for block in taken:
            self._free.pop(block, None)
            self._pinned.pop(block, None)
            self._forget(block)
            self._holders[block] = 1
        return list(taken)

    def register(self, block: int, key: int) -> None:
        """A held block is full, and its content has this key."""
        self._keys[block] = key
        self._by_key.setdefault(key, {})[block] = None

    def free(self, blocks: Iterable[int]) -> None:
        """One holder less of each; ``blocks`` in the order in which they are to be used again."""
        unheld: list[int] = []
        for block in blocks:
            self._holders[block] -= 1
            if self._holders[block] == 0:
                unheld.append(block)
        self._free.update(dict.fromkeys(unheld))
        for block in reversed(unheld):
            if not self._is_matchable(block):
                self._free.move_to_end(block, last=False)

    def pin(self, blocks: Iterable[int], until_ns: int) -> None:
        """Keep those of these blocks that are free and can be matched, until an instant; the first given go first."""
        for block in blocks:
            if self._holders[block] == 0 and self._is_matchable(block) and until_ns > self.now_ns:
                self._free.pop(block, None)
                self._pinned[block] = until_ns, next(self._serial)

    def reset(self) -> bool:
        """Forget all keys; False, and nothing happens, while a block is held."""
        if any(self._holders):
            return False
        self._keys = [None] * len(self._keys)
        self._free.update(dict.fromkeys(self._pinned))
        for memory in (self._by_key, self._pinned, self.second):
            memory.clear()
        return True

    def _is_matchable(self, block: int) -> bool:
        return self._keeps_keys and self._keys[block] is not None

    def _forget(self, block: int) -> None:
        key = self._keys[block]
        if key is None:
            return
        self._keys[block] = None
        self.num_evicted += 1
        del self._by_key[key][block]
        if self._by_key[key]:
            return
        del self._by_key[key]
        if self._most_second:
            self.second[key] = None
            self.second.move_to_end(key)
            if len(self.second) > self._most_second:
                self.second.popitem(last=False)


@dataclass(slots=True, eq=False)
class _Request:
    """num_tokens: prompt and answer so far. end_tokens: with the last token of the answer. num_registered: blocks.

    most_tokens: with an answer of max_tokens. num_computed: with the steps that are decided. num_in_flight: of these,
    in steps that have not ended; num_stale: of these, from before a preemption. num_placeholders: tokens of the answer
    that steps in flight will give. keep_ns: how long its blocks are pinned when it ends.
    """

    handle: int
    num_prompt_tokens: int
    num_tokens: int
    end_tokens: int
    most_tokens: int
    keys: list[int]
    num_computed: int = 0
    num_in_flight: int = 0
    num_stale: int = 0
    num_placeholders: int = 0
    num_registered: int = 0
    was_preempted: bool = False
    keep_ns: int = 0
    blocks: list[int] = field(default_factory=list[int])

    @property
    def num_known(self) -> int:
        """Tokens of prompt and answer, with those that steps in flight will give."""
        return self.num_tokens + self.num_placeholders


@dataclass(slots=True, eq=False)
class _Decided:
    """A step that was decided, and the tokens that each request computes in it."""

    step: Step
    scheduled: list[tuple[_Request, int]]


class NaivePagedScheduler(PagedScheduler):
    """Decides as ``PagedScheduler``, in the same words."""

    def __init__(self, config: EngineConfig, cost_model: CostModel) -> None:  # pyright: ignore[reportMissingSuperCall]
        self.config = config
        self.cost_model = cost_model
        self.pool = BlockPool(config)
        # Tokens that the step's admissions asked the second memory for, and found there.
        self._external = (0, 0)
        self._counts = PrefixCounts()
        self._requests: dict[int, _Request] = {}
        self._waiting: deque[_Request] = deque()
        self._skipped: deque[_Request] = deque()
        self._running: list[_Request] = []
        self._scheduled: list[tuple[_Request, int]] = []
        self._prompt_limit = 0
        self._current: _Decided | None = None
        self._ahead: _Decided | None = None

    @property
    def prefix_counts(self) -> PrefixCounts:
        return self._counts

    def submit(
        self,
        request: int,
        prompt_tokens: int,
        max_tokens: int,
        block_keys: IntArray | Sequence[int],
        stop_tokens: int | None = None,
    ) -> None:
        answer = max_tokens if stop_tokens is None else min(stop_tokens, max_tokens)
        end_tokens = min(prompt_tokens + answer, self.config.slot_tokens)
        keys = np.asarray(block_keys, dtype=np.int64).tolist()
        queued = _Request(request, prompt_tokens, prompt_tokens, end_tokens, prompt_tokens + max_tokens, keys)
        self._requests[request] = queued
        self._waiting.append(queued)

    def keep(self, request: int, keep_ns: int) -> None:
        self._requests[request].keep_ns = min(keep_ns, self.config.keep_kv_ns)

    def tell_time(self, now_ns: int) -> None:
        self.pool.now_ns = now_ns

    def abort(self, request: int) -> None:
        dropped = self._requests.get(request)
        if dropped is not None:
            self._leave(dropped)

    def schedule(self) -> Step:
        decided, self._ahead = self._ahead, None
        if decided is None or not decided.scheduled:
            # A step of nobody takes no time.
            decided = self._decided_now(() if decided is None else decided.step.preempted)
        if self.config.async_scheduling and decided.scheduled:
            self._ahead = self._decided_now()
        self._current = decided
        return decided.step

    def _decided_now(self, preempted_before: tuple[int, ...] = ()) -> _Decided:
        """Source: scheduler.py, schedule() and _update_after_schedule()."""
        self._scheduled, self._external = [], (0, 0)
        # From vLLM 0.31.0 on a request without others may take the whole budget: there is nobody to hold up.
        is_capped = self.config.rule_set.caps_lone_requests or self.num_running + self.num_waiting > 1
        self._prompt_limit = self.config.long_prefill_tokens if is_capped else 0
        budget, preempted = self._schedule_running(self.config.max_num_batched_tokens)
        # A step that had to preempt admits nobody.
        admissions = () if preempted else self._schedule_waiting(budget)
        step = self._step_of((*preempted_before, *preempted), admissions)
        for request, num_tokens in self._scheduled:
            request.num_computed += num_tokens
            request.num_in_flight += num_tokens
            if self.config.async_scheduling and request.handle not in step.unfinished:
                request.num_placeholders += 1
        return _Decided(step, self._scheduled)

    def finish_step(self, num_steps: int = 1, accepted: Mapping[int, int] | None = None) -> tuple[int, ...]:
        """Source: scheduler.py, update_from_output(). One step, without drafts."""
        decided, self._current = self._current, None
        assert (num_steps, accepted) == (1, None)
        finished: list[int] = []
        for request, num_tokens in decided.scheduled:
            # A request that was aborted, or ended in the step before, gets nothing.
            if self._requests.get(request.handle) is not request:
                continue
            is_stale = request.num_stale > 0
            request.num_in_flight -= num_tokens
            request.num_stale -= num_tokens if is_stale else 0
            if request.handle in decided.step.unfinished:
                continue
            request.num_tokens += 1
            if self.config.async_scheduling and not is_stale:
                request.num_placeholders -= 1
                self._register(request, request.num_computed - request.num_placeholders)
            if request.num_tokens >= request.end_tokens:
                blocks = tuple(request.blocks)
                self._leave(request)
                if request.keep_ns:
                    # Last block first, so that the beginning of a text is kept longest.
                    self.pool.pin(reversed(blocks), self.pool.now_ns + request.keep_ns)
                finished.append(request.handle)
        return tuple(finished)

    @property
    def num_evicted(self) -> int:
        return self.pool.num_evicted

    @property
    def free_order(self) -> tuple[int, ...]:
        return self.pool.free_order

    @property
    def second_order(self) -> tuple[int, ...]:
        return tuple(self.pool.second)

    def reset_prefix_cache(self) -> bool:
        return self.pool.reset()

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._skipped) + len(self._waiting)

    @property
    def has_work(self) -> bool:
        return bool(self._requests) or (self._ahead is not None and bool(self._ahead.scheduled))

    @property
    def running(self) -> tuple[int, ...]:
        return tuple(request.handle for request in self._running)

    @property
    def waiting(self) -> tuple[int, ...]:
        return tuple(request.handle for request in (*self._skipped, *self._waiting))

    @property
    def free_blocks(self) -> int:
        return self.pool.num_free

    def output_tokens(self, request: int) -> int:
        alive = self._requests[request]
        return alive.num_tokens - alive.num_prompt_tokens

    def inner_blocks(self, request: int) -> tuple[int, ...]:
        return tuple(self._requests[request].blocks)

    def equal_durations_ns(self, step: Step) -> list[int]:
        """Of the scheduled step alone."""
        return [step.duration_ns]

    def _schedule_running(self, budget: int) -> tuple[int, list[int]]:
        """Running requests first, in admission order; the last admitted give way. Returns the budget left, and them."""
        preempted: list[int] = []
        place = 0
        while place < len(self._running) and budget > 0:
            request = self._running[place]
            num_tokens = min(self._chunk(self._num_open(request)), budget)
            if not num_tokens:
                place += 1
                continue
            while not self._grow(request, num_tokens):
                victim = self._running.pop()
                self._preempt(victim)
                preempted.append(victim.handle)
                if victim is request:
                    return budget, preempted
            self._scheduled.append((request, num_tokens))
            budget -= num_tokens
            place += 1
        return budget, preempted

    def _schedule_waiting(self, budget: int) -> tuple[Admission, ...]:
        """Admit from the head of the queue while there are tokens, seats and blocks for the whole prompt."""
        config = self.config
        admissions: list[Admission] = []
        skipped: list[_Request] = []
        while (queue := self._skipped or self._waiting) and budget > 0 and len(self._running) < config.max_num_seqs:
            request = queue[0]
            if request.num_stale:
                # A token from before its preemption is still to come.
                skipped.append(queue.popleft())
                continue
            matched: list[int] = []
            if config.prefix_caching:
                # The last token is always computed: its output is the next token.
                matched = self.pool.match(request.keys[: (request.num_tokens - 1) // config.block_tokens])
            if not self._fits(request, matched):
                break
            self.pool.hold(matched)
            matched = self._with_loaded(request, matched)
            cached_tokens = len(matched) * config.block_tokens
            num_tokens = min(self._chunk(request.num_tokens - cached_tokens), budget)
            request.blocks, request.num_registered, request.num_computed = matched, len(matched), cached_tokens
            grown = self._grow(request, num_tokens)
            assert grown, "the whole prompt fits, and so does a part of it"
            self._count_lookup(request, cached_tokens)
            queue.popleft()
            self._running.append(request)
            self._scheduled.append((request, num_tokens))
            admissions.append(Admission(request.handle, cached_tokens, request.num_tokens - cached_tokens))
            budget -= num_tokens
        self._skipped.extendleft(reversed(skipped))
        return tuple(admissions)

    def _with_loaded(self, request: _Request, matched: list[int]) -> list[int]:
        """The matched blocks, and those that are loaded from the second memory into new ones."""
        pool, config = self.pool, self.config
        if not config.offload_blocks or not config.prefix_caching:
            return matched
        wanted = request.keys[len(matched) : (request.num_tokens - 1) // config.block_tokens]
        num_loaded = pool.match_second(wanted)
        queries, hits = self._external
        asked = request.num_tokens - len(matched) * config.block_tokens
        self._external = queries + asked, hits + num_loaded * config.block_tokens
        loaded = pool.take(num_loaded)
        for block, key in zip(loaded, wanted, strict=False):
            pool.register(block, key)
        return [*matched, *loaded]

    def _num_open(self, request: _Request) -> int:
        """Tokens that a running request can compute: 0 when a step in flight gives the last that it may have."""
        if request.num_placeholders and request.num_known >= request.most_tokens:
            return 0
        return min(request.num_known, self.config.slot_tokens - 1) - request.num_computed

    def _chunk(self, num_tokens: int) -> int:
        return min(num_tokens, self._prompt_limit) if self._prompt_limit else num_tokens

    def _fits(self, request: _Request, matched: Sequence[int]) -> bool:
        """Whether all tokens that a waiting request has now fit into free blocks (scheduler_reserve_full_isl)."""
        num_new = max(self.config.blocks_of(request.num_tokens) - len(matched), 0)
        return num_new + self.pool.num_unheld(matched) <= self.pool.num_free

    def _grow(self, request: _Request, num_tokens: int) -> bool:
        """Blocks for ``num_tokens`` more; False changes nothing. Full blocks can be matched from now on."""
        num_covered = request.num_computed + num_tokens
        num_new = max(self.config.blocks_of(num_covered) - len(request.blocks), 0)
        if num_new > self.pool.num_free:
            return False
        request.blocks += self.pool.take(num_new)
        self._register(request, min(num_covered, request.num_tokens))
        return True

    def _register(self, request: _Request, num_tokens: int) -> None:
        """The full blocks of the first tokens can be matched from now on."""
        if not self.config.prefix_caching:
            return
        num_full = num_tokens // self.config.block_tokens
        for place in range(request.num_registered, num_full):
            self.pool.register(request.blocks[place], request.keys[place])
        request.num_registered = max(request.num_registered, num_full)

    def _preempt(self, request: _Request) -> None:
        """Back to the head of the queue, with nothing computed; its answer so far becomes part of its prompt."""
        self._free(request)
        request.num_computed, request.was_preempted = 0, True
        request.num_stale, request.num_placeholders = request.num_in_flight, 0
        self._waiting.appendleft(request)

    def _leave(self, request: _Request) -> None:
        """Take a request out of its queue and out of the step ahead, and free its blocks."""
        del self._requests[request.handle]
        next(queue for queue in (self._running, self._waiting, self._skipped) if request in queue).remove(request)
        self._free(request)
        if self._ahead is not None:
            step, gone = self._ahead.step, request.handle
            self._ahead.step = step._replace(
                requests=tuple(handle for handle in step.requests if handle != gone),
                preempted=tuple(handle for handle in step.preempted if handle != gone),
                admissions=tuple(admission for admission in step.admissions if admission.request != gone),
            )

    def _free(self, request: _Request) -> None:
        """Last block first, so that the beginning of a text is kept longest."""
        self.pool.free(reversed(request.blocks))
        request.blocks, request.num_registered = [], 0

    def _count_lookup(self, request: _Request, cached_tokens: int) -> None:
        if not self.config.prefix_caching:
            return
        counts = self._counts
        if request.was_preempted:
            counts.preempted_queries += request.num_tokens
            counts.preempted_hits += cached_tokens
        else:
            counts.queries += request.num_tokens
            counts.hits += cached_tokens

    def _step_of(self, preempted: tuple[int, ...], admissions: tuple[Admission, ...]) -> Step:
        if not self._scheduled:
            return Step(IDLE, preempted=preempted)
        decodes = [
            request
            for request, _ in self._scheduled
            if request.num_known > request.num_prompt_tokens and request.num_computed == request.num_known - 1
        ]
        num_tokens = sum(tokens for _, tokens in self._scheduled)
        num_chunk_tokens = num_tokens - len(decodes)
        kind = DECODE if not num_chunk_tokens else MIXED if decodes else PREFILL
        decoding = {request.handle for request in decodes}
        attended = sum(
            attended_tokens(request.num_computed, tokens)
            for request, tokens in self._scheduled
            if request.handle not in decoding
        )
        return Step(
            kind,
            num_seqs=len(self._scheduled),
            bucket=self.config.padded(num_tokens) if kind == DECODE else 0,
            requests=tuple(request.handle for request, _ in self._scheduled),
            cached_tokens=sum(admission.cached_tokens for admission in admissions),
            computed_tokens=num_chunk_tokens,
            hash_hit_tokens=sum(admission.cached_tokens for admission in admissions),
            context_tokens=sum(request.num_known for request in decodes),
            duration_ns=self._lasts_ns(decodes, num_chunk_tokens, attended),
            preempted=preempted,
            admissions=admissions,
            tokens=tuple(tokens for _, tokens in self._scheduled),
            unfinished=tuple(
                request.handle
                for request, tokens in self._scheduled
                if request.num_computed + tokens < request.num_known
            ),
            attended_tokens=attended,
            external_queries=self._external[0],
            external_hits=self._external[1],
        )

    def _lasts_ns(self, decodes: Sequence[_Request], num_chunk_tokens: int, attended: int) -> int:
        context_tokens, num_decodes = sum(request.num_known for request in decodes), len(decodes)
        costs, config = self.cost_model, self.config
        # Only a pure decode step is padded for its requests: a mixed step is as long as all its tokens.
        size = num_decodes if num_chunk_tokens else config.padded(num_decodes)
        # A server that captures nothing has no steps that lack their graph.
        has_graph = config.is_captured(num_decodes + num_chunk_tokens) or not config.capture_sizes
        extra_ns = 0 if has_graph else costs.chunk_eager_ns if num_chunk_tokens else costs.eager_ns
        # The step waits for what it reads from the second memory.
        extra_ns += self._external[1] // config.block_tokens * config.offload_block_ns
        return costs.chunked_step_ns(size, num_decodes, context_tokens, num_chunk_tokens, attended) + extra_ns
