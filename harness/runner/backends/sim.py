"""The simulator as a backend: a run in virtual time, with the same tables as a measured run. No process is started.

The emulator's engine loop is stepped on a clock that jumps over equal steps. Its events become the tables: there is no
log of a server that never was, and nothing is scraped.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from harness.analysis.logs.derive import ToRunClock, collect, of_simulator
from harness.analysis.logs.parse import Derived, ParseCounts, Scrape, samples_of, table_of_scrapes
from harness.clock import NS_PER_S, NS_PER_US, ScaledClock, utc_now
from harness.kinds import KINDS, kind_named
from harness.measure.client.rows import RequestRows
from harness.measure.emulator.metrics import ServerMetrics
from harness.measure.emulator.step_log import step_log_header, step_log_row
from harness.measure.records import layout, schema
from harness.measure.records.manifest import ClockRecord, FleetRecord, ServerRecord
from harness.measure.records.run import SealedRun
from harness.measure.records.writer import RawFile
from harness.measure.server import provenance
from harness.measure.server.doctor import Check
from harness.model.engine import DECODE, PREFILL, CostModel, EngineConfig, KvEvent
from harness.model.engine.config import PREFILL_CHUNK_TOKENS, settings_of
from harness.model.engine.core import EngineCore, EngineRequest, StepEnd, StepStart
from harness.model.engine.paged import scheduler_of
from harness.model.experiment import PlannedRun
from harness.model.plan.event_queue import ClientEvent
from harness.model.plan.model import Plan
from harness.model.sim import simulate
from harness.model.sim.driver import UnreadRequests, VirtualDriver
from harness.model.sim.plans import check_times, plan_arrays
from harness.model.spec import ServerSpec
from harness.plugins import BackendKind, service
from harness.runner.backends.base import MODELLED, FirstExperiment, ModelledBackend, observation_of
from harness.runner.progress import RequestFinished
from harness.runner.run import RunContext, RunTables, emulated_factor, manifest_of, seal_run
from harness.stacks.rbln.rules.log_grammar import EqualSteps, KvLogEvent, LogEvent

MODEL = "simulated-qwen3-4b"
_KINDS_OF_SLOTS = ("EVICTION", "MAPPING_REMOVE")
_KV_KINDS = ("ALLOC", "CACHE_HIT", "CACHE_PARTIAL", "FREE_REQUEST", *_KINDS_OF_SLOTS)
# Reading all metrics costs as much as a thousand steps. Only sessions that start late need them between start and end.
MAX_READINGS = 24


def perform_simulated_run(planned: PlannedRun, context: RunContext) -> SealedRun | None:
    """Simulate one run and seal it; the same contract as ``perform_run``."""
    if context.stop.now.is_set():
        return None
    plan, kind = planned.plan, kind_named(planned.spec.backend)
    factor = emulated_factor(planned)
    with context.writer(planned) as writer:
        # After the entry of a ledger, which a busy machine takes seconds to write.
        epoch_s = int(utc_now().timestamp())
        costs = planned.cost_model.scaled(factor)
        run: VirtualRun = (
            service("replicas", where="server.replicas").simulated(planned, costs, writer.folder)
            if planned.server.is_routed
            else _OneServer(planned, costs, writer.raw(layout.STEP_LOG) if planned.server.is_paged else None)
        )
        end_ns, settings = run.play(), run.records[0].settings
        context.on_progress(RequestFinished(planned.label, plan.num_requests, plan.num_requests))
        manifest = manifest_of(
            planned,
            context,
            clock=ClockRecord(scale=1.0, realtime_minus_monotonic_ns=epoch_s * NS_PER_S),
            observation=observation_of(planned.server),
            server=ServerRecord(facts={"launch": {"backend": kind.name, "label": kind.label, **run.facts}}),
            effective={"server": settings, "shown": sorted(settings)},
            provenance=provenance.capture(),
            timings={"replay_start_ns": 0, "replay_end_ns": end_ns},
            fleet=_fleet_record(planned, factor),
        )
        tables = RunTables(run.rows.requests_table(), run.rows.chunks_table(), run.derived(writer.folder))
        return seal_run(writer, planned, manifest, tables)


def _fleet_record(planned: PlannedRun, factor: float) -> FleetRecord | None:
    """The simulated device; None outside a fleet."""
    place = planned.place
    if place is None:
        return None
    host = place.host or "simulated"
    return FleetRecord(device=place.device, host=host, neighbours=planned.neighbours, emulated_factor=factor)


def _kv_log_event(event: KvEvent, request_id: str, at_ns: int) -> KvLogEvent | None:
    """An event of KV memory as the kv_events table has it; None where it has no row."""
    if event.kind not in _KV_KINDS:
        return None
    return KvLogEvent(
        end_offset=0,
        created_ns=at_ns,
        pid=0,
        kind=event.kind.lower(),
        request_id="" if event.kind in _KINDS_OF_SLOTS else request_id,
        slots=event.slots[:1] if event.kind in _KINDS_OF_SLOTS else event.slots,
        num_blocks=event.num_blocks,
        caller=("preempt" if event.is_preemption else "request") if event.kind == "FREE_REQUEST" else "",
        reused_tokens=PREFILL_CHUNK_TOKENS * event.num_blocks if event.kind == "CACHE_HIT" else event.reused_tokens,
    )


class ClientRows:
    """The rows of a perfect client: one row for each planned request, one chunk for each token. Instants in virtual ns.

    A key is (session, request).
    """

    def __init__(self, plan: Plan, is_streaming: bool) -> None:
        self._plan, self._is_streaming = plan, is_streaming
        self._requests = RequestRows(plan)
        self._first_row = [0, *accumulate(len(session.requests) for session in plan.sessions)]
        self._token_ns: dict[int, array[int]] = {}

    def _row(self, key: tuple[int, int]) -> int:
        return self._first_row[key[0]] + key[1]

    def sent(self, key: tuple[int, int], trigger_ns: int, due_ns: int) -> None:
        rows, row = self._requests, self._row(key)
        rows.trigger_ns[row] = trigger_ns
        rows.due_ns[row] = rows.sent_ns[row] = due_ns
        rows.request_id[row] = request_name(*key)

    def tokens(self, key: tuple[int, int], ends_ns: Sequence[int], num_tokens: int) -> None:
        """Tokens at the end of each of several steps, or so many at the end of one."""
        each_ns = ends_ns if num_tokens == len(ends_ns) else [*ends_ns] * num_tokens
        self._token_ns.setdefault(self._row(key), array("q")).extend(each_ns)

    def num_tokens(self, key: tuple[int, int]) -> int:
        return len(self._token_ns.get(self._row(key), ()))

    def completed(self, key: tuple[int, int], at_ns: int, cached_tokens: int) -> None:
        rows, row, planned = self._requests, self._row(key), self._plan.request(*key)
        self._answered(row, self._token_ns[row][0] if self._is_streaming else at_ns, "length")
        rows.done_ns[row], rows.status[row] = at_ns, "ok"
        rows.prompt_tokens[row], rows.completion_tokens[row] = planned.prompt_tokens, planned.generate_tokens
        rows.cached_tokens[row] = cached_tokens

    def left(self, key: tuple[int, int], at_ns: int) -> None:
        """Usage comes with an answer's end, so a request that was left has none."""
        row = self._row(key)
        if row in self._token_ns:
            self._answered(row, self._token_ns[row][0], "")
        self._requests.done_ns[row], self._requests.status[row] = at_ns, schema.ABORTED

    def _answered(self, row: int, head_ns: int, finish_reason: str) -> None:
        rows = self._requests
        rows.first_byte_ns[row], rows.http_status[row] = head_ns, 200
        rows.note_texts(row, f"cmpl-{rows.request_id[row]}", finish_reason)

    def requests_table(self) -> pa.Table:
        return self._requests.to_table(self._plan, ScaledClock(1.0))

    def chunks_table(self) -> pa.Table:
        status, done_ns = self._requests.status, self._requests.done_ns
        rows = sorted(row for row in self._token_ns if self._is_streaming or status[row] != schema.ABORTED)
        if not rows:
            return schema.empty("chunks")
        # The tokens of a step come in one piece. Without streaming an answer is one piece, at its end.
        pieces = [np.unique(self._token_ns[row], return_counts=True) for row in rows]
        if not self._is_streaming:
            pieces = [(np.array([done_ns[row]]), np.array([len(self._token_ns[row])])) for row in rows]
        counts = [len(instants_ns) for instants_ns, _ in pieces]
        received = np.concatenate([instants_ns for instants_ns, _ in pieces])
        row = np.repeat(rows, counts)
        return pa.table(
            [
                pa.array(np.frombuffer(self._requests.session, dtype=np.int32)[row]),
                pa.array(np.frombuffer(self._requests.request, dtype=np.int32)[row]),
                pa.array(np.concatenate([np.arange(count, dtype=np.int32) for count in counts])),
                pa.array(received),
                pa.nulls(len(received), pa.int64()),
                pa.nulls(len(received), pa.int64()),
                pa.array(np.concatenate([tokens for _, tokens in pieces]).astype(np.int32)),
                pa.array(np.zeros(len(received), dtype=np.bool_)),
            ],
            schema=schema.CHUNKS,
        )


def request_name(session: int, request: int) -> str:
    """The name of a simulated request in its records."""
    return f"s{session}r{request}"


def _admission(start: StepStart) -> list[KvEvent]:
    """The reuse and the allocation of a prefill, in the vendor's order; slots are not distinguished."""
    step, handle = start.step, start.requests[0].handle
    num_hit = step.cached_tokens // PREFILL_CHUNK_TOKENS
    num_blocks = -(-(step.cached_tokens + step.computed_tokens) // PREFILL_CHUNK_TOKENS)
    blocks = tuple(range(num_blocks))
    hit = [KvEvent("CACHE_HIT", handle, (0,), blocks[:num_hit], "", num_hit, (num_hit,))] if num_hit else []
    given = step.evicted_slots[-1:] or (0,)
    return [*hit, KvEvent("ALLOC", handle, given, blocks, "", num_blocks)]


def _in_whole_us(at_ns: int) -> int:
    return at_ns // NS_PER_US * NS_PER_US


class EngineRecord:
    """What one engine core did, as a server's log and metrics would have it. Instants in virtual ns."""

    def __init__(self, server: ServerSpec, step_log: RawFile | None) -> None:
        config = EngineConfig.from_server(server)
        is_paged = config.rule_set.is_paged
        # The paper's rules log evictions only; admissions, reuse and ends are added as the vendor would log them.
        self._is_laconic = not config.has_inner_blocks and not is_paged
        self._config, self._step_log = config, step_log
        if step_log is not None:
            self._write_step(step_log_header(config, 0))
        self._events, self._readings = list[LogEvent | EqualSteps](), list[Scrape]()
        self.settings = settings_of(config, server.cost_model)
        num_blocks = config.num_blocks if is_paged else server.num_kv_slots
        self._metrics = ServerMetrics(MODEL, config, num_blocks, server.cost_model)

    def tables(self) -> dict[str, pa.Table]:
        """Steps, KV events and metrics. Instants as exact as those of a server's log."""
        derived = collect(self._events, ParseCounts(), ToRunClock(ClockRecord()))
        metrics, _, _ = table_of_scrapes(self._readings)
        return {**derived.tables, "metrics": metrics}

    def step(self, end: StepEnd, names: Mapping[int, tuple[int, int]]) -> None:
        """A step, or equal ones, from its beginning to its end. names: (session, request) by handle."""
        start, end_ns = end.start, end.ends_ns[-1]
        events = (*start.kv_events_before, *start.step.kv_events)
        if self._is_laconic and start.step.kind == PREFILL:
            events = (*events, *_admission(start))
        self._log_events(events, start.start_ns, names)
        if start.step.kind == DECODE and self._step_log is None:
            starts_ns = [_in_whole_us(each) for each in (start.start_ns, *end.ends_ns[:-1])]
            self._events.append(EqualSteps(starts_ns, start.step.num_seqs, start.step.bucket))
        self._log_events(end.kv_events, end_ns, names)
        self._metrics.observe(end)
        if self._step_log is not None and (row := step_log_row(self._config, end)):
            self._write_step(row)
        if self._is_laconic:
            freed = (KvEvent("FREE_REQUEST", request.handle, (0,)) for request in end.finished)
            self._log_events(freed, end_ns, names)

    def _write_step(self, record: dict[str, Any] | list[Any]) -> None:
        assert self._step_log is not None, "only paged rules write a step log"
        self._step_log.write(json.dumps(record, separators=(",", ":")).encode() + b"\n")

    def _log_events(self, events: Iterable[KvEvent], at_ns: int, names: Mapping[int, tuple[int, int]]) -> None:
        for event in events:
            key = names.get(event.request)
            request_id = "" if key is None else f"cmpl-{request_name(*key)}-0"
            if (row := _kv_log_event(event, request_id, _in_whole_us(at_ns))) is not None:
                self._events.append(row)

    def read_metrics(self, at_ns: int, reason: str) -> None:
        """A reading of the metrics, without those of a process: no process serves."""
        body = self._metrics.render(of_the_process=False).decode()
        self._readings.append(Scrape(at_ns, reason, *samples_of(body)))


class VirtualRun(VirtualDriver):
    """One plan on freshly started, equal servers in virtual time, and its records.

    rows: of a perfect client. records: of each server, by its place; empty without ``step_logs``, which are the files
    of servers of paged rules and None of others. facts: for the manifest.
    """

    takes_equal_steps = True

    def __init__(  # noqa: PLR0913  # a plan, its servers and their records
        self,
        plan: Plan,
        server: ServerSpec,
        costs: CostModel,
        num_servers: int = 1,
        *,
        is_streaming: bool = True,
        step_logs: Sequence[RawFile | None] = (),
    ) -> None:
        config = EngineConfig.from_server(server)
        check_times(plan_arrays([plan]), config, [costs])
        if any(step_logs):
            # A step log has a row for each step.
            self.takes_equal_steps = False
        cores = [EngineCore(scheduler_of(config, costs, draw_seed=place)) for place in range(num_servers)]
        super().__init__(plan, cores)
        self.rows, self.facts = ClientRows(plan, is_streaming), dict[str, Any]()
        self.records = [EngineRecord(server, step_log) for step_log in step_logs]
        self._unread = UnreadRequests(plan, config)

    def play(self) -> int:
        self.read_metrics(0, "before")
        end_ns = super().play()
        self.read_metrics(end_ns, "after")
        return end_ns

    def derived(self, folder: Path) -> Derived:
        """What a log and scrapes would say. folder: of the run."""
        return of_simulator(self.records[0].tables(), folder)

    def read_metrics(self, at_ns: int, reason: str) -> None:
        """A reading of the metrics of each server."""
        for record in self.records:
            record.read_metrics(at_ns, reason)

    def request_of(self, event: ClientEvent) -> EngineRequest:
        key = (event.session, event.request)
        self.rows.sent(key, event.trigger_ns, event.at_ns)
        return self._unread.request_of(event, len(self.names), f"cmpl-{request_name(*key)}")

    def num_tokens(self, key: tuple[int, int]) -> int:
        return self.rows.num_tokens(key)

    def left(self, key: tuple[int, int], at_ns: int) -> None:
        self.rows.left(key, at_ns)

    def ended(self, server: int, end: StepEnd, /) -> None:
        for request, num_tokens in zip(end.requests, end.num_tokens, strict=True):
            # Nobody reads the answer, so no token is drawn.
            request.num_generated += num_tokens
            self.rows.tokens(self.names[request.handle], end.ends_ns, num_tokens)
        if self.records:
            self.records[server].step(end, self.names)
        for request in end.finished:
            self.rows.completed(self.names[request.handle], end.ends_ns[-1], request.cached_tokens)


class _OneServer(VirtualRun):
    """A run of one server, whose metrics are read between start and end too where a session starts late."""

    def __init__(self, run: PlannedRun, costs: CostModel, step_log: RawFile | None) -> None:
        plan, server, client = run.plan, run.server, run.spec.client
        super().__init__(plan, server, costs, is_streaming=client.stream, step_logs=[step_log])
        self._interval_ns = round(client.scrape_interval_s * NS_PER_S)
        has_late_start = any(session.start_offset_ns and session.after is None for session in plan.sessions)
        if has_late_start and simulate(plan, server, run.cost_model).end_ns < MAX_READINGS * self._interval_ns:
            self.next_look_ns = self._interval_ns

    def look(self) -> None:
        self.read_metrics(self.next_look_ns, "interval")
        self.next_look_ns += self._interval_ns


@dataclass(frozen=True, slots=True)
class SimulatedBackend(ModelledBackend):
    """The emulator's engine loop on a clock that jumps."""

    kind: BackendKind = KINDS["sim"]

    @property
    def first_command(self) -> str:
        return "harness run demo --backend sim"

    @property
    def first_experiment(self) -> FirstExperiment:
        about = "virtual time: no server is started, and a run takes less than a second"
        return replace(MODELLED, about=about)

    def readiness(self) -> Check:
        return Check(
            name="backend sim", ok=True, found="virtual time, no process, no device", need="nothing", how="Use it"
        )

    def perform(self, run: PlannedRun, context: RunContext) -> SealedRun | None:
        return perform_simulated_run(run, context)


BACKEND = SimulatedBackend()
