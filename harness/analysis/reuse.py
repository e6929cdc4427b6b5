"""KV reuse of re-arrivals: what formula C allows, what the server reported, what was lost and why, and what that costs.

Three ceilings, each of prompt tokens: an endless cache; what the turn before left; whole blocks of the turn before
(formula C). Lost tokens = best possible reuse - actual reuse, divided by cause. Reuse that the server did not report is
None, never zero. Definitions: docs/reference/method-sessions.md, "Reuse" and "Ceilings of reuse".
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

import pyarrow as pa

from harness.analysis.run_tables import RequestKey, join_request_id
from harness.analysis.stats import sum_or_none
from harness.measure.records.run import SealedRun
from harness.measure.records.schema import rows_where, values_of
from harness.model.engine import CostModel
from harness.model.plan.model import Plan

BLOCK_TOKENS = 128
PAGED_BLOCK_TOKENS = 16  # vLLM's default on GPUs
ONE_POOL: Mapping[RequestKey, int] = {}
"""Which engine served each request, where all share one KV pool or nobody knows."""


class ReuseRule(NamedTuple):
    """What a stack can reuse: whole blocks of ``block_tokens``; paged KV memory keeps generated tokens as well."""

    block_tokens: int = BLOCK_TOKENS
    keeps_generated: bool = False

    def kept_tokens(self, prompt_tokens: int, generated_tokens: int) -> int:
        """Tokens of a request whose KV remains. The KV of the last generated token is never computed."""
        return prompt_tokens + max(0, generated_tokens - 1) if self.keeps_generated else prompt_tokens


INNER_BLOCKS = ReuseRule()


def reuse_rule(run: SealedRun) -> ReuseRule:
    """What the server of a run can reuse."""
    if not run.server.is_paged:
        return INNER_BLOCKS
    return ReuseRule(int(run.manifest.server_spec.get("block_size") or PAGED_BLOCK_TOKENS), keeps_generated=True)


class Rearrival(NamedTuple):
    """A request that continues an earlier one. Tokens; cached: None where the server did not report it.

    reusable_tokens: what formula C allows; with_answer_tokens: as if the whole previous answer counted too. wait_ns:
    from the end of the earlier answer to the send of this one, model ns.
    """

    session: int
    request: int
    previous_prompt_tokens: int
    previous_generated_tokens: int
    prompt_tokens: int
    reusable_tokens: int
    with_answer_tokens: int
    cached_tokens: int | None
    wait_ns: int

    @property
    def is_reused(self) -> bool | None:
        return None if self.cached_tokens is None else self.cached_tokens > 0

    @property
    def is_partial(self) -> bool | None:
        return None if self.cached_tokens is None else 0 < self.cached_tokens < self.reusable_tokens


def with_known_zeros(requests: pa.Table, num_cached_by_counter: float | None) -> pa.Table:
    """The requests, with 0 for ``cached_tokens`` that the answers left out although it is known that none was reused.

    vLLM leaves the field out of an answer that reused nothing; a server without it never states reuse. It is a zero
    where another answer of the run states the field, or where the server's counter did not rise.
    num_cached_by_counter: how far the counter of reused tokens rose; None: unknown.
    """
    cached = requests.column("cached_tokens")
    is_stated = cached.null_count < len(cached)
    if not cached.null_count or not (is_stated or num_cached_by_counter == 0):
        return requests
    rows = zip(cached.to_pylist(), requests.column("prompt_tokens").to_pylist(), strict=True)
    filled = [0 if tokens is None and prompt is not None else tokens for tokens, prompt in rows]
    place = requests.schema.get_field_index("cached_tokens")
    return requests.set_column(place, requests.schema.field(place), pa.array(filled, pa.int32()))


def reusable_tokens(previous_prompt_tokens: int, prompt_tokens: int, block_tokens: int = BLOCK_TOKENS) -> int:
    """C = 128 floor(min(p0, p1 - 1) / 128): the whole blocks of what remains of the request before.

    previous_prompt_tokens: p0; with paged KV memory prompt and answer, see ``ReuseRule.kept_tokens``.
    """
    return block_tokens * (min(previous_prompt_tokens, prompt_tokens - 1) // block_tokens)


def rearrivals(
    requests: pa.Table,
    plan: Plan | None = None,
    rule: ReuseRule = INNER_BLOCKS,
    engine_of: Mapping[RequestKey, int] = ONE_POOL,
) -> list[Rearrival]:
    """Every answered request that continues an earlier one, in (session, request) order.

    plan: tells which session continues which, and how much of the earlier text a prompt keeps; without it, a request
    continues the one before it in its session and keeps all of it. engine_of: of requests served by several engines,
    each with a KV pool of its own; what a prompt can reuse is then what its engine served before.
    """
    parents, kept = continuations(plan)
    rows = _answered(requests)
    prompt_of = {(session, request): prompt for session, request, prompt, _cached in rows}
    generated_of = _generated(requests)
    instants = values_of(requests, "session", "request", "sent_ns", "done_ns")
    instants_of = {(session, request): (sent_ns, done_ns) for session, request, sent_ns, done_ns in instants}
    returning: list[Rearrival] = []
    for session, request, prompt, cached in rows:
        previous = parents.get((session, request), (session, request - 1))
        if previous in prompt_of:
            before, answer = prompt_of[previous], generated_of[previous]
            held, most = _held((session, request), parents, kept, prompt_of, engine_of)
            here = (0, 0) if held is None else (prompt_of[held], generated_of[held])
            # A prompt that leaves the previous answer out cannot share it.
            reusable, with_answer = (
                reusable_tokens(min(known, most), prompt, rule.block_tokens) if known else 0
                for known in (rule.kept_tokens(*here), sum(here))
            )
            wait_ns = max(0, instants_of[session, request][0] - instants_of[previous][1])
            returning.append(
                Rearrival(session, request, before, answer, prompt, reusable, with_answer, cached, wait_ns)
            )
    return returning


def _generated(requests: pa.Table) -> dict[RequestKey, int]:
    columns = values_of(requests, "session", "request", "completion_tokens")
    return {(session, request): tokens or 0 for session, request, tokens in columns}


def cached_tokens(requests: pa.Table) -> int | None:
    """Sum of the cached tokens that the answers report; None where an answer does not report them."""
    return sum_or_none(cached for _session, _request, _prompt, cached in _answered(requests))


def prompt_tokens(requests: pa.Table) -> int:
    """Sum of the prompts of the answered requests, as the server counted them."""
    return sum(prompt for _session, _request, prompt, _cached in _answered(requests))


def extra_prefill_ns(cost_model: CostModel, prompt_tokens: int, lost_tokens: int) -> int:
    """T(L) - T(L - C): what computing again ``lost_tokens`` of a prompt of L tokens costs."""
    return cost_model.prefill_ns(prompt_tokens, 0) - cost_model.prefill_ns(prompt_tokens - lost_tokens, lost_tokens)


def continuations(plan: Plan | None) -> tuple[dict[RequestKey, RequestKey], dict[RequestKey, int]]:
    """(first request -> the request of another session that it continues, request -> tokens kept of the stream)."""
    if plan is None:
        return {}, {}
    parents = {
        (session.index, 0): (session.continues, len(plan.sessions[session.continues].requests) - 1)
        for session in plan.sessions
        if session.continues is not None
    }
    kept = {
        (session.index, index): request.keep_tokens
        for session in plan.sessions
        for index, request in enumerate(session.requests)
    }
    return parents, kept


def _held(
    place: RequestKey,
    parents: Mapping[RequestKey, RequestKey],
    kept: Mapping[RequestKey, int],
    answered: Container[RequestKey],
    engine_of: Mapping[RequestKey, int],
) -> tuple[RequestKey | None, int]:
    """The latest turn before whose KV the engine of a request has, and how many of its tokens the prompt keeps.

    None: another engine served all of them. A turn whose engine is not known counts as served by the same one.
    """
    own, most, before = engine_of.get(place), kept.get(place, sys.maxsize), parents.get(place, (place[0], place[1] - 1))
    while before in answered:
        if own is None or engine_of.get(before, own) == own:
            return before, most
        most = min(most, kept.get(before, sys.maxsize))
        before = parents.get(before, (before[0], before[1] - 1))
    return None, 0


def _answered(requests: pa.Table) -> list[tuple[int, int, int, int | None]]:
    rows = values_of(requests, "session", "request", "prompt_tokens", "cached_tokens")
    return sorted((row for row in rows if row[2] is not None), key=lambda row: row[:2])


# Causes of a shortfall, in the order in which reports show them; evictions are by who asked for the slot.
OTHERS, GENERATED, PART_OF_BLOCK = "text of other sessions", "generated text", "part of a block"
EVICTED, KEPT, ELSEWHERE = "evicted by {}", "in its slot, not matched", "on another engine"


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Sums over the answered requests of one run or more, in prompt tokens.

    endless: known to an endless cache in the order of sending; by_turn: prompt and answer of the turn before that the
    prompt keeps; blocks: formula C, of what the request's engine served. reused: what the responses reported. beyond:
    reused beyond what an endless cache knew, which is false sharing. lost: endless - (reused - beyond), by cause.
    """

    prompt: int = 0
    endless: int = 0
    by_turn: int = 0
    blocks: int = 0
    reused: int = 0
    beyond: int = 0
    lost: Mapping[str, int] = field(default_factory=dict[str, int])

    def __add__(self, other: Ceilings) -> Ceilings:
        lost = {cause: self.lost.get(cause, 0) + other.lost.get(cause, 0) for cause in {**self.lost, **other.lost}}
        names = ("prompt", "endless", "by_turn", "blocks", "reused", "beyond")
        return Ceilings(**{name: getattr(self, name) + getattr(other, name) for name in names}, lost=lost)


class _Request(NamedTuple):
    """The columns of a request that count here."""

    session: int
    request: int
    sent_ns: int
    response_id: str
    prompt_tokens: int | None
    planned_prompt_tokens: int
    cached_tokens: int


def ceilings(
    requests: pa.Table,
    kv_events: pa.Table,
    plan: Plan,
    rule: ReuseRule = INNER_BLOCKS,
    engine_of: Mapping[RequestKey, int] = ONE_POOL,
) -> Ceilings:
    """Ceilings and losses of one run; ``plan``: which session continues which, and which begin alike.

    engine_of: see ``rearrivals``. Of each answered request: endless >= by_turn >= shared (kept of the turn before) >=
    blocks >= here (of these, on the request's engine). Their differences are losses, each of one cause.
    """
    parents, kept = continuations(plan)
    rows = {(row.session, row.request): row for row in map(_Request._make, values_of(requests, *_Request._fields))}
    answered = sorted((row for row in rows.values() if row.prompt_tokens is not None), key=attrgetter("sent_ns"))
    evictions = _Evictions(kv_events, (row.response_id for row in answered))
    known, total = _SharedBeginnings(plan), Ceilings()
    generated_of = _generated(requests)

    def stored(place: RequestKey) -> int:
        # Of an answer that the client left, usage is unknown; its prompt is what was sent.
        return rule.kept_tokens(rows[place].prompt_tokens or rows[place].planned_prompt_tokens, generated_of[place])

    for row in answered:
        place = row.session, row.request
        parent = rows.get(parents.get(place, (place[0], place[1] - 1)))
        prompt, reused = row.prompt_tokens or 0, row.cached_tokens
        most = prompt - 1  # the last token is always computed
        by_turn = 0 if parent is None else min(kept[place], most)
        shared = 0 if parent is None else min(by_turn, stored((parent.session, parent.request)))
        blocks = 0 if parent is None else reusable_tokens(shared, prompt, rule.block_tokens)
        held, kept_here = _held(place, parents, kept, rows, engine_of)
        here = (
            0 if held is None else min(blocks, reusable_tokens(min(kept_here, stored(held)), prompt, rule.block_tokens))
        )
        endless = max(by_turn, min(known.tokens(*place), most))
        cause = "" if held is None else evictions.cause(rows[held].response_id, row.response_id)
        parts = {OTHERS: endless - by_turn, GENERATED: by_turn - shared, PART_OF_BLOCK: shared - blocks}
        parts[ELSEWHERE] = blocks - here
        # Reuse from elsewhere than the turn before.
        gained = min(reused, endless) - min(reused, here)
        for name, tokens in parts.items():
            covered = min(tokens, gained)
            parts[name] = tokens - covered
            gained -= covered
        parts[cause] = here - min(reused, here)
        lost = {name: tokens for name, tokens in parts.items() if tokens}
        total += Ceilings(prompt, endless, by_turn, here, reused, max(0, reused - endless), lost)
    return total


class _SharedBeginnings:
    """What an endless cache has seen of the beginnings that sessions share: a common prefix, and named blocks."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._is_prefix_known = False
        self._names: set[int] = set()

    def tokens(self, session: int, request: int) -> int:
        """How many tokens of this request's beginning were known; afterwards all of them are."""
        planned = self._plan.sessions[session]
        if request or planned.continues is not None:
            return 0
        known = self._plan.shared_prefix_tokens if self._is_prefix_known else 0
        self._is_prefix_known = True
        num_known = next((at for at, name in enumerate(planned.blocks) if name not in self._names), len(planned.blocks))
        self._names.update(planned.blocks)
        return max(known, num_known * self._plan.block_tokens)


class _Evictions:
    """Which eviction took a request's slot from the one that continues it."""

    def __init__(self, kv_events: pa.Table, response_ids: Iterable[str]) -> None:
        known = {response_id: 0 for response_id in response_ids if response_id}
        self._admitted: dict[str, tuple[int, list[int]]] = {}
        self._evicted: dict[int, list[tuple[int, str]]] = {}  # slot -> (index, caller), in the order of the log
        for index, request_id, slots in values_of(
            rows_where(kv_events, "kind", "alloc"), "index", "request_id", "slots"
        ):
            if response_id := join_request_id(request_id, known):
                self._admitted[response_id] = index, slots
        for index, slots, caller in values_of(rows_where(kv_events, "kind", "eviction"), "index", "slots", "caller"):
            for slot in slots:
                self._evicted.setdefault(slot, []).append((index, caller or "unknown"))

    def cause(self, before: str, after: str) -> str:
        """Why ``after`` did not find all blocks of ``before``; the log tells the order of the two and of evictions."""
        if before not in self._admitted or after not in self._admitted:
            return "not in the log"
        first, slots = self._admitted[before]
        last, _ = self._admitted[after]
        taken = [
            evicted[at]
            for slot in slots
            if (evicted := self._evicted.get(slot)) and (at := bisect_right(evicted, (first, ""))) < len(evicted)
        ]
        index, caller = min(taken, default=(last, ""))
        return EVICTED.format(caller) if index < last else KEPT
