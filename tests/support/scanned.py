"""The compiled loop's own reading of a chunked answer, without a socket: what it finds in the bytes it is given."""

from __future__ import annotations

import numba
import numpy as np

from harness.live.client.wire import chunks
from harness.live.client.wire.layout import connection_at, session_at
from harness.live.client.wire.tables import SharedTables, address_of

FD = 7
ROOM = 4_096


@numba.njit
def take_chunked(connections_at: int, sessions_at: int, address: int, count: int) -> int:
    return chunks.take_chunked(connection_at(connections_at, FD), session_at(sessions_at, 0), address, count)


@numba.njit
def begin_answer(connections_at: int) -> None:
    chunks.begin_answer(connection_at(connections_at, FD))


class Scanned:
    """What the loop knows of a connection and a session, fed with the pieces of one chunked answer."""

    def __init__(self) -> None:
        self.tables = SharedTables(1, 1)
        self.stream = np.zeros(ROOM, dtype=np.uint8)
        self.session, self.state = self.tables.sessions[0], self.tables.connections[FD]
        self.session.stream_at, self.session.room_bytes = address_of(self.stream), ROOM
        self.begin()

    def begin(self) -> None:
        """Another answer."""
        self.session.used_bytes = 0
        self.state.keeps_ids = 1
        begin_answer(self.tables.reg.connections_at)
        self.num_used = 0

    def take(self, data: bytes) -> None:
        piece = np.frombuffer(data, dtype=np.uint8)
        reg = self.tables.reg
        self.num_used += take_chunked(reg.connections_at, reg.sessions_at, address_of(piece), len(piece))

    @property
    def ids(self) -> bytes:
        return self.stream[: self.session.used_bytes].tobytes()


def chunked(body: bytes, sizes: list[int], extension: bytes) -> bytes:
    """The body in chunks of these sizes, in turn."""
    parts: list[bytes] = []
    place = turn = 0
    while place < len(body):
        size = sizes[turn % len(sizes)]
        data = body[place : place + size]
        parts += [b"%X%b\r\n" % (len(data), extension), data, b"\r\n"]
        place += size
        turn += 1
    return b"".join([*parts, b"0\r\n\r\n"])
