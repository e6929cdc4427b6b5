"""Rows of a replay while it runs: numbers in flat arrays, texts and chunks in files once there are enough of them.

Stamps are CLOCK_MONOTONIC here and become clock ns once, at the end; nothing is averaged or dropped, and every planned
request has exactly one row.
"""

from __future__ import annotations

import os
import struct
import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from weakref import finalize

import numpy as np
import pyarrow as pa
from numpy.typing import DTypeLike, NDArray
from pyarrow import ipc

from harness.clock import NS_PER_MS, ScaledClock
from harness.measure.client.answer import ChunkStamp
from harness.measure.records.schema import CHUNKS, REQUESTS, RowStream
from harness.secrets import without_secrets

if TYPE_CHECKING:
    from harness.measure.client.receive_stamps import OffsetLog
    from harness.model.plan.model import Plan

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]

ABSENT = -1
# 240 kB: small beside a prompt, and written in a fraction of a millisecond.
BLOCK_CHUNKS = 8_192
BLOCK_TEXTS = 2_048
# Chunks of one batch of the finished table.
BATCH_CHUNKS = 1 << 16
NOTHING: Mapping[int, int] = MappingProxyType({})
# The texts of an answer, by row.
TEXTS = pa.schema(
    [("row", pa.int32()), *((name, pa.string()) for name in ("response_id", "finish_reason", "token_digest"))]
)
# Stamps of the receive (monotonic, and realtime of the kernel), the earliest instant at which it can have come (ABSENT
# where its stamp is exact), number of tokens, whether other events came with it, whether it is the first with tokens.
pack_chunk = struct.Struct("<qqqibb").pack
CHUNK_RECORD = np.dtype(
    [
        ("received_ns", "<i8"),
        ("kernel_ns", "<i8"),
        ("earliest_ns", "<i8"),
        ("num_tokens", "<i4"),
        ("is_coalesced", "i1"),
        ("is_first", "i1"),
    ]
)


class SpillFile:
    """An unnamed temporary file for rows. It disappears with this object or the process."""

    def __init__(self, folder: Path | None) -> None:
        """folder: None for the system's folder for temporary files."""
        file = TemporaryFile(dir=folder, prefix="rows-", buffering=0)  # noqa: SIM115 - closed with this object
        finalize(self, file.close)
        self._descriptor = file.fileno()
        self.num_bytes = 0

    def append(self, data: bytes | bytearray | memoryview) -> None:
        """Write all of it at the end. Raises OSError on a full disk."""
        left = memoryview(data)
        while left:
            num_written = os.pwrite(self._descriptor, left, self.num_bytes)
            left = left[num_written:]
            self.num_bytes += num_written

    def read(self, place: int, num_bytes: int) -> bytes:
        """The bytes that were written from ``place`` on."""
        return os.pread(self._descriptor, num_bytes, place)


class RequestRows:
    """One entry per planned request, in plan order; ``ABSENT`` marks what never happened.

    error: rows that have one. Texts of complete rows go to a file in ``folder`` (``SpillFile``).
    """

    def __init__(self, plan: Plan, folder: Path | None = None) -> None:
        self.session = array("i")
        self.request = array("i")
        for session in plan.sessions:
            self.session.extend([session.index] * len(session.requests))
            self.request.extend(range(len(session.requests)))
        count = len(self.session)
        self.count = count
        absent = array("q", [ABSENT]) * count
        # Model time: computed from plan waits and converted completion stamps.
        self.trigger_ns = absent[:]
        self.due_ns = absent[:]
        # CLOCK_MONOTONIC.
        self.sent_ns = absent[:]
        self.first_byte_ns = absent[:]
        self.done_ns = absent[:]
        self.http_status = array("i", [ABSENT]) * count
        self.prompt_tokens = array("i", [ABSENT]) * count
        self.completion_tokens = array("i", [ABSENT]) * count
        self.cached_tokens = array("i", [ABSENT]) * count
        self.status: list[str] = [""] * count
        self.error: dict[int, str] = {}
        self.request_id: list[str] = [""] * count
        self._folder = folder
        self._texts: list[tuple[int, str, str, str]] = []
        self._file: SpillFile | None = None
        self._blocks: list[tuple[int, int]] = []

    def note_texts(self, row: int, response_id: str, finish_reason: str = "", token_digest: str = "") -> None:
        """Keep the texts of an answer; once per row."""
        self._texts.append((row, without_secrets(response_id), sys.intern(finish_reason), token_digest))

    def spill(self) -> None:
        """Move a full block of texts to the file; call between events (about 1 ms when there is one to move)."""
        if len(self._texts) >= BLOCK_TEXTS:
            self._file = self._file or SpillFile(self._folder)
            place = self._file.num_bytes
            self._file.append(memoryview(self._text_block().serialize()))
            self._blocks.append((place, self._file.num_bytes - place))
            self._texts.clear()

    def _text_block(self) -> pa.RecordBatch:
        columns = zip(*self._texts, strict=True) if self._texts else [()] * len(TEXTS)
        arrays = [pa.array(values, field.type) for values, field in zip(columns, TEXTS, strict=True)]
        return pa.record_batch(arrays, schema=TEXTS)

    def _all_texts(self) -> pa.Table:
        """TEXTS with a row for each request; null where there was no answer."""
        blocks = [self._text_block()]
        if self._file is not None:
            blocks += [ipc.read_record_batch(pa.py_buffer(self._file.read(*block)), TEXTS) for block in self._blocks]
        texts = pa.Table.from_batches(blocks, TEXTS)
        place = np.full(self.count, ABSENT, dtype=np.int64)
        place[texts["row"].to_numpy()] = np.arange(len(texts))
        return texts.take(pa.array(place, mask=place == ABSENT))

    def to_table(self, plan: Plan, clock: ScaledClock) -> pa.Table:
        """The REQUESTS table, every instant in clock ns."""
        requests = list(plan.requests)
        texts = self._all_texts()
        columns: dict[str, pa.Array] = {
            "session": pa.array(np.frombuffer(self.session, dtype=np.int32)),
            "request": pa.array(np.frombuffer(self.request, dtype=np.int32)),
            "trigger_ns": _nullable(self.trigger_ns, np.int64),
            "due_ns": _nullable(self.due_ns, np.int64),
            "sent_ns": _clock_column(self.sent_ns, clock),
            "response_head_ns": _clock_column(self.first_byte_ns, clock),
            "done_ns": _clock_column(self.done_ns, clock),
            "status": pa.array(self.status, pa.string()),
            "http_status": _nullable(self.http_status, np.int16),
            "error": pa.array([self.error.get(row, "") for row in range(self.count)], pa.string()),
            "planned_prompt_tokens": pa.array([item.prompt_tokens for item in requests], pa.int32()),
            "planned_generate_tokens": pa.array([item.generate_tokens for item in requests], pa.int32()),
            "planned_wait_ns": pa.array([item.wait_after_ns for item in requests], pa.int64()),
            "prompt_tokens": _nullable(self.prompt_tokens, np.int32),
            "completion_tokens": _nullable(self.completion_tokens, np.int32),
            "cached_tokens": _nullable(self.cached_tokens, np.int32),
            "request_id": pa.array(self.request_id, pa.string()),
            **{name: texts[name].fill_null("") for name in ("response_id", "finish_reason", "token_digest")},
        }
        return pa.table([columns[name] for name in REQUESTS.names], schema=REQUESTS)


class ChunkRows:
    """One record per received chunk, 30 bytes each; past ``BLOCK_CHUNKS`` they wait in a file.

    Kernel stamps stay CLOCK_REALTIME until the offsets are known. folder: as of ``SpillFile``.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        # One entry per request that had chunks.
        self._row = array("i")
        self._num_chunks = array("i")
        self._records = bytearray()
        self._file: SpillFile | None = None

    @property
    def num_spilled(self) -> int:
        """Chunks that have been moved to the file."""
        return 0 if self._file is None else self._file.num_bytes // CHUNK_RECORD.itemsize

    def extend(self, row: int, stamps: Sequence[ChunkStamp], not_before: Mapping[int, int] = NOTHING) -> None:
        """Append all chunks of one request. not_before: as an ``Answer`` has it."""
        if stamps:
            self._row.append(row)
            self._num_chunks.append(len(stamps))
            first = next((place for place, stamp in enumerate(stamps) if stamp[2]), ABSENT)
            for place, (received_ns, kernel_ns, num_tokens, is_coalesced) in enumerate(stamps):
                earliest_ns = not_before.get(received_ns, ABSENT)
                self._records += pack_chunk(
                    received_ns, kernel_ns, earliest_ns, num_tokens, is_coalesced, place == first
                )

    def spill(self) -> None:
        """Move a full block to the file; call between events (about 0.2 ms when there is one to move)."""
        if len(self._records) >= BLOCK_CHUNKS * CHUNK_RECORD.itemsize:
            self._move()

    def together_facts(self, offsets: OffsetLog | None) -> dict[str, Any]:
        """How many chunks have a stamp that is not exact, and how much earlier they can have come than it says.

        First tokens apart from all chunks; ms of wall time, the sum and the longest.
        """
        self._move()
        widths: dict[str, list[FloatArray]] = {"first": [], "all": []}
        for records in self._record_blocks():
            inexact = records[(records["earliest_ns"] != ABSENT) & (records["num_tokens"] > 0)]
            width_ms = np.maximum(0, _stamps(inexact, offsets)[0] - inexact["earliest_ns"]) / NS_PER_MS
            widths["first"].append(width_ms[inexact["is_first"] == 1])
            widths["all"].append(width_ms)
        counts = {"first": len(self._num_chunks), "all": sum(self._num_chunks)}
        of = {name: np.concatenate([np.empty(0), *parts]) for name, parts in widths.items()}
        return {
            "read_together": {
                name: {
                    "num": counts[name],
                    "num_together": len(widths),
                    "sum_ms": float(widths.sum()),
                    "max_ms": float(widths.max(initial=0)),
                }
                for name, widths in of.items()
            }
        }

    def _record_blocks(self) -> Iterator[NDArray[np.void]]:
        """All records in the file, in the order of ``extend``."""
        assert self._file is not None
        size = BATCH_CHUNKS * CHUNK_RECORD.itemsize
        for place in range(0, self._file.num_bytes, size):
            yield np.frombuffer(self._file.read(place, size), dtype=CHUNK_RECORD)

    def _move(self) -> None:
        self._file = self._file or SpillFile(self._folder)
        self._file.append(self._records)
        self._records = bytearray()

    def stream(self, rows: RequestRows, clock: ScaledClock, offsets: OffsetLog | None) -> RowStream:
        """The CHUNKS table by (session, request, chunk), every instant in clock ns; call it after the replay."""
        self._move()
        num_chunks = np.frombuffer(self._num_chunks, dtype=np.int32).astype(np.int64)
        begins = np.cumsum(num_chunks) - num_chunks
        order = np.argsort(np.frombuffer(self._row, dtype=np.int32), kind="stable")

        def batches() -> Iterator[pa.RecordBatch]:
            first = 0
            ends = np.cumsum(num_chunks[order])
            while first < len(order):
                done = ends[first - 1] if first else 0
                past = max(first + 1, int(np.searchsorted(ends, done + BATCH_CHUNKS, side="right")))
                yield self._batch(order[first:past], begins, rows, clock, offsets)
                first = past

        return RowStream(CHUNKS, int(num_chunks.sum()), batches)

    def _batch(
        self,
        entries: NDArray[np.int64],
        begins: NDArray[np.int64],
        rows: RequestRows,
        clock: ScaledClock,
        offsets: OffsetLog | None,
    ) -> pa.RecordBatch:
        """The chunks of some requests. entries: their places in ``_row``. begins: of each entry, its first chunk."""
        num_chunks = np.frombuffer(self._num_chunks, dtype=np.int32)[entries]
        assert self._file is not None
        size = CHUNK_RECORD.itemsize
        places = zip(begins[entries].tolist(), num_chunks.tolist(), strict=True)
        data = b"".join(self._file.read(begin * size, count * size) for begin, count in places)
        records = np.frombuffer(data, dtype=CHUNK_RECORD)
        row = np.repeat(np.frombuffer(self._row, dtype=np.int32)[entries], num_chunks)
        firsts = np.repeat(np.cumsum(num_chunks) - num_chunks, num_chunks)
        received, earliest = (np.ascontiguousarray(records[name]) for name in ("received_ns", "earliest_ns"))
        at, is_trusted = _stamps(records, offsets)
        is_inexact = (earliest != ABSENT) & (earliest < at)
        columns: dict[str, pa.Array] = {
            "session": pa.array(np.frombuffer(rows.session, dtype=np.int32)[row]),
            "request": pa.array(np.frombuffer(rows.request, dtype=np.int32)[row]),
            "chunk": pa.array((np.arange(len(row)) - firsts).astype(np.int32)),
            "received_ns": pa.array(_to_clock(received, clock)),
            # A chunk without a stamp has a number that no clock can hold.
            "kernel_ns": pa.array(_to_clock(np.where(is_trusted, at, 0), clock), mask=~is_trusted),
            "earliest_ns": pa.array(_to_clock(np.where(is_inexact, earliest, 0), clock), mask=~is_inexact),
            "num_tokens": pa.array(np.ascontiguousarray(records["num_tokens"])),
            "is_coalesced": pa.array(records["is_coalesced"].astype(np.bool_)),
        }
        return pa.record_batch([columns[name] for name in CHUNKS.names], schema=CHUNKS)


def _stamps(records: NDArray[np.void], offsets: OffsetLog | None) -> tuple[IntArray, NDArray[np.bool_]]:
    """When each chunk came (CLOCK_MONOTONIC ns), and whether that is the kernel's stamp: it may be absent or wrong."""
    received, kernel = (np.ascontiguousarray(records[name]) for name in ("received_ns", "kernel_ns"))
    if offsets is None:
        return received, np.zeros(len(received), dtype=np.bool_)
    monotonic, is_trusted = offsets.to_monotonic(kernel, received)
    return np.where(is_trusted, monotonic, received), is_trusted


def _nullable(values: Sequence[int], kind: DTypeLike) -> pa.Array:
    numbers = np.asarray(values, dtype=kind)
    return pa.array(numbers, mask=numbers == ABSENT)


def _clock_column(monotonic_ns: Sequence[int], clock: ScaledClock) -> pa.Array:
    numbers = np.asarray(monotonic_ns, dtype=np.int64)
    return pa.array(_to_clock(numbers, clock), mask=numbers == ABSENT)


def _to_clock(monotonic_ns: IntArray, clock: ScaledClock) -> IntArray:
    if clock.scale == 1.0:
        return monotonic_ns
    return np.asarray([clock.from_monotonic_ns(int(stamp)) for stamp in monotonic_ns], dtype=np.int64)
