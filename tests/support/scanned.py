"""The compiled loop's own reading of a chunked answer, without a socket: what it finds in the bytes it is given."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from harness.live.client.wire import layout as at
from harness.live.client.wire import scan

FD = 7
ROOM = 4_096


@numba.njit
def take_chunked(reg: Any, fd: int, address: int, count: int) -> int:
    return scan.take_chunked(reg, fd, address, count)


@numba.njit
def begin_scan(line: Any) -> None:
    scan.begin_scan(line)


class Scanned:
    """A connection's line and a session's text, fed with the pieces of one chunked answer."""

    def __init__(self) -> None:
        self.tables = at.SharedTables(1, 1)
        self.stream = np.zeros(ROOM, dtype=np.uint8)
        self.tables.sess[0, at.S_STREAM], self.tables.sess[0, at.S_ROOM] = at.address_of(self.stream), ROOM
        self.line = self.tables.conn[FD]
        self.begin()

    def begin(self) -> None:
        """Another answer."""
        self.tables.sess[0, at.S_BYTES] = 0
        self.line[at.N_KEEPS_IDS] = 1
        begin_scan(self.line)
        self.num_used = 0

    def take(self, data: bytes) -> None:
        piece = np.frombuffer(data, dtype=np.uint8)
        self.num_used += take_chunked(self.tables.reg, FD, at.address_of(piece), len(piece))

    @property
    def ids(self) -> bytes:
        return self.stream[: self.tables.sess[0, at.S_BYTES]].tobytes()


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
