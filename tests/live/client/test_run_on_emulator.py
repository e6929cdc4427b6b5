"""Both replay clients on the emulator: the same plan gives the same tokens and the same reuse, streaming or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.clock import NS_PER_S, clock_for
from harness.live.client.run import ReplayResult, replay
from harness.plan import Plan, build_plan
from harness.runner.backends.emulator import EmulatorBackend
from harness.spec import ClientSpec, ServerSpec, WorkloadSpec
from tests.support.processes import serving
from tests.support.replays import assert_branches_overlap, assert_forked_and_joined, fork_and_join, rows_of

pytestmark = pytest.mark.live

SCALE = 20.0


def replay_on_emulator(plan: Plan, folder: Path, options: ClientSpec) -> ReplayResult:
    folder.mkdir()
    clock, server = clock_for(SCALE), ServerSpec()
    launch = EmulatorBackend().launch(server, port=0, run_folder=folder, time_scale=SCALE)
    with serving(launch, folder, clock):
        return replay(
            plan,
            host=launch.host,
            port=launch.port,
            model=launch.model,
            options=options,
            clock=clock,
            request_timeout_ns=600 * NS_PER_S,
        )


def counts(result: ReplayResult) -> list[tuple[Any, ...]]:
    names = ("session", "request", "status", "prompt_tokens", "completion_tokens", "cached_tokens")
    return list(zip(*(result.requests[name].to_pylist() for name in names), strict=True))


@pytest.mark.parametrize(
    ("num_background", "cached_tokens"), [(6, 1920), pytest.param(7, 0, marks=pytest.mark.same_everywhere)]
)
def test_both_clients_see_the_same_reuse_of_a_sequential_plan(
    tmp_path: Path, num_background: int, cached_tokens: int
) -> None:
    plan = build_plan(
        WorkloadSpec(source="sequential", num_sessions=num_background + 2, num_background=num_background), 1, 0
    )
    seen = {
        f"{name}-{stream}": counts(
            replay_on_emulator(plan, tmp_path / f"{name}-{stream}", ClientSpec(name=name, stream=stream))
        )
        for name, stream in (("epoll", True), ("epoll", False), ("aiohttp", True))
    }
    assert len({tuple(rows) for rows in seen.values()}) == 1
    rows = seen["epoll-True"]
    assert {row[2] for row in rows} == {"ok"}
    assert rows[-1][5] == cached_tokens


@pytest.mark.parametrize("name", ["epoll", "aiohttp"])
def test_an_agent_with_sub_agents_forks_joins_and_reuses_its_own_context(tmp_path: Path, name: Any) -> None:
    residual_ns = NS_PER_S
    plan = fork_and_join(residual_ns, prompt_tokens=300, generate_tokens=40)
    result = replay_on_emulator(plan, tmp_path / name, ClientSpec(name=name))
    assert_forked_and_joined(rows_of(result), residual_ns)
    assert_branches_overlap(rows_of(result))
    cached = {(row[0], row[1]): row[5] for row in counts(result)}
    assert cached[2, 0] == cached[4, 0] == 256, "whole blocks of the parent's prompt"
    assert cached[1, 0] == 0
