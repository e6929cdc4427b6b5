"""The self-audit measures the harness, not the server: floors, stalls and CPU come with every replay."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from harness.clock import NS_PER_MS, MonotonicClock, ScaledClock
from harness.errors import ServerError
from harness.measure.client.host import StallMeter
from harness.measure.client.null_server import NullServer
from harness.measure.client.self_audit import audit_plan, self_audit, summary
from harness.model.experiment import build_plan
from harness.model.spec import ClientSpec, WorkloadSpec


def workload(num_sessions: int, **more: Any) -> WorkloadSpec:
    return WorkloadSpec(num_sessions=num_sessions, **more)


def test_the_audit_plan_has_the_shape_of_the_plan_but_is_short() -> None:
    plan = build_plan(workload(5), 3, 0)
    short = audit_plan(plan)
    assert short.num_sessions == 5
    for session, audited in zip(plan.sessions, short.sessions, strict=True):
        assert audited.requests[0].prompt_tokens == session.requests[0].prompt_tokens
        assert sum(request.wait_after_ns for request in audited.requests) < 200 * NS_PER_MS
    assert len(set(short.waited_ns())) == short.num_waits


def test_only_sessions_that_run_at_once_are_audited() -> None:
    assert audit_plan(build_plan(workload(9, concurrency=4), 3, 0)).num_sessions == 4


@pytest.mark.live
@pytest.mark.parametrize("stream", [True, False])
def test_the_audit_reports_lags_seen_by_the_server(stream: bool) -> None:
    plan = build_plan(workload(3), 3, 0)
    figures = self_audit(plan, ClientSpec(stream=stream), ScaledClock(4.0))
    assert figures["num_failed"] == 0
    assert figures["num_early_sends"] == 0
    assert figures["num_requests"] == len(figures["floor_lag_ms"]) == 9
    assert figures["rearrival_lag_at_server_ns"]["count"] == len(figures["floor_rearrival_lag_ms"]) == 6
    # What left no earlier than due cannot have arrived earlier than that either.
    assert figures["rearrival_lag_at_server_ns"]["p50"] > 0
    assert min(figures["floor_lag_ms"]) >= 0
    if stream:
        assert figures["chunk_kernel_error_ns"]["count"] > 0


@pytest.mark.live
def test_a_stall_meter_reports_in_clock_time_and_leaves_no_process() -> None:
    clock = ScaledClock(4.0)
    with StallMeter(clock) as meter:
        began_ns = clock.now_ns()
        MonotonicClock().sleep_until_ns(MonotonicClock().now_ns() + 30 * NS_PER_MS)
    assert meter.is_complete
    assert meter.cpu_s > 0
    assert all(
        start_ns >= began_ns - 4 * 50 * NS_PER_MS and duration_ns > 0 for start_ns, duration_ns in meter.intervals
    )


@pytest.mark.live
def test_a_null_server_that_was_killed_is_one_clear_line() -> None:
    with NullServer() as server:
        os.kill(server.pid, signal.SIGKILL)
        with pytest.raises(ServerError, match="the null server"):
            server.stamps()


@pytest.mark.same_everywhere
@pytest.mark.parametrize(
    "module", ["harness.measure.client.null_server", "harness.measure.client.host", "harness.measure.server.supervisor"]
)
def test_the_small_processes_beside_each_run_load_no_large_package(module: str) -> None:
    asked = f"import sys, {module}; print(*{{'numpy', 'httpx', 'pydantic', 'pyarrow'}} & {{*sys.modules}})"
    loaded = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
    assert loaded.stdout.split() == []


def test_a_summary_of_nothing_is_its_count() -> None:
    assert summary(np.array([])) == {"count": 0}
    assert summary(np.array([1.0, 2.0, 3.0])) == {"count": 3, "p50": 2.0, "p99": pytest.approx(2.98), "max": 3.0}
