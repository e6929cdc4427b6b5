"""Finds, in the bytes of an answer as they come in, where its body ends and which token ids and counts it holds.

It only lets the loop go on with a session at once: what an answer *means* is decided later, by real parsers, and a
difference fails the request. Unusual bytes set ``N_IS_ODD`` and are left to them. Next: ``core`` calls ``take_body``.
"""

from __future__ import annotations

from harness.compiled import inner_viewing as inner
from harness.live.client.wire import table
from harness.live.client.wire.layout import (
    ABSENT,
    CHUNK_DATA,
    CHUNK_DATA_CR,
    CHUNK_DATA_LF,
    CHUNK_EXTENSION,
    CHUNK_LAST_CR,
    CHUNK_LAST_LF,
    CHUNK_ODD,
    CHUNK_OVER,
    CHUNK_SIZE,
    N_CHUNK_MODE,
    N_COMPLETION_TOKENS,
    N_HAS_DONE,
    N_IS_ODD,
    N_KEEPS_IDS,
    N_LEFT,
    N_NUM_EVENTS,
    N_NUM_IDS,
    N_PROMPT_TOKENS,
    N_SCAN_MODE,
    N_SESSION,
    N_VALUE,
    N_WINDOW,
    N_WINDOW_BEFORE,
    S_BYTES,
    S_ROOM,
    S_STREAM,
    SCAN_COMPLETION_TOKENS,
    SCAN_IDS,
    SCAN_IDS_OPEN,
    SCAN_PROMPT_IDS,
    SCAN_PROMPT_IDS_OPEN,
    SCAN_PROMPT_TOKENS,
    SCAN_SEARCH,
    BytesArray,
    IntArray,
)
from harness.live.client.wire.syscalls import NO_ROOM, bytes_at, put_byte, put_number


def window_of(text: bytes) -> int:
    """Up to eight bytes as the scanner's window holds them: the last one lowest, as a signed 64-bit number."""
    return int.from_bytes(text.rjust(8, b"\0")[-8:], "big", signed=True)


COLON, COMMA, BRACKET_OPEN, BRACKET_CLOSE, SPACE = 58, 44, 91, 93, 32
CR, LF, SEMICOLON, ZERO, NINE = 13, 10, 59, 48, 57
# The keys, each as its last eight bytes and (a part of) the eight before: the quote in front tells "token_ids" from
# "prompt_token_ids", and inside a JSON string a quote never stands without a backslash.
IDS_KEY, IDS_KEY_BEFORE, IDS_KEY_MASK = window_of(b'en_ids":'), window_of(b'"tok'), 0xFFFFFFFF
PROMPT_IDS_BEFORE = window_of(b"_tok")
TOKENS_KEY = window_of(b'tokens":')
PROMPT_BEFORE, COMPLETION_BEFORE = window_of(b'"prompt_'), window_of(b"pletion_")
DONE_WINDOW = window_of(b": [DONE]")
# What ends an event of a stream.
BLANK_LINE, BLANK_LINE_CRLF = window_of(b"\n\n"), window_of(b"\n\r\n")
MAX_ID = 1 << 31
MAX_CHUNK_BYTES = 1 << 40


@inner
def begin_scan(line: IntArray) -> None:
    """Forget the answer before."""
    line[N_WINDOW] = line[N_WINDOW_BEFORE] = line[N_VALUE] = 0
    line[N_SCAN_MODE] = SCAN_SEARCH
    line[N_NUM_IDS] = line[N_HAS_DONE] = line[N_IS_ODD] = 0
    line[N_PROMPT_TOKENS] = line[N_COMPLETION_TOKENS] = ABSENT
    line[N_CHUNK_MODE] = CHUNK_SIZE
    line[N_LEFT] = 0


@inner
def take_id(line: IntArray, session: IntArray) -> None:
    """One more token id: count it and, when a later prompt goes on from it, append it to the session's text."""
    line[N_NUM_IDS] += 1
    if line[N_KEEPS_IDS]:
        to = session[S_STREAM] + session[S_BYTES]
        end = session[S_STREAM] + session[S_ROOM]
        if session[S_BYTES]:
            to = put_byte(to, end, COMMA)
        to = put_number(to, end, line[N_VALUE])
        if to == NO_ROOM:
            line[N_IS_ODD] = 1
            line[N_KEEPS_IDS] = 0
            return
        session[S_BYTES] = to - session[S_STREAM]
    line[N_VALUE] = ABSENT


@inner
def scan(line: IntArray, session: IntArray, text: BytesArray) -> None:
    """Look through the next bytes of a body."""
    window, before, mode = line[N_WINDOW], line[N_WINDOW_BEFORE], line[N_SCAN_MODE]
    place, count = 0, len(text)
    while place < count:
        byte = int(text[place])
        place += 1
        if mode == SCAN_SEARCH:
            before = (before << 8) | ((window >> 56) & 0xFF)
            window = (window << 8) | byte
            if byte == COLON:
                if window == IDS_KEY:
                    if before & IDS_KEY_MASK == IDS_KEY_BEFORE:
                        mode = SCAN_IDS_OPEN
                    elif before & IDS_KEY_MASK == PROMPT_IDS_BEFORE:
                        mode = SCAN_PROMPT_IDS_OPEN
                elif window == TOKENS_KEY:
                    line[N_VALUE] = ABSENT
                    if before == PROMPT_BEFORE:
                        mode = SCAN_PROMPT_TOKENS
                    elif before == COMPLETION_BEFORE:
                        mode = SCAN_COMPLETION_TOKENS
            elif byte == BRACKET_CLOSE and window == DONE_WINDOW:
                line[N_HAS_DONE] = 1
            elif byte == LF and (window & 0xFFFF == BLANK_LINE or window & 0xFFFFFF == BLANK_LINE_CRLF):
                line[N_NUM_EVENTS] += 1
        elif mode == SCAN_IDS:
            if ZERO <= byte <= NINE:
                value = line[N_VALUE]
                line[N_VALUE] = byte - ZERO if value < 0 else value * 10 + byte - ZERO
                if line[N_VALUE] >= MAX_ID:
                    line[N_IS_ODD] = 1
                    line[N_VALUE] = 0
            elif byte in (COMMA, BRACKET_CLOSE):
                if line[N_VALUE] >= 0:
                    take_id(line, session)
                if byte == BRACKET_CLOSE:
                    mode = SCAN_SEARCH
                    window = before = 0
            elif byte != SPACE:
                line[N_IS_ODD] = 1
                mode = SCAN_SEARCH
        elif mode == SCAN_IDS_OPEN:
            if byte == BRACKET_OPEN:
                line[N_VALUE] = ABSENT
                mode = SCAN_IDS
            elif byte != SPACE:  # null
                mode = SCAN_SEARCH
        elif mode == SCAN_PROMPT_IDS_OPEN:
            if byte == BRACKET_OPEN:
                mode = SCAN_PROMPT_IDS
            elif byte != SPACE:  # null
                mode = SCAN_SEARCH
        elif mode == SCAN_PROMPT_IDS:
            if byte == BRACKET_CLOSE:
                mode = SCAN_SEARCH
        elif ZERO <= byte <= NINE:
            value = line[N_VALUE]
            line[N_VALUE] = byte - ZERO if value < 0 else min(value, MAX_ID) * 10 + byte - ZERO
        elif byte != SPACE or line[N_VALUE] >= 0:
            if line[N_VALUE] >= 0:
                line[N_PROMPT_TOKENS if mode == SCAN_PROMPT_TOKENS else N_COMPLETION_TOKENS] = line[N_VALUE]
            mode = SCAN_SEARCH
            window = before = 0
    line[N_WINDOW], line[N_WINDOW_BEFORE], line[N_SCAN_MODE] = window, before, mode


@inner
def take_chunked(reg: IntArray, fd: int, at: int, count: int) -> int:
    """Look through the next ``count`` bytes of a chunked body, which lie at an address.

    The bytes used: fewer than ``count`` when the body is over before them. A trailer, and what is no chunk at all,
    leaves N_CHUNK_MODE at CHUNK_ODD, for the HTTP parser to judge.
    """
    line = table.conns(reg)[fd]
    session = table.sessions(reg)[line[N_SESSION]]
    text = bytes_at(at, count)
    mode, left = line[N_CHUNK_MODE], line[N_LEFT]
    place = 0
    while place < count and mode < CHUNK_OVER:
        if mode == CHUNK_DATA:
            size = min(left, count - place)
            scan(line, session, text[place : place + size])
            place += size
            left -= size
            if left == 0:
                mode = CHUNK_DATA_CR
            continue
        byte = int(text[place])
        place += 1
        if mode == CHUNK_SIZE:
            digit = hex_digit(byte)
            if digit >= 0 and left < MAX_CHUNK_BYTES:
                left = left * 16 + digit
            elif byte == SEMICOLON:
                mode = CHUNK_EXTENSION
            elif byte != CR:
                mode = CHUNK_DATA if byte == LF else CHUNK_ODD
                if byte == LF and left == 0:
                    mode = CHUNK_LAST_CR
        elif mode == CHUNK_EXTENSION:
            if byte == LF:
                mode = CHUNK_DATA if left else CHUNK_LAST_CR
        elif mode == CHUNK_DATA_CR:
            mode = CHUNK_DATA_LF if byte == CR else CHUNK_ODD
        elif mode == CHUNK_DATA_LF:
            mode = CHUNK_SIZE if byte == LF else CHUNK_ODD
            left = 0
        elif mode == CHUNK_LAST_CR:
            mode = CHUNK_LAST_LF if byte == CR else CHUNK_ODD
        elif mode == CHUNK_LAST_LF:
            mode = CHUNK_OVER if byte == LF else CHUNK_ODD
    line[N_CHUNK_MODE], line[N_LEFT] = mode, left
    return place


@inner
def hex_digit(byte: int) -> int:
    """The value of a hexadecimal digit, -1 for any other byte."""
    if ZERO <= byte <= NINE:
        return byte - ZERO
    if 97 <= byte <= 102:
        return byte - 87
    if 65 <= byte <= 70:
        return byte - 55
    return -1


@inner
def take_counted(reg: IntArray, fd: int, at: int, count: int) -> None:
    """Look through the next bytes of a body of known length."""
    line = table.conns(reg)[fd]
    scan(line, table.sessions(reg)[line[N_SESSION]], bytes_at(at, count))
    line[N_LEFT] -= count
