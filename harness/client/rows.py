"""Rows of a replay while it runs: flat arrays of numbers, one entry per planned request and one per chunk.

Stamps are CLOCK_MONOTONIC here and become clock ns once, at the end; nothing is averaged or dropped, and every planned
request has exactly one row.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, TYPE_CHECKING

import numpy as np
import pyarrow as pa
from numpy.typing import DTypeLike, NDArray

from harness.client.answer import ChunkStamp
from harness.clock import ScaledClock
from harness.records.schema import CHUNKS, REQUESTS

if TYPE_CHECKING:
    from harness.client.kernel_stamps import OffsetLog
    from harness.plan import Plan

IntArray = NDArray[np.int64]

ABSENT = -1
# 240 kB: small beside a prompt, and written in a fraction of a millisecond.
BLOCK_CHUNKS = 8_192
CHUNK_RECORD = np.dtype(
    [("received_ns", "i8"), ("kernel_ns", "i8"), ("num_tokens", "i4"), ("is_coalesced", "i1")], align=False
)


class RequestRows:
    """One entry per planned request, in plan order; ``ABSENT`` marks what never happened."""

    def __init__(self, plan: Plan) -> None:
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
        self.error: list[str] = [""] * count
        self.request_id: list[str] = [""] * count
        self.response_id: list[str] = [""] * count
        self.finish_reason: list[str] = [""] * count
        self.token_digest: list[str] = [""] * count

    def to_table(self, plan: Plan, clock: ScaledClock) -> pa.Table:
        """The REQUESTS table, every instant in clock ns."""
        requests = [request for session in plan.sessions for request in session.requests]
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
            "error": pa.array(self.error, pa.string()),
            "planned_prompt_tokens": pa.array([item.prompt_tokens for item in requests], pa.int32()),
            "planned_generate_tokens": pa.array([item.generate_tokens for item in requests], pa.int32()),
            "planned_wait_ns": pa.array([item.wait_after_ns for item in requests], pa.int64()),
            "prompt_tokens": _nullable(self.prompt_tokens, np.int32),
            "completion_tokens": _nullable(self.completion_tokens, np.int32),
            "cached_tokens": _nullable(self.cached_tokens, np.int32),
            "request_id": pa.array(self.request_id, pa.string()),
            "response_id": pa.array(self.response_id, pa.string()),
            "finish_reason": pa.array(self.finish_reason, pa.string()),
            "token_digest": pa.array(self.token_digest, pa.string()),
        }
        return pa.table([columns[name] for name in REQUESTS.names], schema=REQUESTS)


class ChunkRows:
    """One entry per received chunk, 21 bytes each; past ``BLOCK_CHUNKS`` they wait in a file, not in memory.

    Kernel stamps stay CLOCK_REALTIME until the offsets are known. folder: where the file goes (it has no name and goes
    with the process); None: the system's folder for temporary files.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        # One entry per request that had chunks.
        self._row = array("i")
        self._num_chunks = array("i")
        self.num_spilled = 0
        self._file: IO[bytes] | None = None
        self._clear()

    def _clear(self) -> None:
        self._received_ns = array("q")
        self._kernel_ns = array("q")
        self._num_tokens = array("i")
        self._is_coalesced = array("b")

    def extend(self, row: int, stamps: Sequence[ChunkStamp]) -> None:
        """Append all chunks of one request."""
        if not stamps:
            return
        self._row.append(row)
        self._num_chunks.append(len(stamps))
        if len(stamps) == 1:
            received_ns, kernel_ns, num_tokens, is_coalesced = stamps[0]
            self._received_ns.append(received_ns)
            self._kernel_ns.append(kernel_ns)
            self._num_tokens.append(num_tokens)
            self._is_coalesced.append(is_coalesced)
            return
        received_ns, kernel_ns, num_tokens, is_coalesced = zip(*stamps, strict=True)
        self._received_ns.extend(received_ns)
        self._kernel_ns.extend(kernel_ns)
        self._num_tokens.extend(num_tokens)
        self._is_coalesced.extend(is_coalesced)

    def spill(self) -> None:
        """Move a full block to the file; call between events (about 0.2 ms when there is one to move)."""
        if len(self._received_ns) >= BLOCK_CHUNKS:
            if self._file is None:
                # Without a name, so that it is gone with the process, whatever happens.
                self._file = TemporaryFile(dir=self._folder, prefix="chunks-", buffering=0)  # noqa: SIM115
            self._file.write(self._block().tobytes())
            self.num_spilled += len(self._received_ns)
            self._clear()

    def close(self) -> None:
        """Give the file up, and with it the rows in it."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _block(self) -> NDArray[np.void]:
        block = np.empty(len(self._received_ns), dtype=CHUNK_RECORD)
        block["received_ns"] = self._received_ns
        block["kernel_ns"] = self._kernel_ns
        block["num_tokens"] = self._num_tokens
        block["is_coalesced"] = self._is_coalesced
        return block

    def to_table(self, rows: RequestRows, clock: ScaledClock, offsets: OffsetLog | None) -> pa.Table:
        """The CHUNKS table ordered by (session, request, chunk), every instant in clock ns; call once, it ends the
        file.
        """
        records = self._block()
        if self._file is not None:
            spilled = np.memmap(self._file, dtype=CHUNK_RECORD, mode="r", shape=(self.num_spilled,))
            records = np.concatenate([spilled, records])
            self.close()
        num_chunks = np.frombuffer(self._num_chunks, dtype=np.int32)
        begins = np.cumsum(num_chunks) - num_chunks
        row = np.repeat(np.frombuffer(self._row, dtype=np.int32), num_chunks)
        chunk = (np.arange(len(row)) - np.repeat(begins, num_chunks)).astype(np.int32)
        order = np.argsort(row, kind="stable")
        records, row = records[order], row[order]
        received = np.ascontiguousarray(records["received_ns"])
        columns: dict[str, pa.Array] = {
            "session": pa.array(np.frombuffer(rows.session, dtype=np.int32)[row]),
            "request": pa.array(np.frombuffer(rows.request, dtype=np.int32)[row]),
            "chunk": pa.array(chunk[order]),
            "received_ns": pa.array(_to_clock(received, clock)),
            "kernel_ns": _kernel_column(np.ascontiguousarray(records["kernel_ns"]), received, clock, offsets),
            "num_tokens": pa.array(np.ascontiguousarray(records["num_tokens"])),
            "is_coalesced": pa.array(records["is_coalesced"].astype(np.bool_)),
        }
        return pa.table([columns[name] for name in CHUNKS.names], schema=CHUNKS)


def _kernel_column(realtime: IntArray, received: IntArray, clock: ScaledClock, offsets: OffsetLog | None) -> pa.Array:
    """realtime: CLOCK_REALTIME ns, negative where there is no stamp."""
    if offsets is None:
        return pa.nulls(len(received), pa.int64())
    monotonic, is_trusted = offsets.to_monotonic(realtime, received)
    return pa.array(_to_clock(monotonic, clock), mask=~is_trusted)


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
