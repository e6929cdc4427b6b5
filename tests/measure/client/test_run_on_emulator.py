"""On the emulator streams and whole answers see the same tokens and the same reuse of a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.clock import NS_PER_S, ScaledClock
from harness.measure.client.run import ReplayResult, Target, replay_here
from harness.measure.client.target import endpoint_of
from harness.measure.records.schema import rows_where
from harness.model.experiment import build_plan
from harness.model.plan.model import Plan, RequestPlan, SessionPlan
from harness.model.spec import ClientSpec, ServerSpec, WorkloadSpec
from tests.support.emulator_process import end, start_ready
from tests.support.replays import assert_branches_overlap, assert_forked_and_joined, fork_and_join, plan_of, rows_of

pytestmark = pytest.mark.live

SCALE = 20.0


def replay_on_emulator(plan: Plan, folder: Path, *, stream: bool = True, scale: float = SCALE) -> ReplayResult:
    """The replay against a fresh server, without the process that ``replay`` starts to note stalls of the host."""
    server = start_ready(folder, time_scale=scale)
    target = Target(
        endpoint_of(ServerSpec(url=server.address)),
        model="emulated-qwen3-4b",
        options=ClientSpec(stream=stream),
        clock=ScaledClock(scale),
        request_timeout_ns=600 * NS_PER_S,
    )
    try:
        return replay_here(plan, target, on_event=None, is_stopped=lambda: False)
    finally:
        end(server)


def counts(result: ReplayResult) -> list[tuple[Any, ...]]:
    names = ("session", "request", "status", "prompt_tokens", "completion_tokens", "cached_tokens")
    return list(zip(*(result.requests[name].to_pylist() for name in names), strict=True))


@pytest.mark.parametrize(
    ("num_background", "cached_tokens"), [(6, 1920), pytest.param(7, 0, marks=pytest.mark.same_everywhere)]
)
def test_whole_answers_see_the_same_reuse_of_a_sequential_plan(
    tmp_path: Path, num_background: int, cached_tokens: int
) -> None:
    plan = build_plan(
        WorkloadSpec(source="sequential", num_sessions=num_background + 2, num_background=num_background), 1, 0
    )
    rows = counts(replay_on_emulator(plan, tmp_path / "stream"))
    assert rows == counts(replay_on_emulator(plan, tmp_path / "whole", stream=False))
    assert {row[2] for row in rows} == {"ok"}
    assert rows[-1][5] == cached_tokens


def test_an_agent_with_sub_agents_forks_joins_and_reuses_its_own_context(tmp_path: Path) -> None:
    residual_ns = NS_PER_S
    plan = fork_and_join(residual_ns, prompt_tokens=300, generate_tokens=40)
    result = replay_on_emulator(plan, tmp_path / "forked")
    assert_forked_and_joined(rows_of(result), residual_ns)
    assert_branches_overlap(rows_of(result))
    cached = {(row[0], row[1]): row[5] for row in counts(result)}
    assert cached[2, 0] == cached[4, 0] == 256, "whole blocks of the parent's prompt"
    assert cached[1, 0] == 0


@pytest.mark.same_everywhere
def test_the_client_leaves_as_planned_and_goes_on_from_what_it_has(tmp_path: Path) -> None:
    # A step takes about 10 ms: the answers would take 70 s of model time, 14 of wall time. No client is as late.
    early, short = RequestPlan(0, 300, 7000, NS_PER_S, abort_after_ns=2 * NS_PER_S), RequestPlan(300, 8, 5)
    counted = RequestPlan(0, 300, 7000, 0, abort_after_tokens=70)
    kept = RequestPlan(370, 20, 5)
    stays = RequestPlan(0, 40, 4, 0, abort_after_ns=500 * NS_PER_S)
    plan = plan_of(
        SessionPlan(0, 0, None, None, (early, short)),
        SessionPlan(1, 0, None, None, (counted, kept)),
        SessionPlan(2, 0, 0, 0, (RequestPlan(313, 9, 3),)),
        SessionPlan(3, 0, None, None, (stays,)),
    )
    result = replay_on_emulator(plan, tmp_path / "left", scale=5.0)
    rows = {(row["session"], row["request"]): row for row in rows_of(result)}
    assert {key for key, row in rows.items() if row["status"] == "aborted"} == {(0, 0), (1, 0)}
    assert {row["status"] for key, row in rows.items() if key not in {(0, 0), (1, 0)}} == {"ok"}, rows
    left = rows[0, 0]
    assert left["done_ns"] - left["sent_ns"] >= 2 * NS_PER_S
    assert rows[0, 1]["due_ns"] == left["done_ns"] + NS_PER_S
    assert rows[1, 1]["prompt_tokens"] == 390
    assert rows[1, 1]["cached_tokens"] == rows[0, 1]["cached_tokens"] == 256
    chunks = rows_where(rows_where(result.chunks.to_table(), "session", 1), "request", 0)
    assert 70 <= sum(chunks["num_tokens"].to_pylist()) < 7000


@pytest.mark.parametrize("stream", [True, False])
def test_a_chat_continues_with_the_text_that_came_back_and_finds_its_prefix_again(tmp_path: Path, stream: bool) -> None:
    requests = (RequestPlan(0, 300, 40, 0), RequestPlan(340, 8, 5, 0), RequestPlan(353, 8, 5, 0))
    plan = plan_of(SessionPlan(0, 0, None, None, requests), prompt_form="chat")
    result = replay_on_emulator(plan, tmp_path / "chat", stream=stream)
    rows = rows_of(result)
    assert {row["status"] for row in rows} == {"ok"}, rows
    assert all(row["response_id"].startswith("chatcmpl-") for row in rows)
    assert [row["completion_tokens"] for row in rows] == [40, 5, 5]
    assert all(row["prompt_tokens"] > row["planned_prompt_tokens"] for row in rows), "the template adds tokens"
    reused = [row["prompt_tokens"] // 128 * 128 for row in rows]
    assert [row["cached_tokens"] for row in rows] == [0, *reused[:2]], "whole blocks of the prompt before"
    if stream:
        assert sum(result.chunks.to_table()["num_tokens"].to_pylist()) == 50
