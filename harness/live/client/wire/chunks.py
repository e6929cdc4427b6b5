"""Follows the framing of a chunked body byte by byte, and gives what lies in its chunks to the scanner; compiled.

A trailer, and what is no chunk at all, is left to the HTTP parser. Next: ``receiving`` asks where the body ends.
"""

from __future__ import annotations

from harness.compiled import inner
from harness.compiled.addresses import byte_at
from harness.live.client.wire.layout import ConnectionState, SessionState
from harness.live.client.wire.scan import LF, NINE, begin_scan, scan
from harness.live.client.wire.texts import ZERO

# ConnectionState.chunk_mode: where in the body the next byte is.
SIZE, EXTENSION, DATA, DATA_CR, DATA_LF, LAST_CR, LAST_LF, OVER, ODD = range(9)

CR, SEMICOLON = 13, 59
MAX_CHUNK_BYTES = 1 << 40


@inner
def begin_answer(connection: ConnectionState) -> None:
    """Forget the answer before."""
    connection.chunk_mode = SIZE
    connection.left_bytes = 0
    begin_scan(connection)


@inner
def take_chunked(connection: ConnectionState, session: SessionState, place: int, count: int) -> int:
    """Look through the next ``count`` bytes of a chunked body, which lie at an address.

    The bytes used: fewer than ``count`` when the body is over before them. A trailer, and what is no chunk at all,
    leaves chunk_mode at ODD.
    """
    begin, end = place, place + count
    while place < end and connection.chunk_mode < OVER:
        if connection.chunk_mode == DATA:
            size = min(connection.left_bytes, end - place)
            scan(connection, session, place, place + size)
            place += size
            connection.left_bytes -= size
            if connection.left_bytes == 0:
                connection.chunk_mode = DATA_CR
        else:
            connection.chunk_mode = mode_behind(connection, byte_at(place))
            place += 1
    return place - begin


@inner
def mode_behind(connection: ConnectionState, byte: int) -> int:
    """Where in the framing a byte leads that is not data."""
    mode = connection.chunk_mode
    if mode == SIZE:
        digit = hex_digit(byte)
        if digit >= 0 and connection.left_bytes < MAX_CHUNK_BYTES:
            connection.left_bytes = connection.left_bytes * 16 + digit
            return SIZE
        if byte == CR:
            return SIZE
        return EXTENSION if byte == SEMICOLON else behind_size(connection, byte, ODD)
    if mode == EXTENSION:
        return behind_size(connection, byte, EXTENSION)
    if mode == DATA_LF:
        connection.left_bytes = 0
        return SIZE if byte == LF else ODD
    # Each of the others asks for one byte and leads to the next mode.
    wanted = LF if mode == LAST_LF else CR
    return mode + 1 if byte == wanted else ODD


@inner
def behind_size(connection: ConnectionState, byte: int, otherwise: int) -> int:
    """Where the end of the line leads that holds a chunk's size."""
    if byte != LF:
        return otherwise
    return DATA if connection.left_bytes else LAST_CR


@inner
def hex_digit(byte: int) -> int:
    """The value of a hexadecimal digit, -1 for any other byte."""
    if ZERO <= byte <= NINE:
        return byte - ZERO
    lower = byte | 32
    if 97 <= lower <= 102:
        return lower - 87
    return -1
