"""A client that reads late knows it: chunks that it read together came within the time that it states for them."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from typing import Any

import pytest

from harness.clock import NS_PER_MS
from harness.measure.client.answer import NO_KERNEL_STAMP
from harness.measure.client.host import can_be_real_time
from harness.measure.client.null_server import NullServer, NullServerConfig
from harness.measure.client.rows import ChunkRows
from harness.measure.client.run import ReplayResult, StopSignal, replay
from harness.measure.client.self_audit import null_target
from harness.measure.records.schema import values_of
from harness.model.plan.build import draw_plan
from harness.model.spec import ClientSpec, WorkloadSpec
from tests.support.replays import SCHEMES
from tests.support.tls import over

# Of it, and of what the machine adds between the server's stamp and its send, the client need not say anything: in the
# mean over the chunks. Without its word they would be off by a third of the hold.
NEAR_MS = 0.5
# Shorter than the 50 ms after which the client's loop asks again whether it shall stop.
HOLD_S = 0.03


class Holds:
    """A stop signal that never stops: the client's loop asks for it, and reads late by as long as that takes."""

    num_asked = 0

    def is_set(self) -> bool:
        self.num_asked += 1
        threading.Event().wait(HOLD_S)
        return False


def replayed(
    token_interval_ms: int, stop: StopSignal | None = None, scheme: str = "http", **options: Any
) -> tuple[ReplayResult, dict[tuple[int, int], list[int]]]:
    """A replay against a server in another process, and when that sent each chunk, by request."""
    workload = WorkloadSpec.model_validate(
        {
            "num_sessions": 6,
            "requests_per_session": 20,
            "waits": "none",
            "prompt_tokens": {"distribution": "fixed", "value": 30},
            "generate_tokens": {"distribution": "fixed", "value": 4},
        }
    )
    with NullServer(NullServerConfig(token_interval_ns=token_interval_ms * NS_PER_MS)) as server:
        with over(scheme, server) as served:
            target = null_target(served.host, served.port, ClientSpec(**options))
            if scheme == "https":
                target = replace(target, endpoint=replace(target.endpoint, is_https=True))
            result = replay(draw_plan(workload, 1, 0), target, stop=stop)
        seen = server.stamps()
    sent = {
        (row["session"], row["request"]): seen[row["request_id"]]["chunk_ns"] for row in result.requests.to_pylist()
    }
    return result, sent


@pytest.mark.live
@pytest.mark.parametrize("scheme", SCHEMES)
def test_stamps_of_a_client_that_reads_late_are_off_by_no_more_than_it_says(scheme: str) -> None:
    holds = Holds()
    result, sent = replayed(4, holds, scheme)
    facts = result.audit["read_together"]
    # By how much each stamp is off beyond what the client says of it.
    beyond_ms: dict[str, list[float]] = {"first": [], "all": []}
    for chunk in result.chunks.to_table().to_pylist():
        sent_ns = sent[chunk["session"], chunk["request"]]
        if chunk["chunk"] < len(sent_ns):
            came_ns = chunk["received_ns"] if chunk["kernel_ns"] is None else chunk["kernel_ns"]
            assert (chunk["earliest_ns"] or 0) < came_ns
            beyond_ms["all"].append(((chunk["earliest_ns"] or came_ns) - sent_ns[chunk["chunk"]]) / NS_PER_MS)
            beyond_ms["first"] += beyond_ms["all"][-1:] if chunk["chunk"] == 0 else []
    assert holds.num_asked > 1
    for which, values in beyond_ms.items():
        part = facts[which]
        assert part["num"] == len(values)
        assert part["num_together"] > 0, which
        # On their way a tenth of the chunks may meet a machine that stands still.
        assert sum(sorted(values)[: len(values) * 9 // 10]) <= NEAR_MS * len(values), (which, part)


@pytest.mark.live
@pytest.mark.parametrize("num_processes", [1, 2])
def test_what_is_said_of_all_client_processes_is_the_sum_over_their_chunks(num_processes: int) -> None:
    # Each answer in one piece: all its chunks are read together.
    result, _ = replayed(0, processes=num_processes)
    chunks = values_of(result.chunks.to_table(), "kernel_ns", "received_ns", "earliest_ns")
    widths_ms = [
        ((kernel_ns or received_ns) - earliest_ns) / NS_PER_MS
        for kernel_ns, received_ns, earliest_ns in chunks
        if earliest_ns is not None
    ]
    facts = result.audit["read_together"]["all"]
    assert facts["num"] == facts["num_together"] == 6 * 20 * 4
    assert facts["sum_ms"] == pytest.approx(sum(widths_ms))
    assert facts["max_ms"] == pytest.approx(max(widths_ms))


@pytest.mark.live
@pytest.mark.skipif(not can_be_real_time(), reason="this account may not use SCHED_RR")
def test_a_replay_in_real_time_says_so_and_leaves_the_thread_as_it_was() -> None:
    result, _ = replayed(0, realtime=True)
    assert result.audit["is_real_time"] is True
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
    result, _ = replayed(0)
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
