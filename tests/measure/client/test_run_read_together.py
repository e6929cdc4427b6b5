"""A client that reads late knows it: chunks that it read together came within the time that it states for them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from harness.clock import NS_PER_MS
from harness.measure.client.answer import NO_KERNEL_STAMP
from harness.measure.client.host import can_be_real_time
from harness.measure.client.null_server import NullServer, NullServerConfig
from harness.measure.client.rows import ChunkRows
from harness.measure.client.run import ReplayResult, replay
from harness.measure.client.self_audit import null_target
from harness.model.plan.build import draw_plan
from harness.model.spec import ClientSpec, WorkloadSpec
from harness.processes import num_cores

NUM_RUNS = 4
# What the network of this machine takes, and the server from its stamp to its send.
NEAR_MS = 0.2


@pytest.fixture
def busy_cores() -> Iterator[None]:
    """Two processes for each core that never rest."""
    command = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(command) for _ in range(2 * num_cores())]
    yield
    for process in processes:
        process.kill()
        process.wait()


def replayed(seed: int, num_processes: int, **options: Any) -> tuple[ReplayResult, dict[tuple[int, int], list[int]]]:
    """A replay against a server in another process, and when that sent each chunk, by request."""
    workload = WorkloadSpec.model_validate(
        {
            "num_sessions": 6,
            "requests_per_session": 3,
            "waits": "none",
            "prompt_tokens": {"distribution": "fixed", "value": 300},
            "generate_tokens": {"distribution": "fixed", "value": 40},
        }
    )
    with NullServer(NullServerConfig(token_interval_ns=4 * NS_PER_MS)) as server:
        result = replay(
            draw_plan(workload, 1, seed),
            null_target(server.host, server.port, ClientSpec(processes=num_processes, **options)),
        )
        seen = server.stamps()
    sent = {
        (row["session"], row["request"]): seen[row["request_id"]]["chunk_ns"] for row in result.requests.to_pylist()
    }
    return result, sent


@pytest.mark.live
@pytest.mark.parametrize(("name", "num_processes"), [("epoll", 1), ("epoll", 2), ("aiohttp", 1)])
def test_beside_a_busy_machine_stamps_are_off_by_no_more_than_the_client_says(
    busy_cores: None, name: str, num_processes: int
) -> None:
    del busy_cores
    num_together = 0
    for seed in range(NUM_RUNS):
        result, sent = replayed(seed, num_processes, name=name)
        facts = result.audit["read_together"]
        off_ms: dict[str, list[float]] = {"first": [], "all": []}
        for chunk in result.chunks.to_table().to_pylist():
            sent_ns = sent[chunk["session"], chunk["request"]]
            if chunk["chunk"] < len(sent_ns):
                came_ns = chunk["received_ns"] if chunk["kernel_ns"] is None else chunk["kernel_ns"]
                assert (chunk["earliest_ns"] or 0) < came_ns
                off_ms["all"].append((came_ns - sent_ns[chunk["chunk"]]) / NS_PER_MS)
                off_ms["first"] += off_ms["all"][-1:] if chunk["chunk"] == 0 else []
        for which, values in off_ms.items():
            part = facts[which]
            assert part["num"] == len(values)
            assert sum(values) <= part["sum_ms"] + NEAR_MS * len(values), (which, part)
        num_together += facts["all"]["num_together"]
    # Else nothing was tried.
    assert num_together > 0


@pytest.mark.live
@pytest.mark.skipif(not can_be_real_time(), reason="this account may not use SCHED_RR")
def test_a_replay_in_real_time_says_so_and_leaves_the_thread_as_it_was() -> None:
    result, _ = replayed(0, 1, realtime=True)
    assert result.audit["is_real_time"] is True
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
    result, _ = replayed(0, 1)
    assert result.audit["is_real_time"] is False


def test_a_chunk_that_was_read_alone_has_no_width() -> None:
    rows = ChunkRows()
    ms = NS_PER_MS
    stamps = [(10 * ms, NO_KERNEL_STAMP, 1, False), (30 * ms, NO_KERNEL_STAMP, 1, True)]
    rows.extend(0, [*stamps, (30 * ms, NO_KERNEL_STAMP, 0, True)], {30 * ms: 18 * ms})
    rows.extend(1, [(40 * ms, NO_KERNEL_STAMP, 1, True), (40 * ms, NO_KERNEL_STAMP, 1, True)], {40 * ms: 36 * ms})
    rows.extend(2, [(50 * ms, NO_KERNEL_STAMP, 1, False)])
    facts = rows.together_facts(None)["read_together"]
    assert facts["first"] == {"num": 3, "num_together": 1, "sum_ms": 4.0, "max_ms": 4.0}
    assert facts["all"] == {"num": 6, "num_together": 3, "sum_ms": 20.0, "max_ms": 12.0}
