"""Both replay clients on the twin, the real stack: the same plan gives the same tokens and the same reuse.

Skipped where the twin is not installed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.clock import NS_PER_MS, NS_PER_S, clock_for
from harness.live.client.run import replay
from harness.plan import Plan, RequestPlan, SessionPlan
from harness.runner.backends.twin import TwinBackend
from harness.spec import ClientSpec, ServerSpec
from tests.support.processes import serving

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


def counts_on_twin(folder: Path, options: ClientSpec) -> list[dict[str, Any]]:
    folder.mkdir()
    clock = clock_for(1.0)
    server = ServerSpec(start_timeout_s=240)
    launch = TwinBackend().launch(server, port=0, run_folder=folder, time_scale=1.0, log_format="default")
    with serving(launch, folder, clock):
        result = replay(
            PLAN,
            host=launch.host,
            port=launch.port,
            model=launch.model,
            options=options,
            clock=clock,
            request_timeout_ns=120 * NS_PER_S,
        )
    names = ["session", "request", "status", "prompt_tokens", "completion_tokens", "cached_tokens", "token_digest"]
    return result.requests.select(names).to_pylist()


def test_both_clients_see_the_same_tokens_and_the_same_reuse(tmp_path: Path) -> None:
    epoll = counts_on_twin(tmp_path / "epoll", ClientSpec(name="epoll"))
    aiohttp = counts_on_twin(tmp_path / "aiohttp", ClientSpec(name="aiohttp"))
    assert epoll == aiohttp
    assert {row["status"] for row in epoll} == {"ok"}
    assert [row["cached_tokens"] > 0 for row in epoll] == [False, True, False, True]
