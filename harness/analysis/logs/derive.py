"""Derived tables (steps, KV events, metrics) computed from a run's raw files, the same each time.

The raw files are the record; these tables can be deleted and rebuilt at will. Nothing here judges a run.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from harness.analysis.logs.engine_steps import (
    in_each_server,
    measured_since_ns,
    read_run_steps,
    step_files,
    steps_table,
)
from harness.analysis.logs.parse import Derived, ParseCounts, metrics_table, parse_log
from harness.analysis.logs.replicas import merged_derived, merged_metrics, replicas_in_headers, servers_of
from harness.clock import ScaledClock
from harness.errors import RecordsError
from harness.measure.records import layout, schema
from harness.measure.records.disk import write_parquet
from harness.measure.records.manifest import ClockRecord, Manifest, table_at
from harness.measure.records.run import SealedRun, damaged
from harness.stacks.rbln.rules import log_grammar as ev
from harness.stacks.rbln.rules.log_grammar import LogEvent

READ_BYTES = 1 << 20
# Rows that are kept as Python values: Arrow's own take a tenth of the memory.
BLOCK_ROWS = 1 << 15
ABSENT_NS = np.iinfo(np.int64).min
KINDS = ("alloc", "eviction", "cache_hit", "cache_partial", "free_request", "mapping_remove", "fault", "copy_failed")
CALLERS = ("", "request", "dummy", "preempt")


_LAST_INSTANT_NS = 2**62


class ToRunClock:
    """Instants of log lines as run-clock ns: from their own stamps where they have one, else from their receipt."""

    def __init__(self, clock: ClockRecord, stamps: bytes = b"") -> None:
        self._clock = ScaledClock(clock.scale)
        self._offset_ns = clock.realtime_minus_monotonic_ns
        # A torn last pair is dropped: its bytes say nothing for certain.
        pairs = np.frombuffer(stamps[: len(stamps) // 16 * 16], dtype="<i8").reshape(-1, 2)
        self._read_offsets, self._received_ns = pairs[:, 0], pairs[:, 1]

    def instant_ns(self, event: LogEvent) -> int | None:
        """The event's instant; None when neither the line nor the stamps tell.

        created: model = (realtime - offset) * scale. received: the read that brought the line's newline.
        """
        if event.created_ns is not None:
            created_ns = self.created_ns(event.created_ns)
            # A stamp centuries away is no instant of any clock: the line counts, its time is unknown.
            return created_ns if abs(created_ns) <= _LAST_INSTANT_NS else None
        at = int(np.searchsorted(self._read_offsets, event.end_offset - 1, side="right")) - 1
        return int(self._received_ns[at]) if at >= 0 else None

    def created_ns(self, realtime_ns: int) -> int:
        """The instant of a line's own stamp."""
        return self._clock.from_monotonic_ns(realtime_ns - self._offset_ns)


def derive_tables(folder: Path, manifest: Manifest) -> Derived:
    """Compute the derived tables of the run in ``folder`` (sealed or still being written).

    manifest: for the clock and the configured buckets. Missing raw files give empty tables. Raises RecordsError when
    a raw file cannot be read.
    """
    scrapes = _pieces(folder / layout.SCRAPES, lambda file: file.readline())
    folders = layout.replica_folders(folder)
    if manifest.num_scraped == 1:
        return _derived(folder, manifest, scrapes)
    lines = list(scrapes)
    of_servers = ([line for line in lines if b'"replica": %d,' % at in line] for at in range(manifest.num_scraped))
    in_headers = replicas_in_headers(folder / layout.SERVED, table_at(manifest.server.facts, "launch"))
    if folders:
        parts = [_derived(each, manifest, own) for each, own in zip(folders, of_servers, strict=True)]
        return replace(merged_derived(parts, merged_metrics(parts)), in_headers=in_headers)
    # Somebody else's replicas: what each counted is known, and no log of theirs.
    derived = _derived(folder, manifest, ())
    scraped = [_derived(folder / layout.REPLICAS, manifest, own) for own in of_servers]
    derived.tables["metrics"], derived.num_scrapes, derived.num_failed_scrapes = merged_metrics(scraped)
    derived.in_headers = in_headers
    derived.counters = max((each.counters for each in scraped), key=lambda watch: watch.num_fallen)
    return derived


def _derived(folder: Path, manifest: Manifest, scrapes: Iterable[bytes]) -> Derived:
    """What the files of one server say."""
    events = parse_log(_pieces(folder / layout.SERVER_LOG), counts := ParseCounts())
    stamps = b"".join(_pieces(folder / layout.LOG_STAMPS))
    derived = collect(events, counts, ToRunClock(manifest.clock, stamps), manifest.decode_buckets)
    metrics, derived.num_scrapes, derived.num_failed_scrapes = metrics_table(scrapes, derived.counters)
    model = str(table_at(manifest.server.facts, "launch").get("model", ""))
    derived.tables["metrics"], derived.other_models = of_model(metrics, model)
    take_step_log(derived, folder, ScaledClock(manifest.clock.scale), measured_since_ns(manifest))
    return derived


def of_model(metrics: pa.Table, model: str) -> tuple[pa.Table, tuple[str, ...]]:
    """(the samples without those of other models, names of these).

    All are kept where none names ``model``; the names are then told where there are several.
    """
    names = {labels: match[1] for labels in metrics["labels"].unique().to_pylist() if (match := _MODEL.search(labels))}
    others = tuple(sorted({name for name in names.values() if name != model}))
    if not others or model not in names.values():
        return metrics, others if len(others) > 1 else ()
    is_kept = [names.get(labels, model) == model for labels in metrics["labels"].to_pylist()]
    return metrics.filter(pa.array(is_kept)), others


_MODEL = re.compile(r'(?:^|,)model_name="([^"]*)"')


def of_simulator(tables: dict[str, pa.Table], folder: Path, num_replicas: int = 1) -> Derived:
    """What the derived tables of a simulated run say, and its step log in ``folder`` where its rules have one."""
    if num_replicas > 1:
        of_servers = servers_of(tables["steps"], tables["kv_events"], (), num_replicas)
        parts = [
            of_simulator(
                {**tables, "steps": each.steps, "kv_events": each.kv_events}, layout.replica_folder(folder, at)
            )
            for at, each in enumerate(of_servers)
        ]
        return merged_derived(parts, (tables["metrics"], 0, 0))
    kv_events = tables["kv_events"]
    causes = zip(*(kv_events[name].to_pylist() for name in ("kind", "caller")), strict=True)
    derived = Derived(
        tables,
        ParseCounts(),
        num_kv_lines=kv_events.num_rows,
        num_preemptions=sum(cause == ("free_request", "preempt") for cause in causes),
    )
    take_step_log(derived, folder, ScaledClock(1.0))
    if derived.step_log is None and (num_steps := tables["steps"].num_rows):
        derived.steps_source, derived.num_bucket_lines = "bucket-log", num_steps
    derived.log_ns_source = "created" if derived.tables["steps"].num_rows or kv_events.num_rows else "none"
    return derived


def take_step_log(derived: Derived, folder: Path, clock: ScaledClock, since_ns: int = 0) -> None:
    """Where the run in ``folder`` has a step log, its decode steps from an instant on are the run's steps."""
    log, derived.step_log_problem = read_run_steps(folder, since_ns)
    if log is not None:
        derived.step_log, derived.steps_source = log, "step-log"
        derived.tables["steps"] = steps_table(log, clock)
        derived.log_ns_source = "created" if derived.tables["steps"].num_rows else "none"


def derived_of(run: SealedRun) -> Derived:
    """The derived tables of a sealed run, computed again from its raw files, once they are known to be as sealed.

    Those of the simulator are as sealed.
    """
    for name in (layout.SCRAPES, *in_each_server(run, layout.SERVER_LOG, layout.LOG_STAMPS)):
        run.file(name)
    step_files(run)
    if run.is_by_simulator:
        tables = {name: run.table(name) for name in schema.DERIVED_TABLES}
        return of_simulator(tables, run.path, run.manifest.num_replicas)
    return derive_tables(run.path, run.manifest)


_CANNOT_REBUILD = "Make the folder writable, or copy the runs elsewhere first; the sealed run is as it was"


def rebuild(run: SealedRun) -> Derived:
    """Write the derived tables of a sealed run again, each in one rename: who reads meanwhile finds old or new.

    Raises RecordsError when the rebuilt content is not what was sealed, that is, when the code or the raw files
    changed since. Tables of the simulator stay as they are.
    """
    derived = derived_of(run)
    if run.is_by_simulator:
        return derived
    if (run.path / layout.DERIVED).is_symlink():
        raise damaged(run.path / layout.DERIVED, "is a symbolic link")
    run.forget()
    changed: list[str] = []
    for name, sealed in run.manifest.derived.items():
        table = schema.conform_stream(name, schema.RowStream.of(derived.tables[name]))
        if sealed.content_sha256 != schema.content_sha256(table):
            changed.append(name)
        else:
            write_parquet(table, run.path / layout.table_path(name), hint=_CANNOT_REBUILD)
    if changed:
        raise RecordsError(
            f"rebuilt table(s) {', '.join(changed)} differ from what was sealed",
            where=str(run.path),
            hint="`harness verify` says whether raw files changed; if not, this version reads logs otherwise",
        )
    return derived


def collect(
    events: Iterable[LogEvent | ev.EqualSteps], counts: ParseCounts, to_clock: ToRunClock, buckets: tuple[int, ...] = ()
) -> Derived:
    """Steps and KV events of a stream of log events, causes of evictions read from their order."""
    derived = Derived(tables={}, counts=counts)
    steps = _StepRows(to_clock)
    kv = _KvRows(to_clock)
    for event in events:
        derived.slots.add(event)
        if isinstance(event, ev.EqualSteps | ev.BucketEvent | ev.IterationEvent):
            steps.add(event)
            kv.count_steps(steps.num_bucket_steps, steps.num_iteration_steps)
            if not isinstance(event, ev.IterationEvent) or event.is_from_engine:
                kv.end_schedule()
        elif isinstance(event, ev.SettingEvent):
            derived.settings[event.setting] = event.after
        else:
            kv.add(event)
            if isinstance(event, ev.KvCopyFailedEvent):
                derived.failed_copies += event.request_ids
            elif isinstance(event, ev.KvLogEvent) and event.fault:
                derived.faults += (f"{event.fault} slot {event.slots[0]}",)
    derived.tables["steps"] = steps.table(buckets)
    derived.tables["kv_events"] = kv.table(has_bucket_lines=steps.num_bucket_steps > 0)
    derived.steps_source = steps.source
    derived.num_bucket_lines = steps.num_bucket_steps
    derived.num_iteration_lines = steps.num_iterations
    derived.num_kv_lines = kv.num_rows
    derived.num_preemptions = kv.num_preemptions
    stamped = derived.tables["steps" if derived.tables["steps"].num_rows else "kv_events"].column("log_ns")
    if stamped.null_count < len(stamped):
        derived.log_ns_source = "created" if steps.has_created or kv.has_created else "received"
    return derived


class _StepRows:
    """Decode steps, from [BUCKET] lines where there are any, else from iteration lines."""

    def __init__(self, to_clock: ToRunClock) -> None:
        self._to_clock = to_clock
        self._bucket_ns, self._bucket_n, self._bucket_b = array("q"), array("i"), array("i")
        self._iteration_ns, self._iteration_n = array("q"), array("i")
        self.num_iterations = 0
        self.has_created = False

    @property
    def num_bucket_steps(self) -> int:
        return len(self._bucket_n)

    @property
    def num_iteration_steps(self) -> int:
        return len(self._iteration_n)

    @property
    def source(self) -> str:
        if self._bucket_n:
            return "bucket-log"
        return "iteration-log" if self._iteration_n else "none"

    def add(self, event: ev.EqualSteps | ev.BucketEvent | ev.IterationEvent) -> None:
        self.has_created |= event.created_ns is not None
        if isinstance(event, ev.EqualSteps):
            created_ns, num_seqs, bucket = event
            self._bucket_ns.extend(map(self._to_clock.created_ns, created_ns))
            self._bucket_n.extend([num_seqs] * len(created_ns))
            self._bucket_b.extend([bucket] * len(created_ns))
            return
        if isinstance(event, ev.BucketEvent):
            self._bucket_ns.append(_instant_or_absent(self._to_clock, event))
            self._bucket_n.append(event.num_seqs)
            self._bucket_b.append(event.bucket)
            return
        if event.is_dummy:
            return  # another rank's step
        self.num_iterations += 1
        if event.generation_requests > 0:
            self._iteration_ns.append(_instant_or_absent(self._to_clock, event))
            self._iteration_n.append(event.generation_requests)

    def table(self, buckets: tuple[int, ...]) -> pa.Table:
        log_ns, n = np.array(self._bucket_ns), np.array(self._bucket_n)
        b = np.array(self._bucket_b)
        if not len(n):
            # b is a pure function of n: the smallest compiled batch size that holds it (docs/reference/stack.md,
            # "Buckets").
            n = np.array(self._iteration_n)
            fits = n <= (buckets[-1] if buckets else 0)
            log_ns, n = np.array(self._iteration_ns)[fits], n[fits]
            b = np.array(buckets, dtype=np.int32)[np.searchsorted(buckets, n)]
        step = np.arange(len(n), dtype=np.int32)
        return pa.table([pa.array(step), _instants(log_ns), pa.array(n), pa.array(b)], schema=schema.STEPS)


class _KvRows:
    """KV events in log order, each eviction attributed when the log has said enough.

    Inside one schedule() an eviction is followed by the ALLOC of that slot (request), or by nothing before the next
    model step (dummy), or preceded by the FREE-REQUEST of a preemption (preempt). Without model-step lines the first
    two cannot be distinguished: a dummy's slot is exactly the one the next admission receives.
    """

    def __init__(self, to_clock: ToRunClock) -> None:
        self._to_clock = to_clock
        self._kinds, self._callers = array("b"), array("b")
        self._log_ns, self._num_blocks, self._reused = array("q"), array("q"), array("q")
        self._bucket_steps, self._iteration_steps = array("i"), array("i")
        self._slots, self._slot_ends = array("i"), array("i", [0])
        # Of the rows since the last block, and of those before them.
        self._ids: list[str] = []
        self._id_blocks: list[pa.Array] = []
        self._open: dict[int, int] = {}
        self._preempted_slots: set[int] = set()
        self._num_steps = (0, 0)
        self._has_step_lines = False
        self.num_preemptions = 0
        self.has_created = False

    @property
    def num_rows(self) -> int:
        return len(self._kinds)

    def count_steps(self, num_bucket_steps: int, num_iteration_steps: int) -> None:
        """How many steps the log has shown so far."""
        self._num_steps = (num_bucket_steps, num_iteration_steps)

    def end_schedule(self) -> None:
        """A model step began: evictions that no ALLOC has claimed were made for the dummy block.

        Not called for a step that another process reported: its line does not tell when it began.
        """
        self._has_step_lines = True
        for row in self._open.values():
            self._callers[row] = CALLERS.index("dummy")
        self._open.clear()
        self._preempted_slots.clear()

    def add(self, event: LogEvent) -> None:
        """The rows of one event; none of an event that is not about KV."""
        if isinstance(event, ev.KvCopyFailedEvent):
            for request_id in event.request_ids:
                self._append(ev.KvLogEvent(*event[:3], "copy_failed", request_id))
        elif isinstance(event, ev.KvLogEvent):
            self._append(self._with_cause(event))

    def _with_cause(self, event: ev.KvLogEvent) -> ev.KvLogEvent:
        """The event, with its caller where it is an eviction by a preemption."""
        if event.kind == "alloc":
            for slot in event.slots:
                if (eviction := self._open.pop(slot, None)) is not None:
                    self._callers[eviction] = CALLERS.index("request")
        elif event.kind == "eviction":
            (slot,) = event.slots
            if slot in self._preempted_slots:
                self._preempted_slots.discard(slot)
                return event._replace(caller="preempt")
            self._open[slot] = self.num_rows
        elif event.kind == "free_request" and event.caller == "preempt":
            self._preempted_slots.update(event.slots)
            self.num_preemptions += 1
        return event

    def table(self, *, has_bucket_lines: bool) -> pa.Table:
        kinds, callers = np.array(self._kinds), np.array(self._callers)
        if not self._has_step_lines:
            is_eviction = kinds == KINDS.index("eviction")
            callers[is_eviction & (callers == CALLERS.index("request"))] = CALLERS.index("")
        ids = pa.chunked_array([*self._id_blocks, pa.array(self._ids, pa.string())])
        columns = {
            "index": np.arange(self.num_rows, dtype=np.int32),
            "step": np.array(self._bucket_steps if has_bucket_lines else self._iteration_steps),
            "log_ns": _instants(np.array(self._log_ns)),
            "kind": _names(kinds, KINDS),
            "request_id": ids,
            "slots": pa.ListArray.from_arrays(np.array(self._slot_ends), np.array(self._slots)),
            "num_blocks": pa.array(np.array(self._num_blocks)).cast(pa.int32()),
            "caller": _names(callers, CALLERS),
            "reused_tokens": pa.array(np.array(self._reused)).cast(pa.int32()),
        }
        return pa.table([columns[name] for name in schema.KV_EVENTS.names], schema=schema.KV_EVENTS)

    def _append(self, event: ev.KvLogEvent) -> None:
        self.has_created |= event.created_ns is not None
        self._kinds.append(KINDS.index(event.kind))
        self._callers.append(CALLERS.index(event.caller))
        self._log_ns.append(_instant_or_absent(self._to_clock, event))
        self._num_blocks.append(event.num_blocks)
        self._reused.append(event.reused_tokens)
        bucket_steps, iteration_steps = self._num_steps
        self._bucket_steps.append(bucket_steps)
        self._iteration_steps.append(iteration_steps)
        self._slots.extend(event.slots)
        self._slot_ends.append(len(self._slots))
        self._ids.append(event.request_id)
        if len(self._ids) == BLOCK_ROWS:
            self._id_blocks.append(pa.array(self._ids, pa.string()))
            self._ids.clear()


def _instant_or_absent(to_clock: ToRunClock, event: LogEvent) -> int:
    instant_ns = to_clock.instant_ns(event)
    return ABSENT_NS if instant_ns is None else instant_ns


def _instants(log_ns: NDArray[np.int64]) -> pa.Array:
    return pa.array(log_ns, mask=log_ns == ABSENT_NS)


def _names(codes: NDArray[np.int8], names: tuple[str, ...]) -> pa.Array:
    return pa.DictionaryArray.from_arrays(codes, pa.array(names)).dictionary_decode()


def _pieces(path: Path, read: Callable[[BinaryIO], bytes] = lambda file: file.read(READ_BYTES)) -> Iterator[bytes]:
    """What a raw file holds, piece by piece; nothing where there is no file."""
    if not path.exists():
        return
    try:
        with open(path, "rb") as file:
            while piece := read(file):
                yield piece
    except OSError as error:
        raise RecordsError(f"cannot be read ({error.strerror})", where=str(path), hint="Check the disk") from error
