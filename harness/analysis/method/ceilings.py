"""How much of its prompts a run could have reused, beside what it did, and where the rest went.

Three ceilings, each of prompt tokens: an endless cache; what the turn before left; whole blocks of the turn before
(formula C). What lies between them and the reuse is divided by cause, so that the parts sum to the whole.
Definitions: docs/method.md, "Ceilings of reuse".
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from operator import attrgetter
from typing import NamedTuple

import pyarrow as pa

from harness.analysis.method.reconstruct import join_request_id
from harness.analysis.method.reuse import continuations, reusable_tokens
from harness.plan import Plan
from harness.records.schema import rows_where, values_of

# Causes of a shortfall, in the order in which reports show them; evictions are by who asked for the slot.
OTHERS, GENERATED, PART_OF_BLOCK = "text of other sessions", "generated text", "part of a block"
EVICTED, KEPT = "evicted: {}", "in its slot, not matched"


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Sums over the answered requests of one run or more, in prompt tokens.

    endless: known to an endless cache in the order of sending; by_turn: prompt and answer of the turn before that the
    prompt keeps; blocks: formula C. reused: what the responses reported. beyond: reused beyond what an endless cache
    knew, which is false sharing. lost: endless - (reused - beyond), by cause.
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
        return Ceilings(
            self.prompt + other.prompt,
            self.endless + other.endless,
            self.by_turn + other.by_turn,
            self.blocks + other.blocks,
            self.reused + other.reused,
            self.beyond + other.beyond,
            lost,
        )


def total(of: Iterable[Ceilings]) -> Ceilings:
    """The sums over several runs."""
    return reduce(Ceilings.__add__, of, Ceilings())


class _Request(NamedTuple):
    """The columns of a request that count here."""

    session: int
    request: int
    sent_ns: int
    response_id: str
    prompt_tokens: int | None
    planned_prompt_tokens: int
    cached_tokens: int


def ceilings(requests: pa.Table, kv_events: pa.Table, plan: Plan) -> Ceilings:
    """Ceilings and losses of one run; ``plan``: which session continues which, and which begin alike."""
    parents, kept = continuations(plan)
    rows = {(row.session, row.request): row for row in map(_Request._make, values_of(requests, *_Request._fields))}
    answered = sorted((row for row in rows.values() if row.prompt_tokens is not None), key=attrgetter("sent_ns"))
    evictions = _Evictions(kv_events, (row.response_id for row in answered))
    known = _SharedBeginnings(plan)
    found: list[Ceilings] = []
    for row in answered:
        place = row.session, row.request
        parent = rows.get(parents.get(place, (place[0], place[1] - 1)))
        prompt, reused = row.prompt_tokens or 0, row.cached_tokens
        most = prompt - 1  # the last token is always computed
        by_turn = 0 if parent is None else min(kept[place], most)
        # Of an answer that the client left, usage is unknown; its prompt is what was sent.
        before = 0 if parent is None else parent.prompt_tokens or parent.planned_prompt_tokens
        shared = min(by_turn, before)
        blocks = 0 if parent is None else reusable_tokens(shared, prompt)
        endless = max(by_turn, min(known.tokens(*place), most))
        cause = "" if parent is None else evictions.cause(parent.response_id, row.response_id)
        lost = _losses(endless, by_turn, shared, blocks, reused, cause)
        found.append(Ceilings(prompt, endless, by_turn, blocks, reused, max(0, reused - endless), lost))
    return total(found)


def _losses(endless: int, by_turn: int, shared: int, blocks: int, reused: int, cause: str) -> dict[str, int]:
    """The tokens of one request that an endless cache would have hit and this one did not, by cause."""
    parts = {OTHERS: endless - by_turn, GENERATED: by_turn - shared, PART_OF_BLOCK: shared - blocks}
    gained = min(reused, endless) - min(reused, blocks)  # what came from elsewhere than the turn before
    for name, tokens in parts.items():
        took = min(tokens, gained)
        parts[name] = tokens - took
        gained -= took
    parts[cause] = blocks - min(reused, blocks)
    return {name: tokens for name, tokens in parts.items() if tokens}


class _SharedBeginnings:
    """What an endless cache has seen of the beginnings that sessions share: a common prefix, and named blocks."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._is_prefix_known = False
        self._names: set[int] = set()

    def tokens(self, session: int, request: int) -> int:
        """How many tokens of this request's beginning were known; afterwards all of them are."""
        one = self._plan.sessions[session]
        if request or one.continues is not None:
            return 0
        known = self._plan.shared_prefix_tokens if self._is_prefix_known else 0
        self._is_prefix_known = True
        num_known = next((at for at, name in enumerate(one.blocks) if name not in self._names), len(one.blocks))
        self._names.update(one.blocks)
        return max(known, num_known * self._plan.block_tokens)


class _Evictions:
    """Which eviction took a request's slot from the one that continues it."""

    def __init__(self, kv_events: pa.Table, response_ids: Iterable[str]) -> None:
        told = {response_id: 0 for response_id in response_ids if response_id}
        self._admitted: dict[str, tuple[int, list[int]]] = {}
        self._evicted: dict[int, list[tuple[int, str]]] = {}  # slot -> (index, caller), in the order of the log
        for index, request_id, slots in values_of(
            rows_where(kv_events, "kind", "alloc"), "index", "request_id", "slots"
        ):
            if response_id := join_request_id(request_id, told):
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
