"""The memory of the compiled wire loop: one guarded table for each kind of record, a ring of received bytes.

The interpreter reads and writes the records by name where they lie; the loop is told one address, that of the
registers. Next: ``core`` works on it, ``replay`` steers it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from harness.compiled.records import by_name, record_dtype
from harness.live.client.wire.layout import (
    ABSENT,
    DEADLINES_PER_REQUEST,
    EPOLL_EVENT,
    HEAD_FIELDS_BYTES,
    HEAD_STRIDE,
    JOURNAL_ENTRIES,
    MAX_CONTROL_MESSAGES,
    MAX_EVENTS,
    MAX_HEADS,
    MAX_PARTS,
    NUM_TEXTS,
    RING_BYTES,
    ConnectionState,
    ControlMessage,
    Deadline,
    Message,
    Receive,
    Registers,
    RequestState,
    SessionState,
    Span,
    TimerSpec,
    TimeSpec,
)
from harness.live.client.wire.memory import GuardedMemory

Record = TypeVar("Record")
BytesArray = NDArray[np.uint8]


class SharedTables:
    """The memory itself, for a plan of ``num_sessions`` and ``num_rows``; the registers tell the loop where it is."""

    connections: Sequence[ConnectionState]
    connection_columns: NDArray[Any]

    def __init__(self, num_sessions: int, num_rows: int) -> None:
        self.memory = GuardedMemory()
        self._kept: list[NDArray[Any]] = []
        registers, views = self._records("registers", Registers, 1)
        self.address, self.reg = address_of(registers), views[0]
        sessions, self.sessions = self._records("sessions", SessionState, num_sessions)
        sessions["fd"] = ABSENT
        self.request_columns, self.requests = self._records("requests", RequestState, num_rows)
        deadlines, self.deadlines = self._records("deadlines", Deadline, DEADLINES_PER_REQUEST * num_rows + 1)
        receives, self.receives = self._records("receives", Receive, JOURNAL_ENTRIES)
        texts, self._texts = self._records("texts", Span, NUM_TEXTS)
        self.ring: BytesArray = self.memory.table("received bytes", RING_BYTES, np.uint8)
        # Written once here, so that the kernel need not find its pages during the run.
        self.ring[:] = 0xFF
        self._heads: BytesArray = self.memory.table("heads", MAX_HEADS * HEAD_STRIDE, np.uint8)
        reg = self.reg
        reg.num_requests = num_rows
        reg.sessions_at, reg.requests_at = address_of(sessions), address_of(self.request_columns)
        reg.deadlines_at, reg.receives_at = address_of(deadlines), address_of(receives)
        reg.texts_at, reg.ring_at, reg.heads_at = address_of(texts), address_of(self.ring), address_of(self._heads)
        reg.epoll_events_at = address_of(self.memory.table("events", MAX_EVENTS, EPOLL_EVENT))
        reg.now_at = address_of(self._records("now", TimeSpec, 1)[0])
        reg.nap_end_at = address_of(self._records("end of a nap", TimeSpec, 1)[0])
        reg.timer_at = address_of(self._records("timer", TimerSpec, 1)[0])
        reg.message_at = address_of(self._records("message", Message, 1)[0])
        reg.parts_at = address_of(self._records("parts of a message", Span, MAX_PARTS)[0])
        reg.control_at = address_of(self._records("control messages", ControlMessage, MAX_CONTROL_MESSAGES)[0])
        self._make_connections(256)

    def _records(self, name: str, record: type[Record], count: int) -> tuple[NDArray[Any], Sequence[Record]]:
        """A table, by column and by name."""
        table = self.memory.table(name, count, record_dtype(record))
        return table, by_name(record, table)

    def keep(self, memory: NDArray[Any]) -> int:
        """The address of an array, which is kept for as long as these tables live."""
        self._kept.append(memory)
        return address_of(memory)

    def share_text(self, place: int, text: bytes) -> None:
        """Let the compiled side find a text (TEXT_...)."""
        span = self._texts[place]
        span.start_at, span.num_bytes = self.keep(np.frombuffer(text or b" ", dtype=np.uint8)), len(text)

    def make_room_for(self, fd: int) -> None:
        """Have a record for a file descriptor; only while the compiled side does not run."""
        count = len(self.connections)
        if fd >= count:
            self._make_connections(max(2 * count, fd + 1))

    def _make_connections(self, count: int) -> None:
        old = self.connection_columns if self.reg.num_connections else None
        self.memory.give_up("connections")
        self.connection_columns, self.connections = self._records("connections", ConnectionState, count)
        if old is not None:
            self.connection_columns[: len(old)] = old
        self.reg.connections_at, self.reg.num_connections = address_of(self.connection_columns), count

    def forget(self, fd: int) -> None:
        """Nothing is known of a connection any more: another has its number."""
        self.connection_columns[fd] = np.zeros((), dtype=record_dtype(ConnectionState))

    def end_exchange(self, fd: int, mode: int) -> None:
        """The answer on a connection is over, or will never be."""
        connection = self.connections[fd]
        self.reg.num_urgent -= connection.is_urgent
        connection.mode, connection.is_urgent = mode, 0

    def know_head(self, head: bytes, status: int, body_bytes: int, is_kept_alive: bool) -> None:
        """Remember what a head promises (status 0: nothing the loop can follow); the oldest gives way."""
        base = self.reg.num_heads % MAX_HEADS * HEAD_STRIDE
        start = base + HEAD_FIELDS_BYTES
        fields = np.asarray([len(head), status, body_bytes, is_kept_alive], dtype=np.int64)
        self._heads[base:start] = fields.view(np.uint8)
        self._heads[start : start + len(head)] = np.frombuffer(head, dtype=np.uint8)
        self.reg.num_heads += 1


def address_of(memory: NDArray[Any]) -> int:
    """Where an array's data lie; the caller keeps the array."""
    return int(memory.ctypes.data)
