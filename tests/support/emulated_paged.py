"""The emulator's loop on a virtual clock, every token drawn, held to the compiled simulator under paged rules.

``python -m tests.support.emulated_paged [STEPS] [FIRST_SEED]`` compares at least so many steps; exit status 0 means no
difference.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from typing import Any

from harness.model.plan.model import Plan
from harness.model.sim import simulate
from harness.model.spec import ServerSpec
from harness.stacks.rbln.rules.kv_rules import PAGED
from tests.support.paged_in_steps import LONGEST, drawn_plan
from tests.support.virtual_emulator import run_virtually


def drawn_server(chosen: random.Random) -> ServerSpec:
    """Memory from one longest request up, token budgets from a decode step up. Nothing is pinned: what is kept, and
    several replicas, are held in ``emulated_replicas``."""
    limit, block = chosen.choice((1, 2, 3, 6, 8, 12)), chosen.choice((8, 16, 32))
    longest = LONGEST // block
    return ServerSpec.model_validate(
        {
            "rules": chosen.choice((PAGED, "vllm-paged-0.30")),
            "cost_model": "emulated-gpu",
            "slot_tokens": LONGEST,
            "block_size": block,
            "max_num_seqs": limit,
            "decode_buckets": chosen.choice(((1,), (1, 2, 4), (1, 2, 3, 4, 5, 6), (8,))),
            "num_gpu_blocks": 1 + chosen.choice((longest, longest, longest + 5, 2 * longest, 9 * longest)),
            "max_num_batched_tokens": max(limit, chosen.choice((limit, limit + 1, 16, 40, 300, 2048))),
            "prefix_caching": chosen.random() < 0.85,
            "async_scheduling": chosen.random() < 0.5,
        }
    )


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
        # vLLM never admits a request whose padding is above the budget.
        "max_num_batched_tokens": max(longest, 2 * (1 + num_drafts), 8 * (1 + num_drafts)),
    }


def has_own_prompts(plan: Plan) -> bool:
    """Whether no two sessions can ask the same: equal prompts have equal answers, which a plan does not know."""
    return all(
        request.prompt_tokens > max(plan.shared_prefix_tokens, plan.block_tokens * len(session.blocks))
        for session in plan.sessions
        for request in session.requests
    )


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
        )
        for start in starts
    ] == [(row["start_ns"], row["kind"], row["n"], row["b"], row["duration_ns"]) for row in result.steps.to_pylist()]
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


def main(num_steps: str = "100000", first_seed: str = "0") -> int:
    """Compare so many steps; 1 when anything differs."""
    seen, seed = Counter[str](), int(first_seed)
    while seen["steps"] < int(num_steps):
        chosen = random.Random(f"emulated paged {seed}")
        plan, server = drawn_plan(chosen), drawn_server(chosen)
        seed += 1
        if not has_own_prompts(plan):
            continue
        try:
            seen += compare_runs(plan, server)
        except AssertionError as error:
            print(f"seed {seed - 1}: {str(error)[:2000]}")
            return 1
    print(f"seeds {first_seed} to {seed - 1}", dict(seen))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
