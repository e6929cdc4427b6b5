"""KV reuse of re-arrivals: what formula C allows, what the server reported, and what losing it costs.

Pure arithmetic over the requests table. Reuse that the server did not report is None, never zero.
Definitions: docs/method.md, "Reuse".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import pyarrow as pa

if TYPE_CHECKING:
    from harness.plan import Plan

BLOCK_TOKENS = 128
Place = tuple[int, int]  # (session, request)


class PrefillCost(Protocol):
    """The part of a cost model that prices prefills."""

    def prefill_ns(self, computed_tokens: int, cached_tokens: int = 0) -> int: ...


class Rearrival(NamedTuple):
    """A request that continues an earlier one. Tokens; cached: None where the server did not report it."""

    session: int
    request: int
    previous_prompt_tokens: int
    prompt_tokens: int
    reusable_tokens: int
    cached_tokens: int | None

    @property
    def is_reused(self) -> bool | None:
        return None if self.cached_tokens is None else self.cached_tokens > 0

    @property
    def is_partial(self) -> bool | None:
        return None if self.cached_tokens is None else 0 < self.cached_tokens < self.reusable_tokens


def sum_or_none(values: Iterable[int | None]) -> int | None:
    """The sum; None where one of the values is unknown."""
    known = list(values)
    return None if None in known else sum(value for value in known if value is not None)


def is_reuse_known(requests: pa.Table) -> bool:
    """Whether every answered request states what it reused."""
    return all(cached is not None for _session, _request, _prompt, cached in _answered(requests))


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
    """C = 128 floor(min(p0, p1 - 1) / 128): the whole blocks of the previous prompt; generated text never counts."""
    return block_tokens * (min(previous_prompt_tokens, prompt_tokens - 1) // block_tokens)


def rearrivals(requests: pa.Table, plan: Plan | None = None) -> list[Rearrival]:
    """Every answered request that continues an earlier one, in (session, request) order.

    plan: tells which session continues which, and how much of the earlier text a prompt keeps; without it, a request
    continues the one before it in its session and keeps all of it.
    """
    parents, kept = continuations(plan)
    rows = _answered(requests)
    prompt_of = {(session, request): prompt for session, request, prompt, _cached in rows}
    found: list[Rearrival] = []
    for session, request, prompt, cached in rows:
        previous = parents.get((session, request), (session, request - 1))
        if previous in prompt_of:
            before = prompt_of[previous]
            shared = min(before, kept.get((session, request), before))
            found.append(Rearrival(session, request, before, prompt, reusable_tokens(shared, prompt), cached))
    return found


def computed_prefill_tokens(requests: pa.Table) -> int | None:
    """Prompt tokens that the server computed: sum of prompt - cached over answered requests; None where unknown."""
    rows = _answered(requests)
    return sum_or_none(None if cached is None else prompt - cached for _session, _request, prompt, cached in rows)


def cached_tokens(requests: pa.Table) -> int | None:
    """Sum of the cached tokens that the answers report; None where an answer reports none."""
    return sum_or_none(cached for _session, _request, _prompt, cached in _answered(requests))


def prompt_tokens(requests: pa.Table) -> int:
    """Sum of the prompts of the answered requests, as the server counted them."""
    return sum(prompt for _session, _request, prompt, _cached in _answered(requests))


def extra_prefill_ns(cost_model: PrefillCost, prompt_tokens: int, lost_tokens: int) -> int:
    """T(L) - T(L - C): what computing again ``lost_tokens`` of a prompt of L tokens costs."""
    return cost_model.prefill_ns(prompt_tokens, 0) - cost_model.prefill_ns(prompt_tokens - lost_tokens, lost_tokens)


def critical_request_count(is_reused_by_count: Mapping[int, Sequence[bool]]) -> int | None:
    """The largest number m of background requests at which reuse is retained in every replicate, and at all smaller
    m that were tried; None when it is lost at the smallest one."""
    critical: int | None = None
    for count in sorted(is_reused_by_count):
        if not all(is_reused_by_count[count]):
            break
        critical = count
    return critical


def continuations(plan: Plan | None) -> tuple[dict[Place, Place], dict[Place, int]]:
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


def _answered(requests: pa.Table) -> list[tuple[int, int, int, int | None]]:
    columns = [requests.column(name).to_pylist() for name in ("session", "request", "prompt_tokens", "cached_tokens")]
    return sorted((row for row in zip(*columns, strict=True) if row[2] is not None), key=lambda row: row[:2])
