"""On the twin, the real stack: what a session that comes back reuses, and an agent with sub-agents.

Skipped where the twin is not installed.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from harness.clock import NS_PER_MS, NS_PER_S, ScaledClock
from harness.extras.twin.backend import TwinBackend
from harness.measure.client.run import ReplayResult, Target, replay
from harness.model.plan.model import Plan, RequestPlan, SessionPlan
from harness.model.spec import ClientSpec, ServerSpec
from harness.runner.run import LaunchOptions
from tests.support.processes import serving
from tests.support.replays import assert_branches_overlap, assert_forked_and_joined, fork_and_join, rows_of

pytestmark = [pytest.mark.live, pytest.mark.timeout(600), pytest.mark.usefixtures("twin")]

# A first prompt of two blocks and a half, and a re-arrival that carries it on.
FIRST, AGAIN = RequestPlan(0, 320, 12, 30 * NS_PER_MS), RequestPlan(332, 60, 12, 0)
PLAN = Plan(
    "test",
    7,
    0,
    "as-drawn",
    0,
    (1000, 60_000),
    (SessionPlan(0, 0, None, None, (FIRST, AGAIN)), SessionPlan(1, 0, 0, None, (FIRST, AGAIN))),
)


def replayed_on_twin(plan: Plan, folder: Path) -> ReplayResult:
    folder.mkdir()
    clock = ScaledClock(1.0)
    server = ServerSpec(start_timeout_s=240)
    launch = TwinBackend().launch(server, LaunchOptions(0, folder))
    with serving(launch, folder, clock):
        target = Target(launch.endpoint, launch.model, ClientSpec(), clock, request_timeout_ns=120 * NS_PER_S)
        return replay(plan, target)


def test_a_session_that_comes_back_reuses_what_the_real_stack_kept(tmp_path: Path) -> None:
    # That another client sees the same is held on the emulator.
    rows = replayed_on_twin(PLAN, tmp_path / "again").requests.to_pylist()
    assert {row["status"] for row in rows} == {"ok"}
    assert [row["cached_tokens"] > 0 for row in rows] == [False, True, False, True]


def test_an_agent_with_sub_agents_and_text_shared_by_name_is_replayed_on_the_real_stack(tmp_path: Path) -> None:
    residual_ns = 100 * NS_PER_MS
    forked = fork_and_join(residual_ns, prompt_tokens=300, generate_tokens=12)
    named = [replace(forked.sessions[at], blocks=(7, 8)) for at in (0, 1)]
    plan = replace(forked, sessions=(*named, *forked.sessions[2:]), block_tokens=128)
    rows = rows_of(replayed_on_twin(plan, tmp_path / "forked"))
    assert_forked_and_joined(rows, residual_ns)
    assert_branches_overlap(rows)
    cached = {(row["session"], row["request"]): row["cached_tokens"] for row in rows}
    assert cached[1, 0] == 256, "another session's blocks of the same names"
    assert cached[2, 0] == cached[4, 0] == 256, "whole blocks of the parent's prompt"
    assert cached[3, 0] == 0
