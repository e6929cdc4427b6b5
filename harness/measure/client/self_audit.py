"""What the client itself adds to a measurement on this machine: a short replay against the null server.

The figures describe the harness and its host, never the server under test, and decide nothing. All are wall time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.clock import NS_PER_MS, NS_PER_S, ScaledClock
from harness.measure.client.null_server import NullServer, NullServerConfig
from harness.measure.client.run import ReplayResult, Target, replay
from harness.measure.client.target import Endpoint
from harness.model.plan.model import Plan, RequestPlan, SessionPlan
from harness.model.spec.sections import ClientSpec

FloatArray = NDArray[np.float64]

MAX_AUDIT_TOKENS = 12
AUDIT_TOKEN_INTERVAL_NS = 3 * NS_PER_MS
FIRST_WAIT_NS = 20 * NS_PER_MS
# Waits differ by an odd amount, so that re-arrivals of different sessions do not coincide.
WAIT_STEP_NS = 1_300_000
NUM_AUDIT_REQUESTS = 3
AUDIT_TIMEOUT_NS = 30 * NS_PER_S


def audit_plan(plan: Plan) -> Plan:
    """A short plan of the same shape: as many sessions, as long first prompts, few tokens, waits of milliseconds."""
    sessions = tuple(_short_session(session) for session in plan.sessions if session.after is None)
    renumbered = tuple(SessionPlan(place, 0, None, None, session.requests) for place, session in enumerate(sessions))
    return Plan("self-audit", plan.seed, 0, "as-drawn", 0, plan.token_id_range, renumbered)


def _short_session(session: SessionPlan) -> SessionPlan:
    first = session.requests[0]
    generate = min(MAX_AUDIT_TOKENS, first.generate_tokens)
    requests: list[RequestPlan] = []
    keep = 0
    for place in range(NUM_AUDIT_REQUESTS):
        new = first.prompt_tokens if place == 0 else 8
        wait_ns = FIRST_WAIT_NS + (session.index * NUM_AUDIT_REQUESTS + place) * WAIT_STEP_NS % FIRST_WAIT_NS
        requests.append(RequestPlan(keep, new, generate, wait_ns))
        keep += new + generate
    return SessionPlan(session.index, 0, None, None, tuple(requests))


def null_target(
    host: str,
    port: int,
    options: ClientSpec,
    *,
    request_timeout_ns: int = AUDIT_TIMEOUT_NS,
    records: Path | None = None,
) -> Target:
    """The null server at an address, in wall time. records: folder for rows that wait on disk."""
    return Target(Endpoint(host, port), "null", options, ScaledClock(1.0), request_timeout_ns, records)


def self_audit(
    plan_shape: Plan, options: ClientSpec, clock: ScaledClock, records: Path | None = None
) -> dict[str, Any]:
    """Replay a short plan of the same shape against the null server: how late this client is on this machine now.

    Takes about a second, in wall time. clock: of the run, which notes when the audit was made. The result holds plain
    JSON values. Raises ServerError when the null server cannot be started.
    """
    short = audit_plan(plan_shape)
    config = NullServerConfig(token_interval_ns=AUDIT_TOKEN_INTERVAL_NS if options.stream else 0)
    with NullServer(config) as server:
        result = replay(short, null_target(server.host, server.port, options, records=records))
        seen = server.stamps()
    figures = compare_with_server(result, seen)
    return {
        "at_ns": clock.now_ns(),
        "num_sessions": short.num_sessions,
        "num_requests": short.num_requests,
        "num_failed": sum(1 for status in result.requests["status"].to_pylist() if status != "ok"),
        "num_early_sends": result.audit["num_early_sends"],
        "floor_lag_ms": _sorted_ms(figures["dispatch_lag_ns"]),
        "floor_rearrival_lag_ms": _sorted_ms(figures["rearrival_dispatch_lag_ns"]),
        **{name: summary(values) for name, values in figures.items()},
        "cpu_s": result.audit["cpu_s"],
        "cpu_others_s": result.audit["cpu_others_s"],
        "num_stalls": result.audit["num_stalls"],
    }


def _sorted_ms(lags_ns: FloatArray) -> list[float]:
    return [round(float(lag_ns) / NS_PER_MS, 4) for lag_ns in np.sort(lags_ns)]


def compare_with_server(result: ReplayResult, seen: dict[str, dict[str, Any]]) -> dict[str, FloatArray]:
    """Lags and stamp errors of a replay (clock scale 1) against the server's own stamps; arrays in ns.

    dispatch_lag_ns: sent - due; rearrival_dispatch_lag_ns: the same without first sends, which crowd at the common
    start. rearrival_lag_at_server_ns: arrival at the server - (its last send of the previous answer + the planned
    wait): everything that the client and both network stacks add. start_spread_ns: latest - earliest first send;
    start_spread_at_server_ns: the same of arrivals. chunk_user_error_ns, chunk_kernel_error_ns: stamp - server's send.
    """
    rows: dict[tuple[int, int], dict[str, Any]] = {}
    for row in result.requests.to_pylist():
        stamp = seen.get(row["request_id"])
        if row["status"] == "ok" and stamp is not None and stamp["chunk_ns"]:
            arrived_ns = stamp["kernel_ns"] or stamp["received_ns"]
            rows[row["session"], row["request"]] = {
                **row,
                "arrived_ns": arrived_ns,
                "answered_ns": stamp["chunk_ns"][-1],
                "lag_ns": row["sent_ns"] - row["due_ns"],
            }
    first = [row for (_, request), row in rows.items() if request == 0]
    again = [
        row["arrived_ns"] - before["answered_ns"] - before["planned_wait_ns"]
        for (session, request), row in rows.items()
        if (before := rows.get((session, request - 1))) is not None
    ]
    user, kernel = _chunk_errors(result, seen)
    return {
        "dispatch_lag_ns": _floats([row["lag_ns"] for row in rows.values()]),
        "rearrival_dispatch_lag_ns": _floats([row["lag_ns"] for (_, request), row in rows.items() if request]),
        "rearrival_lag_at_server_ns": _floats(again),
        "start_spread_ns": _spread([row["sent_ns"] for row in first]),
        "start_spread_at_server_ns": _spread([row["arrived_ns"] for row in first]),
        "chunk_user_error_ns": user,
        "chunk_kernel_error_ns": kernel,
    }


def _chunk_errors(result: ReplayResult, seen: dict[str, dict[str, Any]]) -> tuple[FloatArray, FloatArray]:
    request_ids = {
        (row["session"], row["request"]): row["request_id"] for row in result.requests.to_pylist() if row["request_id"]
    }
    user: list[int] = []
    kernel: list[int] = []
    for chunk in result.chunks.to_table().to_pylist():
        stamp = seen.get(request_ids[chunk["session"], chunk["request"]])
        # Chunks that were sent together share a stamp, so they show no error.
        if stamp is None or chunk["is_coalesced"] or chunk["chunk"] >= len(stamp["chunk_ns"]):
            continue
        sent_ns = stamp["chunk_ns"][chunk["chunk"]]
        user.append(chunk["received_ns"] - sent_ns)
        if chunk["kernel_ns"] is not None:
            kernel.append(chunk["kernel_ns"] - sent_ns)
    return _floats(user), _floats(kernel)


def _floats(values: list[int]) -> FloatArray:
    return np.asarray(values, dtype=np.float64)


def _spread(instants: list[int]) -> FloatArray:
    return _floats([max(instants) - min(instants)] if instants else [])


def summary(values: FloatArray) -> dict[str, float | int]:
    """Count, median, 99th percentile and maximum; only the count when there is nothing."""
    if not len(values):
        return {"count": 0}
    median, high, highest = (float(value) for value in np.percentile(values, (50, 99, 100)))
    return {"count": len(values), "p50": median, "p99": high, "max": highest}
