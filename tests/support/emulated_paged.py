"""The emulator's loop on a virtual clock, every token drawn, held to the compiled simulator under paged rules."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from harness.model.engine import DECODE
from harness.model.plan.model import Plan
from harness.model.sim import simulate
from harness.model.spec import ServerSpec
from tests.support.paged_in_steps import LONGEST
from tests.support.virtual_emulator import run_virtually


def drawn_drafts(chosen: random.Random, server: ServerSpec) -> dict[str, Any]:
    """Keys of that server's speculative decoding: few and many drafts, rates between certain and hopeless."""
    num_drafts = chosen.choice((1, 2, 3, 5))
    rates = sorted((chosen.choice((0.0, 1.0, chosen.random())) for _ in range(num_drafts)), reverse=True)
    longest = LONGEST if server.max_num_batched_tokens is None else server.max_num_batched_tokens
    return {
        "num_speculative_tokens": num_drafts,
        "speculative_method": chosen.choice(("ngram", "eagle3")),
        "synthetic_acceptance_rates": tuple(rates),
        "decode_buckets": tuple(size * (1 + num_drafts) for size in server.decode_buckets),
        # vLLM never admits a request that it pads above the threshold of long prompts.
        "long_prefill_tokens": server.long_prefill_tokens and max(server.long_prefill_tokens, 1 + num_drafts),
        # vLLM never admits a request whose padding is above the budget.
        "max_num_batched_tokens": max(longest, 2 * (1 + num_drafts), 8 * (1 + num_drafts)),
    }


def compare_runs(plan: Plan, server: ServerSpec) -> Counter[str]:
    """What happened in the run; AssertionError where the two do not agree, step by step and request by request."""
    ends = [end for end in run_virtually(plan, server) if end.start.step.num_seqs]
    result = simulate(plan, server)
    starts = [end.start for end in ends]
    assert [
        (
            start.start_ns,
            start.step.kind.lower(),
            start.step.num_seqs,
            start.step.bucket or None,
            start.step.duration_ns,
            None if start.step.kind == DECODE else start.step.computed_tokens,
        )
        for start in starts
    ] == [
        tuple(row[name] for name in ("start_ns", "kind", "n", "b", "duration_ns", "computed_tokens"))
        for row in result.steps.to_pylist()
    ]
    rows = {f"{row['session']}-{row['request']}": row for row in result.requests.to_pylist()}
    finished = {request.external_id: (request, end.start.end_ns) for end in ends for request in end.finished}
    assert {
        name: (request.arrival_ns, request.scheduled_ns, request.first_token_ns, over_ns, request.cached_tokens)
        for name, (request, over_ns) in finished.items()
    } == {
        name: tuple(
            row[field] for field in ("arrival_ns", "admitted_ns", "first_token_ns", "completed_ns", "cached_tokens")
        )
        for name, row in rows.items()
        if row["aborted_tokens"] < 0
    }
    num_preempted = sum(len(start.step.preempted) for start in starts)
    assert result.preemptions == num_preempted
    assert result.computed_tokens == sum(start.step.computed_tokens for start in starts)
    assert result.end_ns == max([row["completed_ns"] for row in rows.values()] + [start.end_ns for start in starts])
    return Counter(
        {
            "steps": len(ends),
            "asynchronous steps": len(ends) * bool(server.async_scheduling),
            "requests": len(rows),
            "clients that leave": len(rows) - len(finished),
            "preemptions": num_preempted,
            "cases": 1,
        }
    )
