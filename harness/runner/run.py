"""One run in stages: fresh server, healthy, scrape, replay, scrape, stop, derive, invariants, seal.

Whatever happens, the server is stopped afterwards, and an unfinished run never looks complete.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from harness.analysis import Evidence, check_run
from harness.analysis.figures import Lateness
from harness.analysis.logs.derive import derive_tables
from harness.analysis.logs.engine_steps import read_run_steps
from harness.analysis.logs.glance import REARRIVAL_P99_MS, START_SPREAD_MS
from harness.analysis.logs.parse import Derived
from harness.analysis.reuse import with_known_zeros
from harness.analysis.run_tables import CACHED_COUNTER, counter_increment
from harness.clock import NS_PER_MS, NS_PER_S, MonotonicClock, ScaledClock, realtime_minus_monotonic_ns
from harness.errors import HarnessError, ServerError
from harness.judge.prereg import RunAuthorization
from harness.kinds import kind_named
from harness.measure.client.host import cores_for_clients, on_cores
from harness.measure.client.prompts import RequestOptions
from harness.measure.client.run import ReplayEvent, ReplayResult, Target, replay
from harness.measure.client.self_audit import self_audit
from harness.measure.records import layout
from harness.measure.records.findings import finding
from harness.measure.records.manifest import (
    WARMED_UP,
    ClockRecord,
    Finding,
    FleetRecord,
    Manifest,
    PreregistrationRecord,
    ServerRecord,
)
from harness.measure.records.run import SealedRun
from harness.measure.records.schema import RowStream
from harness.measure.records.writer import RunWriter
from harness.measure.server import provenance
from harness.measure.server.ask import Get, Scraper, asking_process
from harness.measure.server.clean_start import clean_start
from harness.measure.server.life import LaunchPlan, LogFormat, ServerHandle, metrics_address, start_server
from harness.measure.server.process import ExitReport
from harness.measure.server.tokenizer import configured_vocabulary, range_within, remembered_vocabulary, text_sizes_of
from harness.measure.server.warm_up import warm_up
from harness.model.engine.config import changed_keys
from harness.model.experiment import PlannedRun, unbalanced_order
from harness.model.plan.model import canonical_lines
from harness.model.plan.tokens import PromptIds
from harness.model.sim import simulate
from harness.model.spec import ServerSpec
from harness.model.spec.server import PAGED_KEYS
from harness.model.spec.workload import KEEP_KV, RequestSpec
from harness.redact import redacted_arguments, redacted_text
from harness.run_key import RunKey
from harness.runner.fleet.slot import WorkerSlot
from harness.runner.progress import ProgressSink, RequestFinished, ServerReady, ServerStarting, StopFlag
from harness.stacks.rbln.launch.device_watch import (
    EXPORTER_INTERVAL_S,
    DeviceWatch,
    device_findings,
    devices_seen,
    exporter_address,
    from_driver,
    from_exporter,
)
from harness.stacks.rbln.launch.launch_log import (
    LaunchFacts,
    launch_findings,
    read_launch_files,
    replicas_findings,
    rules_findings,
)
from harness.stacks.rbln.rules.kv_rules import RULE_SETS, rule_set, rules_for_vllm
from harness.stacks.vllm.step_log import StepLog

# How often a wait for a server is told.
TOLD_EVERY_S = 10.0


class LaunchOptions(NamedTuple):
    """What a run determines of a launch. port: 0 for any free port. run_folder: for the files of the backend.

    device: of a fleet that the server is for; None outside one. step_factor: of an emulated device's step times.
    """

    port: int
    run_folder: Path
    time_scale: float = 1.0
    log_format: LogFormat = "default"
    device: int | None = None
    step_factor: float = 1.0


Launch = Callable[[ServerSpec, LaunchOptions], LaunchPlan]


@dataclass(frozen=True, slots=True)
class RunContext:
    """What a call of ``run_experiment`` passes to each of its runs.

    spec_source: the file the experiment is from. worker_slot: the device of a fleet that this process works for.
    await_others: returns when the other devices of a run's period are as far as this one. client_cores: those that
    the server is kept off; a fleet shares cores out by itself. fixed_by: SHA-256 of what fixed the runs beforehand.
    """

    runs_root: Path
    spec_source: str
    authorization: RunAuthorization | None
    on_progress: ProgressSink
    stop: StopFlag
    worker_slot: WorkerSlot | None = None
    await_others: Callable[[], None] | None = None
    starts: dict[RunKey, str] = field(default_factory=dict[RunKey, str])
    client_cores: tuple[int, ...] = ()
    fixed_by: str = ""

    @contextmanager
    def writer(self, run: PlannedRun) -> Generator[RunWriter]:
        """A writer for ``run``, its inputs written. A run that was not sealed at the end is renamed.

        The ledger of a frozen run has an entry before anything starts, and one for how it ended.
        """
        if self.authorization is None:
            with self._writer(run) as writer:
                yield writer
            return
        ledger = self.authorization.ledger
        start = self.starts[run.key] = ledger.start(run)
        try:
            with self._writer(run) as writer:
                yield writer
        except BaseException as error:
            with suppress(HarnessError):
                ledger.aborted(start, run.key, redacted_text(f"{type(error).__name__}: {error}"))
            raise
        manifest = layout.run_folder(self.runs_root, *run.key) / layout.MANIFEST
        if manifest.is_file():
            ledger.sealed(start, run.key, manifest)
        else:
            ledger.aborted(start, run.key, "interrupted by a person")

    @contextmanager
    def _writer(self, run: PlannedRun) -> Generator[RunWriter]:
        with RunWriter(self.runs_root, *run.key, run.plan.num_requests) as writer:
            writer.raw(layout.PLAN).write(b"".join(canonical_lines(run.plan, run.plan.hash)))
            writer.raw(layout.COST_MODEL).write(run.cost_file.read_bytes())
            if self.authorization is not None:
                writer.raw(layout.FROZEN).write(self.authorization.content)
            if self.worker_slot is not None:
                self.worker_slot.note(writer.folder, run)
            yield writer

    def fleet_record(self, folder: Path, requested: Mapping[str, Any], neighbours: Iterable[int]) -> FleetRecord | None:
        """The manifest's record of the device in its fleet; None outside one. requested: of the server's launch."""
        if self.worker_slot is None:
            return None
        record = self.worker_slot.record(folder, requested.get("npus", ()), neighbours)
        return record.model_copy(update={"emulated_factor": requested.get("step_factor")})

    def in_worker_slot(self) -> AbstractContextManager[set[int]]:
        """On the client's own cores, where it has some; gives the devices of a fleet that are busy beside it."""
        return on_cores(self.client_cores) if self.worker_slot is None else self.worker_slot.held(self.runs_root)

    def record_of(self, run: PlannedRun) -> PreregistrationRecord | None:
        """The manifest's record of the freeze; None for an exploratory run."""
        if self.authorization is None:
            return None
        return self.authorization.record.model_copy(update={"start": self.starts[run.key]})


@dataclass(frozen=True, slots=True)
class _Measured:
    """Observations from a server's start to its stop. Instants in model ns.

    log_offsets: for a log with another host's stamps, (its wall clock - our monotonic clock, uncertainty) in ns, before
    and after the replay. neighbours: other devices of the host that were busy before or after it.
    changes: see ``AttachedServer.changes``.
    """

    launch: LaunchPlan
    pid: int
    replay: ReplayResult
    audit: dict[str, Any]
    exit_report: ExitReport
    is_alive_until_stop: bool
    timings: dict[str, int]
    log_offsets: tuple[tuple[int, int], ...] = ()
    neighbours: frozenset[int] = frozenset()
    changes: tuple[Finding, ...] = ()
    clock: ClockRecord = field(default_factory=ClockRecord)
    provenance: Mapping[str, Any] = field(default_factory=dict[str, Any])


def perform_run(run: PlannedRun, context: RunContext, launch: Launch) -> SealedRun | None:
    """Perform one run and seal it, valid or not; None when the person aborted it.

    launch: makes the plan of a fresh server, its files in the run's folder; starts nothing.
    Raises ServerError when the server never got ready or could not be stopped, RecordsError when records cannot be
    written; then nothing of the run counts.
    """
    clock = ScaledClock(run.spec.time_scale)
    has_own_core = run.spec.client.own_core and context.worker_slot is None
    own = cores_for_clients(run.spec.client.processes) if has_own_core else ()
    with context.writer(run) as writer, _kept(writer):
        before_ns = realtime_minus_monotonic_ns()
        facts = provenance.capture()
        with on_cores(os.sched_getaffinity(0).difference(own) if own else ()):
            plan = _launched(run, context, launch, writer)
            measured = _Measurement(run, replace(context, client_cores=own), plan, writer, clock).performed()
        if measured is None:
            writer.discard()
            return None
        after_ns = realtime_minus_monotonic_ns()
        if measured.log_offsets:
            before_ns, after_ns = measured.log_offsets[0][0], measured.log_offsets[-1][0]
        clock_record = ClockRecord(
            scale=clock.scale, realtime_minus_monotonic_ns=before_ns, realtime_minus_monotonic_after_ns=after_ns
        )
        return _seal(run, context, writer, replace(measured, clock=clock_record, provenance=facts))


@contextmanager
def _kept(writer: RunWriter) -> Generator[None]:
    """An error of a server says where the log of the unfinished run is kept."""
    try:
        yield
    except ServerError as error:
        kept = writer.abort()
        if kept is not None and (kept / layout.SERVER_LOG).is_file():
            error.below = (
                *error.below,
                f"its log: {kept / layout.SERVER_LOG}; then the same command goes on (run, calibrate: with --resume)",
            )
        raise


def _launched(run: PlannedRun, context: RunContext, launch_server: Launch, writer: RunWriter) -> LaunchPlan:
    """The plan of the run's server; the run's folder is removed when the launch is refused."""
    try:
        slot = context.worker_slot
        options = LaunchOptions(run.server.port, writer.folder, run.spec.time_scale, "precise")
        if slot is not None:
            options = options._replace(device=slot.place.device, step_factor=emulated_factor(run))
        return launch_server(run.server, options)
    except HarnessError:
        # Nothing has started, so the folder holds no evidence.
        writer.discard()
        raise


@dataclass(frozen=True, slots=True)
class _Measurement:
    """One run on its server, in three stages: the server gets ready, the plan is replayed, the server is stopped.

    timings: instants in model ns, filled in as the stages pass.
    """

    run: PlannedRun
    context: RunContext
    launch: LaunchPlan
    writer: RunWriter
    clock: ScaledClock
    timings: dict[str, int] = field(default_factory=dict[str, int])

    def performed(self) -> _Measured | None:
        """What was observed; None when the person aborted the run."""
        run, launch, folder, clock = self.run, self.launch, self.writer.folder, self.clock
        self.timings["server_start_ns"] = clock.now_ns()
        with self.context.in_worker_slot():
            audit = self_audit(run.plan, run.spec.client, clock, folder)
        with (
            _asking(self.context, launch, run.server) as (metrics, device_metrics),
            start_server(
                launch, log_path=folder / layout.SERVER_LOG, stamps_path=folder / layout.LOG_STAMPS, clock=clock
            ) as process,
            DeviceWatch(folder / layout.DEVICES, from_driver(launch.device_command), clock),
            DeviceWatch(
                folder / layout.DEVICE_METRICS,
                from_exporter(run.server.device_metrics_url, device_metrics),
                clock,
                EXPORTER_INTERVAL_S,
            ),
        ):
            offset = self._offset() if self._is_ready(process) else ()
            if self._is_stopped:
                process.kill()
                return None
            result, neighbours = self._replayed(metrics)
            if self._is_stopped:
                process.kill()
                return None
            is_alive = not process.has_exited
            changes = process.changes()
            offsets = (*offset, *(self._offset() if is_alive else ()))
            exit_report = process.stop(grace_s=run.server.stop_grace_s)
            self.timings["server_stopped_ns"] = clock.now_ns()
        return _Measured(
            launch=launch,
            pid=process.pid,
            replay=result,
            audit=audit,
            exit_report=exit_report,
            is_alive_until_stop=is_alive,
            timings=self.timings,
            log_offsets=offsets,
            neighbours=neighbours,
            changes=changes,
        )

    @property
    def _is_stopped(self) -> bool:
        return self.context.stop.now.is_set()

    def _offset(self) -> tuple[tuple[int, int], ...]:
        """The offset of another host's clock now, where the log has its stamps."""
        return () if self.launch.read_offset is None else (self.launch.read_offset(),)

    def _is_ready(self, process: ServerHandle) -> bool:
        """Whether the server answers, and the others of its block are ready too; False when the person aborted."""
        run, limit_s = self.run, self.run.server.start_timeout_s
        startup_ns = process.wait_healthy(
            self.launch.host,
            self.launch.port,
            deadline_s=limit_s,
            is_stopped=waiting_for_server(run.label, limit_s, self.context.on_progress, self.context.stop),
        )
        if self._is_stopped:
            return False
        self.context.on_progress(ServerReady(run.label, startup_ns / NS_PER_S))
        self.timings["healthy_ns"] = self.clock.now_ns()
        if run.period is not None and self.context.await_others is not None:
            self.context.await_others()
        return True

    def _replayed(self, metrics: Sequence[Get]) -> tuple[ReplayResult, frozenset[int]]:
        """What the client saw, and the devices of a fleet that were busy beside."""
        run, launch, stop = self.run, self.launch, self.context.stop.now
        target, started = _target(run, launch, self.writer.folder, self.clock)
        if launch.warms_up:
            for each in launch.servers:
                started = warm_up(run.plan, run.server, replace(target, endpoint=each.endpoint), stop)
            self.timings[WARMED_UP] = self.clock.now_ns()
        lateness = _LiveLateness(run.label, self.clock.scale, self.context.on_progress)
        interval_s = run.spec.client.scrape_interval_s
        with (
            open(self.writer.folder / layout.SCRAPES, "ab") as scrapes,
            self.context.in_worker_slot() as neighbours,
            Scraper(scrapes, *metrics, clock=self.clock, interval_s=interval_s, beside=lateness.so_far),
        ):
            result = replay(run.plan, target, on_event=lateness.add, stop=stop)
        result.audit.update(started)
        if replicas := result.audit.pop("replicas"):
            # A line for each answer that named its replica, by the client's id of the request.
            lines = (json.dumps([name, replica], separators=(",", ":")) for name, replica in replicas.items())
            self.writer.raw(layout.SERVED).write("".join(f"{line}\n" for line in lines).encode())
        self.timings["replay_start_ns"] = result.start_ns
        self.timings["replay_end_ns"] = self.clock.now_ns()
        return result, frozenset(neighbours)


def _target(run: PlannedRun, launch: LaunchPlan, records: Path, clock: ScaledClock) -> tuple[Target, dict[str, Any]]:
    """Whom the client asks and how, and what a clean start did on a server that is not ours."""
    spec, server, is_ours = run.spec, run.server, launch.is_ours
    target = Target(
        launch.endpoint,
        model=launch.model,
        options=spec.client,
        clock=clock,
        request_timeout_ns=int(spec.limits.request_timeout_s * NS_PER_S),
        records=records,
        is_strict=is_ours,
        request=with_hints(spec.workload_of(run.condition).request, server),
        replica_header=server.names_replica_in,
    )
    vocabulary = configured_vocabulary(server) if is_ours else remembered_vocabulary(launch.endpoint)
    target = replace(target, prompt_ids=PromptIds(token_id_range=range_within(vocabulary, run.plan.token_id_range)))
    target = replace(target, text_sizes=text_sizes_of(target, run.plan, is_ours=is_ours))
    # Read here too, so that they are known where scrapes and logs are kept.
    _ = RequestOptions(target.request)
    return (target, {}) if is_ours else clean_start(target)


@contextmanager
def _asking(context: RunContext, launch: LaunchPlan, server: ServerSpec) -> Generator[tuple[Sequence[Get], Get | None]]:
    """Processes on the client's cores that ask the servers and the devices' exporter. They load while these start."""
    with ExitStack() as stack:
        with context.in_worker_slot():
            addresses = [metrics_address(each.endpoint, server.metrics_url) for each in launch.servers]
            metrics = [stack.enter_context(asking_process(*address)) for address in addresses]
            exporter_url = server.device_metrics_url
            exporter = exporter_url and stack.enter_context(asking_process(exporter_address(exporter_url)))
        yield metrics, exporter or None


def with_hints(request: RequestSpec, server: ServerSpec) -> RequestSpec:
    """The request with what a router and a server that pins KV go by; as it is without these."""
    if server.keep_kv_s is not None:
        body = {KEEP_KV: "{expected_wait_ms}", **request.extra_body}
        request = request.model_copy(update={"extra_body": body})
    name = server.routing.session_header if server.is_routed else ""
    if not name or name.lower() in map(str.lower, request.headers):
        return request
    return request.model_copy(update={"headers": {**request.headers, name: "{session_id}"}})


def waiting_for_server(label: str, limit_s: float, on_progress: ProgressSink, stop: StopFlag) -> Callable[[], bool]:
    """Whether the user stopped, as a wait for a server asks it; every few seconds it tells that the wait goes on."""
    clock = MonotonicClock()
    began_ns = told_ns = clock.now_ns()

    def is_stopped() -> bool:
        nonlocal told_ns
        now_ns = clock.now_ns()
        if now_ns - told_ns >= TOLD_EVERY_S * NS_PER_S:
            told_ns = now_ns
            on_progress(ServerStarting(label, (now_ns - began_ns) / NS_PER_S, limit_s))
        return stop.now.is_set()

    return is_stopped


class _LiveLateness:
    """Counts the finished requests of a run, and how late they were sent, for its live progress."""

    def __init__(self, label: str, scale: float, on_progress: ProgressSink) -> None:
        self._label, self._scale, self._on_progress = label, scale, on_progress
        self._starts_ms: list[float] = []
        self._rearrivals_ms: list[float] = []

    def add(self, event: ReplayEvent) -> None:
        """Count a request; called from the client's thread."""
        if event.late_ns is not None:
            late_ms = self._rearrivals_ms if event.request else self._starts_ms
            late_ms.append(event.late_ns / self._scale / NS_PER_MS)
        self._on_progress(RequestFinished(self._label, event.num_finished, event.num_requests))

    def so_far(self) -> dict[str, float]:
        """Lateness so far, wall ms, as the report will compute it; each scrape records it for ``harness watch``."""
        late = Lateness(np.sort(self._rearrivals_ms), np.array(self._starts_ms), 0)
        figures = {REARRIVAL_P99_MS: late.rearrival_p99_ms, START_SPREAD_MS: late.start_spread_ms}
        return {name: value for name, value in figures.items() if value is not None}


def _seal(run: PlannedRun, context: RunContext, writer: RunWriter, measured: _Measured) -> SealedRun:
    launch = measured.launch
    all_shown = read_launch_files(writer.folder, len(launch.servers))
    log, _ = read_run_steps(writer.folder)
    shown, has_paged = all_shown[0], bool(changed_keys(run.server) & PAGED_KEYS)
    in_force = settings_in_force(run.server, shown, launch.effective, log, has_paged=has_paged)
    engine = {} if log is None or not log.engine_settings else {"engine": log.engine_settings}
    devices = devices_seen(writer.folder)
    manifest = manifest_of(
        run,
        context,
        clock=measured.clock,
        observation=launch.observation,
        effective={
            "server": in_force,
            "shown": sorted(in_force),
            "launch": shown.report.model_dump(mode="json"),
            **engine,
        },
        server=ServerRecord(
            pid=measured.pid,
            is_alive_until_stop=measured.is_alive_until_stop,
            exit_status=measured.exit_report.returncode,
            argv=redacted_arguments(launch.argv),
            facts={"launch": launch.to_json(), "exit": measured.exit_report.to_json(), "devices": devices},
        ),
        client_audit={**measured.replay.audit, "self_audit": measured.audit},
        fleet=context.fleet_record(writer.folder, launch.requested, measured.neighbours),
        provenance=dict(measured.provenance),
        timings=measured.timings,
    )
    findings = [*launch.findings, *measured.changes, *device_findings(devices)]
    if unbalanced := unbalanced_order(run.spec):
        findings.append(finding("order-unbalanced", unbalanced))
    if measured.log_offsets:
        within_us = max(uncertainty for _, uncertainty in measured.log_offsets) / 1000
        findings.append(
            finding(
                "clock-remote",
                f"log stamps are another host's, placed on this host's clock to within {within_us:.0f} us",
            )
        )
    needs_observer = run.server.observer and kind_named(launch.backend).has_stack
    for each in all_shown:
        findings += launch_findings(each, needs_observer=needs_observer)
    findings += replicas_findings(run.label, all_shown, launch.effective)
    if log is not None and run.server.is_paged and not launch.is_ours:
        do = "Name the step log that this server writes"
        findings += [finding("setting-differs", each, do=do) for each in unlike_log(log, shown, launch.effective)]
    server, version = run.server, manifest.vllm_version if run.server.is_vllm else manifest.serving_version
    stack = f"{'vllm' if server.is_vllm else 'vllm-rbln'} {version}" if version else ""
    # Of vllm-rbln the launch read the rules in its sources.
    served = rules_for_vllm(version) if server.is_vllm else RULE_SETS.get(in_force.get("rules", ""))
    findings += rules_findings(server.rules, stack, served, server.rule_set(version))
    return seal_run(writer, run, manifest, RunTables(measured.replay.requests, measured.replay.chunks), findings)


def settings_in_force(
    server: ServerSpec, shown: LaunchFacts, stated: Mapping[str, Any], log: StepLog | None, *, has_paged: bool
) -> dict[str, Any]:
    """Settings in force, from log and metrics, what is stated beside them, and the step log.

    has_paged: with the blocks of paged KV memory.
    """
    paged = shown.paged(server.num_gpu_blocks) if has_paged else {}
    in_force = shown.effective({**paged, **stated, **({} if log is None else log.settings)})
    # Paged KV memory has no slots.
    return {key: value for key, value in in_force.items() if not (server.is_paged and key == "usable_kv_slots")}


def unlike_log(log: StepLog, shown: LaunchFacts, stated: Mapping[str, Any]) -> list[str]:
    """ "block_size: 128 in its step log, 64 in its metrics", of each setting that both show.

    stated: what the server states of itself, such as the longest request in its list of models.
    """
    metrics = {**shown.effective(), **shown.paged(log.settings.get("num_gpu_blocks"))}
    # Those of several engines are added up in the metrics.
    keys = ("block_size", "prefix_caching", *(["num_gpu_blocks"] if log.num_declared_engines == 1 else []))
    sides = [(key, metrics, "metrics") for key in keys] + [("slot_tokens", stated, "list of models")]
    return [
        f"{key}: {logged} in its step log, {side[key]} in its {where}"
        for key, side, where in sides
        if key in side and (logged := log.settings.get(key)) not in (None, side[key])
    ]


class RunTables(NamedTuple):
    """The tables of a run. derived: None to compute them from the raw files."""

    requests: pa.Table
    chunks: pa.Table | RowStream
    derived: Derived | None = None


def seal_run(
    writer: RunWriter, run: PlannedRun, manifest: Manifest, tables: RunTables, findings: Iterable[Finding] = ()
) -> SealedRun:
    """Write the tables, compute the derived ones, judge the invariants, seal. findings: of the launch."""
    writer.close_raw()
    derived = tables.derived or derive_tables(writer.folder, manifest)
    requests = with_known_zeros(tables.requests, counter_increment(derived.tables["metrics"], CACHED_COUNTER))
    writer.write("requests", requests)
    writer.write("chunks", tables.chunks)
    for name, table in derived.tables.items():
        writer.write(name, table)
    # Simulated channels are equal by construction: no limit on their difference applies.
    cost_model = None if kind_named(run.spec.backend).is_virtual else run.cost_model
    checks = check_run(Evidence(manifest, requests, derived, run.plan, cost_model))
    judged = (*findings, *checks)
    reasons = [f"{finding.code}: {finding.evidence}" for finding in judged if finding.severity == "invalid"]
    return writer.seal(manifest.model_copy(update={"findings": judged}), reasons)


def manifest_of(run: PlannedRun, context: RunContext, **observed: Any) -> Manifest:
    """The manifest of a run before it is judged. observed: further keys of the manifest."""
    spec = run.spec
    manifest = Manifest(
        experiment=spec.name,
        condition=run.condition.name,
        replicate=run.replicate,
        order_index=run.order_index,
        baseline=spec.baseline_of(run.condition),
        backend=spec.backend,
        plan_hash=run.plan.hash,
        drawn_hash=run.plan.drawn_hash,
        treatment=run.condition.treatment,
        planned_requests=run.plan.num_requests,
        requested={
            "experiment": spec.model_dump(mode="json"),
            "server": run.server.model_dump(mode="json"),
            "client": spec.client.model_dump(mode="json"),
            "limits": spec.limits.model_dump(mode="json"),
            "spec_source": redacted_text(context.spec_source),
            **({"fixed_by": context.fixed_by} if context.fixed_by else {}),
        },
        preregistration=context.record_of(run),
        **observed,
    )
    # By name: what "auto" stands for changes with every release.
    if run.server.is_paged:
        return manifest
    in_force = {"rules": rule_set(run.server.rules).name, **manifest.effective.get("server", {})}
    return manifest.model_copy(update={"effective": {**manifest.effective, "server": in_force}})


def emulated_factor(run: PlannedRun) -> float:
    """The factor on the step times of a run of an emulated fleet; 1 for other runs. Resumed runs have the same.

    For drift, each earlier run of the device counts with the modelled duration of this run. Channel A keeps the prices
    of the cost model, as on a real device that is slower than its calibration.
    """
    fleet, place = run.spec.fleet, run.place
    traits = None if fleet is None or place is None else fleet.emulated.get(place.device)
    if fleet is None or traits is None:
        return 1.0
    earlier = run.replicate // len(fleet.places) * len(run.spec.condition) + run.order_index
    run_ns = simulate(run.plan, run.server, run.cost_model).end_ns if traits.drift_per_hour else 0
    normal = random.Random(f"{run.spec.base_seed}/{place}/{run.label}").gauss(0, 1)
    return traits.factor(earlier * run_ns / NS_PER_S / 3600, len(run.neighbours), normal)
