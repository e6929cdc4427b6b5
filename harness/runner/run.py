"""One run in hops: fresh server, healthy, scrape, replay, scrape, stop, derive, invariants, seal.

Whatever happens, the server is gone afterwards and an unfinished run never looks whole. No result is interpreted.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from harness.analysis import check_run
from harness.analysis.logs.derive import Derived, derive_tables
from harness.analysis.logs.glance import REARRIVAL_P99_MS, START_SPREAD_MS
from harness.analysis.method.figures import Lateness
from harness.analysis.method.invariants import CACHED_COUNTER, counter_increment
from harness.analysis.method.reuse import with_known_zeros
from harness.client.run import ReplayEvent, ReplayResult, Target, replay
from harness.client.self_audit import self_audit
from harness.clock import NS_PER_MS, NS_PER_S, ScaledClock, clock_for, realtime_minus_monotonic_ns
from harness.engine import CostModel
from harness.errors import HarnessError
from harness.experiment import PlannedRun
from harness.kinds import kind_named
from harness.plan import Plan
from harness.plan.model import canonical_lines
from harness.prereg import Ticket
from harness.records import (
    ClockRecord,
    Finding,
    FleetRecord,
    Manifest,
    PreregistrationRecord,
    RunKey,
    RunWriter,
    SealedRun,
    ServerRecord,
    layout,
)
from harness.records.schema import RowStream
from harness.redact import redacted_arguments, redacted_text
from harness.runner.fleet.slot import WorkerSlot
from harness.runner.progress import ProgressSink, RequestFinished, ServerReady, StopFlag
from harness.server import provenance
from harness.server.ask import Scraper
from harness.server.life import LaunchPlan, start_server
from harness.server.process import ExitReport
from harness.sim import simulate
from harness.stack.rbln.device_watch import (
    DeviceWatch,
    device_findings,
    devices_seen,
    from_driver,
    from_exporter,
)
from harness.stack.rbln.kv_rules import rules_in_force
from harness.stack.rbln.launch_log import launch_findings, read_launch_files, rules_findings

Launch = Callable[..., LaunchPlan]


@dataclass(frozen=True, slots=True)
class Invocation:
    """What one call of ``run_experiment`` gives to each of its runs.

    spec_source: the file the experiment is from. worker_slot: the device of a fleet that this process works for.
    await_others: returns when the other devices of a run's period are as far as this one.
    """

    runs_root: Path
    spec_source: str
    ticket: Ticket | None
    on_progress: ProgressSink
    stop: StopFlag
    worker_slot: WorkerSlot | None = None
    await_others: Callable[[], None] | None = None
    starts: dict[RunKey, str] = field(default_factory=dict[RunKey, str])

    @contextmanager
    def writer(self, run: PlannedRun) -> Generator[RunWriter]:
        """A writer for ``run`` that holds its inputs already; what is not sealed in the end is set aside.

        Of a frozen run the ledger knows before anything of it starts, and afterwards how it ended.
        """
        if self.ticket is None:
            with self._writer(run) as writer:
                yield writer
            return
        ledger = self.ticket.ledger
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
            if self.ticket is not None:
                writer.raw(layout.FROZEN).write(self.ticket.content)
            if self.worker_slot is not None:
                self.worker_slot.note(writer.folder, run)
            yield writer

    def fleet_record(self, folder: Path, requested: Mapping[str, Any], neighbours: Iterable[int]) -> FleetRecord | None:
        """What a manifest says of the place in a fleet; None outside one. requested: of the server's launch."""
        if self.worker_slot is None:
            return None
        found = self.worker_slot.record(folder, requested.get("npus", ()), neighbours)
        return found.model_copy(update={"emulated_factor": requested.get("step_factor")})

    def in_worker_slot(self) -> AbstractContextManager[set[int]]:
        """On the client's own cores, where a fleet shares them out; gives the devices that are busy beside it."""
        return nullcontext(set[int]()) if self.worker_slot is None else self.worker_slot.held(self.runs_root)

    def record_of(self, run: PlannedRun) -> PreregistrationRecord | None:
        """What its manifest says of the freeze that it was made under."""
        if self.ticket is None:
            return None
        return self.ticket.record.model_copy(update={"start": self.starts[run.key]})


@dataclass(frozen=True, slots=True)
class _Measured:
    """What one server's life gave. Instants in model ns.

    log_offsets: for a log that another host stamps, (its wall clock - our monotonic clock, uncertainty) in ns, before
    and after the replay. neighbours: devices beside this one that were busy before or after it.
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


def perform_run(run: PlannedRun, invocation: Invocation, launch: Launch) -> SealedRun | None:
    """Perform one run and seal it, valid or not; None when the person aborted it.

    launch: makes the plan of a fresh server, its files in the run's folder; starts nothing.
    Raises ServerError when the server never got ready or could not be stopped, RecordsError when records cannot be
    written; then nothing of the run counts.
    """
    clock = clock_for(run.spec.time_scale)
    with invocation.writer(run) as writer:
        offset_before_ns = realtime_minus_monotonic_ns()
        facts = provenance.capture()
        measured = _measure(run, invocation, launch, writer, clock)
        if measured is None:
            writer.discard()
            return None
        clock_record = ClockRecord(
            scale=clock.scale,
            realtime_minus_monotonic_ns=offset_before_ns,
            realtime_minus_monotonic_after_ns=realtime_minus_monotonic_ns(),
        )
        if measured.log_offsets:
            clock_record = clock_record.model_copy(
                update={
                    "realtime_minus_monotonic_ns": measured.log_offsets[0][0],
                    "realtime_minus_monotonic_after_ns": measured.log_offsets[-1][0],
                }
            )
        return _seal(run, invocation, writer, measured, clock_record, facts)


def _launched(run: PlannedRun, invocation: Invocation, launch_server: Launch, writer: RunWriter) -> LaunchPlan:
    """The plan of the run's server, for the device of a fleet where there is one; nothing is kept of a refusal."""
    try:
        return launch_server(
            run.server,
            port=run.server.port,
            run_folder=writer.folder,
            time_scale=run.spec.time_scale,
            log_format="precise",
            **({} if invocation.worker_slot is None else _of_device(run, invocation.worker_slot)),
        )
    except HarnessError:
        # Refused before anything started: there is nothing to look into.
        writer.discard()
        raise


def _of_device(run: PlannedRun, slot: WorkerSlot) -> dict[str, float]:
    """What a launch is told of its device in a fleet; of its speed, where it is emulated and has one of its own."""
    factor = emulated_factor(run)
    return {"device": slot.place.device, **({} if factor == 1 else {"step_factor": factor})}


def _measure(
    run: PlannedRun, invocation: Invocation, launch_server: Launch, writer: RunWriter, clock: ScaledClock
) -> _Measured | None:
    """Start the server, replay the plan against it and stop it; None when the person aborted the run."""
    spec, server, plan, interval_s = run.spec, run.server, run.plan, run.spec.client.scrape_interval_s
    on_progress, stop = invocation.on_progress, invocation.stop
    launch = _launched(run, invocation, launch_server, writer)
    timings, seen = {"server_start_ns": clock.now_ns()}, _Seen(run.label, clock.scale, on_progress)
    with invocation.in_worker_slot():
        audit = self_audit(plan, spec.client, clock, writer.folder)
    with (
        start_server(
            launch,
            log_path=writer.folder / layout.SERVER_LOG,
            stamps_path=writer.folder / layout.LOG_STAMPS,
            clock=clock,
        ) as process,
        open(writer.folder / layout.SCRAPES, "ab") as scrapes,
        DeviceWatch(writer.folder / layout.DEVICES, from_driver(launch.device_command), clock),
        DeviceWatch(writer.folder / layout.DEVICE_METRICS, from_exporter(server.device_metrics_url), clock),
    ):
        startup_ns = process.wait_healthy(launch.host, launch.port, deadline_s=server.start_timeout_s)
        on_progress(ServerReady(run.label, startup_ns / NS_PER_S))
        timings["healthy_ns"] = clock.now_ns()
        if run.period is not None and invocation.await_others is not None:
            invocation.await_others()
        offsets = [] if launch.read_offset is None else [launch.read_offset()]
        if stop.now.is_set():
            process.kill()
            return None
        with (
            invocation.in_worker_slot() as neighbours,
            Scraper(scrapes, endpoint=launch.endpoint, clock=clock, interval_s=interval_s, beside=seen.so_far),
        ):
            result = replay(
                plan,
                Target(
                    launch.endpoint,
                    model=launch.model,
                    options=spec.client,
                    clock=clock,
                    request_timeout_ns=int(spec.limits.request_timeout_s * NS_PER_S),
                    records=writer.folder,
                ),
                on_event=seen.add,
                stop=stop.now,
            )
        timings["replay_start_ns"] = result.start_ns
        timings["replay_end_ns"] = clock.now_ns()
        if stop.now.is_set():
            process.kill()
            return None
        is_alive = not process.has_exited
        offsets += [] if launch.read_offset is None or not is_alive else [launch.read_offset()]
        exit_report = process.stop(grace_s=server.stop_grace_s)
        timings["server_stopped_ns"] = clock.now_ns()
    return _Measured(
        launch, process.pid, result, audit, exit_report, is_alive, timings, tuple(offsets), frozenset(neighbours)
    )


class _Seen:
    """The requests of a run that have finished: counted for its progress, and how late they left so far."""

    def __init__(self, label: str, scale: float, on_progress: ProgressSink) -> None:
        self._label, self._scale, self._on_progress = label, scale, on_progress
        self._starts_ms: list[float] = []
        self._rearrivals_ms: list[float] = []

    def add(self, event: ReplayEvent) -> None:
        """One more, from the thread in which the client tells of it."""
        if event.late_ns is not None:
            late_ms = self._rearrivals_ms if event.request else self._starts_ms
            late_ms.append(event.late_ns / self._scale / NS_PER_MS)
        self._on_progress(RequestFinished(self._label, event.num_finished, event.num_requests))

    def so_far(self) -> dict[str, float]:
        """What a scrape notes for those who watch: wall ms, as the report will count them from all rows."""
        late = Lateness(np.sort(self._rearrivals_ms), np.array(self._starts_ms), 0)
        told = {REARRIVAL_P99_MS: late.rearrival_p99_ms, START_SPREAD_MS: late.start_spread_ms}
        return {name: value for name, value in told.items() if value is not None}


def _seal(
    run: PlannedRun,
    invocation: Invocation,
    writer: RunWriter,
    measured: _Measured,
    clock_record: ClockRecord,
    facts: Mapping[str, Any],
) -> SealedRun:
    launch = measured.launch
    said = read_launch_files(writer.folder)
    in_force = said.effective(launch.effective)
    devices = devices_seen(writer.folder)
    manifest = manifest_of(
        run,
        invocation,
        clock=clock_record,
        observation=launch.observation,
        effective={"server": in_force, "shown": sorted(in_force), "launch": said.report.model_dump(mode="json")},
        server=ServerRecord(
            pid=measured.pid,
            is_alive_until_stop=measured.is_alive_until_stop,
            exit_status=measured.exit_report.returncode,
            argv=redacted_arguments(launch.argv),
            facts={"launch": launch.to_json(), "exit": measured.exit_report.to_json(), "devices": devices},
        ),
        client_audit={**measured.replay.audit, "self_audit": measured.audit},
        fleet=invocation.fleet_record(writer.folder, launch.requested, measured.neighbours),
        provenance=dict(facts),
        timings=measured.timings,
    )
    found = [*launch.findings, *device_findings(devices)]
    if measured.log_offsets:
        within_us = max(uncertainty for _, uncertainty in measured.log_offsets) / 1000
        found.append(
            Finding(
                code="clock-remote",
                severity="info",
                evidence=f"log stamps are another host's, placed on this host's clock to within {within_us:.0f} us",
            )
        )
    needs_observer = run.server.observer and kind_named(launch.backend).has_stack
    found += launch_findings(said, needs_observer=needs_observer)
    found += rules_findings(run.server.rules, manifest.serving_version)
    return seal_run(writer, manifest, run.plan, measured.replay.requests, measured.replay.chunks, found, run.cost_model)


def seal_run(
    writer: RunWriter,
    manifest: Manifest,
    plan: Plan,
    requests: pa.Table,
    chunks: pa.Table | RowStream,
    findings: Sequence[Finding] = (),
    cost_model: CostModel | None = None,
    derived: Derived | None = None,
) -> SealedRun:
    """Write the tables, derive what the raw files say, judge the invariants, seal.

    findings: what the launch itself showed, beside the invariants. cost_model: prices channel A for a limit on it.
    derived: what the raw files say, where their writer knows it without reading them.
    """
    writer.close_raw()
    derived = derived or derive_tables(writer.folder, manifest)
    requests = with_known_zeros(requests, counter_increment(derived.tables["metrics"], CACHED_COUNTER))
    writer.write("requests", requests)
    writer.write("chunks", chunks)
    for name, table in derived.tables.items():
        writer.write(name, table)
    found = [*findings, *check_run(manifest, plan=plan, requests=requests, derived=derived, cost_model=cost_model)]
    reasons = [f"{finding.code}: {finding.evidence}" for finding in found if finding.severity == "invalid"]
    return writer.seal(manifest.model_copy(update={"findings": tuple(found)}), reasons)


def manifest_of(run: PlannedRun, invocation: Invocation, **observed: Any) -> Manifest:
    """What is known of a run before it is judged. observed: the manifest's own keys for what happened."""
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
            "spec_source": redacted_text(invocation.spec_source),
        },
        preregistration=invocation.record_of(run),
        **observed,
    )
    # By name: what "auto" stands for changes with every release.
    rules = rules_in_force(run.server.rules, manifest.serving_version).name
    in_force = {"rules": rules, **manifest.effective.get("server", {})}
    return manifest.model_copy(update={"effective": {**manifest.effective, "server": in_force}})


def emulated_factor(run: PlannedRun) -> float:
    """What this run's step times are multiplied by; 1 outside a fleet and on a device like its model.

    The device's clock counts each run that it has to make before this one as long as this one is by the model.
    """
    fleet, place = run.spec.fleet, run.place
    traits = None if fleet is None or place is None else fleet.emulated.get(place.device)
    if fleet is None or traits is None:
        return 1.0
    earlier = run.replicate // len(fleet.places) * len(run.spec.condition) + run.order_index
    run_ns = simulate(run.plan, run.server, run.cost_model).end_ns if traits.drift_per_hour else 0
    normal = random.Random(f"{run.spec.base_seed}/{place}/{run.label}").gauss(0, 1)
    return traits.factor(earlier * run_ns / NS_PER_S / 3600, len(run.neighbours), normal)
