"""Which server or engine core served each of the client's requests, and what became of it inside vLLM's."""

from __future__ import annotations

import pyarrow as pa

from harness.analysis.logs.engine_steps import step_log_of, step_logs_of
from harness.analysis.logs.replicas import (
    Server,
    replicas_in_headers,
    servers_of,
    who_served,
)
from harness.analysis.run_tables import join_request_id
from harness.clock import ScaledClock
from harness.measure.records import layout
from harness.measure.records.manifest import table_at
from harness.measure.records.run import SealedRun, once_per_run
from harness.measure.records.schema import values_of
from harness.stacks.vllm.core_steps import REQUESTS

SCHEMA = pa.schema([("session", pa.int32()), ("request", pa.int32()), *((one.name, one.type) for one in REQUESTS)])
_SERVED = ("session", "request", "engine")
_INSTANTS = ("queued_ns", "admitted_ns", "first_token_ns", "last_ns")


def engines_of(run: SealedRun) -> dict[tuple[int, int], int]:
    """(session, request) -> the replica or engine core that served it; empty where one served all, or nobody says."""
    servers = servers_in(run)
    in_headers = replicas_in_headers(run.file(layout.SERVED), table_at(run.manifest.server.facts, "launch"))
    requests, num_replicas = run.table("requests"), run.manifest.num_scraped
    if in_headers or num_replicas > 1:
        return who_served(requests, servers, in_headers, run.table("metrics"), num_replicas)
    served = {(session, request): engine for session, request, engine in values_of(core_requests(run), *_SERVED)}
    return served if len({*served.values()}) > 1 else {}


@once_per_run
def servers_in(run: SealedRun) -> list[Server]:
    """Each server of a run, as if it were alone."""
    return servers_of(run.table("steps"), run.table("kv_events"), step_logs_of(run), run.manifest.num_replicas)


@once_per_run
def core_requests(run: SealedRun) -> pa.Table:
    """The requests of a run that an engine core and the client both name, in the order of admission.

    Columns: session, request, and those of ``harness.stacks.vllm.core_steps.REQUESTS`` with instants on the run's
    clock. Empty for a run whose engine cores were not observed.
    """
    log = step_log_of(run)
    columns = values_of(run.table("requests"), "response_id", "session", "request")
    place_of = {name: (session, request) for name, session, request in columns if name}
    clock, rows = ScaledClock(run.manifest.clock.scale), list[dict[str, object]]()
    for core in () if log is None else log.cores:
        for row in core.requests.to_pylist():
            name = join_request_id(row["request_id"], place_of)
            if name is None:
                continue
            instants = {one: None if row[one] is None else clock.from_monotonic_ns(row[one]) for one in _INSTANTS}
            session, request = place_of[name]
            rows.append({"session": session, "request": request, **row, **instants})
    return pa.Table.from_pylist(rows, schema=SCHEMA).sort_by("admitted_ns")
