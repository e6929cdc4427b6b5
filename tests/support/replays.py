"""Small plans by hand, and their replay against a null server: what tests of the client have in common."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from harness.clock import NS_PER_S, ScaledClock
from harness.measure.client.run import ReplayEvent, ReplayResult, StopSignal, Target, replay, replay_here
from harness.measure.client.target import Endpoint
from harness.model.plan.model import Plan, RequestPlan, SessionPlan
from harness.model.plan.tokens import TokenStreams
from harness.model.spec import ClientSpec, RequestSpec
from tests.support.tls import Served, over

# How a server is reached.
SCHEMES = ("http", "https")


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
    also_after: tuple[int, ...] = (),
) -> SessionPlan:
    requests: list[RequestPlan] = []
    keep = keep_first
    for place in range(num_requests):
        new = prompt_tokens if place == 0 else 8
        requests.append(RequestPlan(keep, new, generate_tokens, wait_ns))
        keep += new + generate_tokens
    return SessionPlan(index, start_offset_ns, after, continues, tuple(requests), also_after)


def plan_of(*sessions: SessionPlan, prompt_form: Any = "token-ids") -> Plan:
    return Plan("test", 7, 0, "as-drawn", 0, (1000, 60_000), sessions, prompt_form=prompt_form)


def fork_and_join(residual_ns: int, **lengths: int) -> Plan:
    """A parent, three branches at once of which one continues the parent, and a join that continues it too."""
    first: dict[str, Any] = {"prompt_tokens": 40, "generate_tokens": 6} | lengths
    streamed = sum(first.values())
    return plan_of(
        session(0, num_requests=1, **first),
        session(1, after=0, num_requests=1, **first),
        session(2, after=0, continues=0, keep_first=streamed, **first),
        session(3, after=0, num_requests=3, **first),
        session(4, after=1, also_after=(2, 3), continues=0, keep_first=streamed, start_offset_ns=residual_ns, **first),
    )


def assert_forked_and_joined(rows: list[dict[str, Any]], residual_ns: int) -> None:
    """Branches start when the parent has ended; the join when its last branch has, plus the residual."""
    by_session: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        by_session.setdefault(row["session"], []).append(row)
    (parent,) = by_session[0]
    branches = [by_session[branch] for branch in (1, 2, 3)]
    assert {row["status"] for row in rows} == {"ok"}, [row["error"] for row in rows]
    assert [branch[0]["trigger_ns"] for branch in branches] == [parent["done_ns"]] * 3
    last_end_ns = max(branch[-1]["done_ns"] for branch in branches)
    assert by_session[4][0]["trigger_ns"] == last_end_ns
    assert by_session[4][0]["due_ns"] == last_end_ns + residual_ns <= by_session[4][0]["sent_ns"]


def assert_branches_overlap(rows: list[dict[str, Any]]) -> None:
    """On a server that takes its time: every branch was sent before the first of them ended."""
    branches = [row for row in rows if row["session"] in {1, 2, 3}]
    assert max(row["sent_ns"] for row in branches if not row["request"]) < min(row["done_ns"] for row in branches)


def run(
    plan: Plan,
    server: Served,
    scheme: str = "http",
    *,
    stream: bool = True,
    scale: float = 1.0,
    timeout_s: float = 120,
    is_strict: bool = True,
    request: RequestSpec | None = None,
    on_event: Callable[[ReplayEvent], None] | None = None,
    stop: StopSignal | None = None,
    is_watched: bool = False,
) -> ReplayResult:
    """A replay. scheme: "https": behind TLS. is_watched: beside the process that notes stalls of the host."""
    with over(scheme, server) as served:
        target = Target(
            Endpoint(served.host, served.port, is_https=scheme == "https"),
            model="null",
            options=ClientSpec(stream=stream),
            clock=ScaledClock(scale),
            request_timeout_ns=int(timeout_s * NS_PER_S),
            is_strict=is_strict,
            request=request or RequestSpec(),
        )
        if is_watched:
            return replay(plan, target, on_event=on_event, stop=stop)
        return replay_here(plan, target, on_event=on_event, is_stopped=(stop or threading.Event()).is_set)


def rows_of(result: ReplayResult) -> list[dict[str, Any]]:
    return result.requests.to_pylist()


def expected_prompts(plan: Plan, generated: dict[int, list[list[int]]]) -> list[list[int]]:
    """The prompts that a plan asks for, in plan order, when the server answers with these ids by session."""
    streams = TokenStreams(plan)
    return [
        streams.prompt(item.index, request, generated).tolist()
        for item in plan.sessions
        for request in range(len(item.requests))
    ]
