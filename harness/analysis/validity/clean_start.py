"""Whether a run found a clean cache: no session's first request may reuse more than its plan explains.

A server that is not restarted has a cache that outlives a run; before one that is, a router may change prompts.
Definitions: docs/reference/method.md, "A run and its invariants".
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from harness.analysis.validity.evidence import Evidence
from harness.kinds import kind_of_run
from harness.measure.records.manifest import Finding, Manifest, invalid, table_at
from harness.measure.records.schema import values_of

if TYPE_CHECKING:
    from harness.model.plan.model import Plan

# On servers that match single tokens, the first ids of two prompts may be equal by chance.
CHANCE_TOKENS = 4
# Text that is sized by a mean is longer or shorter by a few percent (MOST_DRIFT and above are findings).
TEXT_MARGIN = 1.1


def check_clean_start(run: Evidence) -> Iterator[Finding]:
    """The finding ``cache-not-clean``; nothing is judged without the plan, or where reuse is not reported."""
    is_fresh = kind_of_run(run.manifest.backend).is_restarted
    if run.plan is None or (is_fresh and _has_unknown_template(run.manifest, run.plan)):
        return
    explained = _explained(run.manifest, run.plan)
    columns = values_of(run.requests, "session", "request", "cached_tokens", "prompt_tokens")
    first = [row for row in columns if (row[0], row[1]) in explained and row[2] is not None]
    stale = [row for row in first if row[2] > explained[row[0], row[1]] + CHANCE_TOKENS]
    if not stale:
        return
    session, request, cached, _prompt = stale[0]
    found, prompts = sum(row[2] for row in first), sum(row[3] or 0 for row in first)
    yield invalid(
        "cache-not-clean",
        f"{len(stale)} of {len(first)} first requests found tokens that nothing of this run had sent: {found:,} of "
        f"{prompts:,} tokens were cached, first session {session} request {request} with {cached:,} where the plan "
        f"explains {explained[session, request]:,}",
        "Something changes the prompts on their way, or the cache matches what is not equal: measure without the router"
        if is_fresh
        else "Something else uses the server with these prompts, or its cache matches what is not equal: restart it",
    )


def _has_unknown_template(manifest: Manifest, plan: Plan) -> bool:
    """Whether a server adds words to every prompt of which nobody told the number."""
    return plan.prompt_form == "chat" and not table_at(manifest.client_audit, "text_sizes").get("first_tokens")


def _explained(manifest: Manifest, plan: Plan) -> dict[tuple[int, int], int]:
    """For each request that begins a stream afresh the tokens that other requests of the run may have cached."""
    held = Counter(name for session in plan.sessions for name in set(session.blocks))
    shared: dict[tuple[int, int], int] = {}
    for session in plan.sessions:
        for place, request in enumerate(session.requests):
            if request.keep_tokens or (place == 0 and session.continues is not None):
                continue
            names = session.blocks if place == 0 else ()
            alone = next((at for at, name in enumerate(names) if held[name] == 1), len(names))
            shared[session.index, place] = max(plan.shared_prefix_tokens, alone * plan.block_tokens)
    if plan.prompt_form == "token-ids":
        return shared
    # A server adds the same words to every prompt, whatever the run.
    added = table_at(manifest.client_audit, "text_sizes").get("first_tokens", 0)
    return {key: math.ceil(TEXT_MARGIN * tokens) + added for key, tokens in shared.items()}
