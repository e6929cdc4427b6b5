"""What surrounded a replay becomes facts of its audit: stalls that touched a request, receives that waited."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from harness.clock import NS_PER_MS, NS_PER_S, ScaledClock, monotonic_ns
from harness.errors import SpecError
from harness.measure.client.host import (
    MAX_SLICE_NS,
    SHORT_SLICE_NS,
    CpuMeter,
    SchedulerSlice,
    StallMeter,
    best_nice,
    cores_for_clients,
    on_cores,
    preferred,
    stall_facts,
    stamp_facts,
)
from harness.measure.records.schema import CHUNKS, RowStream


def requests_at(*instants_s: tuple[float, float, float]) -> pa.Table:
    """Requests of a session each: due, sent and done, seconds."""
    columns = [[int(value * NS_PER_S) for value in column] for column in zip(*instants_s, strict=True)]
    places = list(range(len(instants_s)))
    return pa.table(
        {
            "session": pa.array(places, pa.int32()),
            "request": pa.array([0] * len(places), pa.int32()),
            **dict(zip(("due_ns", "sent_ns", "done_ns"), columns, strict=True)),
        }
    )


def marked(*intervals_s: tuple[float, float], scale: float = 1.0) -> StallMeter:
    meter = StallMeter(ScaledClock(scale))
    meter.intervals = [[int(start * NS_PER_S), int(duration * NS_PER_S)] for start, duration in intervals_s]
    meter.is_complete = True
    return meter


def test_requests_that_a_stall_touched_are_named() -> None:
    meter = StallMeter(ScaledClock(2.0))
    meter.intervals = [[100, 50], [1000, 200]]
    requests = pa.table(
        {
            "session": pa.array([0, 1, 2, 3], pa.int32()),
            "request": pa.array([0, 0, 1, 0], pa.int32()),
            "due_ns": pa.array([90, 160, 1100, 120], pa.int64()),
            "sent_ns": pa.array([160, 170, 1150, None], pa.int64()),
            "done_ns": pa.array([170, 1001, 1300, None], pa.int64()),
        }
    )
    facts = stall_facts(meter, requests)
    assert facts["stalled_sends"] == [[0, 0], [2, 1]]
    assert facts["num_stalled_requests"] == 3
    assert facts["num_stalls"] == 2
    assert facts["stall_max_ms"] == 200 / 2 / 1e6
    assert facts["touching_stall_max_ms"] == 200 / 2 / 1e6


def streamed(rows: list[dict[str, Any]]) -> RowStream:
    def batches() -> Iterator[pa.RecordBatch]:
        yield from pa.Table.from_pylist(rows, CHUNKS).to_batches()

    return RowStream(CHUNKS, len(rows), batches)


def test_stalls_and_lags_are_told_in_wall_time() -> None:
    assert stall_facts(marked((1.5, 0.3), scale=4.0), requests_at((1.0, 1.0, 2.0)))["touching_stall_max_ms"] == 75.0
    row = {"session": 0, "request": 0, "chunk": 0, "num_tokens": 1, "is_coalesced": False}
    stamps = [(2000, 200), (2000, 1960), (2000, None)]
    rows = [
        {**row, "received_ns": received * NS_PER_MS, "kernel_ns": None if kernel is None else kernel * NS_PER_MS}
        for received, kernel in stamps
    ]
    assert stamp_facts(streamed(rows), 4.0) == {"stamp_lag_max_ms": 450.0}
    assert stamp_facts(streamed(rows[2:]), 1.0) == {"stamp_lag_max_ms": None}


def test_processes_use_no_more_cpu_than_the_machine_has() -> None:
    meter, began_ns = CpuMeter(), monotonic_ns()
    assert math.fsum(math.sqrt(number) for number in range(300_000)) > 0
    used = meter.read()
    assert used["cpu_s"] > 0
    most_s = (monotonic_ns() - began_ns) / NS_PER_S * (os.cpu_count() or 1) + 1.0
    assert all(0 <= seconds <= most_s for seconds in used.values()), used
    assert meter.read(children_s=1e9)["cpu_others_s"] == 0.0


@pytest.mark.live
def test_a_meter_that_was_killed_is_no_calm_machine() -> None:
    with StallMeter(ScaledClock(1.0)) as meter:
        os.kill(meter.pid, signal.SIGKILL)
    assert stall_facts(meter, requests_at((1.0, 1.0, 2.0)))["is_stall_meter_complete"] is False


def test_a_scheduler_slice_is_given_back() -> None:
    with SchedulerSlice() as first:
        assert first.ask(SHORT_SLICE_NS) in {None, SHORT_SLICE_NS}
    with SchedulerSlice() as second:
        assert second.ask(10**18) in {None, MAX_SLICE_NS}


def test_a_better_nice_value_is_given_back() -> None:
    before = os.getpriority(os.PRIO_PROCESS, 0)
    with preferred(False) as kept:
        assert kept == before
    with preferred(True) as better:
        assert os.getpriority(os.PRIO_PROCESS, 0) == better == best_nice() <= before
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


WITHOUT_ROOT = """
import os, resource, sys
from harness.measure.client.host import RLIMIT_NICE, best_nice, can_be_real_time, preferred
limit = int(sys.argv[1])
try:
    resource.setrlimit(RLIMIT_NICE, (limit, limit))
except ValueError:
    sys.exit("no limit can be raised here")
resource.setrlimit(resource.RLIMIT_RTPRIO, (0, 0))
os.setuid(65534)
assert not can_be_real_time()
with preferred(True) as nice:
    print(nice, os.getpriority(os.PRIO_PROCESS, 0))
print(os.getpriority(os.PRIO_PROCESS, 0))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give up what it may do")
@pytest.mark.parametrize(("limit", "nice"), [(0, 0), (25, -5), (40, -15)])
def test_an_account_without_real_time_gets_the_nice_value_that_its_limit_allows(limit: int, nice: int) -> None:
    command = ["nice", "-n", str(-os.getpriority(os.PRIO_PROCESS, 0)), sys.executable, "-c", WITHOUT_ROOT, str(limit)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "no limit can be raised here" in done.stderr:
        pytest.skip("a container whose root may not raise limits")
    assert done.stdout.split() == [str(nice), str(nice), "0"]


def allowed_cores_of_a_child() -> list[int]:
    ask = "import os; print(*sorted(os.sched_getaffinity(0)))"
    return list(map(int, subprocess.check_output([sys.executable, "-c", ask], text=True).split()))


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_a_client_with_a_core_of_its_own_keeps_a_server_off_it_and_gives_all_back() -> None:
    before, there = os.sched_getaffinity(0), allowed_cores_of_a_child()
    (own,) = cores_for_clients(1)
    with on_cores(before - {own}):
        assert allowed_cores_of_a_child() == [core for core in there if core != own]
        with on_cores((own,)):
            assert os.sched_getaffinity(0) == {own}
    assert os.sched_getaffinity(0) == before


def test_clients_that_would_take_every_core_are_refused() -> None:
    num = len(os.sched_getaffinity(0))
    with pytest.raises(SpecError, match="would leave none for a server"):
        cores_for_clients(num)
