"""Derived tables (steps, KV events, metrics) computed from a run's raw files, the same each time.

The raw files are the record; these tables can be deleted and rebuilt at will. Nothing here judges a run.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from harness.analysis.logs.parse import ParseCounts, parse_log
from harness.clock import ScaledClock
from harness.errors import RecordsError
from harness.records import Manifest, SealedRun, layout, schema
from harness.records.disk import write_parquet
from harness.records.run import damaged
from harness.stack.rbln import log_events as ev
from harness.stack.rbln.log_events import LogEvent

READ_BYTES = 1 << 20
HTTP_OK = 200


@dataclass(slots=True)
class Derived:
    """What a run's raw files say. tables: by name, in their schemas; the rest is what the tables cannot hold.

    log_ns_source: "created" (microsecond stamps of the logging call), "received" (when the harness read the line) or
    "none". steps_source: "bucket-log", "iteration-log" (then b is the smallest configured bucket >= n) or "none".
    """

    tables: dict[str, pa.Table]
    counts: ParseCounts
    log_ns_source: str = "none"
    steps_source: str = "none"
    num_bucket_lines: int = 0
    num_iteration_lines: int = 0
    num_kv_lines: int = 0
    num_preemptions: int = 0
    num_scrapes: int = 0
    num_failed_scrapes: int = 0
    faults: tuple[str, ...] = ()
    failed_copies: tuple[str, ...] = ()
    settings: dict[str, str] = field(default_factory=dict[str, str])


class ToRunClock:
    """Instants of log lines as run-clock ns: from their own stamps where they have one, else from their receipt."""

    def __init__(self, manifest: Manifest, stamps: bytes = b"") -> None:
        self._clock = ScaledClock(manifest.clock.scale)
        self._offset_ns = manifest.clock.realtime_minus_monotonic_ns
        # A torn last pair is dropped: its bytes say nothing for certain.
        pairs = np.frombuffer(stamps[: len(stamps) // 16 * 16], dtype="<i8").reshape(-1, 2)
        self._read_offsets, self._received_ns = pairs[:, 0], pairs[:, 1]

    def instant_ns(self, event: LogEvent) -> int | None:
        """The event's instant; None when neither the line nor the stamps tell.

        created: model = (realtime - offset) * scale. received: the read that brought the line's newline.
        """
        if event.created_ns is not None:
            return self.created_ns(event.created_ns)
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
    events = parse_log(_chunks(folder / layout.SERVER_LOG), counts := ParseCounts())
    stamps = _read_optional(folder / layout.LOG_STAMPS)
    return derived_from(events, counts, _lines(folder / layout.SCRAPES), manifest, stamps)


def derived_from(
    events: Iterable[LogEvent | ev.EqualSteps],
    counts: ParseCounts,
    scrapes: Iterable[bytes],
    manifest: Manifest,
    stamps: bytes = b"",
) -> Derived:
    """The derived tables of what a log says and of the lines of the scrapes' file."""
    derived = collect(events, counts, ToRunClock(manifest, stamps), manifest.decode_buckets)
    metrics, derived.num_scrapes, derived.num_failed_scrapes = metrics_table(scrapes)
    derived.tables["metrics"] = metrics
    return derived


def derived_of(run: SealedRun) -> Derived:
    """The derived tables of a sealed run, computed again from its raw files, once they are known to be as sealed."""
    for name in (layout.SERVER_LOG, layout.LOG_STAMPS, layout.SCRAPES):
        run.file(name)
    return derive_tables(run.path, run.manifest)


def rebuild(run: SealedRun) -> Derived:
    """Write the derived tables of a sealed run again, each in one rename: who reads meanwhile finds old or new.

    Raises RecordsError when the rebuilt content is not what was sealed, that is, when the code or the raw files
    changed since.
    """
    derived = derived_of(run)
    if (run.path / layout.DERIVED).is_symlink():
        raise damaged(run.path / layout.DERIVED, "is a symbolic link")
    run.forget()
    changed: list[str] = []
    for name, sealed in run.manifest.derived.items():
        table = schema.conform(name, derived.tables[name])
        if sealed.content_sha256 != schema.content_sha256(table):
            changed.append(name)
        else:
            write_parquet(table, run.path / layout.table_path(name))
    if changed:
        raise RecordsError(
            f"rebuilt table(s) {', '.join(changed)} differ from what was sealed",
            where=str(run.path),
            hint="`harness verify` tells whether the raw files changed; if not, this version reads the log differently",
        )
    return derived


def collect(
    events: Iterable[LogEvent | ev.EqualSteps],
    counts: ParseCounts,
    to_clock: ToRunClock,
    buckets: tuple[int, ...] = (),
) -> Derived:
    """Steps and KV events of a stream of log events, causes of evictions read from their order."""
    derived = Derived(tables={}, counts=counts)
    steps = _StepRows(to_clock)
    kv = _KvRows(to_clock)
    faults: list[str] = []
    failed_copies: list[str] = []
    for event in events:
        if isinstance(event, ev.EqualSteps):
            steps.add_equal(event)
            kv.end_schedule(steps.num_bucket_steps, steps.num_iteration_steps)
        elif isinstance(event, ev.BucketEvent | ev.IterationEvent):
            steps.add(event)
            if isinstance(event, ev.BucketEvent) or event.is_from_engine:
                kv.end_schedule(steps.num_bucket_steps, steps.num_iteration_steps)
            else:
                kv.count_steps(steps.num_bucket_steps, steps.num_iteration_steps)
        elif isinstance(event, ev.KvCopyFailedEvent):
            failed_copies += event.request_ids
            kv.add(event)
        elif isinstance(event, ev.SettingEvent):
            derived.settings[event.setting] = event.after
        elif isinstance(event, ev.KvFaultEvent):
            faults.append(f"{event.fault} slot {event.slot}")
            kv.add(event)
        else:
            kv.add(event)
    derived.tables["steps"] = steps.table(buckets)
    derived.tables["kv_events"] = kv.table(has_bucket_lines=steps.num_bucket_steps > 0)
    derived.steps_source = steps.source
    derived.num_bucket_lines = steps.num_bucket_steps
    derived.num_iteration_lines = steps.num_iterations
    derived.num_kv_lines = kv.num_rows
    derived.num_preemptions = kv.num_preemptions
    derived.faults = tuple(faults)
    derived.failed_copies = tuple(failed_copies)
    stamped = derived.tables["steps" if derived.tables["steps"].num_rows else "kv_events"].column("log_ns")
    if stamped.null_count < len(stamped):
        derived.log_ns_source = "created" if steps.has_created or kv.has_created else "received"
    return derived


class _StepRows:
    """Decode steps, from [BUCKET] lines where there are any, else from iteration lines."""

    def __init__(self, to_clock: ToRunClock) -> None:
        self._to_clock = to_clock
        self._bucket_rows: list[tuple[int | None, int, int]] = []
        self._iteration_rows: list[tuple[int | None, int]] = []
        self.num_iterations = 0
        self.has_created = False

    @property
    def num_bucket_steps(self) -> int:
        return len(self._bucket_rows)

    @property
    def num_iteration_steps(self) -> int:
        return len(self._iteration_rows)

    @property
    def source(self) -> str:
        if self._bucket_rows:
            return "bucket-log"
        return "iteration-log" if self._iteration_rows else "none"

    def add(self, event: ev.BucketEvent | ev.IterationEvent) -> None:
        self.has_created |= event.created_ns is not None
        if isinstance(event, ev.BucketEvent):
            self._bucket_rows.append((self._to_clock.instant_ns(event), event.num_seqs, event.bucket))
            return
        if event.is_dummy:
            return  # another rank's step
        self.num_iterations += 1
        if event.generation_requests > 0:
            self._iteration_rows.append((self._to_clock.instant_ns(event), event.generation_requests))

    def add_equal(self, steps: ev.EqualSteps) -> None:
        self.has_created = True
        created_ns, num_seqs, bucket = steps
        self._bucket_rows += [(self._to_clock.created_ns(each), num_seqs, bucket) for each in created_ns]

    def table(self, buckets: tuple[int, ...]) -> pa.Table:
        rows = self._bucket_rows
        if not rows:
            # b is a pure function of n: the smallest compiled batch size that holds it (docs/stack.md, "Buckets").
            fitting = [(at_ns, n) for at_ns, n in self._iteration_rows if buckets and n <= buckets[-1]]
            rows = [(at_ns, n, buckets[bisect_left(buckets, n)]) for at_ns, n in fitting]
        log_ns, n, b = zip(*rows, strict=True) if rows else ((), (), ())
        step = np.arange(len(rows), dtype=np.int32)
        return pa.table(
            [pa.array(step), pa.array(log_ns, pa.int64()), pa.array(n, pa.int32()), pa.array(b, pa.int32())],
            schema=schema.STEPS,
        )


class _KvRows:
    """KV events in log order, each eviction attributed when the log has said enough.

    Inside one schedule() an eviction is followed by the ALLOC of that slot (request), or by nothing before the next
    model step (dummy), or preceded by the FREE-REQUEST of a preemption (preempt). Without model-step lines the first
    two cannot be told apart: a dummy's slot is exactly the one the next admission receives.
    """

    def __init__(self, to_clock: ToRunClock) -> None:
        self._to_clock = to_clock
        self._rows: list[dict[str, Any]] = []
        self._open: dict[int, int] = {}
        self._preempted_slots: set[int] = set()
        self._num_steps = (0, 0)
        self._has_step_lines = False
        self.num_preemptions = 0
        self.has_created = False

    @property
    def num_rows(self) -> int:
        return len(self._rows)

    def count_steps(self, num_bucket_steps: int, num_iteration_steps: int) -> None:
        """A step was reported by another process: how many there were, not when, is known."""
        self._num_steps = (num_bucket_steps, num_iteration_steps)

    def end_schedule(self, num_bucket_steps: int, num_iteration_steps: int) -> None:
        """A model step began: evictions that no ALLOC has claimed were made for the dummy block."""
        self._has_step_lines = True
        self.count_steps(num_bucket_steps, num_iteration_steps)
        for row in self._open.values():
            self._rows[row]["caller"] = "dummy"
        self._open.clear()
        self._preempted_slots.clear()

    def add(self, event: LogEvent) -> None:
        if isinstance(event, ev.AllocEvent):
            for slot in event.slots:
                if (row := self._open.pop(slot, None)) is not None:
                    self._rows[row]["caller"] = "request"
            self._append(event, "alloc", event.request_id, event.slots, event.num_blocks)
        elif isinstance(event, ev.EvictionEvent):
            is_preempt = event.slot in self._preempted_slots
            if is_preempt:
                self._preempted_slots.discard(event.slot)
            else:
                self._open[event.slot] = len(self._rows)
            caller = "preempt" if is_preempt else ""
            self._append(event, "eviction", "", (event.slot,), event.num_blocks, caller=caller)
        elif isinstance(event, ev.CacheHitEvent):
            reused_tokens = event.reused_tokens
            self._append(event, "cache_hit", event.request_id, event.slots, event.num_blocks, reused=reused_tokens)
        elif isinstance(event, ev.CachePartialEvent):
            self._append(event, "cache_partial", event.request_id, (), 0, reused=event.reused_tokens)
        elif isinstance(event, ev.FreeRequestEvent):
            if event.is_preemption:
                self._preempted_slots.update(event.slots)
                self.num_preemptions += 1
            caller = "preempt" if event.is_preemption else "request"
            self._append(event, "free_request", event.request_id, event.slots, 0, caller=caller)
        elif isinstance(event, ev.MappingRemoveEvent):
            self._append(event, "mapping_remove", "", (event.slot,), event.num_blocks)
        elif isinstance(event, ev.KvFaultEvent):
            self._append(event, "fault", "", (event.slot,), 0)
        elif isinstance(event, ev.KvCopyFailedEvent):
            for request_id in event.request_ids:
                self._append(event, "copy_failed", request_id, (), 0)

    def table(self, *, has_bucket_lines: bool) -> pa.Table:
        for row in self._rows:
            bucket_step, iteration_step = row.pop("steps")
            row["step"] = bucket_step if has_bucket_lines else iteration_step
            if row["kind"] == "eviction" and row["caller"] == "request" and not self._has_step_lines:
                row["caller"] = ""
        return pa.Table.from_pylist(self._rows, schema=schema.KV_EVENTS)

    def _append(
        self,
        event: LogEvent,
        kind: str,
        request_id: str,
        slots: tuple[int, ...],
        num_blocks: int,
        *,
        caller: str = "",
        reused: int = 0,
    ) -> None:
        self.has_created |= event.created_ns is not None
        self._rows.append(
            {
                "index": len(self._rows),
                "steps": self._num_steps,
                "log_ns": self._to_clock.instant_ns(event),
                "kind": kind,
                "request_id": request_id,
                "slots": slots,
                "num_blocks": num_blocks,
                "caller": caller,
                "reused_tokens": reused,
            }
        )


def metrics_table(lines: Iterable[bytes]) -> tuple[pa.Table, int, int]:
    """(METRICS table, scrapes, scrapes without a readable body) of the lines of the scrapes' file."""
    columns: dict[str, list[Any]] = {name: [] for name in schema.METRICS.names}
    num_scrapes = num_failed = 0
    for line in lines:
        scrape = num_scrapes
        num_scrapes += 1
        try:
            record = json.loads(line)
            if record["status"] != HTTP_OK:
                raise ValueError("no body")
            names, values = _samples(record["body"])
            at_ns, reason = int(record["at_ns"]), str(record["reason"])
            if not (0 <= at_ns < 1 << 63 and reason.isprintable()):
                raise ValueError("no instant or no reason")
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            num_failed += 1
            continue
        same = ([one] * len(values) for one in (scrape, at_ns, reason))
        both = ([name for name, _ in names], [labels for _, labels in names])
        for column, cells in zip(columns.values(), (*same, *both, values), strict=True):
            column.extend(cells)
    return pa.table(columns, schema=schema.METRICS), num_scrapes, num_failed


def _samples(body: str) -> tuple[list[tuple[str, str]], list[float]]:
    """(name, labels) and value of every sample. Scrapes of one server differ in values alone: names are read once."""
    # A body may hold bytes that were no UTF-8, kept as lone surrogates: Arrow strings cannot.
    text = body.encode("utf-8", "replace").decode("utf-8")
    lines = [line.rpartition(" ") for line in text.split("\n") if line and not line.startswith("#")]
    heads = "\n".join(head for head, _space, _value in lines)
    key = hashlib.sha256(f"{heads}\n{_comments(text)}".encode()).digest()
    known = _known_names.get(key)
    # A line without a space has no head, as has no line.
    if known is not None and len(known) == len(lines):
        return known, [float(value) for _head, _space, value in lines]
    parsed = list(_parsed(text))
    names = [(name, labels) for name, labels, _value in parsed]
    if len(parsed) == len(lines) and all(
        _is_value(line[2], sample[2]) for line, sample in zip(lines, parsed, strict=True)
    ):
        if len(_known_names) >= MOST_KNOWN_NAMES:
            _known_names.clear()
        _known_names[key] = names
    return names, [value for _name, _labels, value in parsed]


MOST_KNOWN_NAMES = 16
_known_names: dict[bytes, list[tuple[str, str]]] = {}


def _comments(text: str) -> str:
    return "\n".join(line for line in text.split("\n") if line.startswith("#"))


def _is_value(text: str, value: float) -> bool:
    """Whether the last word of a line is its value, and no timestamp."""
    try:
        return repr(float(text)) == repr(value)
    except ValueError:
        return False


def _parsed(text: str) -> Iterator[tuple[str, str, float]]:
    # Only what derives tables needs it, and it takes a tenth of the start of a command.
    from prometheus_client.parser import text_string_to_metric_families

    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f'{key}="{sample.labels[key]}"' for key in sorted(sample.labels))
            yield sample.name, labels, float(sample.value)


def _chunks(path: Path) -> Iterator[bytes]:
    if not path.exists():
        return
    try:
        with open(path, "rb") as file:
            while block := file.read(READ_BYTES):
                yield block
    except OSError as error:
        raise _unreadable(path, error) from error


def _lines(path: Path) -> Iterator[bytes]:
    if not path.exists():
        return
    try:
        with open(path, "rb") as file:
            yield from file
    except OSError as error:
        raise _unreadable(path, error) from error


def _read_optional(path: Path) -> bytes:
    try:
        return path.read_bytes() if path.exists() else b""
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> RecordsError:
    return RecordsError(f"cannot be read ({error.strerror})", where=str(path), hint="Check the disk")
