"""Several replicas behind a router in the tables of one run, and which of them, or which engine core, served a request.

The rows of replicas lie one replica after another. Of replica r, steps are numbered from r * 2^24, and slots from
r * 2^16, so that the rows of each can be taken apart again. Nothing is priced or judged across replicas: each is a
server by itself, and the figures are sums.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa

from harness.analysis.logs.engine_steps import step_log_of, step_logs_of
from harness.analysis.logs.parse import Derived, ParseCounts, SlotWalk
from harness.analysis.run_tables import RequestKey, join_request_id
from harness.clock import NS_PER_MS, ScaledClock
from harness.errors import RecordsError
from harness.measure.records import layout
from harness.measure.records.manifest import table_at
from harness.measure.records.run import SealedRun, once_per_run
from harness.measure.records.schema import rows_where, values_of
from harness.stacks.vllm.core_steps import REQUESTS
from harness.stacks.vllm.step_log import StepLog, numbered_through

_Counts = TypeVar("_Counts", ParseCounts, SlotWalk)
STEPS_OF_A_REPLICA = 1 << 24
SLOTS_OF_A_REPLICA = 1 << 16
FINISHED_COUNTER = "vllm:request_success_total"
PROMPT_COUNTER, ANSWER_COUNTER = "vllm:prompt_tokens_total", "vllm:generation_tokens_total"
NEAR_NS = 100 * NS_PER_MS
"""A reading of counters within this of a request's end may or may not count it."""
_REPLICA = re.compile(r'(?:^|,)replica="(\d+)"')


class ServerTables(NamedTuple):
    """What one server of a run did: its decode steps and KV events as a server alone has them, and its step log."""

    steps: pa.Table
    kv_events: pa.Table
    log: StepLog | None


def servers_of(
    steps: pa.Table, kv_events: pa.Table, logs: Sequence[StepLog | None], num_replicas: int
) -> list[ServerTables]:
    """The servers of a run's tables. logs: of each replica. One server is its tables as they are."""
    if num_replicas == 1:
        return [ServerTables(steps, kv_events, next(iter(logs), None))]
    return [
        ServerTables(_rows_of(steps, replica), _rows_of(kv_events, replica), log)
        for replica, log in zip(range(num_replicas), logs or [None] * num_replicas, strict=True)
    ]


def _rows_of(table: pa.Table, replica: int) -> pa.Table:
    """The rows of a replica with its own numbers."""
    numbers = table["step"].to_numpy()
    return _renumbered(table.filter(pa.array(numbers // STEPS_OF_A_REPLICA == replica)), -replica)


def replicas_in_headers(path: Path, launch: Mapping[str, Any]) -> dict[str, int]:
    """The client's id of a request -> the replica that the response's header names; empty without such a file.

    path: of the file. launch: the manifest's record of it. A header names a replica by its number, or by its address;
    where the harness started none, other names count in their alphabetical order.
    """
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        named = {str(request_id): str(name) for request_id, name in lines}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError) as error:
        raise RecordsError(f"cannot be read ({error})", where=str(path)) from error
    replicas = launch.get("replicas", ())
    numbers = {str(number): number for number in range(len(replicas))}
    numbers |= {f"{each.get('host')}:{each.get('port')}": number for number, each in enumerate(replicas)}
    if launch.get("is_ours") is False and not numbers.keys() >= {*named.values()}:
        numbers = {name: number for number, name in enumerate(sorted({*named.values()}))}
    return {request_id: numbers[name] for request_id, name in named.items() if name in numbers}


def served_by(
    requests: pa.Table, servers: Sequence[ServerTables], in_headers: Mapping[str, int]
) -> dict[RequestKey, int]:
    """(session, request) -> the server whose log names it, else whom the header names; without those of neither.

    in_headers: see ``replicas_in_headers``. Empty where one server answered all.
    """
    ids = values_of(requests, "request_id", "session", "request")
    by_header = {(session, request): in_headers[name] for name, session, request in ids if name in in_headers}
    if len(servers) == 1:
        return by_header if len({*by_header.values()}) > 1 else {}
    columns = values_of(requests, "response_id", "session", "request")
    place_of = {name: (session, request) for name, session, request in columns if name}
    served = by_header
    for number, server in enumerate(servers):
        cores = () if server.log is None else server.log.cores
        named = [server.kv_events["request_id"].unique(), *(core.requests["request_id"] for core in cores)]
        for log_id in (log_id for ids_of_part in named for log_id in ids_of_part.to_pylist() if log_id):
            if (name := join_request_id(log_id, place_of)) is not None:
                served[place_of[name]] = number
    return served


def served_by_counters(requests: pa.Table, metrics: pa.Table, num_replicas: int) -> dict[RequestKey, int]:
    """(session, request) -> the only replica that counted finished requests while it ended; without others.

    Told from one reading to the next near which nothing ended, where as many requests ended as the replicas counted.
    """
    ended = sorted(
        (done_ns, (session, request))
        for session, request, done_ns in values_of(requests, "session", "request", "done_ns")
        if done_ns is not None
    )
    instants = [done_ns for done_ns, _place in ended]
    readings = [
        reading
        for reading in _readings(rows_where(metrics, "name", FINISHED_COUNTER), num_replicas)
        if bisect_right(instants, reading.first_ns - NEAR_NS) == bisect_right(instants, reading.last_ns + NEAR_NS)
    ]
    served: dict[RequestKey, int] = {}
    for before, after in pairwise(readings):
        within = ended[bisect_right(instants, before.last_ns) : bisect_right(instants, after.first_ns)]
        rose = [round(late - early) for early, late in zip(before.counts, after.counts, strict=True)]
        if sum(rose) == len(within) and sum(map(bool, rose)) == 1:
            served.update((place, rose.index(len(within))) for _done_ns, place in within)
    return served


def counted_by_replica(metrics: pa.Table, counter: str, num_replicas: int) -> list[int] | None:
    """By how much each replica's counter rose from the first to the last reading; None without two."""
    readings = list(_readings(rows_where(metrics, "name", counter), num_replicas))
    if len(readings) < 2:
        return None
    return [round(last - first) for first, last in zip(readings[0].counts, readings[-1].counts, strict=True)]


def who_served(
    requests: pa.Table,
    servers: Sequence[ServerTables],
    in_headers: Mapping[str, int],
    metrics: pa.Table,
    num_replicas: int,
) -> dict[RequestKey, int]:
    """``served_by``; where nothing names a replica, whom the counters tell, if they tell it of every request."""
    named = served_by(requests, servers, in_headers)
    if named or num_replicas == 1:
        return named
    counted = served_by_counters(requests, metrics, num_replicas)
    return counted if len(counted) == requests.num_rows - requests["done_ns"].null_count else {}


class _Reading(NamedTuple):
    """A counter of each replica, and when the first and the last of them was asked."""

    first_ns: int
    last_ns: int
    counts: Sequence[float]


def _readings(samples: pa.Table, num_replicas: int) -> Iterator[_Reading]:
    counts: dict[int, list[float]] = {}
    asked_ns: dict[int, list[int]] = {}
    for scrape, at_ns, labels, value in values_of(samples, "scrape", "at_ns", "labels", "value"):
        if match := _REPLICA.search(labels):
            counts.setdefault(scrape, [0.0] * num_replicas)[int(match[1])] += value
            asked_ns.setdefault(scrape, []).append(at_ns)
    for scrape in sorted(counts):
        yield _Reading(min(asked_ns[scrape]), max(asked_ns[scrape]), counts[scrape])


def split_requests(requests: pa.Table, served: Mapping[RequestKey, int], num_servers: int) -> list[pa.Table]:
    """The rows of the requests that each server served; all of one server."""
    if num_servers == 1:
        return [requests]
    servers = [served.get(key) for key in values_of(requests, "session", "request")]
    return [
        requests.filter(pa.array([server == number for server in servers], pa.bool_())) for number in range(num_servers)
    ]


Metrics = tuple[pa.Table, int, int]
"""A METRICS table, the number of scrapes, and of those without a readable body."""


def merged_derived(parts: Sequence[Derived], of_all: Metrics) -> Derived:
    """What the raw files of all replicas say, as those of one run; ``parts`` keeps what each says by itself."""
    first = parts[0]
    metrics, num_scrapes, num_failed = of_all
    logs = [part.step_log for part in parts]
    whole = replace(
        first,
        tables={
            **{
                name: pa.concat_tables([_renumbered(part.tables[name], at) for at, part in enumerate(parts)])
                for name in ("steps", "kv_events")
            },
            "metrics": metrics,
        },
        counts=_summed(ParseCounts(), [part.counts for part in parts]),
        num_scrapes=num_scrapes,
        num_failed_scrapes=num_failed,
        faults=tuple(fault for part in parts for fault in part.faults),
        failed_copies=tuple(name for part in parts for name in part.failed_copies),
        step_log=numbered_through([log for log in logs if log is not None]) if all(logs) else None,
        step_log_problem=next((part.step_log_problem for part in parts if part.step_log_problem), ""),
        steps_source=next((part.steps_source for part in parts if part.steps_source != "none"), "none"),
        log_ns_source=next((part.log_ns_source for part in parts if part.log_ns_source != "none"), "none"),
        slots=_summed(SlotWalk(), [part.slots for part in parts]),
        parts=tuple(parts),
    )
    whole.counters.num_fallen = sum(part.counters.num_fallen for part in parts)
    whole.counters.first = next((part.counters.first for part in parts if part.counters.first), "")
    for name in ("num_bucket_lines", "num_iteration_lines", "num_kv_lines", "num_preemptions"):
        setattr(whole, name, sum(getattr(part, name) for part in parts))
    return whole


def _renumbered(table: pa.Table, replica: int) -> pa.Table:
    """Steps or KV events with the numbers of steps and slots that a replica has among all; -replica: its own again."""
    moved: dict[str, Any] = {"step": table["step"].to_numpy().astype(np.int64) + replica * STEPS_OF_A_REPLICA}
    if "slots" in table.schema.names:
        shift = replica * SLOTS_OF_A_REPLICA
        moved["slots"] = [[slot + shift for slot in row] for row in table["slots"].to_pylist()]
    for name, values in moved.items():
        place = table.schema.get_field_index(name)
        table = table.set_column(place, table.schema.field(place), pa.array(values, table.schema.field(place).type))
    return table


def merged_metrics(parts: Sequence[Derived]) -> Metrics:
    """Samples with the label of their replica, of the scrapes that all replicas answered."""
    tables = [part.tables["metrics"] for part in parts]
    readable = set.intersection(*(set(table["scrape"].unique().to_pylist()) for table in tables))
    num_scrapes = max(part.num_scrapes for part in parts)
    labelled: list[pa.Table] = []
    for replica, table in enumerate(tables):
        is_kept = [scrape in readable for scrape in table["scrape"].to_pylist()]
        kept = table.filter(pa.array(is_kept, pa.bool_()))
        # The texts may be dictionaries, of which each replica has its own.
        plain = kept.cast(
            pa.schema([field.with_type(getattr(field.type, "value_type", field.type)) for field in kept.schema])
        )
        of = f'replica="{replica}"'
        texts = [f"{text},{of}" if text else of for text in plain["labels"].to_pylist()]
        place = plain.schema.get_field_index("labels")
        labelled.append(plain.set_column(place, plain.schema.field(place), pa.array(texts, pa.string())))
    return pa.concat_tables(labelled).sort_by("scrape"), num_scrapes, max(0, num_scrapes - len(readable))


def _summed(total: _Counts, parts: Sequence[_Counts]) -> _Counts:
    """Numbers are summed, lists joined; of texts the first counts."""
    names = [field.name for field in fields(total)] if isinstance(total, ParseCounts) else list(_PUBLIC_OF_A_WALK)
    for name in names:
        values = [getattr(part, name) for part in parts]
        start = getattr(total, name)
        if isinstance(start, bool):
            setattr(total, name, any(values))
        elif isinstance(start, int):
            setattr(total, name, sum(values))
        elif isinstance(start, list):
            setattr(total, name, [item for value in values for item in value])
        else:
            setattr(total, name, next(filter(None, values), start))
    return total


_PUBLIC_OF_A_WALK = ("num_contradictions", "first", "num_prefill_lines", "num_unprefilled", "first_unprefilled")


CORE_REQUESTS = pa.schema(
    [("session", pa.int32()), ("request", pa.int32()), *((one.name, one.type) for one in REQUESTS)]
)
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
def servers_in(run: SealedRun) -> list[ServerTables]:
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
    return pa.Table.from_pylist(rows, schema=CORE_REQUESTS).sort_by("admitted_ns")
