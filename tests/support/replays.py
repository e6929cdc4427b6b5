"""Small plans by hand, and their replay against a null server: what tests of both clients have in common."""

from __future__ import annotations

from typing import Any

from harness.clock import NS_PER_S, clock_for
from harness.live.audit.nullserver import NullServer
from harness.live.client.run import ReplayResult, replay
from harness.plan import Plan, RequestPlan, SessionPlan
from harness.spec import ClientSpec


def session(
    index: int,
    *,
    num_requests: int = 2,
    prompt_tokens: int = 40,
    generate_tokens: int = 6,
    wait_ns: int = 0,
    start_offset_ns: int = 0,
    after: int | None = None,
    continues: int | None = None,
    keep_first: int = 0,
) -> SessionPlan:
    requests: list[RequestPlan] = []
    keep = keep_first
    for place in range(num_requests):
        new = prompt_tokens if place == 0 else 8
        requests.append(RequestPlan(keep, new, generate_tokens, wait_ns))
        keep += new + generate_tokens
    return SessionPlan(index, start_offset_ns, after, continues, tuple(requests))


def plan_of(*sessions: SessionPlan, prompt_form: Any = "token-ids") -> Plan:
    return Plan("test", 7, 0, "as-drawn", 0, (1000, 60_000), sessions, prompt_form=prompt_form)


def run(
    plan: Plan,
    server: NullServer,
    client: Any,
    *,
    stream: bool = True,
    scale: float = 1.0,
    timeout_s: float = 20,
    **more: Any,
) -> ReplayResult:
    return replay(
        plan,
        host=server.host,
        port=server.port,
        model="null",
        options=ClientSpec(name=client, stream=stream),
        clock=clock_for(scale),
        request_timeout_ns=int(timeout_s * NS_PER_S),
        **more,
    )


def rows_of(result: ReplayResult) -> list[dict[str, Any]]:
    return result.requests.to_pylist()
