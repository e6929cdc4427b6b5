"""Rows of a replay while it runs: flat arrays of numbers, one entry per planned request and one per chunk.

Stamps are CLOCK_MONOTONIC here and become clock ns once, at the end; nothing is averaged or dropped, and every planned
request has exactly one row. Next: the tables go to ``harness.records`` unchanged.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from harness.clock import ScaledClock
from harness.live.client_answer import ChunkStamp
from harness.records.schema import CHUNKS, REQUESTS

if TYPE_CHECKING:
    from harness.live.kernel_stamps import OffsetLog
    from harness.plan import Plan

IntArray = NDArray[np.int64]

ABSENT = -1
TIMESPEC = struct.Struct("qq")


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
        self.cached_tokens = array("i", [0]) * count
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
            "trigger_ns": _nullable(self.trigger_ns, pa.int64()),
            "due_ns": _nullable(self.due_ns, pa.int64()),
            "sent_ns": _clock_column(self.sent_ns, clock),
            "first_byte_ns": _clock_column(self.first_byte_ns, clock),
            "done_ns": _clock_column(self.done_ns, clock),
            "status": pa.array(self.status, pa.string()),
            "http_status": _nullable(self.http_status, pa.int16()),
            "error": pa.array(self.error, pa.string()),
            "planned_prompt_tokens": pa.array([item.prompt_tokens for item in requests], pa.int32()),
            "planned_generate_tokens": pa.array([item.generate_tokens for item in requests], pa.int32()),
            "planned_wait_ns": pa.array([item.wait_after_ns for item in requests], pa.int64()),
            "prompt_tokens": _nullable(self.prompt_tokens, pa.int32()),
            "completion_tokens": _nullable(self.completion_tokens, pa.int32()),
            "cached_tokens": pa.array(np.frombuffer(self.cached_tokens, dtype=np.int32)),
            "request_id": pa.array(self.request_id, pa.string()),
            "response_id": pa.array(self.response_id, pa.string()),
            "finish_reason": pa.array(self.finish_reason, pa.string()),
            "token_digest": pa.array(self.token_digest, pa.string()),
        }
        return pa.table([columns[name] for name in REQUESTS.names], schema=REQUESTS)


class ChunkRows:
    """One entry per received chunk, 30 bytes each; kernel stamps stay CLOCK_REALTIME until the offsets are known."""

    def __init__(self) -> None:
        self.row = array("i")
        self.chunk = array("i")
        self.received_ns = array("q")
        self.kernel_realtime_ns = array("q")
        self.num_tokens = array("i")
        self.is_coalesced = array("b")

    def extend(self, row: int, stamps: Iterable[ChunkStamp]) -> None:
        """Append all chunks of one request."""
        for chunk, (received_ns, kernel, num_tokens, is_coalesced) in enumerate(stamps):
            self.row.append(row)
            self.chunk.append(chunk)
            self.received_ns.append(received_ns)
            self.kernel_realtime_ns.append(_realtime_ns(kernel))
            self.num_tokens.append(num_tokens)
            self.is_coalesced.append(is_coalesced)

    def to_table(self, rows: RequestRows, clock: ScaledClock, offsets: OffsetLog | None) -> pa.Table:
        """The CHUNKS table ordered by (session, request, chunk), every instant in clock ns."""
        row = np.frombuffer(self.row, dtype=np.int32)
        chunk = np.frombuffer(self.chunk, dtype=np.int32)
        order = np.lexsort((chunk, row))
        session = np.frombuffer(rows.session, dtype=np.int32)[row]
        request = np.frombuffer(rows.request, dtype=np.int32)[row]
        received = np.frombuffer(self.received_ns, dtype=np.int64)
        columns: dict[str, pa.Array] = {
            "session": pa.array(session[order]),
            "request": pa.array(request[order]),
            "chunk": pa.array(chunk[order]),
            "received_ns": pa.array(_to_clock(received[order], clock)),
            "kernel_ns": self._kernel_column(received, order, clock, offsets),
            "num_tokens": pa.array(np.frombuffer(self.num_tokens, dtype=np.int32)[order]),
            "is_coalesced": pa.array(np.frombuffer(self.is_coalesced, dtype=np.int8)[order].astype(np.bool_)),
        }
        return pa.table([columns[name] for name in CHUNKS.names], schema=CHUNKS)

    def _kernel_column(
        self, received: IntArray, order: IntArray, clock: ScaledClock, offsets: OffsetLog | None
    ) -> pa.Array:
        realtime = np.frombuffer(self.kernel_realtime_ns, dtype=np.int64)
        if offsets is None:
            return pa.nulls(len(order), pa.int64())
        monotonic, is_trusted = offsets.to_monotonic(realtime, received)
        return pa.array(_to_clock(monotonic[order], clock), mask=~is_trusted[order])


def _realtime_ns(kernel: bytes) -> int:
    if not kernel:
        return ABSENT
    seconds, nanoseconds = TIMESPEC.unpack(kernel)
    return seconds * 1_000_000_000 + nanoseconds


def _nullable(values: Sequence[int], kind: pa.DataType) -> pa.Array:
    numbers = np.asarray(values)
    return pa.array(numbers, mask=numbers == ABSENT).cast(kind)


def _clock_column(monotonic_ns: Sequence[int], clock: ScaledClock) -> pa.Array:
    numbers = np.asarray(monotonic_ns, dtype=np.int64)
    return pa.array(_to_clock(numbers, clock), mask=numbers == ABSENT)


def _to_clock(monotonic_ns: IntArray, clock: ScaledClock) -> IntArray:
    if clock.scale == 1.0:
        return monotonic_ns
    return np.asarray([clock.from_monotonic_ns(int(stamp)) for stamp in monotonic_ns], dtype=np.int64)
