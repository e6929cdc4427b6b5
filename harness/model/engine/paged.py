"""A server with paged KV memory as one object: submit, schedule, finish the step. No clock, no arrivals.

PagedScheduler is a thin shell over the compiled functions of ``paged_steps``, which decide as vLLM's own scheduler
does, with the settings that ``vllm serve`` has by default.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import numpy as np

from harness.compiled import bind, compiled
from harness.compiled.records import IntArray, Records, record_as_dict
from harness.errors import PlanError
from harness.model.engine import paged_steps
from harness.model.engine.config import EngineConfig
from harness.model.engine.cost import CostModel
from harness.model.engine.paged_state import NO_PIN, SKIPPED, PagedPart, PagedRow, PagedState, new_paged_state
from harness.model.engine.scheduler import (
    DECODE,
    FIRST_ROWS,
    IDLE,
    MIXED,
    PREFILL,
    Admission,
    KvEvent,
    Scheduler,
    SchedulerRows,
    Step,
    StepPart,
)
from harness.model.engine.state import QUEUED, ROW_GONE
from harness.stacks.rbln.rules.kv_rules import PAGED
from harness.stacks.vllm.graph_rules import Graph

_FUNCTIONS: Any = (
    paged_steps.reset_paged,
    paged_steps.submit_paged,
    paged_steps.keep_paged,
    paged_steps.abort_paged,
    paged_steps.take_ahead,
    paged_steps.next_ahead,
    paged_steps.decide_running,
    paged_steps.decide_waiting,
    paged_steps.more_equal_steps,
    paged_steps.skip_steps,
    paged_steps.finish_paged,
    paged_steps.paged_has_work,
    paged_steps.reset_prefixes,
)
ENTRYPOINTS = [compiled(each) for each in cast("tuple[Callable[..., int], ...]", _FUNCTIONS)]


@dataclass
class PrefixCounts:
    """Tokens looked up at admissions and tokens found; those after a preemption are counted apart, as in vLLM."""

    queries: int = 0
    hits: int = 0
    preempted_queries: int = 0
    preempted_hits: int = 0


class PagedScheduler(SchedulerRows[PagedState]):
    """One server's scheduler and KV blocks, from its start on; first come, first served.

    Call order as for ``Scheduler``: submit and abort, then schedule, then finish_step. With asynchronous scheduling
    ``schedule`` returns the step that runs now, and decides the step after it, which the answers of this step, and
    what arrives during it, cannot change.
    """

    def __init__(self, config: EngineConfig, cost_model: CostModel, draw_seed: int = 0) -> None:
        """draw_seed: of what is accepted where the configuration has rates."""
        cost_model.check_paged(config)
        self.config = config
        self.cost_model = cost_model
        # Of decode steps without and with drafts, where these have prices of their own.
        self._costs = tuple(map(cost_model.of_query, config.queries)) if config.rule_set.never_mixes else ()
        super().__init__(PagedRow, new_paged_state(config, FIRST_ROWS))
        self._state.server["draw_seed"][:] = draw_seed
        self._reset()
        # Rows left since the last step was over, and before: a step that was decided ahead may still name these.
        self._left: list[int] = []
        self._left_before: list[int] = []
        self._is_running = False
        # Requests that ran and blocks that were free when each of the two steps was decided.
        self._when_decided = [(0, 0), (0, 0)]

    def submit(
        self,
        request: int,
        prompt_tokens: int,
        max_tokens: int,
        block_keys: IntArray | Sequence[int],
        stop_tokens: int | None = None,
    ) -> None:
        """Queue a request at the tail.

        block_keys: chain keys of the full blocks of prompt and answer; the answer's last token needs none.
        stop_tokens: the true output length when the model stops before max_tokens; nothing is scheduled by it.
        """
        config = self.config
        if not 1 <= prompt_tokens < config.slot_tokens or max_tokens < 1:
            raise PlanError(
                f"{prompt_tokens} prompt and {max_tokens} output tokens do not fit {config.slot_tokens} tokens "
                "(a prompt may fill all but one)",
                where=f"request {request}",
            )
        answer = max_tokens if stop_tokens is None else min(stop_tokens, max_tokens)
        end_tokens = min(prompt_tokens + answer, config.slot_tokens)
        needed = (end_tokens - 1) // config.block_tokens
        if config.prefix_caching and len(block_keys) < needed:
            raise PlanError(
                f"{len(block_keys)} block keys for {end_tokens} tokens, {needed} needed", where=f"request {request}"
            )
        row = self._new_row(request)
        self._keys[row] = np.asarray(block_keys, dtype=np.int64)[:needed]
        self._submit(row, prompt_tokens, max_tokens, answer)

    def keep(self, request: int, keep_ns: int) -> None:
        """Pin the blocks of a request for that long once it has ended, where the server pins."""
        self._keep(self._rows[request], keep_ns)

    def tell_time(self, now_ns: int) -> None:
        """The instant of what happens next, where pins end by it."""
        self._state.server["now_ns"][0] = now_ns

    def abort(self, request: int) -> None:
        """Drop a request, waiting or running, at any time; unknown or finished handles are ignored."""
        row = self._rows.get(request)
        if row is not None:
            self._abort(row)
            self._drop_row(request)

    def schedule(self) -> Step:
        """The next step: who computes how many tokens. Requests that have ended since it was decided are left out."""
        assert not self._is_running, "the step before has not ended"
        num_preempted = self._take_ahead()
        current = int(self._state.server["current"][0])
        if num_preempted >= 0:
            self._decide(current, num_preempted)
        ahead = self._next_ahead()
        if ahead >= 0:
            self._decide(ahead, 0)
        self._is_running = True
        return self._step(current)

    def finish_step(self, num_steps: int = 1, accepted: Mapping[int, int] | None = None) -> tuple[int, ...]:
        """The step ran: a token for everyone whose prompt is computed; the finished, freed, in batch order.

        num_steps: more than 1 takes as many equal decode steps at once, see ``equal_durations_ns``. accepted: drafts of
        each request that were accepted, none of one that is not named.
        """
        assert self._is_running, "no step is running"
        self._is_running = False
        for request, count in (accepted or {}).items():
            self._accept(request, count)
        if num_steps > 1:
            self._skip(num_steps - 1)
        count = self._finish()
        finished = tuple(self._handles[row] for row in self._state.places["finished"][:count].tolist())
        self._free_rows += self._left_before
        self._left_before, self._left = self._left, []
        for request in finished:
            self._drop_row(request)
        return finished

    def draft(self, request: int, num_tokens: int) -> None:
        """So many tokens, fewer than the server's usual number, were drafted for a running request's next step."""
        drafts, row = self._state.rows["drafts"], self._rows[request]
        drafts[row] = min(drafts[row], num_tokens)

    @property
    def when_decided(self) -> tuple[int, int]:
        """Requests that ran and blocks that were free when the running step was decided; zeros without drafts."""
        if not self.config.drafts.num_drafts:
            return 0, 0
        return self._when_decided[int(self._state.server["current"][0])]

    @property
    def parts(self) -> tuple[StepPart, ...]:
        """The batch of the step that is over, those too that had ended before, on a server with drafts; else ()."""
        if not self.config.drafts.num_drafts:
            return ()
        server = record_as_dict(self._state.server, 0)
        first = 2 * self.config.max_num_seqs * server["current"]
        parts = self._state.parts[first : first + record_as_dict(self._state.steps, server["current"])["num_scheduled"]]
        columns = (parts[name].tolist() for name in ("row", "tokens", "drafts", "accepted"))
        return tuple(StepPart(self._handles[row], *numbers) for row, *numbers in zip(*columns, strict=True))

    def _accept(self, request: int, count: int) -> None:
        """The running step accepts so many drafts of a request; those that pad it are never accepted."""
        server = record_as_dict(self._state.server, 0)
        first = 2 * self.config.max_num_seqs * server["current"]
        numbers = record_as_dict(self._state.steps, server["current"])
        parts = self._state.parts[first : first + numbers["num_scheduled"]]
        (place,) = np.flatnonzero(parts["row"] == self._rows[request])
        if not 0 <= count <= parts["drafts"][place] * (1 - parts["is_padded"][place]):
            raise PlanError(f"{count} drafts accepted of {parts['drafts'][place]}", where=f"request {request}")
        parts["accepted"][place] = count

    def equal_durations_ns(self, step: Step) -> list[int]:
        """How long the decode step just scheduled lasts, and each step exactly like it that must follow."""
        more = self._more_equal() if step.kind == DECODE else 0
        current = int(self._state.server["current"][0])
        numbers = record_as_dict(self._state.steps, current)
        return [
            self._duration_ns({**numbers, "context_tokens": step.context_tokens + place * step.num_seqs})
            for place in range(more + 1)
        ]

    def reset_prefix_cache(self) -> bool:
        """Forget the content of all blocks; False, and nothing happens, while a request holds some."""
        return bool(self._reset_prefixes())

    @property
    def has_work(self) -> bool:
        """Whether any request waits or runs, or a step that was decided for some has yet to run."""
        return bool(self._rows) or bool(self._has_work())

    @property
    def waiting(self) -> tuple[int, ...]:
        """Waiting requests, head first."""
        return (*self._queued(SKIPPED), *self._queued(QUEUED))

    @property
    def free_blocks(self) -> int:
        """Blocks that no running request holds."""
        return int(self._state.server["num_free"][0])

    @property
    def free_order(self) -> tuple[int, ...]:
        """Blocks that no running request holds, the next to be used first."""
        pinned = sorted(
            (until_ns, serial, block)
            for block, (until_ns, serial, place, _heap) in enumerate(self._state.pins.tolist())
            if place != NO_PIN
        )
        now_ns, after = int(self._state.server["now_ns"][0]), self._state.blocks["next"]
        ended = [block for until_ns, _serial, block in pinned if until_ns <= now_ns]
        free: list[int] = []
        block = int(after[0])
        while block != 0:
            free.append(block)
            block = int(after[block])
        return (*ended, *free, *(block for until_ns, _serial, block in pinned if until_ns > now_ns))

    @property
    def second_order(self) -> tuple[int, ...]:
        """Keys of the blocks in the second memory, the least recently used first."""
        second, keys = self._state.second, list[int]()
        place = int(second["next"][0]) if len(second) else 0
        while place != 0:
            keys.append(int(second["key"][place]))
            place = int(second["next"][place])
        return tuple(keys)

    @property
    def num_blocks(self) -> int:
        """Blocks that requests can hold."""
        return self.config.num_blocks - 1

    @property
    def num_evicted(self) -> int:
        """Blocks with content that were used again."""
        return int(self._state.server["num_evicted"][0])

    @property
    def prefix_counts(self) -> PrefixCounts:
        """What look-ups at admissions found, since the start."""
        server = record_as_dict(self._state.server, 0)
        return PrefixCounts(**{name: server[name] for name in PrefixCounts.__dataclass_fields__})

    def inner_blocks(self, request: int) -> tuple[int, ...]:
        """Blocks of a request in order; none while it waits."""
        row = self._rows[request]
        seat = int(self._state.rows["seat"][row])
        if seat < 0:
            return ()
        return tuple(self._state.seat_blocks[seat, : self._state.rows["num_blocks"][row]].tolist())

    def take_kv_events(self) -> tuple[KvEvent, ...]:
        """None: vLLM logs nothing about single blocks."""
        return ()

    def _bind(self, state: PagedState) -> None:
        super()._bind(state)
        functions = [bind(function, state) for function in ENTRYPOINTS]
        self._reset, self._submit, self._keep, self._abort, self._take_ahead, self._next_ahead, *rest = functions
        self._decide_running, self._decide_waiting, self._more_equal, self._skip, *others = rest
        self._finish, self._has_work, self._reset_prefixes = others

    def _drop_row(self, request: int) -> None:
        self._left.append(self._rows.pop(request))

    def _decide(self, which: int, num_preempted: int) -> None:
        row = self._decide_running(which, num_preempted)
        while row >= 0:
            keys = self._keys[row]
            self._state.prefix["key"][: len(keys)] = keys
            row = self._decide_waiting(which, row)
        if self.config.drafts.num_drafts:
            self._when_decided[which] = self.num_running, self.free_blocks

    def _step(self, which: int) -> Step:
        """The decided step of this place, by the handles of its requests."""
        state = self._state
        numbers = record_as_dict(state.steps, which)
        first = 2 * self.config.max_num_seqs * which
        preempted = self._alive(state.parts["preempted"][first : first + numbers["num_preempted"]].tolist())
        count = numbers["num_scheduled"]
        if count == 0:
            return Step(IDLE, preempted=preempted)
        parts = state.parts[first : first + count]
        rows, tokens = parts["row"].tolist(), tuple(parts["tokens"].tolist())
        admissions, cached_tokens = (
            self._admissions(first, numbers["num_admitted"]) if numbers["num_admitted"] else ((), 0)
        )
        computed, block_size = numbers["num_chunk_tokens"], self.config.block_tokens
        kind = DECODE if not computed else MIXED if numbers["num_decodes"] else PREFILL
        unfinished = tuple(
            self._handles[row] for row, is_left in zip(rows, parts["is_unfinished"].tolist(), strict=True) if is_left
        )
        return Step(
            kind,
            num_seqs=count,
            bucket=self._graph(numbers)[1] if kind == DECODE else 0,
            requests=self._alive(rows),
            cached_tokens=cached_tokens,
            computed_tokens=computed,
            hash_hit_tokens=cached_tokens,
            context_tokens=numbers["context_tokens"],
            duration_ns=self._duration_ns(numbers),
            preempted=preempted,
            admissions=admissions,
            tokens=tokens,
            unfinished=unfinished,
            attended_tokens=numbers["attended_tokens"],
            external_queries=numbers["asked_tokens"],
            external_hits=numbers["num_loaded"] * block_size,
            drafts=self._drafts(parts) if self.config.drafts.num_drafts else (),
        )

    def _drafts(self, parts: Records[PagedPart]) -> tuple[tuple[int, int], ...]:
        """Drafts of each request of these parts that has not ended and is not padded with them."""
        status = self._state.rows["status"]
        with_drafts = parts[(parts["drafts"] > 0) & (parts["is_padded"] == 0)]
        each = zip(with_drafts["row"].tolist(), with_drafts["drafts"].tolist(), strict=True)
        return tuple((self._handles[row], drafts) for row, drafts in each if status[row] != ROW_GONE)

    def _alive(self, rows: Sequence[int]) -> tuple[int, ...]:
        """The handles of those of these rows that have not ended."""
        status = self._state.rows["status"]
        return tuple(self._handles[row] for row in rows if status[row] != ROW_GONE)

    def _admissions(self, first: int, count: int) -> tuple[tuple[Admission, ...], int]:
        """The admissions of requests that have not ended, and the cached tokens of all."""
        rows, parts = self._state.rows, self._state.parts[first : first + count]
        cached = parts["cached_tokens"].tolist()
        return tuple(
            Admission(self._handles[row], reused, int(rows["prompt"][row] + rows["output"][row]) - reused)
            for row, reused in zip(parts["admitted"].tolist(), cached, strict=True)
            if rows["status"][row] != ROW_GONE
        ), sum(cached)

    def _graph(self, step: dict[str, int]) -> tuple[Graph, int]:
        """See ``EngineConfig.graph``. step: the fields of ``PagedStep``."""
        if self.config.rule_set.never_mixes:
            return "FULL", self.config.padded(step["num_decodes"])
        drafts, num_chunk_tokens = step["draft_tokens"], step["num_chunk_tokens"]
        is_uniform = not num_chunk_tokens and drafts == self.config.drafts.num_drafts * step["num_decodes"]
        return self.config.graph(step["num_decodes"] + drafts + num_chunk_tokens, is_uniform=is_uniform)

    def _duration_ns(self, step: dict[str, int]) -> int:
        """How long a step lasts. step: the fields of ``PagedStep``."""
        costs, config = self.cost_model, self.config
        num_decodes, num_chunk_tokens = step["num_decodes"], step["num_chunk_tokens"]
        if config.rule_set.never_mixes:
            costs = self._costs[step["draft_tokens"] > 0]
            num_chunk_tokens = config.max_num_batched_tokens if num_chunk_tokens else 0
        mode, size = self._graph(step)
        # Only a pure decode step is padded for its requests: a mixed step is as long as all its tokens.
        size = num_decodes + step["draft_tokens"] if num_chunk_tokens else size
        # A server that captures nothing has no steps that lack their graph.
        has_graph = mode != "NONE" or not config.capture_sizes
        extra_ns = 0 if has_graph else costs.chunk_eager_ns if num_chunk_tokens else costs.eager_ns
        # The step waits for what it reads from the second memory.
        extra_ns += step["num_loaded"] * config.offload_block_ns
        extra_ns += (costs.draft_pass_ns or 0) * config.drafts.num_passes
        context_tokens, attended = step["context_tokens"], step["attended_tokens"]
        return costs.chunked_step_ns(size, num_decodes, context_tokens, num_chunk_tokens, attended) + extra_ns


AnyScheduler: TypeAlias = Scheduler | PagedScheduler


def scheduler_of(
    config: EngineConfig, cost_model: CostModel, *, with_events: bool = True, draw_seed: int = 0
) -> AnyScheduler:
    """The scheduler that a server's rules ask for. with_events: KV events, which paged rules do not have. draw_seed:
    of one of several replicas, which accept drafts each by draws of its own."""
    if config.rule_set.is_paged:
        return PagedScheduler(config, cost_model, draw_seed)
    return Scheduler(config, cost_model, with_events=with_events)


def warm_up() -> None:
    """Compile everything that a PagedScheduler calls, or load it, so that no first step pays for it (seconds)."""
    costs = CostModel("warm-up", "none", {1: 1}, chunk_step_fs=1)
    scheduler = PagedScheduler(EngineConfig(2, (1, 2), slot_tokens=32, block_tokens=16, rules=PAGED), costs)
    for request in range(2):
        scheduler.submit(request, 16, 8, [request])
        scheduler.keep(request, 0)
    while scheduler.has_work:
        durations_ns = scheduler.equal_durations_ns(scheduler.schedule())
        scheduler.abort(1)
        scheduler.finish_step(len(durations_ns))
    scheduler.reset_prefix_cache()
