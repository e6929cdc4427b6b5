"""Requests that a fresh server answers before the measured part, so that its first steps are not measured.

A server's first steps take longer: memory is touched and code is loaded for the first time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from harness.clock import NS_PER_MS
from harness.measure.client.run import StopSignal, replay
from harness.measure.client.target import Target
from harness.model.plan.model import Plan, RequestPlan, SessionPlan
from harness.model.spec import ServerSpec

MAX_SESSIONS = 8
GENERATE_TOKENS, RETURN_TOKENS = 16, 16
# The server's statistics of its last step come after the answer.
SETTLE_NS = 300 * NS_PER_MS
# Prompts of their own: no block of them is one of the plan's.
SEED = 0x57A57ED


def warm_up_plan(plan: Plan, server: ServerSpec) -> Plan:
    """As many sessions as run at once, up to MAX_SESSIONS, with a prompt as long as the plan's and one return.

    The prefix cache keeps blocks of it that nobody asks for: vLLM takes unused blocks first, and then these, before any
    block of the measured part.
    """
    room = server.slot_tokens - 2 * GENERATE_TOKENS - RETURN_TOKENS
    longest = max(1, min(room, max(request.new_tokens for request in plan.requests)))
    first = RequestPlan(0, longest, GENERATE_TOKENS)
    again = RequestPlan(first.stream_tokens, RETURN_TOKENS, GENERATE_TOKENS)
    num_sessions = min(MAX_SESSIONS, server.max_num_seqs, plan.num_sessions)
    return Plan(
        source="warm-up",
        seed=plan.seed,
        replicate=plan.replicate,
        treatment="as-drawn",
        shared_prefix_tokens=0,
        token_id_range=plan.token_id_range,
        sessions=tuple(SessionPlan(index, 0, None, None, (first, again)) for index in range(num_sessions)),
        prompt_form=plan.prompt_form,
    )


def warm_up(plan: Plan, server: ServerSpec, target: Target, stop: StopSignal) -> dict[str, Any]:
    """Send the warm-up of a plan, and wait until the server is idle; what was done, for the manifest.

    Text and chat prompts begin alike in every session, so that a warm-up would leave their beginning cached: there none
    is sent.
    """
    if plan.prompt_form != "token-ids":
        return {}
    own = replace(target, prompt_ids=target.prompt_ids._replace(seed=SEED), records=None)
    statuses = replay(warm_up_plan(plan, server), own, stop=stop).requests.column("status").to_pylist()
    target.clock.sleep_until_ns(target.clock.now_ns() + SETTLE_NS)
    return {"warm_up": {"requests": len(statuses), "failed": sum(status != "ok" for status in statuses)}}
